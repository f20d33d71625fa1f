"""What a method asks of a drafter, and drafting with a model, which two families share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from harness.model.tiers import Tier
from harness.sampling import Chooser, Sampling


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed block, possibly shorter than asked, possibly empty.

    ``probs`` holds the very distributions its tokens were drawn from; None when each token was certain
    (greedy drafting, table look-up), which is the one-hot distribution on it.
    """

    tokens: tuple[int, ...]
    probs: Float[Tensor, "G V"] | None = None


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
    drafted: list[int] = []
    probs = []
    for _ in range(count):
        drawn_from = sampling.warp(tier.forward((*tokens, *drafted), rows=1))
        drafted.append(chooser.draw(drawn_from[0]))
        probs.append(drawn_from)
    return Draft(tuple(drafted), None if sampling.greedy or not probs else torch.cat(probs))
