"""Key-value storage addressed by absolute position, shared by the tiers that run one model's weights.

Only the full verifier commits. A tier that runs fewer layers of the same weights reads the committed entries and keeps
its own provisional tail behind them; tails of different tiers take turns in the same storage, so a third tier needs no
second cache. Whenever the committed part changes, every tail is void and starts again at the committed length.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from harness.model.spec import ModelSpec


@runtime_checkable
class CacheView(Protocol):
    """What a forward needs of a cache: where to write, and how far it is filled."""

    @property
    def keys(self) -> Float[Tensor, "L K P D"]: ...
    @property
    def values(self) -> Float[Tensor, "L K P D"]: ...
    @property
    def length(self) -> int: ...

    def begin(self, count: int) -> int: ...
    def append(self, count: int) -> None: ...
    def rollback(self, length: int) -> None: ...


class KVCache:
    """Storage of capacity ``P`` positions and the committed length of the tier that owns it.

    Example: ``start = cache.begin(3)``; write keys and values at ``start..start+2``; ``cache.append(3)``; the last two
    turn out wrong: ``cache.rollback(start + 1)``.
    """

    keys: Float[Tensor, "L K P D"]
    values: Float[Tensor, "L K P D"]

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.layers, spec.kv_heads, capacity, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0
        self.version = 0
        self.resident: Tail | None = None

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
        self.saved: tuple[Tensor, Tensor] | None = None

    @property
    def keys(self) -> Float[Tensor, "L K P D"]:
        return self.cache.keys

    @property
    def values(self) -> Float[Tensor, "L K P D"]:
        return self.cache.values

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
                self.region(cache.keys).copy_(self.saved[0])
                self.region(cache.values).copy_(self.saved[1])
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
            self.saved = (self.saved[0][:, :, :count], self.saved[1][:, :, :count])
        self.count = count

    def save(self) -> None:
        """Copy the entries aside; another tail is about to take their place."""
        self.saved = (self.region(self.cache.keys).clone(), self.region(self.cache.values).clone())

    def region(self, storage: Float[Tensor, "L K P D"]) -> Float[Tensor, "L K n D"]:
        return storage[:, :, self.cache.length : self.cache.length + self.count]
