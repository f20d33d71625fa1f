"""What a method asks of a drafter, and drafting with a model, which two families share."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from harness.decode.accept import Chooser, Draft, Sampling
from harness.model.tiers import Tier


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
