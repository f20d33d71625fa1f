"""One decoder-only transformer for every tier: an explicit list of layers per forward, caches by absolute position."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from harness.model.cache import CacheView
from harness.model.spec import ModelSpec

PREFILL_CHUNK = 256
"""Positions per forward while prefilling; bounds the memory of attention scores."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; query, key and value, and gate and up, each fused into one matrix."""

    attn_norm: Float[Tensor, "E"]
    qkv: Float[Tensor, "HD E"]
    out: Float[Tensor, "E QD"]
    mlp_norm: Float[Tensor, "E"]
    gate_up: Float[Tensor, "I2 E"]
    down: Float[Tensor, "E I"]


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameters. ``head`` is ``embed`` itself when the checkpoint ties them; it may have fewer rows."""

    embed: Float[Tensor, "V E"]
    layers: tuple[LayerWeights, ...]
    norm: Float[Tensor, "E"]
    head: Float[Tensor, "N E"]


class Transformer:
    """Weights plus the forward pass. Norms, rotary embedding and softmax run in at least float32."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = weights.embed.dtype
        self.device = weights.embed.device
        self.compute_dtype = torch.promote_types(self.dtype, torch.float32)
        self.cos, self.sin = rotary_table(spec, self.compute_dtype, self.device)

    def with_vocabulary(self, size: int) -> "Transformer":
        """The same weights with a head of the first ``size`` rows: padding rows beyond a tokenizer are never drawn."""
        return Transformer(self.spec, replace(self.weights, head=self.weights.head[:size]))

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
        end = start + count
        if end > self.spec.max_positions:
            raise ValueError(f"the model has {self.spec.max_positions} positions, {end} are needed")
        cos, sin = self.cos[start:end], self.sin[start:end]  # [S, D/2]
        mask = causal_mask(count, end, self.compute_dtype, self.device) if count > 1 else None
        hidden = F.embedding(tokens, self.weights.embed)  # [S, E]
        for index in layers:
            layer = self.weights.layers[index]
            normed = rms_norm(hidden, layer.attn_norm, self.spec.norm_eps, self.compute_dtype)
            keys, values = cache.keys[index], cache.values[index]  # [K, P, D]
            hidden = hidden + self.attend(layer, normed, keys, values, start, cos, sin, mask)
            normed = rms_norm(hidden, layer.mlp_norm, self.spec.norm_eps, self.compute_dtype)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)  # [S, I] each
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        cache.append(count)
        last = rms_norm(hidden[count - rows :], self.weights.norm, self.spec.norm_eps, self.compute_dtype)
        return F.linear(last, self.weights.head)

    def attend(
        self,
        layer: LayerWeights,
        normed: Float[Tensor, "S E"],
        keys: Float[Tensor, "K P D"],
        values: Float[Tensor, "K P D"],
        start: int,
        cos: Float[Tensor, "S D2"],
        sin: Float[Tensor, "S D2"],
        mask: Float[Tensor, "S T"] | None,
    ) -> Float[Tensor, "S E"]:
        """Grouped-query attention of new positions over the cache, which receives their keys and values."""
        spec = self.spec
        count = normed.shape[0]
        end = start + count
        heads = spec.heads + 2 * spec.kv_heads
        qkv = F.linear(normed, layer.qkv).view(count, heads, spec.head_dim).transpose(0, 1)  # [H+2K, S, D]
        turned = rotate(qkv[: spec.heads + spec.kv_heads], cos, sin)
        keys[:, start:end] = turned[spec.heads :]
        values[:, start:end] = qkv[spec.heads + spec.kv_heads :]
        # Query heads of one group share a key head: fold them into rows of one product.
        query = turned[: spec.heads].reshape(spec.kv_heads, -1, spec.head_dim)  # [K, H/K*S, D]
        scores = torch.bmm(query, keys[:, :end].transpose(1, 2)).to(self.compute_dtype)  # [K, H/K*S, T]
        scores *= spec.head_dim**-0.5
        if mask is not None:
            scores.view(spec.kv_heads, -1, count, end).add_(mask)
        weights = torch.softmax(scores, dim=-1).to(self.dtype)
        mixed = torch.bmm(weights, values[:, :end])  # [K, H/K*S, D]
        return F.linear(mixed.view(spec.heads, count, spec.head_dim).transpose(0, 1).reshape(count, -1), layer.out)

    def prefill(self, tokens: Int[Tensor, "S"], cache: CacheView, layers: Sequence[int]) -> None:
        """Fill ``cache`` with ``tokens`` in chunks, without computing logits."""
        for chunk in tokens.split(PREFILL_CHUNK):
            self.forward(chunk, cache, layers, rows=0)


def rms_norm(
    x: Float[Tensor, "S E"], weight: Float[Tensor, "E"], eps: float, compute_dtype: torch.dtype
) -> Float[Tensor, "S E"]:
    """Root-mean-square norm in ``compute_dtype``, cast back before the gain (as Llama does)."""
    wide = x.to(compute_dtype)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rotate(x: Float[Tensor, "N S D"], cos: Float[Tensor, "S D2"], sin: Float[Tensor, "S D2"]) -> Float[Tensor, "N S D"]:
    """Rotary embedding, first half against second half of each head, in the dtype of the table."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary_table(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "P D2"], Float[Tensor, "P D2"]]:
    """Cosine and sine of position times frequency, for every position of the model."""
    exponent = torch.arange(0, spec.head_dim, 2, dtype=dtype, device=device) / spec.head_dim
    angle = torch.arange(spec.max_positions, dtype=dtype, device=device)[:, None] * spec.rope_theta**-exponent
    return angle.cos(), angle.sin()


def causal_mask(count: int, end: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "S T"]:
    """0 where query ``s`` (absolute position ``end - count + s``) may look, -inf where it may not."""
    return torch.full((count, end), float("-inf"), dtype=dtype, device=device).triu_(end - count + 1)
