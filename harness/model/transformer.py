"""One decoder-only transformer for every tier: an explicit list of layers per forward, caches by absolute position."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from harness.model.cache import CacheView, KVCache
from harness.model.linear import linear, pack
from harness.model.rotary import rotary_table, rotate
from harness.model.spec import ModelSpec

PREFILL_CHUNK = 256
"""Positions per forward while prefilling; bounds the memory of attention scores."""


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; query, key and value, and gate and up, each fused into one matrix. None: the model has no such part.

    A norm's gain is what it multiplies by: where ``ModelSpec.offset_norm`` is set, one plus the checkpoint's weight,
    in at least float32. ``qk_norm`` has the gains of the query heads, then of the key heads.
    """

    attn_norm: Float[Tensor, "E"]
    qkv: Float[Tensor, "HD E"]
    out: Float[Tensor, "E QD"]
    mlp_norm: Float[Tensor, "E"]
    gate_up: Float[Tensor, "I2 E"]
    down: Float[Tensor, "E I"]
    qkv_bias: Float[Tensor, "HD"] | None = None
    out_bias: Float[Tensor, "E"] | None = None
    gate_up_bias: Float[Tensor, "I2"] | None = None
    down_bias: Float[Tensor, "E"] | None = None
    qk_norm: Float[Tensor, "N 1 D"] | None = None
    post_attn_norm: Float[Tensor, "E"] | None = None
    post_mlp_norm: Float[Tensor, "E"] | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameters. ``head`` is ``embed`` itself when the checkpoint ties them and both are on one device; it may
    have fewer rows.
    """

    embed: Float[Tensor, "V E"]
    layers: tuple[LayerWeights, ...]
    norm: Float[Tensor, "E"]
    head: Float[Tensor, "N E"]


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


class Transformer:
    """Weights plus the forward pass. Norms, rotary embedding and softmax run in at least float32.

    The layers may lie on several devices: ``input_device`` has the embedding, ``device`` the norm and head, and gives
    the logits. What differs from model to model is decided here, once: a plain Llama pays for no other family.
    """

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = weights.embed.dtype
        self.input_device = weights.embed.device
        self.device = weights.head.device
        self.layer_devices = tuple(layer.qkv.device for layer in weights.layers)
        self.devices = tuple(dict.fromkeys((self.input_device, *self.layer_devices, self.device)))
        self.compute_dtype = torch.promote_types(self.dtype, torch.float32)
        self.norm = offset_rms_norm if spec.offset_norm else rms_norm
        self.activate = ACTIVATIONS[spec.activation]
        self.attn_scale = spec.attn_scale or spec.head_dim**-0.5
        # As published, the factor is rounded to the model's dtype.
        self.embed_scale = spec.embed_scale and torch.tensor(spec.embed_scale, dtype=self.dtype).item()
        # On a CPU in low precision torch's fused attention is the faster one; it knows no soft-cap.
        self.fused_attention = spec.attn_softcap is None and self.dtype.itemsize == 2 and self.device.type == "cpu"
        masks = self.dtype if self.fused_attention else self.compute_dtype
        self.kinds, self.kind_of = layer_kinds(spec, self.layer_devices, self.compute_dtype, masks)

    def with_vocabulary(self, size: int) -> "Transformer":
        """The same weights with a head of the first ``size`` rows: padding rows beyond a tokenizer are never drawn.

        The head is packed (``linear.pack``), which is why it can be cut no more than once.
        """
        narrowed = copy(self)
        head = self.weights.head
        narrowed.weights = replace(self.weights, head=pack(head[:size] if size < len(head) else head))
        return narrowed

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for this model, each layer's part on the layer's device."""
        return KVCache(self.spec, capacity, self.dtype, self.layer_devices)

    @torch.inference_mode()
    def forward(
        self, tokens: Int[Tensor, "S"], cache: CacheView, layers: Sequence[int], rows: int
    ) -> Float[Tensor, "R V"]:
        """Run ``layers`` over ``tokens``, which follow what ``cache`` holds; return the last ``rows`` logits.

        The entries of the executed layers are appended to ``cache``. ``rows=0`` fills the cache only.

        Raises:
            ValueError: the cache or the position table is too short.
        """
        count = tokens.shape[0]
        start = cache.begin(count)
        self.check_positions(start + count)
        logits = self.run(tokens, cache.layers, layers, [kind.sight(start, count) for kind in self.kinds], rows)
        cache.append(count)
        return logits

    @torch.inference_mode()
    def fixed_forward(
        self,
        tokens: Int[Tensor, "S"],
        start: Int[Tensor, ""],
        entries: Sequence[tuple[Tensor, Tensor]],
        layers: Sequence[int],
    ) -> Float[Tensor, "S V"]:
        """As ``forward`` from position ``start`` over keys and values ``entries``; all logits, in shapes for any start.

        Nothing here depends on a value on the device, so that a CUDA graph can hold it. The caller keeps the count.
        """
        capacity = entries[0][0].shape[1]
        sights = [kind.fixed_sight(start, tokens.shape[0], capacity) for kind in self.kinds]
        return self.run(tokens, entries, layers, sights, tokens.shape[0])

    def check_positions(self, needed: int) -> None:
        if needed > self.spec.max_positions:
            raise ValueError(f"the model has {self.spec.max_positions} positions, {needed} are needed")

    def run(
        self,
        tokens: Int[Tensor, "S"],
        entries: Sequence[tuple[Tensor, Tensor]],
        layers: Sequence[int],
        sights: Sequence[Sight],
        rows: int,
    ) -> Float[Tensor, "R V"]:
        """The layers, whatever the shapes; ``sights`` has one for each kind of layer."""
        spec, norm, eps, wide = self.spec, self.norm, self.spec.norm_eps, self.compute_dtype
        several = len(self.devices) > 1
        hidden = F.embedding(tokens, self.weights.embed)  # [S, E]
        if self.embed_scale is not None:
            hidden = hidden * self.embed_scale
        for index in layers:
            layer = self.weights.layers[index]
            if several:
                hidden = hidden.to(self.layer_devices[index])
            keys, values = entries[index]  # [K, P, D]
            normed = norm(hidden, layer.attn_norm, eps, wide)
            mixed = self.attend(layer, normed, keys, values, sights[self.kind_of[index]])
            hidden = hidden + (mixed if layer.post_attn_norm is None else norm(mixed, layer.post_attn_norm, eps, wide))
            normed = norm(hidden, layer.mlp_norm, eps, wide)
            gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)  # [S, I] each
            mixed = linear(self.activate(gate).mul_(up), layer.down, layer.down_bias)
            hidden = hidden + (mixed if layer.post_mlp_norm is None else norm(mixed, layer.post_mlp_norm, eps, wide))
        last = hidden[hidden.shape[0] - rows :]
        logits = linear(norm(last.to(self.device), self.weights.norm, eps, wide), self.weights.head)
        return logits if spec.logit_softcap is None else softcap_(logits, spec.logit_softcap)

    def attend(
        self,
        layer: LayerWeights,
        normed: Float[Tensor, "S E"],
        keys: Float[Tensor, "K P D"],
        values: Float[Tensor, "K P D"],
        sight: Sight,
    ) -> Float[Tensor, "S E"]:
        """Grouped-query attention of new positions over the cache, which receives their keys and values."""
        spec = self.spec
        count = normed.shape[0]
        heads = spec.heads + 2 * spec.kv_heads
        qkv = linear(normed, layer.qkv, layer.qkv_bias).view(count, heads, spec.head_dim).transpose(0, 1)  # [N, S, D]
        turned = qkv[: spec.heads + spec.kv_heads]
        if layer.qk_norm is not None:
            turned = self.norm(turned, layer.qk_norm, spec.norm_eps, self.compute_dtype)
        if sight.cos is not None and sight.sin is not None:
            turned = rotate(turned, sight.cos, sight.sin)
        keys[:, sight.new] = turned[spec.heads :]
        values[:, sight.new] = qkv[spec.heads + spec.kv_heads :]
        attention = self.fused if self.fused_attention else self.grouped
        mixed = attention(turned[: spec.heads], keys[:, sight.seen], values[:, sight.seen], sight.mask)  # [H, S, D]
        return linear(mixed.transpose(0, 1).reshape(count, -1), layer.out, layer.out_bias)

    def fused(
        self,
        query: Float[Tensor, "H S D"],
        keys: Float[Tensor, "K T D"],
        values: Float[Tensor, "K T D"],
        mask: Float[Tensor, "S T"] | None,
    ) -> Float[Tensor, "H S D"]:
        """Torch's fused attention, whose scores are never stored."""
        return F.scaled_dot_product_attention(
            query[None], keys[None], values[None], mask, scale=self.attn_scale, enable_gqa=True
        )[0]

    def grouped(
        self,
        query: Float[Tensor, "H S D"],
        keys: Float[Tensor, "K T D"],
        values: Float[Tensor, "K T D"],
        mask: Float[Tensor, "S T"] | None,
    ) -> Float[Tensor, "H S D"]:
        """Two products a layer: query heads of one group share a key head and are folded into its rows."""
        groups, seen, width = keys.shape
        count = query.shape[1]
        folded = query.reshape(groups, -1, width)  # [K, H/K*S, D]
        scores = torch.bmm(folded, keys.transpose(1, 2)).to(self.compute_dtype)  # [K, H/K*S, T]
        scores *= self.attn_scale
        if self.spec.attn_softcap is not None:
            softcap_(scores, self.spec.attn_softcap)
        if mask is not None:
            scores.view(groups, -1, count, seen).add_(mask)
        weights = torch.softmax(scores, dim=-1).to(self.dtype)
        return torch.bmm(weights, values).view(-1, count, width)

    def prefill(self, tokens: Int[Tensor, "S"], cache: CacheView, layers: Sequence[int]) -> None:
        """Fill ``cache`` with ``tokens`` in chunks, without computing logits."""
        for chunk in tokens.split(PREFILL_CHUNK):
            self.forward(chunk, cache, layers, rows=0)


