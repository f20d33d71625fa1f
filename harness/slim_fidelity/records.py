"""What ``job=fidelity`` stores: sums over positions. Means are derived from them in ``slim_fidelity.numbers``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.records import RunRecord, SampleRecord


@dataclass(frozen=True, slots=True)
class SlimFacts:
    """A slim verifier that was scored.

    ``kind``  where it comes from, without the ratio: ``random``, ``even``, ``prefix``, ``sublayers``, a mask file's
    name; one line of the figure.
    ``skip_ratio``  share of the full verifier's layers, or sublayers, that it skips; None of another model.
    ``layers``  what it keeps, as ``Mask.text`` has it.
    ``cache_bytes``  bytes that its own keys and values take for one position; 0 in ``shared`` mode.
    """

    source: str
    kind: str
    skip_ratio: float | None
    cache: str
    layers: str
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class SlimFidelitySum:
    """Sums over the positions of one text that stand at ``place`` (from 1) in their blocks.

    ``sums`` by the names in ``harness.slim_fidelity.numbers.QUANTITIES``, of ``positions`` terms each.
    """

    slim: str
    task: str
    example_id: str
    place: int
    positions: int
    sums: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SlimFidelityRecord:
    """A measurement, ``results/fidelity/<run_id>.json``. ``slims`` by name; ``drafter`` and ``gate`` of the theory.

    ``timed``: what one and two tiers, and ``via_sd`` with slim verifiers, by name as arms, made of the same prompts.
    """

    run: RunRecord
    settings: Mapping[str, Any]
    drafter: str
    gate: str
    slims: Mapping[str, SlimFacts]
    sums: tuple[SlimFidelitySum, ...] = ()
    timed: tuple[SampleRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class SlimFidelityRow:
    """One number, tidy. ``place`` None: all positions of a block. ``n`` counts texts; ``low``, ``high``: 95 %."""

    slim: str
    kind: str
    skip_ratio: float | None
    cache: str
    place: int | None
    metric: str
    unit: str
    value: float | None
    low: float | None
    high: float | None
    positions: int
    n: int
