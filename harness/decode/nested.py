"""Drafters made of drafters: a tier that reviews a weaker drafter, and weaker drafters for later positions.

Each of their tokens is, given the ones before it, drawn from the very distribution that stands beside it in
``Draft.probs``; and whether a block goes on behind a token has nothing to do with what would come there. So whoever
verifies such a block by the lossless rule emits its own law, and drafters of drafters can be stacked.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from harness.decode.accept import first_stop, keep_probability
from harness.decode.length import Length
from harness.decode.rule import drawn_from
from harness.drafters.base import Draft, Drafter, Remembering
from harness.model.tiers import Tier, Tiers
from harness.model.transfer import to_host
from harness.records import BlockTrace
from harness.sampling import Chooser, Dense, Law, Sampling


@runtime_checkable
class Extending(Protocol):
    """A drafter that knows its tokens on the host when it is done."""

    @property
    def name(self) -> str: ...

    @property
    def tier(self) -> Tier: ...

    def extend(self, tokens: Sequence[int], count: int, chooser: Chooser) -> tuple[Draft, list[int]]:
        """A block of up to ``count`` tokens, and the same tokens on the host."""
        ...


class Reviewed:
    """Speculative decoding inside a draft: ``tier`` verifies what ``inner`` proposes, and its own tokens are the draft.

    The tokens have the law of ``tier``, whatever ``inner`` proposes. One review is one pass of ``tier`` and one read
    by the host, and gives at least one token; where ``inner`` proposes nothing, it is a plain step of ``tier``.

    Args:
        gamma: tokens asked of ``inner`` for a review, at most.
        reviews: reviews a block, at most; None, as many as fill it.
        lenience: greedy only. Above 1, a proposed token v that is not the likeliest is kept too where the reviewer's
            softmax gives it more than 1/lenience of what ``inner`` gave it (Cascade Speculative Drafting, its code).
    """

    has_probs = True

    def __init__(
        self,
        tiers: Tiers,
        tier: Tier,
        sampling: Sampling,
        inner: Length,
        gamma: int,
        reviews: int | None = None,
        lenience: float = 1.0,
    ) -> None:
        self.tiers = tiers
        self.tier = tier
        self.sampling = sampling
        self.inner = inner
        self.gamma = gamma
        self.reviews = reviews
        self.lenience = lenience
        self.name = f"{tier.name} over {inner.name}"

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        return self.extend(tokens, count, chooser)[0]

    def extend(self, tokens: Sequence[int], count: int, chooser: Chooser) -> tuple[Draft, list[int]]:
        drafts: list[Draft] = []
        ids: list[int] = []
        while len(ids) < count and (self.reviews is None or len(drafts) < self.reviews):
            draft, more = self.review((*tokens, *ids), count - len(ids), chooser)
            drafts.append(draft)
            ids += more
        # A drafter whose features the full verifier had to catch up for has let it process drafts.
        self.tiers.full.rollback(len(tokens) - 1)
        return chained(drafts, self.tiers.model.device), ids

    def review(self, text: Sequence[int], room: int, chooser: Chooser) -> tuple[Draft, list[int]]:
        """One pass of the tier: what it keeps of a proposal, and the token that it adds; at most ``room`` of both."""
        proposed = self.inner.draft(text, min(self.inner.ask(self.gamma), room - 1), chooser)
        logits = self.tier.forward(text, len(proposed) + 1, proposed.tokens)
        law = self.sampling.law(logits)
        if len(proposed):
            stop = first_stop(self.kept(law, logits, proposed, chooser))
            last = law.replace(proposed.probs, proposed.tokens, stop, chooser)
        else:
            stop = torch.zeros((), dtype=torch.long, device=logits.device)
            last = law.draw(stop, chooser)
        *ids, kept, added = to_host(proposed.tokens, stop, last)
        self.inner.note(len(proposed), kept)
        self.tiers.rollback(len(text) + kept)
        probs = law.probs[: kept + 1] if isinstance(law, Dense) else None
        draft = Draft(torch.cat((proposed.tokens[:kept], last)), probs, logits[: kept + 1] if probs is None else None)
        return draft, [*ids[:kept], added]

    def kept(self, law: Law, logits: Float[Tensor, "R V"], proposed: Draft, chooser: Chooser) -> Bool[Tensor, "G"]:
        """Which of the proposed tokens the tier keeps, each by itself."""
        exact = chooser.accept(keep_probability(law, proposed))
        if self.lenience == 1:
            return exact
        tokens = proposed.tokens[:, None]
        found = torch.softmax(logits[: len(proposed)], dim=-1).gather(-1, tokens)[:, 0]
        certain = proposed.probs is None and proposed.logits is None
        asked = torch.ones_like(found) if certain else proposed.distributions().gather(-1, tokens)[:, 0]
        return exact | (found > asked / self.lenience)

    def finish(self, text: Sequence[int]) -> None:
        self.inner.finish(text)


class InTurn:
    """Weaker drafters for later positions: each of ``members`` up to its number of tokens, then ``last`` up to its own.

    Later tokens of a block count only where all before them are kept, so that they may be guessed more cheaply.
    """

    tier = None
    has_probs = False

    def __init__(
        self, members: Sequence[tuple[Extending, int]], last: Drafter, last_count: int, device: torch.device
    ) -> None:
        self.members = members
        self.last = last
        self.last_count = last_count
        self.device = device
        self.name = ", then ".join([*(member.name for member, _ in members), last.name])

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        text = list(tokens)
        drafts: list[Draft] = []
        for member, share in self.members:
            if room := min(share, len(tokens) + count - len(text)):
                draft, ids = member.extend(text, room, chooser)
                drafts.append(draft)
                text += ids
        if room := min(self.last_count, len(tokens) + count - len(text)):
            drafts.append(self.last.draft(text, room, chooser))
        return chained(drafts, self.device)

    def origins(self, block: BlockTrace) -> list[Tier | None]:
        """Each member fills its share, whatever it reviews."""
        made: list[Tier | None] = [member.tier for member, share in self.members for _ in range(share)]
        return (made + [None] * block.drafted)[: block.drafted]

    def finish(self, text: Sequence[int]) -> None:
        if isinstance(self.last, Remembering):
            self.last.finish(text)


def chained(drafts: Sequence[Draft], device: torch.device) -> Draft:
    """Drafts of any drafters, each continuing the one before; certain tokens get a one-hot row where others have one.

    Logits stay only where all have them.
    """
    drafts = [draft for draft in drafts if len(draft)]
    if not drafts:
        return Draft(torch.empty(0, dtype=torch.long, device=device))
    tokens = torch.cat([draft.tokens for draft in drafts])
    logits = [draft.logits for draft in drafts if draft.logits is not None]
    known = next((draft.probs for draft in drafts if draft.probs is not None), None)
    if known is None:
        return Draft(tokens, None, torch.cat(logits) if len(logits) == len(drafts) else None)
    return Draft(tokens, torch.cat([drawn_from(draft, known) for draft in drafts]))