def rms_norm(
    x: Float[Tensor, "*rows E"], gain: Float[Tensor, "*every E"], eps: float, compute_dtype: torch.dtype
) -> Float[Tensor, "*rows E"]:
    """Root-mean-square norm in ``compute_dtype``, cast back before the gain (as Llama does)."""
    return normalised(x.to(compute_dtype), eps).to(x.dtype) * gain


def offset_rms_norm(
    x: Float[Tensor, "*rows E"], gain: Float[Tensor, "*every E"], eps: float, compute_dtype: torch.dtype
) -> Float[Tensor, "*rows E"]:
    """As ``rms_norm``, cast back after the gain, which is in ``compute_dtype`` too (as Gemma does)."""
    return (normalised(x.to(compute_dtype), eps) * gain).to(x.dtype)


def normalised(x: Float[Tensor, "*rows E"], eps: float) -> Float[Tensor, "*rows E"]:
    """x / sqrt(mean(x^2) + eps), in few calls: on a CPU a call costs more than the arithmetic on one row."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.rsqrt(length.square().mul_(1 / x.shape[-1]).add_(eps))


def softcap_(x: Float[Tensor, "*shape"], cap: float) -> Float[Tensor, "*shape"]:
    """cap tanh(x / cap), in place and in the dtype of ``x``."""
    return x.div_(cap).tanh_().mul_(cap)


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
