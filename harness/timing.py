"""Clocks that wait for the device or stand still, and warm-up. Wall seconds, monotonic."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from weakref import WeakKeyDictionary

import torch

from harness.model.tiers import Tier, Tiers
from harness.model.transformer import Transformer

Clock = Callable[[], float]


def synced_clock(device: torch.device) -> Clock:
    """A clock that reads the time only when all work queued on ``device`` is done."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


@contextmanager
def outside_the_clock(tiers: Tiers) -> Iterator[None]:
    """For measurements within decoding: what happens inside is nobody's time, as ``without_asides`` reads it.

    Work queued before is waited for first. The provisional tail that lies in the cache's storage is brought back at
    the end, so that no tier pays for the swap.
    """
    read = synced_clock(tiers.model.device)
    resident = tiers.cache.resident
    begun = read()
    yield
    if resident is not None:
        resident.begin(0)
    tiers.aside_s += read() - begun


def without_asides(clock: Clock, tiers: Tiers) -> Clock:
    """``clock``, standing still while ``tiers`` were used outside the clock."""
    return lambda: clock() - tiers.aside_s


_warm: WeakKeyDictionary[Transformer, set[tuple[object, ...]]] = WeakKeyDictionary()
"""Shapes of a forward that each model has run."""

LONGEST_CATCH_UP = 64
"""Tokens of backlog up to which a full pass is warmed: each size costs a pass of warming, and longer ones are rare."""


def warm_up(
    tiers: Tiers,
    largest_block: int,
    backlog: int = 0,
    draft: Callable[[Sequence[int], int], object] | None = None,
    lagging: Collection[Tier] = (),
) -> None:
    """Run every tier at every number of tokens it may get, so that no timed forward is a shape's first.

    That is 1 to ``largest_block``; a tier with a cache of its own, such as the full verifier, and those of ``lagging``
    that sit blocks out as it does, also catch up with as many as ``backlog`` tokens that were accepted without them.
    With graphs, ``draft``, called with a sequence and a count, makes every block that has a graph of its own: of up to
    ``largest_block - 1`` tokens, behind 1 or 2 that the drafter has not processed yet. The sequence is made of token 0;
    nothing of it is kept. On a CPU, where nothing is captured, a shape that the same layers ran before in this process
    is warm: another arm or another cell of a sweep runs the largest alone again, for its tiers' first call.
    """
    longest = largest_block + min(backlog, LONGEST_CATCH_UP)
    zeros = (0,) * (longest + 1)
    for tier in tiers.every:
        warm = _warm.setdefault(tier.model, set())
        lasts = all(device.type == "cpu" for device in tier.model.devices)
        largest = longest if tier in tiers.prefilled or tier in lagging else largest_block
        for size in range(1, largest + 1):
            over = tier.cache.capacity if tier.block else None  # a forward of fixed shape is over the whole cache
            shape = (tier.layers, tier.block, over, tier.taps, size, min(size, largest_block))
            if size < largest and lasts and shape in warm:
                continue
            tiers.prefill(zeros[:2])
            tier.forward(zeros[: tier.length + size], rows=min(size, largest_block))
            warm.add(shape)
    if tiers.graphs and draft is not None:
        for count, behind in product(range(1, largest_block), (1, 2)):
            tiers.prefill(zeros[:2])
            draft(zeros[: 1 + behind], count)
    tiers.rollback(0)


def peak_bytes(*devices: torch.device) -> int | None:
    """Highest memory the CUDA allocator has held since ``reset_peak``, devices summed; None on other devices."""
    peaks = [torch.cuda.max_memory_allocated(device) for device in devices if device.type == "cuda"]
    return sum(peaks) if peaks else None


def reset_peak(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
