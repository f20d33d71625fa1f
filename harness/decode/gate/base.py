"""What a method asks of a gate, and what gates share."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.errors import UserError
from harness.kernels.gate import ACCEPT, ESCALATE, REGENERATE
from harness.model.tiers import Tiers
from harness.records import Route
from harness.sampling import Sampling, widen

ROUTES = (Route.ACCEPT, Route.REGENERATE, Route.ESCALATE)


class Decision(NamedTuple):
    """The route of every drafted token, and the first position that is not accepted, G if there is none."""

    codes: Int[Tensor, "G"]
    stop: Int[Tensor, ""]


@runtime_checkable
class Described(Protocol):
    """``reachable`` are the routes that some input can take.

    ``lossless``: whatever it accepts, or lets a slim verifier regenerate, has the full verifier's law.

    A gate whose thresholds leave a route without tokens is refused unless it is told ``allow_unreachable``; a gate that
    is named for leaving one out, such as ``always_escalate``, needs no permission.
    """

    @property
    def name(self) -> str: ...

    @property
    def reachable(self) -> frozenset[Route]: ...

    @property
    def lossless(self) -> bool: ...


@runtime_checkable
class Gate(Described, Protocol):
    """Routes each drafted token by the scores of the slim verifier at its position."""

    def __call__(self, scores: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Decision: ...


@runtime_checkable
class Tabled(Gate, Protocol):
    """A gate whose routes are known for every token that might have been drafted: ``table[g, v]`` is that of v at g."""

    def table(self, scores: Float[Tensor, "G V"]) -> Int[Tensor, "G V"]: ...


@runtime_checkable
class Foreseeing(Described, Protocol):
    """A gate that reads more than the slim scores: over the tiers of a method, it makes a gate of each text."""

    def over(self, tiers: Tiers, sampling: Sampling) -> Callable[[Sequence[int]], Gate]: ...


def ratio_table(scores: Float[Tensor, "G V"], accept_at: float, keep_at: float) -> Int[Tensor, "G V"]:
    """The codes of ``kernels.gate.route_block`` for every token."""
    ratio = (widen(scores) - widen(scores.amax(dim=-1, keepdim=True))).exp()
    return torch.where(ratio >= accept_at, ACCEPT, torch.where(ratio >= keep_at, REGENERATE, ESCALATE))


def check_open_interval(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < 1:
            raise UserError(f"gate.{name}={value}: want a threshold between 0 and 1, both excluded.")


def routes_of(codes: Iterable[int]) -> tuple[Route, ...]:
    """Codes as records hold them."""
    return tuple(ROUTES[code] for code in codes)
