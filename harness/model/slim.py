"""Masks: which layers of the full verifier a slim tier keeps, or which halves of them."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError, unknown

CACHES = ("shared", "own")
"""What a slim verifier reads: the full verifier's entries, or keys and values of its own."""
CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class LayerMask:
    """``kept[i]`` is True where layer ``i`` runs."""

    kept: tuple[bool, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the kept layers, ascending."""
        return places(self.kept)

    @property
    def attending(self) -> tuple[int, ...]:
        """Layers whose attention runs: all that are kept."""
        return self.layers

    @property
    def text(self) -> str:
        """As tables and records have it: ``0 1 4``."""
        return " ".join(map(str, self.layers))

    @property
    def skip_ratio(self) -> float:
        """Share of layers skipped."""
        return 1 - sum(self.kept) / len(self.kept)

    @classmethod
    def of(cls, layers: Sequence[int], depth: int) -> "LayerMask":
        wanted = set(layers)
        return cls(tuple(index in wanted for index in range(depth)))


@dataclass(frozen=True, slots=True)
class SublayerMask:
    """``attention[i]`` and ``mlp[i]`` are True where that half of layer ``i`` runs (SWIFT, arXiv 2410.06916)."""

    attention: tuple[bool, ...]
    mlp: tuple[bool, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of which at least one half runs, ascending."""
        return places([one or other for one, other in zip(self.attention, self.mlp, strict=True)])

    @property
    def attending(self) -> tuple[int, ...]:
        """Layers whose attention runs, ascending."""
        return places(self.attention)

    @property
    def skip_ratio(self) -> float:
        """Share of the 2 L sublayers skipped."""
        return 1 - (sum(self.attention) + sum(self.mlp)) / (2 * len(self.mlp))

    @property
    def text(self) -> str:
        """As tables and records have it: ``0 1a 4m``, whole layers bare, attention alone ``a``, MLP alone ``m``."""
        ends = {(True, True): "", (True, False): "a", (False, True): "m"}
        return " ".join(f"{index}{ends[self.attention[index], self.mlp[index]]}" for index in self.layers)

    @classmethod
    def of(cls, attention: Sequence[int], mlp: Sequence[int], depth: int) -> "SublayerMask":
        return cls(LayerMask.of(attention, depth).kept, LayerMask.of(mlp, depth).kept)


Mask = LayerMask | SublayerMask


def places(kept: Sequence[bool]) -> tuple[int, ...]:
    """Indices that are True, ascending."""
    return tuple(index for index, true in enumerate(kept) if true)


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


def inner_kept(depth: int, skip_ratio: float) -> int:
    """Layers that stay besides the first and the last one, which always do, as in SWIFT.

    Raises:
        UserError: a ratio that leaves fewer than these two.
    """
    kept = kept_count(depth, skip_ratio) - 2
    if not 0 <= kept <= depth - 2:
        raise UserError(f"skip_ratio={skip_ratio} leaves {kept + 2} of {depth} layers; first and last always stay.")
    return kept


def inner_sublayers_kept(depth: int, skip_ratio: float) -> int:
    """Sublayers that stay besides the four of the first and the last layer: 2 L - round(2 r L) - 4.

    Reading, ours: r is a share of all 2 L sublayers, so that a ratio means as much work as for whole layers. SWIFT's
    0.45 is of the 2 (L - 2) inner ones.

    Raises:
        UserError: a ratio that leaves fewer than these four.
    """
    kept = 2 * depth - round(2 * skip_ratio * depth) - 4 if 0 <= skip_ratio < 1 else -1
    if not 0 <= kept <= 2 * (depth - 2):
        raise UserError(
            f"skip_ratio={skip_ratio} of {2 * depth} sublayers: want 0 or more, and the four of the first and the last "
            "layer always stay."
        )
    return kept


def random_layers(depth: int, skip_ratio: float, seed: int) -> LayerMask:
    """Round(r L) inner layers skipped at random."""
    inner = random.Random(seed).sample(range(1, depth - 1), inner_kept(depth, skip_ratio))
    return LayerMask.of([0, *inner, depth - 1], depth)


def first_layers(depth: int, skip_ratio: float) -> LayerMask:
    """The first L - round(r L) layers: early exit."""
    return LayerMask.of(range(kept_count(depth, skip_ratio)), depth)


def random_sublayers(depth: int, skip_ratio: float, seed: int) -> SublayerMask:
    """Inner sublayers skipped at random, as many as ``inner_sublayers_kept`` says."""
    return sublayers_of(
        random.Random(seed).sample(range(2 * (depth - 2)), inner_sublayers_kept(depth, skip_ratio)), depth
    )


def sublayers_of(chosen: Sequence[int], depth: int) -> SublayerMask:
    """First layer, last layer, and the ``chosen`` inner sublayers: 2 i is attention, 2 i + 1 the MLP of layer i + 1."""
    halves: tuple[list[int], list[int]] = ([0, depth - 1], [0, depth - 1])
    for unit in chosen:
        halves[unit % 2].append(unit // 2 + 1)
    return SublayerMask.of(*halves, depth)


def mask_or_evenly_spaced(mask: str | Sequence[int] | None, depth: int, skip_ratio: float) -> tuple[Mask, str]:
    """``mask`` as ``read_mask`` has it, evenly spaced where there is none; and what records call it."""
    if mask is None:
        return evenly_spaced(depth, skip_ratio), f"evenly spaced, skip {skip_ratio}"
    return read_mask(mask, depth), str(mask)


def mask_stem(slug: str, skip_ratio: float, cache: str = "shared", units: str = "layers") -> str:
    """What ``job=search`` calls a mask: ``embedded_skip45``; with units and cache mode where they are not these.

    ``slug``: the model's, as ``Model`` has it.
    """
    unusual = [part for part, usual in ((units, "layers"), (cache, "shared")) if part != usual]
    return "_".join((slug, f"skip{round(100 * skip_ratio)}", *unusual))


def mask_path(mask: str | Path) -> Path:
    """Where a mask file lies: as it is named from here, else among those shipped, whatever folder this is run from."""
    path = Path(mask)
    return path if path.is_file() or path.is_absolute() else CHECKOUT / path


def searched_mask(slug: str, skip_ratio: float, cache: str, chosen: str) -> str:
    """The file in which ``job=search`` keeps its mask for the model ``slug``; ``chosen`` is how a command names that.

    Raises:
        UserError: no such cache mode, or no such file: with the command that makes it.
    """
    if cache not in CACHES:
        raise unknown("slim cache", cache, CACHES)
    file = f"results/masks/{mask_stem(slug, skip_ratio, cache)}.json"
    if not mask_path(file).is_file():
        raise UserError(
            f"slim.skip_ratio={skip_ratio:g} with slim.cache={cache} wants {file}, which does not exist: make it by "
            f"`python -m harness job=search {chosen} task=quick_four job.skip_ratio={skip_ratio:g} job.cache={cache}`, "
            "give slim.mask=FILE, or choose slim=even or another slim=NAME."
        )
    return file


def searched_cache(mask: str | Path | Sequence[int]) -> str | None:
    """The cache mode in which ``job=search`` scored a mask file; None of a list, or where a file does not say."""
    if not isinstance(mask, str | Path) or not mask_path(mask).is_file():
        return None
    found = json.loads(mask_path(mask).read_text())
    return found.get("cache_mode") if isinstance(found, dict) else None


def read_mask(mask: str | Path | Sequence[int], depth: int) -> Mask:
    """A mask from a file written by ``job=search`` or a list of kept layer indices.

    A file of sublayers has ``kept_attention`` and ``kept_mlp`` in place of ``kept_layers``.

    Raises:
        UserError: no such file, not a mask, or a mask for a model of another depth.
    """
    if not isinstance(mask, str | Path):
        return checked(list(mask), depth, "layer mask")
    path = mask_path(mask)
    if not path.is_file():
        raise UserError(
            f"layer mask {str(mask)!r} does not exist; make one with job=search, or set model.slim_mask=null where no "
            "arm has a slim tier."
        )
    try:
        found = json.loads(path.read_text())
        halves = isinstance(found, dict) and "kept_attention" in found
        lists = [found[key] for key in (("kept_attention", "kept_mlp") if halves else ("kept_layers",))]
        found_depth = found["layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a layer mask ({error!r}); want keys 'layers' and 'kept_layers'.") from error
    if found_depth != depth:
        raise UserError(
            f"{path} is a mask over {found_depth} layers, the model has {depth}; search one for this model."
        )
    masks = [checked(layers, depth, str(path)) for layers in lists]
    return SublayerMask(masks[0].kept, masks[1].kept) if halves else masks[0]


def read_text(text: str, depth: int, units: str) -> Mask:
    """Inverse of ``Mask.text`` of a mask of ``units``, ``layers`` or ``sublayers``."""
    halves: tuple[list[int], list[int]] = ([], [])
    for part in text.split():
        for half, end in zip(halves, "am", strict=True):
            if part.endswith(end) or part.isdigit():
                half.append(int(part.rstrip("am")))
    return LayerMask.of(halves[0], depth) if units == "layers" else SublayerMask.of(*halves, depth)


def checked(layers: object, depth: int, origin: str) -> LayerMask:
    """The mask that keeps ``layers``, which must be distinct indices below ``depth``."""
    valid = isinstance(layers, list) and all(type(index) is int and 0 <= index < depth for index in layers)
    if not isinstance(layers, list) or not valid or not 0 < len(layers) == len(set(layers)):
        raise UserError(f"{origin}: kept layers {layers} must be distinct integers from 0 to {depth - 1}.")
    return LayerMask.of(layers, depth)
