"""Gates: the slim verifier's scores over a block -> a route for each drafted token.

M' is the largest probability of the slim verifier at a position; a gate of the paper reads the confidence ratio
q'(v)/M' of the drafted token v (VIA-SD, App. B). Scores are logits or log-probabilities: the ratio is the same, and
needs no softmax. Routes travel as integer codes, indices into ``ROUTES``.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.errors import UserError
from harness.kernels.gate import ESCALATE, route_block
from harness.records import Route

ROUTES = (Route.ACCEPT, Route.REGENERATE, Route.ESCALATE)


class Decision(NamedTuple):
    """The route of every drafted token, and the first position that is not accepted, G if there is none."""

    codes: Int[Tensor, "G"]
    stop: Int[Tensor, ""]


@runtime_checkable
class Gate(Protocol):
    """``reachable`` are the routes that some input can take; a method reads from it whether it is lossless."""

    @property
    def name(self) -> str: ...

    @property
    def reachable(self) -> frozenset[Route]: ...

    def __call__(self, scores: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Decision: ...


class Thresholds:
    """Accept where the ratio is at least ``accept_at``, else regenerate where at least ``keep_at``, else escalate."""

    def __init__(self, name: str, accept_at: float, keep_at: float, allow_unreachable: bool) -> None:
        self.name = name
        self.accept_at = accept_at
        self.keep_at = keep_at
        if Route.REGENERATE not in self.reachable and not allow_unreachable:
            raise UserError(
                f"gate {name}: no token can be regenerated, since it accepts from {accept_at:g} and escalates below "
                f"{keep_at:g} of the largest probability; change alpha1 and alpha2, or set gate.allow_unreachable=true."
            )

    @property
    def reachable(self) -> frozenset[Route]:
        # A ratio lies between 0 and 1, so accepting and escalating are always possible for thresholds inside (0, 1).
        return frozenset(ROUTES) if self.keep_at < self.accept_at else frozenset((Route.ACCEPT, Route.ESCALATE))

    def __call__(self, scores: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Decision:
        routed = route_block(scores, tokens, self.accept_at, self.keep_at)
        return Decision(routed.codes, routed.stop)


class Strictness(Thresholds):
    """alpha as strictness (reading of Fig. 6 and App. H.2): accept from alpha1, escalate below alpha2.

    Raises:
        UserError: thresholds outside (0, 1), or alpha2 >= alpha1 (nothing would be regenerated).
    """

    def __init__(self, alpha1: float = 0.5, alpha2: float = 0.3, allow_unreachable: bool = False) -> None:
        check_open_interval(alpha1=alpha1, alpha2=alpha2)
        super().__init__(f"strictness({alpha1:g}, {alpha2:g})", alpha1, alpha2, allow_unreachable)


class Literal(Thresholds):
    """Algorithm 2's thresholds as printed: escalate below 1 - alpha2, else accept from 1 - alpha1, else regenerate.

    The published alpha1 = 0.5, alpha2 = 0.3 accept from 0.7 and escalate everything else.

    Raises:
        UserError: thresholds outside (0, 1), or alpha2 <= alpha1 (nothing would be regenerated).
    """

    def __init__(self, alpha1: float = 0.5, alpha2: float = 0.3, allow_unreachable: bool = False) -> None:
        check_open_interval(alpha1=alpha1, alpha2=alpha2)
        super().__init__(f"literal({alpha1:g}, {alpha2:g})", 1 - alpha1, 1 - alpha2, allow_unreachable)


class AlwaysEscalate:
    """Every draft goes to the full verifier: three-tier code, two-tier law."""

    name = "always_escalate"
    reachable = frozenset((Route.ESCALATE,))

    def __call__(self, scores: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Decision:
        return Decision(torch.full_like(tokens, ESCALATE), torch.zeros_like(tokens[0]))


def check_open_interval(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < 1:
            raise UserError(f"gate.{name}={value}: want a threshold between 0 and 1, both excluded.")


def routes_of(codes: Iterable[int]) -> tuple[Route, ...]:
    """Codes as records hold them."""
    return tuple(ROUTES[code] for code in codes)
