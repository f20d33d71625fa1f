"""What a method asks of a drafter, and drafting with a tier of a model, which several families share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.errors import UserError
from harness.model.tiers import Tier
from harness.records import BlockTrace
from harness.sampling import Chooser, Sampling, top, widen


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed block on the verifier's device, possibly shorter than asked, possibly empty.

    ``probs`` holds the very distributions its tokens were drawn from; None when each token was certain
    (greedy drafting, table look-up), which is the one-hot distribution on it. ``logits`` are those a greedy draft is
    the largest of, None where there were none. ``looked_up`` of its last tokens are from a table, behind a model's.
    """

    tokens: Int[Tensor, "G"]
    probs: Float[Tensor, "G V"] | None = None
    logits: Float[Tensor, "G V"] | None = None
    looked_up: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def distributions(self) -> Float[Tensor, "G V"]:
        """What the drafter believed at each token: what it was drawn from, or the softmax that it is the largest of."""
        if self.probs is not None:
            return self.probs
        assert self.logits is not None, "asked of a drafter without probabilities"
        return torch.softmax(widen(self.logits), dim=-1)

    def first(self, count: int) -> "Draft":
        """The leading ``count`` tokens."""
        probs, logits = (None if table is None else table[:count] for table in (self.probs, self.logits))
        return Draft(self.tokens[:count], probs, logits, max(0, self.looked_up - max(0, len(self) - count)))


@runtime_checkable
class Drafter(Protocol):
    """Proposes up to ``count`` tokens after ``tokens``; fewer, or none, where it has nothing to say.

    ``tier`` is the model tier whose forwards count as draft forwards, None for a drafter without a model.
    ``has_probs``: each of its tokens comes with the distribution it was chosen from.
    """

    @property
    def name(self) -> str: ...

    @property
    def tier(self) -> Tier | None: ...

    @property
    def has_probs(self) -> bool: ...

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft: ...


@runtime_checkable
class Composite(Protocol):
    """A drafter made of others."""

    def origins(self, block: BlockTrace) -> Sequence[Tier | None]:
        """The tier whose law each draft of ``block`` is from, in order; None where it is from a table."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A drafter that learns from finished texts."""

    def finish(self, text: Sequence[int]) -> None:
        """A prompt is done; ``text`` is all of it and its output."""
        ...


class TierDrafter:
    """Draws its tokens one by one from a tier: a block is the same, and costs the same, drafted in several calls."""

    has_probs = True

    def __init__(self, name: str, tier: Tier, sampling: Sampling) -> None:
        self.name = name
        self.tier = tier
        self.sampling = sampling

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        return draft_with(self.tier, self.sampling, tokens, count, chooser)


def draft_with(tier: Tier, sampling: Sampling, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
    """Draw ``count`` tokens one by one from ``tier``, remembering the distributions they were drawn from."""
    if count < 1:
        return Draft(torch.empty(0, dtype=torch.long, device=tier.model.device))

    def pick(logits: Float[Tensor, "1 V"], uniform: Float[Tensor, ""]) -> tuple[Tensor, Tensor]:
        if sampling.greedy:
            return top(logits), logits
        probs = sampling.warp(logits)
        return chooser.draw(probs[0], uniform), probs

    drafts, drawn_from = tier.extend(tokens, count, pick, chooser.uniforms(count))
    return Draft(drafts, None, drawn_from) if sampling.greedy else Draft(drafts, drawn_from)


def pieces(drafter: Drafter, tokens: Sequence[int], count: int, chooser: Chooser) -> Iterator[Draft]:
    """A block of ``drafter`` in parts that are not empty, for one who may want to end it early.

    Token by token where looking at each one costs nothing, so that what is not wanted is never drafted: on the CPU,
    from a tier. Whole everywhere else: on an accelerator the host would wait for every token.
    """
    if not (isinstance(drafter, TierDrafter) and drafter.tier.model.device.type == "cpu"):
        if len(piece := drafter.draft(tokens, count, chooser)):
            yield piece
        return
    text = list(tokens)
    for _ in range(count):
        piece = drafter.draft(text, 1, chooser)
        yield piece
        text += piece.tokens.tolist()


def joined(drafts: Sequence[Draft]) -> Draft:
    """Drafts of one drafter, at least one, each continuing the one before."""
    if len(drafts) == 1:
        return drafts[0]
    probs, logits = ([getattr(draft, table) for draft in drafts] for table in ("probs", "logits"))
    return Draft(
        torch.cat([draft.tokens for draft in drafts]),
        None if probs[0] is None else torch.cat(probs),
        None if logits[0] is None else torch.cat(logits),
    )


def check_probs(drafter: Drafter, who: str) -> None:
    """Refuse a drafter without probabilities.

    Raises:
        UserError: it has none; ``who`` needs them.
    """
    if not drafter.has_probs:
        raise UserError(
            f"{who} needs the drafter's probabilities, and {drafter.name} has none: choose a drafter with a model, "
            "such as self_skip or small_lm."
        )
