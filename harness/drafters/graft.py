"""Graft: where a small drafter is unsure, its block goes on from retrieval (after GRAFT, arXiv 2605.20104)."""

from collections.abc import Callable, Sequence

import torch

from harness.drafters.base import Draft, Drafter, check_probs, joined, pieces
from harness.drafters.retrieval import Retrieval
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.model.transfer import to_device, to_host
from harness.records import BlockTrace
from harness.sampling import Chooser, Sampling


class Graft:
    """Keeps the tokens of ``inner`` up to the first position where its likeliest token has less than ``threshold``.

    From there on the block is what retrieval continues it with; where retrieval knows nothing, ``inner``'s token stays
    and the next position is looked at. When ``inner`` drafts greedily, its likeliest token is the one it drafted, with
    its probability at temperature 1.

    When sampling, the likeliest token is asked about and not the drawn one, because a draw that its own value can
    discard has another law than the one it was drawn from: where to graft depends on the tokens before alone. So
    ``probs`` has ``inner``'s own distributions, and behind them a one-hot row for each token retrieved.

    On the CPU a tier drafts no further than its last token that is kept; on an accelerator it drafts its whole block,
    and a block waits for the device once more.
    """

    has_probs = False

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        inner: Callable[[Tiers, Sampling, Model], Drafter],
        retrieval: Callable[[Tiers, Sampling, Model], Retrieval],
        threshold: float = 0.4,
    ) -> None:
        if not 0 < threshold <= 1:
            raise UserError(f"graft: threshold={threshold}: want a probability above 0, at most 1.")
        self.inner = inner(tiers, sampling, model)
        check_probs(self.inner, "graft")
        self.retrieval = retrieval(tiers, sampling, model)
        self.threshold = threshold
        self.tier = self.inner.tier
        self.name = f"graft({self.inner.name}, {threshold:g}, {self.retrieval.name})"

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        drafts: list[Draft] = []
        behind: list[int] = []  # the tokens of drafts, on the host
        for piece in pieces(self.inner, tokens, count, chooser):
            unsure = (piece.distributions().amax(dim=-1) < self.threshold).long()
            read = to_host(piece.tokens, unsure)
            drafted, doubts = read[: len(piece)], read[len(piece) :]
            for place in (place for place, doubt in enumerate(doubts) if doubt):
                before = behind + drafted[:place]
                if found := self.retrieval.continuation(tokens, count - len(before), before):
                    self.cut(len(tokens) + len(before))
                    return grafted(joined([*drafts, piece.first(place)]), found)
            drafts.append(piece)
            behind += drafted
        return joined(drafts) if drafts else self.inner.draft(tokens, 0, chooser)

    def cut(self, length: int) -> None:
        """Forget what ``inner`` has processed of its own behind ``length``: other tokens may come to stand there."""
        if self.tier is not None:
            self.tier.cache.rollback(length)

    def origins(self, block: BlockTrace) -> list[Tier | None]:
        return [self.tier] * (block.drafted - block.looked_up) + [None] * block.looked_up

    def finish(self, text: Sequence[int]) -> None:
        self.retrieval.finish(text)


def grafted(kept: Draft, found: Sequence[int]) -> Draft:
    """A draft and behind it the tokens ``found``, which are certain."""
    tokens = to_device(found, kept.tokens.device)
    probs = kept.probs
    if probs is not None:
        certain = probs.new_zeros(len(tokens), probs.shape[-1]).scatter_(-1, tokens[:, None], 1.0)
        probs = torch.cat((probs, certain))
    return Draft(torch.cat((kept.tokens, tokens)), probs, looked_up=len(tokens))
