"""Gates that never, or always, call the full verifier: the ends of the scale on which all others lie."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.decode.gate.base import Decision, check_open_interval, ratio_table
from harness.kernels.gate import ESCALATE, route_block
from harness.records import Route


class AlwaysEscalate:
    """Every draft goes to the full verifier: three-tier code, two-tier law."""

    name = "always_escalate"
    reachable = frozenset((Route.ESCALATE,))
    lossless = True

    def __call__(self, scores: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Decision:
        return Decision(torch.full_like(tokens, ESCALATE), torch.zeros_like(tokens[0]))

    def table(self, scores: Float[Tensor, "G V"]) -> Int[Tensor, "G V"]:
        return torch.full_like(scores, ESCALATE, dtype=torch.long)


class NeverEscalate:
    """The slim verifier decides alone: a draft is accepted from a ratio of ``alpha1`` on, else regenerated.

    The full verifier's passes that are left are those of plain steps, and what ``ending`` and ``bonus`` ask for.

    Raises:
        UserError: ``alpha1`` outside (0, 1).
    """

    reachable = frozenset((Route.ACCEPT, Route.REGENERATE))
    lossless = False

    def __init__(self, alpha1: float = 0.5) -> None:
        check_open_interval(alpha1=alpha1)
        self.alpha1 = alpha1
        self.name = f"never_escalate({alpha1:g})"

    def __call__(self, scores: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Decision:
        routed = route_block(scores, tokens, self.alpha1, 0.0)
        return Decision(routed.codes, routed.stop)

    def table(self, scores: Float[Tensor, "G V"]) -> Int[Tensor, "G V"]:
        return ratio_table(scores, self.alpha1, 0.0)
