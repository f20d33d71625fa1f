"""Layer masks: which layers of the full verifier a slim tier keeps."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class LayerMask:
    """``kept[i]`` is True where layer ``i`` runs."""

    kept: tuple[bool, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the kept layers, ascending."""
        return tuple(index for index, kept in enumerate(self.kept) if kept)

    @property
    def skip_ratio(self) -> float:
        """Share of layers skipped."""
        return 1 - sum(self.kept) / len(self.kept)

    @classmethod
    def of(cls, layers: Sequence[int], depth: int) -> "LayerMask":
        wanted = set(layers)
        return cls(tuple(index in wanted for index in range(depth)))


def kept_count(depth: int, skip_ratio: float) -> int:
    """Layers that stay: L - round(r L).

    Raises:
        UserError: a ratio outside [0, 1), or one that leaves no layer.
    """
    kept = depth - round(skip_ratio * depth) if 0 <= skip_ratio < 1 else 0
    if kept < 1:
        raise UserError(f"skip_ratio={skip_ratio} leaves no layer of {depth}; give a value from 0 to below 1.")
    return kept


def evenly_spaced(depth: int, skip_ratio: float) -> LayerMask:
    """Skip round(r L) layers spread evenly over the inner ones; the first and last layer stay where they can."""
    skipped = depth - kept_count(depth, skip_ratio)
    inner = max(depth - 2, skipped)
    offset = (depth - inner) // 2
    drop = {offset + int((index + 0.5) * inner / skipped) for index in range(skipped)}
    return LayerMask(tuple(index not in drop for index in range(depth)))


def mask_or_evenly_spaced(mask: str | Sequence[int] | None, depth: int, skip_ratio: float) -> tuple[LayerMask, str]:
    """``mask`` as ``read_mask`` has it, evenly spaced where there is none; and what records call it."""
    if mask is None:
        return evenly_spaced(depth, skip_ratio), f"evenly spaced, skip {skip_ratio}"
    return read_mask(mask, depth), str(mask)


def read_mask(mask: str | Path | Sequence[int], depth: int) -> LayerMask:
    """A mask from a file written by ``job=search`` or a list of kept layer indices.

    Raises:
        UserError: no such file, not a mask, or a mask for a model of another depth.
    """
    if not isinstance(mask, str | Path):
        return checked(list(mask), depth, "layer mask")
    path = Path(mask)
    if not path.is_file() and not path.is_absolute():
        path = CHECKOUT / path  # the masks shipped with the project, whatever folder the command is run from
    if not path.is_file():
        raise UserError(
            f"layer mask {str(mask)!r} does not exist; make one with job=search, or set model.slim_mask=null where no "
            "arm has a slim tier."
        )
    try:
        found = json.loads(path.read_text())
        layers, found_depth = found["kept_layers"], found["layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a layer mask ({error!r}); want keys 'layers' and 'kept_layers'.") from error
    if found_depth != depth:
        raise UserError(
            f"{path} is a mask over {found_depth} layers, the model has {depth}; search one for this model."
        )
    return checked(layers, depth, str(path))


def checked(layers: object, depth: int, origin: str) -> LayerMask:
    """The mask that keeps ``layers``, which must be distinct indices below ``depth``."""
    valid = isinstance(layers, list) and all(type(index) is int and 0 <= index < depth for index in layers)
    if not isinstance(layers, list) or not valid or not 0 < len(layers) == len(set(layers)):
        raise UserError(f"{origin}: kept layers {layers} must be distinct integers from 0 to {depth - 1}.")
    return LayerMask.of(layers, depth)
