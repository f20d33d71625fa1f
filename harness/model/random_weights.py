"""Models of any shape with random weights, drawn where they stay: nothing is downloaded, and the text means nothing."""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.errors import UserError
from harness.model.linear import pack
from harness.model.load import (
    Model,
    known_dtype,
    matrices,
    norms,
    one_or_several,
    resolve_devices,
    set_threads,
    spread,
)
from harness.model.slim import mask_or_evenly_spaced
from harness.model.spec import ModelSpec
from harness.model.tokenizer import ByteTokenizer
from harness.model.transformer import LayerWeights, Transformer, Weights

CPU = torch.device("cpu")


def random_model(
    name: str,
    config: Mapping[str, Any],
    seed: int = 0,
    skip_ratio: float = 0.3,
    slim_mask: str | Sequence[int] | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    devices: Sequence[str] | None = None,
    threads: int | None = None,
    notify: Callable[[str], None] | None = None,
) -> Model:
    """A model of the shape of ``config``, which is what a checkpoint's config.json says, with a byte tokenizer.

    The head keeps all its rows, since they cost time; ids that the tokenizer does not know decode to nothing.

    Args:
        skip_ratio: share of layers that the slim tier leaves out, evenly spaced; ``slim_mask`` instead names a mask
            file or the kept layers.
        device, devices, threads, notify: as for ``load_model``.

    Raises:
        UserError: a shape that is not supported, or that cannot fit the memory.
    """
    set_threads(threads)
    kind = known_dtype(dtype)
    places = resolve_devices(one_or_several(device, devices))
    spec = ModelSpec.from_hf(config, "model.config")
    tokenizer = ByteTokenizer()
    if spec.vocab_size < tokenizer.vocab_size:
        raise UserError(f"model.config.vocab_size={spec.vocab_size}: want {tokenizer.vocab_size} at least, for bytes.")
    mask, mask_name = mask_or_evenly_spaced(slim_mask, spec.layers, skip_ratio)
    check_memory(name, spec, places, kind)
    if notify is not None:
        notify(f"drawing {sum(parameters(spec, [CPU]).values()):,} random weights in {dtype}")
    transformer = random_transformer(spec, seed, kind, places=places)
    return Model(name, transformer, tokenizer, mask, mask_name, slug=name)


def parameters(spec: ModelSpec, places: Sequence[torch.device]) -> Counter[torch.device]:
    """How many numbers the weights have on each device when the layers are spread over ``places``."""
    owners = spread(spec.layers, places)
    table = spec.vocab_size * spec.hidden_size
    found = Counter({places[0]: table})
    for index, place in enumerate(owners):
        parts = [part for stack in matrices(spec, index).values() for part in stack]
        found[place] += sum(math.prod(shape) for _, shape in (*parts, *norms(spec, index).values()))
    shared = spec.tied_head and places[0] == places[-1]
    found[places[-1]] += spec.hidden_size + (0 if shared else table)
    return found


def check_memory(name: str, spec: ModelSpec, places: Sequence[torch.device], dtype: torch.dtype) -> None:
    """Refuse a model whose weights alone cannot fit; one that fits barely may still run out later.

    Raises:
        UserError: what is needed, what there is, what to do.
    """
    for place, count in parameters(spec, places).items():
        needed, most = count * dtype.itemsize, available_bytes(place)
        if needed > most:
            raise UserError(
                f"the weights of {name} need {needed / 1e9:.1f} GB on {place}, which has {most / 1e9:.1f} GB: take "
                "model.dtype=bfloat16 if it is wider, several model.devices, or fewer model.config.num_hidden_layers."
            )


def available_bytes(place: torch.device) -> int:
    """Of a CUDA device the memory that nobody uses; of the CPU all there is, since how much can be freed is unsure."""
    if place.type == "cuda":
        kept = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)  # ours, from a model before
        return torch.cuda.mem_get_info(place)[0] + kept
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def random_transformer(
    spec: ModelSpec,
    seed: int,
    dtype: torch.dtype,
    layer_scale: float = 0.5,
    head_scale: float = 3.0,
    places: Sequence[torch.device] = (CPU,),
) -> Transformer:
    """Random weights, each tensor drawn in ``dtype`` on its device: never is more in memory than the model.

    ``layer_scale`` is how much each layer moves the residual stream: small values make a model with skipped layers
    agree often with the whole one. ``head_scale`` is about the spread of the logits. Neither depends on the size, so
    that a large model stays in the range of its dtype too. A seed's weights differ between dtypes and kinds of device.

    Raises:
        UserError: no possible seed, or more devices than layers.
    """
    if not 0 <= seed < 2**63:
        raise UserError(f"model.seed={seed}: want 0 or more, below 2**63.")
    generators = {
        place: torch.Generator(place).manual_seed(seed + turn) for turn, place in enumerate(dict.fromkeys(places))
    }
    scales = {"qkv": 2.0, "out": layer_scale, "gate_up": 2.0, "down": layer_scale}

    def normal(place: torch.device, shape: tuple[int, ...], std: float) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=place).normal_(generator=generators[place]).mul_(std)

    def layer(index: int, place: torch.device) -> LayerWeights:
        drawn: dict[str, Tensor] = {}
        for field, stack in matrices(spec, index).items():
            rows, (_, *columns) = sum(shape[0] for _, shape in stack), stack[0][1]
            std = scales[field] * columns[0] ** -0.5 if columns else 0.3
            weight = normal(place, (rows, *columns), std)
            drawn[field] = pack(weight) if columns else weight
        return LayerWeights(**drawn, **gains[place])

    gains = {place: norm_gains(spec, dtype, place, layer_scale) for place in places}
    layers = tuple(layer(index, place) for index, place in enumerate(spread(spec.layers, places)))
    last, table, width = places[-1], (spec.vocab_size, spec.hidden_size), spec.hidden_size
    embed_std = 1 / (spec.embed_scale or 1.0)
    embed = normal(places[0], table, embed_std)
    norm = gains[last]["attn_norm"]
    if spec.tied_head:
        # The norm makes up for the embedding's scale; its signs keep the model from repeating what it has just read.
        norm = norm * normal(last, (width,), 1.0).sign() * (head_scale * width**-0.5 / embed_std)
        head = embed.to(last)
    else:
        head = normal(last, table, head_scale * width**-0.5)
    return Transformer(spec, Weights(embed, layers, norm, pack(head)))


def norm_gains(spec: ModelSpec, dtype: torch.dtype, place: torch.device, layer_scale: float) -> dict[str, Tensor]:
    """The norms of every layer on ``place``, which share them."""
    gain_dtype = torch.promote_types(dtype, torch.float32) if spec.offset_norm else dtype
    ones = torch.ones(spec.hidden_size, dtype=gain_dtype, device=place)
    gains = {"attn_norm": ones, "mlp_norm": ones}
    if spec.post_norms:
        gains |= {"post_attn_norm": ones * layer_scale, "post_mlp_norm": ones * layer_scale}
    if spec.qk_norm:
        gains["qk_norm"] = torch.ones(spec.heads + spec.kv_heads, 1, spec.head_dim, dtype=gain_dtype, device=place)
    return gains
