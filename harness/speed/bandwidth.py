"""How fast memory can be read here: a large matrix-vector product, and on CUDA a copy.

A forward of one token is such products and little else, so the rate at which a large one reads its weights is the
limit that a forward's share is taken of.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.model.linear import linear, pack
from harness.speed.records import COPY, ProductTime
from harness.timing import Clock

MIB = 2**20
SMALLEST = 512 * MIB
COLUMNS = 8192
WARM = 2
ON_CUDA = 10
"""Calls between two readings of the clock on CUDA, where one is short beside the wait for the device."""


def decoder_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The product as the decoder makes it."""
    return partial(linear, weight=pack(weight))


def plain_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return partial(F.linear, weight=weight)


PRODUCTS: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "the decoder's linear": decoder_linear,
    "F.linear": plain_linear,
}


def matrix_bytes(cache: int | None, available: int | None) -> int:
    """Size of the matrix: four times the last cache, so that none of it stays there; an eighth of memory at most."""
    wanted = max(SMALLEST, 4 * (cache or 0))
    return wanted if available is None else min(wanted, available // 8)


def time_products(
    dtype: torch.dtype, device: torch.device, size: int, repeats: int, clock: Clock
) -> Iterator[ProductTime]:
    """Each way to multiply a matrix of ``size`` bytes by a vector; on CUDA also a copy of as much, read and written."""
    calls = ON_CUDA if device.type == "cuda" else 1
    rows = max(1, size // (COLUMNS * dtype.itemsize))
    vector = torch.full((1, COLUMNS), 0.5, dtype=dtype, device=device)
    for name, make in PRODUCTS.items():
        # Filled, not zeros: pages that nobody wrote to are all the same one and never leave the cache.
        weight = torch.full((rows, COLUMNS), 0.5, dtype=dtype, device=device)
        moved = weight.nbytes
        product = make(weight)
        del weight  # where the product has a copy of its own, the first is not needed
        with torch.inference_mode():
            yield ProductTime(name, moved, time_calls(partial(product, vector), calls, repeats, clock))
    if device.type == "cuda":
        source = torch.full((size,), 1, dtype=torch.uint8, device=device)
        copied = time_calls(partial(torch.empty_like(source).copy_, source), calls, repeats, clock)
        yield ProductTime(COPY, 2 * source.nbytes, copied)


def time_calls(call: Callable[[], object], calls: int, repeats: int, clock: Clock) -> tuple[float, ...]:
    """Seconds of one call, ``repeats`` times, after some that warm up."""
    for _ in range(WARM):
        call()
    found = []
    for _ in range(repeats):
        begun = clock()
        for _ in range(calls):
            call()
        found.append((clock() - begun) / calls)
    return tuple(found)


def last_cache_bytes(device: torch.device) -> int | None:
    """Size of the device's last cache, None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=None)


def available_bytes(device: torch.device) -> int | None:
    """Memory that can be had now, None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
