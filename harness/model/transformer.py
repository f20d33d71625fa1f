"""One decoder-only transformer for every tier: an explicit list of layers per forward, caches by absolute position."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from harness.model.cache import CacheView, KVCache
from harness.model.linear import linear, pack
from harness.model.rotary import rotate
from harness.model.sight import Sight, layer_kinds
from harness.model.spec import ModelSpec

PREFILL_CHUNK = 256
"""Positions per forward while prefilling; bounds the memory of attention scores."""

AFTER_NORM = -1
"""Among ``taps``: the state that the head reads, behind the last norm, which is what LlamaModel returns."""


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; query, key and value, and gate and up, each fused into one matrix. None: the model has no such part.

    Attention reads ``X`` values of each position: E of them but in some drafting heads.

    ``attn_norm`` None: the layer reads its input as it is. A norm's gain is what it multiplies by: where
    ``ModelSpec.offset_norm`` is set, one plus the checkpoint's weight, in at least float32. ``qk_norm`` has the gains
    of the query heads, then of the key heads.
    """

    attn_norm: Float[Tensor, "E"] | None
    qkv: Float[Tensor, "HD X"]
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
    have fewer rows. ``head_tokens``: what its rows are for, where they are a choice out of ``vocabulary`` tokens.
    """

    embed: Float[Tensor, "V E"]
    layers: tuple[LayerWeights, ...]
    norm: Float[Tensor, "E"]
    head: Float[Tensor, "N E"]
    head_tokens: Int[Tensor, "N"] | None = None
    vocabulary: int = 0


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

    def with_head_tokens(self, tokens: Int[Tensor, "N"]) -> "Transformer":
        """The same weights with the head's rows of ``tokens`` alone; the logits of all others are -inf."""
        narrowed = copy(self)
        head = self.weights.head
        rows = (head.to_dense() if head.is_mkldnn else head)[tokens.to(head.device)]
        narrowed.weights = replace(
            self.weights, head=pack(rows), head_tokens=tokens.to(head.device), vocabulary=len(head)
        )
        return narrowed

    def new_cache(self, capacity: int, layers: Sequence[int] | None = None) -> KVCache:
        """An empty cache for this model, each layer's part on the layer's device; room for ``layers`` or for all."""
        return KVCache(self.spec, capacity, self.dtype, self.layer_devices, layers)

    def new_entries(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Room for the keys and values of ``count`` positions in tensors of their own, which autograd can follow."""
        shape = (self.spec.kv_heads, count, self.spec.head_dim)
        kind = partial(torch.zeros, shape, dtype=self.dtype)
        return [(kind(device=device), kind(device=device)) for device in self.layer_devices]

    @torch.inference_mode()
    def forward(
        self, tokens: Int[Tensor, "S"], cache: CacheView, layers: Sequence[int], rows: int
    ) -> Float[Tensor, "R V"]:
        """Run ``layers`` over ``tokens``, which follow what ``cache`` holds; return the last ``rows`` logits.

        The entries of the executed layers are appended to ``cache``. ``rows=0`` fills the cache only.

        Raises:
            ValueError: the cache or the position table is too short.
        """
        return self.observe(tokens, cache, layers, rows, ())[0]

    @torch.inference_mode()
    def observe(
        self, tokens: Int[Tensor, "S"], cache: CacheView, layers: Sequence[int], rows: int, taps: Sequence[int]
    ) -> tuple[Float[Tensor, "R V"], Float[Tensor, "S F"] | None]:
        """As ``forward``, and the hidden states of all ``tokens`` at ``taps``, as ``run`` has them."""
        count = tokens.shape[0]
        start = cache.begin(count)
        self.check_positions(start + count)
        sights = [kind.sight(start, count) for kind in self.kinds]
        found = self.run(tokens, cache.layers, layers, sights, rows, taps)
        cache.append(count)
        return found

    @torch.inference_mode()
    def fixed_forward(
        self,
        tokens: Int[Tensor, "S"],
        start: Int[Tensor, ""],
        entries: Sequence[tuple[Tensor, Tensor]],
        layers: Sequence[int],
        taps: Sequence[int] = (),
    ) -> tuple[Float[Tensor, "S V"], Float[Tensor, "S F"] | None]:
        """As ``observe`` from position ``start`` over keys and values ``entries``; all logits, in shapes for any start.

        Nothing here depends on a value on the device, so that a CUDA graph can hold it. The caller keeps the count.
        """
        sights = self.fixed_sights(start, tokens.shape[0], entries)
        return self.run(tokens, entries, layers, sights, tokens.shape[0], taps)

    def fixed_sights(self, start: Int[Tensor, ""], count: int, entries: Sequence[tuple[Tensor, Tensor]]) -> list[Sight]:
        """One for each kind of layer, for ``count`` positions from ``start`` on."""
        capacity = entries[0][0].shape[1]
        return [kind.fixed_sight(start, count, capacity) for kind in self.kinds]

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
        taps: Sequence[int] = (),
    ) -> tuple[Float[Tensor, "R V"], Float[Tensor, "S F"] | None]:
        """The layers, whatever the shapes; ``sights`` has one for each kind of layer.

        Besides the last logits, what a drafting head reads: for all rows the hidden states at ``taps`` side by side,
        None without taps. A tap is ``AFTER_NORM``, or the index of a layer: the state behind it, before any norm; where
        that layer does not run it is what the layers before it left.
        """
        hidden = self.embedded(tokens)
        states = [hidden]
        for index in layers:
            hidden = self.layer(index, hidden, entries[index], sights[self.kind_of[index]])
            if taps:
                states.append(hidden)
        count = hidden.shape[0]
        normed = self.normed(hidden if AFTER_NORM in taps else hidden[count - rows :])
        logits = self.full_logits(normed[normed.shape[0] - rows :])
        if not taps:
            return logits, None
        found = [normed if tap == AFTER_NORM else states[bisect_right(layers, tap)] for tap in taps]
        return logits, torch.cat([state.to(self.device) for state in found], dim=-1)

    def embedded(self, tokens: Int[Tensor, "S"]) -> Float[Tensor, "S E"]:
        hidden = F.embedding(tokens, self.weights.embed)
        return hidden if self.embed_scale is None else hidden * self.embed_scale

    def normed(self, hidden: Float[Tensor, "S E"]) -> Float[Tensor, "S E"]:
        """What the head reads, on its device."""
        return self.norm(hidden.to(self.device), self.weights.norm, self.spec.norm_eps, self.compute_dtype)

    def full_logits(self, normed: Float[Tensor, "R E"]) -> Float[Tensor, "R V"]:
        """Of the whole vocabulary, -inf where the head has no row."""
        logits = self.head_logits(normed)
        tokens = self.weights.head_tokens
        if tokens is None:
            return logits
        return logits.new_full((len(logits), self.weights.vocabulary), float("-inf")).index_copy(1, tokens, logits)

    def head_logits(self, normed: Float[Tensor, "R E"]) -> Float[Tensor, "R N"]:
        """Of each row of the head."""
        logits = linear(normed, self.weights.head)
        return logits if self.spec.logit_softcap is None else softcap_(logits, self.spec.logit_softcap)

    def layer(
        self, index: int, hidden: Float[Tensor, "S E"], entries: tuple[Tensor, Tensor], sight: Sight
    ) -> Float[Tensor, "S E"]:
        """One layer: attention, then the MLP, each added to its input."""
        layer = self.weights.layers[index]
        if len(self.devices) > 1:
            hidden = hidden.to(self.layer_devices[index])
        return self.add_layer(layer, hidden, self.attention_input(layer, hidden), entries, sight)

    def attention_input(self, layer: LayerWeights, hidden: Float[Tensor, "S E"]) -> Float[Tensor, "S E"]:
        if layer.attn_norm is None:
            return hidden
        return self.norm(hidden, layer.attn_norm, self.spec.norm_eps, self.compute_dtype)

    def add_layer(
        self,
        layer: LayerWeights,
        hidden: Float[Tensor, "S E"],
        read: Float[Tensor, "S X"],
        entries: tuple[Tensor, Tensor],
        sight: Sight,
    ) -> Float[Tensor, "S E"]:
        """What ``layer`` makes of ``hidden`` when its attention reads ``read``."""
        return self.add_mlp(layer, self.add_attention(layer, hidden, read, entries, sight))

    def add_attention(
        self,
        layer: LayerWeights,
        hidden: Float[Tensor, "S E"],
        read: Float[Tensor, "S X"],
        entries: tuple[Tensor, Tensor],
        sight: Sight,
    ) -> Float[Tensor, "S E"]:
        """The first half of ``add_layer``."""
        mixed = self.attend(layer, read, *entries, sight)  # keys, values: [K, P, D]
        if layer.post_attn_norm is not None:
            mixed = self.norm(mixed, layer.post_attn_norm, self.spec.norm_eps, self.compute_dtype)
        return hidden + mixed

    def add_mlp(self, layer: LayerWeights, hidden: Float[Tensor, "S E"]) -> Float[Tensor, "S E"]:
        """The second half of ``add_layer``."""
        norm, eps, wide = self.norm, self.spec.norm_eps, self.compute_dtype
        normed = norm(hidden, layer.mlp_norm, eps, wide)
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)  # [S, I] each
        mixed = linear(self.activate(gate).mul_(up), layer.down, layer.down_bias)
        return hidden + (mixed if layer.post_mlp_norm is None else norm(mixed, layer.post_mlp_norm, eps, wide))

    def attend(
        self,
        layer: LayerWeights,
        normed: Float[Tensor, "S X"],
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
