"""Heads for tests: made of a verifier's own weights, so that they draft well now and then; and their naive twins."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.drafters import eagle, medusa, mtp, small_lm
from harness.drafters.base import Drafter
from harness.drafters.heads import HeadDrafter, HeadTier
from harness.drafters.weights import CARD_KEYS, save_drafter
from harness.model.load import Model, matrices, norms
from harness.model.tiers import Tiers
from harness.model.transformer import Transformer
from harness.sampling import Sampling
from tests.toys import DrafterFactory

SHAPE = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "eagle": {"model": "tiny", "bias": True, **SHAPE},
    "copying": {"model": "tiny", "bias": True, "beside": [0, 2], **SHAPE},
    "fused": {"model": "tiny", "fused": True, **SHAPE},
    "mtp": {"model": "tiny", **SHAPE},
    "medusa": {"model": "tiny", "medusa_num_heads": 8, "medusa_num_layers": 2},
}
SHAPES = {
    **{"eagle": eagle.shapes, "copying": eagle.shapes, "fused": eagle.shapes},
    **{"mtp": mtp.shapes, "medusa": medusa.shapes},
}


def first_layer(model: Transformer) -> dict[str, Tensor]:
    """The verifier's first layer by the names of a checkpoint."""
    found: dict[str, Tensor] = {}
    for field, stack in matrices(model.spec, 0).items():
        rows = getattr(model.weights.layers[0], field).split([shape[0] for _, shape in stack])
        found |= {name: part for (name, _), part in zip(stack, rows, strict=True)}
    return found | {name: getattr(model.weights.layers[0], field) for field, (name, _) in norms(model.spec, 0).items()}


def tensors_of(kind: str, model: Transformer, seed: int, noise: float = 0.05) -> dict[str, Tensor]:
    """Weights of a head that mostly reads the token and runs the verifier's first layer over it."""
    width, dtype = model.spec.hidden_size, model.dtype
    generator = torch.Generator().manual_seed(seed)
    wanted = SHAPES[kind](CONFIGS[kind], model.spec)
    found = {
        name: torch.randn(shape, generator=generator, dtype=dtype) * noise / (shape[-1] ** 0.5 if len(shape) > 1 else 1)
        for name, shape in wanted.items()
    }
    for name, tensor in found.items():
        if "norm" in name:
            tensor += 1
    for name, tensor in first_layer(model).items():
        own = name if kind == "mtp" else eagle.renamed(name, kind == "fused")
        if own not in found:
            continue
        if found[own].shape == tensor.shape:
            found[own] += tensor
        else:
            found[own][:, :width] += tensor  # the half of attention's input that is the token
    if kind in ("eagle", "copying", "mtp"):
        found["eh_proj.weight" if kind == "mtp" else "fc.weight"][:, :width] += torch.eye(width, dtype=dtype)
    if kind == "fused":
        found["fc.weight"][:, -width:] += torch.eye(width, dtype=dtype)
    return found


def build(kind: str, tensors: Mapping[str, Tensor], verifier: Transformer, kept: Tensor | None = None) -> Any:
    """The head of these tensors."""
    make = {"mtp": mtp.mtp_head, "medusa": medusa.medusa_heads}.get(kind, eagle.eagle_head)
    return make(CONFIGS[kind], tensors, verifier, kept)


