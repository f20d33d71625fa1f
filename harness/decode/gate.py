"""Gates: the slim verifier's distributions over a block -> a route for each drafted token.

M' is the largest probability of the slim verifier at a position; a gate of the paper reads the confidence ratio
q'(v)/M' of the drafted token v (VIA-SD, App. B). Routes travel as integer codes, indices into ``ROUTES``.
"""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.errors import UserError
from harness.records import Route

ROUTES = (Route.ACCEPT, Route.REGENERATE, Route.ESCALATE)
ACCEPT, REGENERATE, ESCALATE = range(3)


@runtime_checkable
class Gate(Protocol):
    """``reachable`` are the routes that some input can take; a method reads from it whether it is lossless."""

    @property
    def name(self) -> str: ...

    @property
    def reachable(self) -> frozenset[Route]: ...

    def __call__(self, slim_probs: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Int[Tensor, "G"]: ...


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

    def __call__(self, slim_probs: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Int[Tensor, "G"]:
        drafted = slim_probs.gather(-1, tokens[:, None])[:, 0]
        largest = slim_probs.amax(dim=-1)
        # Compared as products: a division would round a ratio of exactly the threshold to either side.
        return torch.where(
            drafted >= self.keep_at * largest,
            torch.where(drafted >= self.accept_at * largest, ACCEPT, REGENERATE),
            ESCALATE,
        )


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

    def __call__(self, slim_probs: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Int[Tensor, "G"]:
        return torch.full_like(tokens, ESCALATE)


def check_open_interval(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < 1:
            raise UserError(f"gate.{name}={value}: want a threshold between 0 and 1, both excluded.")


def routes_of(codes: Iterable[int]) -> tuple[Route, ...]:
    """Codes as records hold them."""
    return tuple(ROUTES[code] for code in codes)
