"""Gates that escalate where the slim verifier itself is in doubt, whatever was drafted: by entropy, or by margin."""

import math
from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from harness.decode.accept import first_stop
from harness.decode.gate.base import ROUTES, Decision, check_open_interval, ratio_table
from harness.kernels.gate import ACCEPT, ESCALATE, route_block
from harness.sampling import widen


class Doubt(ABC):
    """Escalate where in doubt; elsewhere the slim verifier's word counts.

    Its word is the paper's: the draft is accepted where its ratio q'(v)/M' is at least ``alpha1``, else regenerated,
    since a verifier that is sure of something else should say it (reading: ours; the paper's gate is the ratio alone).
    For thresholds inside (0, 1) all three routes can be taken.
    """

    reachable = frozenset(ROUTES)
    lossless = False
    reading = "a sure slim verifier judges by the ratio"

    def __init__(self, name: str, alpha1: float) -> None:
        check_open_interval(alpha1=alpha1)
        self.name = name
        self.alpha1 = alpha1

    @abstractmethod
    def doubtful(self, scores: Float[Tensor, "G V"]) -> Bool[Tensor, "G"]:
        """Where the slim verifier is in doubt."""

    def __call__(self, scores: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Decision:
        sure = route_block(scores, tokens, self.alpha1, 0.0).codes
        codes = torch.where(self.doubtful(scores), ESCALATE, sure)
        return Decision(codes, first_stop(codes == ACCEPT))

    def table(self, scores: Float[Tensor, "G V"]) -> Int[Tensor, "G V"]:
        return torch.where(self.doubtful(scores)[:, None], ESCALATE, ratio_table(scores, self.alpha1, 0.0))


class Entropy(Doubt):
    """In doubt above an entropy of ``escalate_above`` times log V, that of a flat distribution over the vocabulary.

    Raises:
        UserError: a threshold outside (0, 1).
    """

    def __init__(self, escalate_above: float = 0.2, alpha1: float = 0.5) -> None:
        check_open_interval(escalate_above=escalate_above)
        super().__init__(f"entropy({escalate_above:g}, {alpha1:g})", alpha1)
        self.escalate_above = escalate_above

    def doubtful(self, scores: Float[Tensor, "G V"]) -> Bool[Tensor, "G"]:
        probs = torch.softmax(widen(scores), dim=-1)
        return torch.special.entr(probs).sum(dim=-1) > self.escalate_above * math.log(scores.shape[-1])


class Margin(Doubt):
    """In doubt where the largest probability exceeds the second largest by less than ``escalate_below``.

    Raises:
        UserError: a threshold outside (0, 1).
    """

    def __init__(self, escalate_below: float = 0.2, alpha1: float = 0.5) -> None:
        check_open_interval(escalate_below=escalate_below)
        super().__init__(f"margin({escalate_below:g}, {alpha1:g})", alpha1)
        self.escalate_below = escalate_below

    def doubtful(self, scores: Float[Tensor, "G V"]) -> Bool[Tensor, "G"]:
        first, second = torch.softmax(widen(scores), dim=-1).topk(2, dim=-1).values.unbind(-1)
        return first - second < self.escalate_below
