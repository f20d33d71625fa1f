"""Exact laws of a decoder: run it once for every sequence of random decisions and add up the probabilities."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from harness.decode.base import Decoder, Method, StopRule
from harness.kernels.residual import residual_weights
from tests.toys import shapes_unchecked


class BranchChooser:
    """Follows a list of decisions, then takes the first possible outcome of each further one, noting the others."""

    residual = staticmethod(residual_weights)

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.branches: list[list[int]] = []
        self.probability = 1.0

    def decide(self, probs: list[float]) -> int:
        possible = [outcome for outcome, prob in enumerate(probs) if prob > 0]
        place = len(self.taken)
        outcome = self.script[place] if place < len(self.script) else possible[0]
        self.taken.append(outcome)
        self.branches.append([other for other in possible if other > outcome])
        self.probability *= probs[outcome]
        return outcome

    def accept(self, probability: Tensor) -> Tensor:
        certain = [min(1.0, float(prob)) for prob in probability]
        return torch.tensor([bool(self.decide([1 - prob, prob])) for prob in certain])

    def uniforms(self, count: int) -> Tensor:
        return torch.zeros(count)  # nothing is decided by numbers here

    def draw(self, probs: Tensor, uniform: Tensor) -> Tensor:
        return torch.tensor([self.decide(probs.tolist())])

    def replace(self, verifier: Tensor, draft: Tensor | None, tokens: Tensor, stop: Tensor) -> Tensor:
        if stop >= len(verifier):
            return torch.tensor([0])  # there is nothing to draw
        weights = self.residual(verifier, draft, tokens, stop)
        return torch.tensor([self.decide((weights / weights.sum()).tolist())])


def exact_law(run: Callable[[BranchChooser], Hashable]) -> dict[Hashable, float]:
    """Probability of each result of ``run`` over all decisions it asks its chooser for."""
    law: dict[Hashable, float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        chooser = BranchChooser(scripts.pop())
        law[run(chooser)] += chooser.probability
        for place in range(len(chooser.script), len(chooser.taken)):
            scripts.extend([*chooser.taken[:place], other] for other in chooser.branches[place])
    return dict(law)


def output_law(make: Callable[[], Method], prompt: Sequence[int], new_tokens: int) -> dict[Hashable, float]:
    """Joint law of the ``new_tokens`` that a method writes; tensor shapes are checked in the first run alone."""
    decoder = Decoder(make())
    checked = False

    def run(chooser: BranchChooser) -> tuple[int, ...]:
        nonlocal checked
        with shapes_unchecked() if checked else nullcontext():
            checked = True
            decoder.prefill(prompt)
            return decoder.decode(StopRule(new_tokens), chooser).token_ids

    return exact_law(run)


def total_variation(one: dict, other: dict) -> float:
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())
