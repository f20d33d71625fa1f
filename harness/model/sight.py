"""What one forward sees: positions to write, keys to look at, rotary angles and masks, for each kind of layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.model.rotary import rotary_table
from harness.model.spec import ModelSpec


class Sight(NamedTuple):
    """What layers of one kind share in one forward.

    ``new`` are the positions to write, ``seen`` the keys to look at; angles and mask are None where there are none.
    """

    new: slice | Int[Tensor, "S"]
    seen: slice
    cos: Float[Tensor, "S D"] | None
    sin: Float[Tensor, "S D"] | None
    mask: Float[Tensor, "S T"] | None


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers have in common besides their weights' shapes: window, rotary table of every position, device.

    ``dtype`` is that of the masks.
    """

    window: int | None
    table: tuple[Float[Tensor, "P D"], Float[Tensor, "P D"]] | None
    dtype: torch.dtype
    device: torch.device

    def sight(self, start: int, count: int) -> Sight:
        """For ``count`` new positions from ``start`` on: no more keys than those there are."""
        end = start + count
        first = 0 if self.window is None else max(0, start + 1 - self.window)
        mask = None
        if count > 1:
            places = torch.arange(first, end, device=self.device)
            mask = causal_mask(places[start - first :], places, self.window, self.dtype)
        new = slice(start, end)
        return Sight(new, slice(first, end), *self.angles(new), mask)

    def fixed_sight(self, start: Int[Tensor, ""], count: int, capacity: int) -> Sight:
        """The same with the start on the device and all ``capacity`` keys, masked: one shape for every start."""
        places = torch.arange(capacity, device=self.device)
        new = start.to(self.device) + places[:count]
        return Sight(new, slice(0, capacity), *self.angles(new), causal_mask(new, places, self.window, self.dtype))

    def angles(self, new: slice | Int[Tensor, "S"]) -> tuple[Float[Tensor, "S D"] | None, Float[Tensor, "S D"] | None]:
        if self.table is None:
            return None, None
        if isinstance(new, slice):
            return self.table[0][new], self.table[1][new]
        within = new.clamp(max=self.table[0].shape[0] - 1)  # rows of padding may lie behind the model's last position
        return self.table[0].index_select(0, within), self.table[1].index_select(0, within)


def layer_kinds(
    spec: ModelSpec, devices: Sequence[torch.device], dtype: torch.dtype, masks: torch.dtype
) -> tuple[list[LayerKind], list[int]]:
    """The different kinds of layers, and each layer's index among them. Equal tables, in ``dtype``, are shared."""
    shapes = [(spec.window_of(index), spec.rope_of(index), device) for index, device in enumerate(devices)]
    tables = {
        (rope, device): rotary_table(rope, spec.head_dim, spec.max_positions, dtype, device)
        for _, rope, device in dict.fromkeys(shapes)
        if rope is not None
    }
    distinct = list(dict.fromkeys(shapes))
    kinds = [
        LayerKind(window, None if rope is None else tables[rope, device], masks, device)
        for window, rope, device in distinct
    ]
    return kinds, [distinct.index(shape) for shape in shapes]


def causal_mask(
    queries: Int[Tensor, "S"], keys: Int[Tensor, "T"], window: int | None, dtype: torch.dtype
) -> Float[Tensor, "S T"]:
    """0 where a query may look, -inf where it may not; both are given by their positions.

    Each sees itself and what is before it, of that no more than the last ``window`` positions.
    """
    apart = queries[:, None] - keys  # [S, T]
    hidden = apart < 0 if window is None else (apart < 0) | (apart >= window)
    return torch.zeros(apart.shape, dtype=dtype, device=apart.device).masked_fill_(hidden, float("-inf"))
