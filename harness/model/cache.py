"""Key-value storage addressed by absolute position, shared by the tiers that run one model's weights.

Only the full verifier commits. A tier that runs fewer layers of the same weights reads the committed entries and keeps
its own provisional tail behind them; tails of different tiers take turns in the same storage, so a third tier needs no
second cache. Whenever the committed part changes, every tail is void and starts again at the committed length.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from harness.model.spec import ModelSpec

Entries = list[tuple[Tensor, Tensor]]
"""Keys and values of some positions, [l, K, n, D] each, for every storage of a cache."""


@runtime_checkable
class CacheView(Protocol):
    """What a forward needs of a cache: where to write, and how far it is filled. ``layers``: keys, values of each."""

    @property
    def layers(self) -> Sequence[tuple[Tensor, Tensor]]: ...
    @property
    def length(self) -> int: ...
    @property
    def capacity(self) -> int: ...

    def begin(self, count: int) -> int: ...
    def append(self, count: int) -> None: ...
    def rollback(self, length: int) -> None: ...


class KVCache:
    """Storage of capacity ``P`` positions and the committed length of the tier that owns it.

    Layers with a sliding window keep every position too, so that a rollback may reach back behind the window; they
    take as much memory as the others.

    Example: ``start = cache.begin(3)``; write keys and values at ``start..start+2``; ``cache.append(3)``; the last two
    turn out wrong: ``cache.rollback(start + 1)``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | Sequence[torch.device],
        layers: Sequence[int] | None = None,
    ) -> None:
        """``device`` is one for all layers, or one for each; neighbours on one device share a storage.

        ``layers``, ascending: those that will attend, None for all. The others have no storage: in ``self.layers`` each
        shows that of a layer that has one, and must not write there.
        """
        places = [device] * spec.layers if isinstance(device, torch.device) else list(device)
        attending = range(spec.layers) if layers is None else layers
        self.storages: Entries = []
        stored: list[tuple[Tensor, Tensor]] = []
        for place, group in groupby(places[index] for index in attending):
            shape = (len(list(group)), spec.kv_heads, capacity, spec.head_dim)
            keys, values = (torch.zeros(shape, dtype=dtype, device=place) for _ in range(2))
            self.storages.append((keys, values))
            stored += zip(keys, values, strict=True)
        place_of = {index: place for place, index in enumerate(attending)}
        self.layers = [stored[place_of.get(index, 0)] for index in range(spec.layers)]
        self.capacity = capacity
        self.length = 0
        self.version = 0
        self.resident: Tail | None = None

    @property
    def keys(self) -> Float[Tensor, "L K P D"]:
        """All keys, of a cache on one device."""
        ((keys, _),) = self.storages
        return keys

    @property
    def values(self) -> Float[Tensor, "L K P D"]:
        """All values, of a cache on one device."""
        ((_, values),) = self.storages
        return values

    def read(self, begin: int, end: int) -> Entries:
        """A copy of the entries of positions ``begin`` to before ``end``."""
        return [(keys[:, :, begin:end].clone(), values[:, :, begin:end].clone()) for keys, values in self.storages]

    def write(self, begin: int, entries: Entries) -> None:
        """Put back what ``read`` returned, from position ``begin`` on."""
        for (keys, values), (old_keys, old_values) in zip(self.storages, entries, strict=True):
            keys[:, :, begin : begin + old_keys.shape[2]] = old_keys
            values[:, :, begin : begin + old_values.shape[2]] = old_values

    def begin(self, count: int) -> int:
        """First position to write, after making sure that ``count`` entries fit.

        Raises:
            ValueError: the cache is too small.
        """
        self.check_fits(self.length + count)
        self.resident = None
        self.version += 1
        return self.length

    def append(self, count: int) -> None:
        """Commit ``count`` entries that were written from ``length`` on."""
        self.length += count

    def rollback(self, length: int) -> None:
        """Forget entries from ``length`` on; a length beyond the filled part changes nothing."""
        if length < self.length:
            self.length = length
            self.resident = None
            self.version += 1

    def check_fits(self, length: int) -> None:
        if length > self.capacity:
            raise ValueError(f"cache holds {self.capacity} positions, {length} are needed")


class Tail:
    """A provisional continuation of the committed entries, private to one tier."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.version = cache.version
        self.count = 0
        self.saved: Entries | None = None

    @property
    def layers(self) -> Sequence[tuple[Tensor, Tensor]]:
        return self.cache.layers

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    @property
    def length(self) -> int:
        """Committed length plus this tier's own entries, none when the committed part has changed since."""
        return self.cache.length + (self.count if self.version == self.cache.version else 0)

    def begin(self, count: int) -> int:
        """Bring this tail into the storage; as ``KVCache.begin``."""
        cache = self.cache
        cache.check_fits(self.length + count)
        if self.version != cache.version:
            self.version, self.count, self.saved = cache.version, 0, None
        if cache.resident is not self:
            if cache.resident is not None:
                cache.resident.save()
            if self.saved is not None:
                cache.write(cache.length, self.saved)
                self.saved = None
            cache.resident = self
        return self.length

    def append(self, count: int) -> None:
        self.count += count

    def rollback(self, length: int) -> None:
        """Cut the tail so that it ends at absolute position ``length``, at the committed length at least."""
        if self.version != self.cache.version:
            return
        count = max(0, min(self.count, length - self.cache.length))
        if self.saved is not None and count < self.count:
            self.saved = [(keys[:, :, :count], values[:, :, :count]) for keys, values in self.saved]
        self.count = count

    def save(self) -> None:
        """Copy the entries aside; another tail is about to take their place."""
        self.saved = self.cache.read(self.cache.length, self.cache.length + self.count)
