"""What a method asks of a drafter, and drafting with a model, which two families share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.model.tiers import Tier
from harness.sampling import Chooser, Sampling, top


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed block on the verifier's device, possibly shorter than asked, possibly empty.

    ``probs`` holds the very distributions its tokens were drawn from; None when each token was certain
    (greedy drafting, table look-up), which is the one-hot distribution on it.
    """

    tokens: Int[Tensor, "G"]
    probs: Float[Tensor, "G V"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@runtime_checkable
class Drafter(Protocol):
    """Proposes up to ``count`` tokens after ``tokens``; fewer, or none, where it has nothing to say.

    ``tier`` is the model tier whose forwards count as draft forwards, None for a drafter without a model.
    """

    @property
    def name(self) -> str: ...

    @property
    def tier(self) -> Tier | None: ...

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft: ...


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
    return Draft(drafts, None if sampling.greedy else drawn_from)
