"""Llama layers that can be trained, with the names of a checkpoint. Master weights in float32; see ``computing``."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from harness.model.rotary import rotary_table
from harness.model.spec import ModelSpec


class Norm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped-query attention; ``reads`` is the width of its input, the layer's own unless a drafting head says so."""

    def __init__(self, spec: ModelSpec, reads: int) -> None:
        super().__init__()
        query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.spec = spec
        self.q_proj = nn.Linear(reads, query, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(reads, key, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(reads, key, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(query, spec.hidden_size, bias=spec.out_bias)

    def forward(
        self, x: Float[Tensor, "B S X"], angles: tuple[Tensor, Tensor], mask: Float[Tensor, "S S"] | None
    ) -> Float[Tensor, "B S E"]:
        """Causal without ``mask``; padding lies behind, so it needs none."""
        rows, count = x.shape[:2]
        query, key, value = (
            part(x).view(rows, count, -1, self.spec.head_dim).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(
            turned(query, *angles),
            turned(key, *angles),
            value,
            None if mask is None else mask.to(query.dtype),
            is_causal=mask is None,
            enable_gqa=True,
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, count, -1))


def turned(x: Float[Tensor, "B H S D"], cos: Float[Tensor, "S D"], sin: Float[Tensor, "S D"]) -> Tensor:
    """Rotary embedding, as ``model.rotary.rotate`` has it."""
    wide = x.float()
    return (wide * cos + wide.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        width, inner = spec.hidden_size, spec.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(width, inner, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=spec.mlp_bias)

    def forward(self, x: Float[Tensor, "B S E"]) -> Float[Tensor, "B S E"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec, spec.hidden_size)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.norm_eps)
        self.mlp = Mlp(spec)

    def forward(
        self, x: Float[Tensor, "B S E"], angles: tuple[Tensor, Tensor], mask: Float[Tensor, "S S"] | None = None
    ) -> Float[Tensor, "B S E"]:
        x = x + self.self_attn(self.input_layernorm(x), angles, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Rotary:
    """Angles of every position of a model, made once."""

    def __init__(self, spec: ModelSpec) -> None:
        rope = spec.rope_of(0)
        assert rope is not None
        self.table = rotary_table(rope, spec.head_dim, spec.max_positions, torch.float32, torch.device("cpu"))

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        return self.table[0][:count], self.table[1][:count]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.table[0][positions], self.table[1][positions]
