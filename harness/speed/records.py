"""What ``job=speed`` stores: counts and seconds. Every rate is derived from them in ``harness.speed.numbers``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.records import RunRecord

COPY = "copy"
"""The product that is none: a device's memory copied onto itself."""


@dataclass(frozen=True, slots=True)
class ProductTime:
    """A large product, or a copy, and the bytes that it must move. ``seconds`` of one, once a repeat."""

    product: str
    moved_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """One tier's forward of ``block`` tokens over ``context`` cached ones, with the logits of all of them.

    ``read_bytes`` is what it cannot do without reading, see ``harness.speed.forwards.forward_bytes``. ``seconds`` has
    one entry a repeat; the same entry of another tier was measured next to it.
    """

    tier: str
    block: int
    context: int
    read_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """One prompt decoded by one arm, ours or one of ``transformers``.

    ``first_s``  seconds from the call to when the first tokens were there, prefill included.
    ``first_tokens``  how many they were: 1, or a block where the first forward scores a draft.
    ``rest_s``  seconds from then to the end.
    ``read_bytes``  what the forwards after the first tokens must read; None where a forward gives several tokens.
    ``decode_s``, ``tier_s``  seconds after prefill, and those within forwards of the draft, slim and full tier; None
    of ``transformers``, and ``tier_s`` also on devices that run ahead of the clock.
    """

    arm: str
    sampled: bool
    task: str
    example_id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    first_tokens: int
    first_s: float
    rest_s: float
    read_bytes: int | None = None
    decode_s: float | None = None
    tier_s: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.first_tokens <= len(self.token_ids):
            raise ValueError(f"want 1 to {len(self.token_ids)} first tokens, got {self.first_tokens}")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that an arm holds: weights, caches, saved tails, tables; on CUDA with its part of the allocator's peak."""

    arm: str
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm of ours beside one of ``transformers`` on the same prompts. ``reason``: why there is none, else None."""

    name: str
    ours: str
    theirs: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SpeedRecord:
    """A measurement, ``results/speed/<run_id>.json``.

    ``tiers`` say what each runs, ``notes`` what was left out; ``cache_bytes`` is the size of the device's last cache.
    """

    run: RunRecord
    settings: Mapping[str, Any]
    tiers: Mapping[str, str]
    cache_bytes: int | None
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]
    products: tuple[ProductTime, ...] = ()
    forwards: tuple[ForwardTime, ...] = ()
    decodes: tuple[DecodeTime, ...] = ()
    memory: tuple[MemoryUse, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One number, tidy. ``name`` is a tier, an arm, a comparison or a product; ``block`` and ``context`` where it has.

    ``value`` is None where undefined (0/0) or not measured; ``low`` and ``high`` bound a 95 % interval; ``n`` counts
    the repeats or prompts behind it.
    """

    table: str
    name: str
    metric: str
    unit: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    block: int | None = None
    context: int | None = None