def head_drafter(
    kind: str, seed: int = 0, source: str = "slim", kept: Tensor | None = None, noise: float = 0.05, text: int = 0
) -> DrafterFactory:
    """A drafter factory as methods want it; ``text``: tokens of the text that it may say besides ``kept``."""

    def make(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
        head = build(kind, tensors_of(kind, model.transformer, seed, noise), model.transformer, kept)
        if kind == "medusa":
            return HeadDrafter(kind, medusa.MedusaTier(tiers, head, source), sampling, len(head.blocks))
        return HeadDrafter(kind, HeadTier(tiers, head, source, text), sampling)

    return make


def write_shipped_for(model: Model, root: Path) -> None:
    """Random drafters for ``model`` in ``root``, at the paths where those of the embedded model are looked for."""
    spec, generator = model.transformer.spec, torch.Generator().manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads}
    layer = {"model": model.name, "intermediate_size": 48, **shape}
    medusa_config = {"model": model.name, "medusa_num_heads": 5, "medusa_num_layers": 1}
    card: dict[str, Any] = {key: {} if key == "held_out" else 1 for key in CARD_KEYS}
    for kind, shapes, config in (
        ("small_lm", small_lm.shapes, layer),
        ("eagle", eagle.shapes, layer),
        ("medusa", medusa.shapes, medusa_config),
    ):
        wanted = shapes(config, spec)
        tensors = {name: torch.randn(size, generator=generator) * 0.05 for name, size in wanted.items()}
        save_drafter(root / "results" / "drafters" / f"embedded_{kind}", kind, config, tensors, card)


def rms(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def naive_layer(weight: Callable[[str], Tensor], x: Tensor, read: Tensor) -> Tensor:
    """A Llama layer over a whole sequence, 4 query heads and 2 key heads of 8, written out head by head."""
    count, size = len(x), 8
    query, key, value = (read @ weight(f"self_attn.{name}_proj.weight").T for name in "qkv")
    angle = torch.arange(count, dtype=x.dtype)[:, None] * 10_000.0 ** -(torch.arange(0, size, 2, dtype=x.dtype) / size)

    def turned(part: Tensor) -> Tensor:
        a, b = part.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    mixed = []
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    for head in range(4):
        own, shared = slice(head * size, (head + 1) * size), slice(head // 2 * size, (head // 2 + 1) * size)
        scores = (turned(query[:, own]) @ turned(key[:, shared]).T / size**0.5).masked_fill(future, float("-inf"))
        mixed.append(scores.softmax(-1) @ value[:, shared])
    x = x + torch.cat(mixed, -1) @ weight("self_attn.o_proj.weight").T
    normed = rms(x, weight("post_attention_layernorm.weight"))
    gate, up = (normed @ weight(f"mlp.{name}_proj.weight").T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ weight("mlp.down_proj.weight").T


def naive_states(kind: str, tensors: Mapping[str, Tensor], embed: Tensor, features: Tensor, taken: int) -> Tensor:
    """Outputs of a recurrent head for a whole sequence, whose first ``taken`` features are the verifier's."""
    base = {"fused": "midlayer.", "mtp": "model.layers.0."}.get(kind, "layers.0.")
    width = embed.shape[-1]
    beside = features[:taken, :-width]
    if kind == "fused":
        features = features @ tensors["fc.weight"].T
    states = features[:taken, -width:]
    while True:
        e = embed[: len(states)]
        if kind in ("eagle", "copying"):
            x = read = torch.cat((e, states), -1) @ tensors["fc.weight"].T + tensors["fc.bias"]
            if kind == "copying":
                ones = torch.ones(width, dtype=x.dtype)
                deep = [F.pad(rms(part, ones), (0, 0, 0, len(x) - taken)) for part in beside.split(width, -1)]
                read = torch.cat((x, rms(e, ones), *deep), -1)
        elif kind == "mtp":
            normed = torch.cat((rms(e, tensors["enorm.weight"]), rms(states, tensors["hnorm.weight"])), -1)
            x = normed @ tensors["eh_proj.weight"].T
            read = rms(x, tensors[f"{base}input_layernorm.weight"])
        else:
            x = states
            read = torch.cat(
                (rms(e, tensors[f"{base}input_layernorm.weight"]), rms(x, tensors[f"{base}hidden_norm.weight"])), -1
            )
        out = naive_layer(lambda name: tensors[f"{base}{name}"], x, read)
        if len(states) == len(embed):
            return out
        states = torch.cat((states, out[-1:]))


def naive_logits(kind: str, tensors: Mapping[str, Tensor], states: Tensor, head: Tensor) -> Tensor:
    norm = {"fused": "norm.weight", "mtp": "shared_head.norm.weight"}.get(kind)
    return (states if norm is None else rms(states, tensors[norm])) @ head.T
