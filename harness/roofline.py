"""Time of a forward from bytes and products alone: what a machine that we do not have would take for a given trace.

    t(B, n, S) = max{(W + B S kv) / BW, 2 P B n / F} + t_over

with batch B, n rows, S cached positions, W bytes of the weights read, kv bytes of keys and values of a position, BW the
memory bandwidth, P weights multiplied, F the rate of products and t_over what launching takes, here a constant for each
layer. Attention's own products, activations, communication between devices and everything outside forwards are left
out: times are floors, more so with a long context and many rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize

from harness.cost import Shape
from harness.errors import UserError


@dataclass(frozen=True, slots=True)
class Machine:
    """Constants of a device. ``source`` says where they are from.

    Args:
        bandwidth: bytes a second from its memory.
        compute: products and sums a second (FLOP/s), dense, in the precision of the weights.
        layer_overhead_s: seconds a layer that neither bytes nor products explain.
    """

    bandwidth: float
    compute: float
    layer_overhead_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "compute"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"machine {name}={getattr(self, name)}: want a finite number above 0.")
        if not 0 <= self.layer_overhead_s < math.inf:
            raise UserError(f"machine layer_overhead_s={self.layer_overhead_s}: want seconds, 0 or more.")

    def times(self, devices: int) -> "Machine":
        """So many of it, the weights spread evenly over them; what they tell each other costs nothing here."""
        if devices < 1:
            raise UserError(f"devices={devices}: want at least 1.")
        return replace(self, bandwidth=devices * self.bandwidth, compute=devices * self.compute)


@dataclass(frozen=True, slots=True)
class Load:
    """What a forward of a tier has to move: bytes of weights, bytes of cache a position, weights, layers."""

    weight_bytes: float
    cache_bytes: float
    weights: float
    layers: float


def load_of(shape: Shape, weight_bytes: float, cache_bytes: float, skip_ratio: float = 0.0) -> Load:
    """Of a model, or of the layers of it that are left when ``skip_ratio`` of them are skipped.

    Args:
        weight_bytes: bytes of a weight.
        cache_bytes: bytes of a number in the cache.
    """
    for name, value in (("weight_bytes", weight_bytes), ("cache_bytes", cache_bytes)):
        if not 0 < value < math.inf:
            raise UserError(f"{name}={value}: want bytes a number, above 0; 2 in bfloat16.")
    layers = shape.kept_layers(skip_ratio)
    weights = shape.read_weights(layers)
    return Load(weights * weight_bytes, 2 * layers * shape.kv_heads * shape.head_dim * cache_bytes, weights, layers)


def parts_s(machine: Machine, load: Load, rows: int, context: float, batch: int = 1) -> tuple[float, float]:
    """Seconds that the bytes of a forward take, and its products; the longer of both counts."""
    moved = (load.weight_bytes + batch * context * load.cache_bytes) / machine.bandwidth
    return moved, 2 * load.weights * batch * rows / machine.compute


def forward_s(machine: Machine, load: Load, rows: int, context: float, batch: int = 1) -> float:
    """Seconds of a forward of ``rows`` tokens of each of ``batch`` texts over ``context`` cached positions."""
    return max(parts_s(machine, load, rows, context, batch)) + load.layers * machine.layer_overhead_s


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured forward: whose, its load, shape and seconds."""

    tier: str
    load: Load
    rows: int
    context: int
    seconds: float


def errors(machine: Machine, timed: Sequence[Timed]) -> list[float]:
    """Predicted / measured - 1 of each."""
    return [forward_s(machine, one.load, one.rows, one.context) / one.seconds - 1 for one in timed]


def calibrated(machine: Machine, timed: Sequence[Timed]) -> Machine:
    """Compute and overhead with which the roofline comes nearest to measured forwards, in mean squares of log ratios.

    The bandwidth stays that of ``machine``: it can be measured by itself, and would trade places with the overhead.

    Raises:
        UserError: nothing was measured.
    """
    if not timed:
        raise UserError("the roofline cannot be calibrated: no forward was measured.")
    begin = min(one.seconds / one.load.layers for one in timed) / 2

    def made(logs: np.ndarray) -> Machine:
        compute, overhead = np.exp(logs).tolist()
        return replace(machine, compute=compute, layer_overhead_s=overhead)

    def distance(logs: np.ndarray) -> float:
        return float(np.mean(np.log1p(errors(made(logs), timed)) ** 2))

    first = np.log([machine.compute, begin])
    best = minimize(distance, first, method="Nelder-Mead", options={"maxiter": 4000, "xatol": 1e-5, "fatol": 1e-9})
    return replace(made(best.x), source="compute and overhead fitted to measured forwards, the bandwidth given")
