"""Llama layers that can be trained, with the names of a checkpoint. Master weights in float32; see ``computing``."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
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
        query, key, value = self.split(x, angles)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            None if mask is None else mask.to(query.dtype),
            is_causal=mask is None,
            enable_gqa=True,
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Float[Tensor, "B S X"], angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, H, S, D], key and value [B, K, S, D], turned."""
        query, key, value = (
            part(x).view(*x.shape[:2], -1, self.spec.head_dim).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return turned(query, *angles), turned(key, *angles), value

    def unrolled(
        self, x: Float[Tensor, "B S X"], angles: tuple[Tensor, Tensor], past: "Turns | Chains"
    ) -> Float[Tensor, "B S E"]:
        """One more turn of a head that reads its own outputs; ``past`` says what each row sees and takes it in."""
        query, key, value = self.split(x, angles)
        groups, scale = query.shape[1] // key.shape[1], self.spec.head_dim**-0.5
        (first_keys, first_values), later, hidden = past.seen(
            key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        )
        scores = [(query @ first_keys.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))]
        scores += [(query * keys).sum(-1, keepdim=True) * scale for keys, _ in later]
        weights = torch.softmax(torch.cat(scores, -1).float(), -1).nan_to_num(0.0).to(query.dtype)
        count = first_keys.shape[2]
        mixed = weights[..., :count] @ first_values
        for place, (_, values) in enumerate(later):
            mixed = mixed + weights[..., count + place, None] * values
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


Kept = tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T D"]]
"""Keys and values of a turn's rows."""


class Turns:
    """What a row sees where every row of a text begins a block.

    In drafting, row i of turn t comes behind row i - 1 of turn t - 1, and so on back to the first turn, whose rows
    are all there is before. So it sees of the first turn the rows up to i - t + 1, and of each later turn u the row
    i - t + u. The rows i < t - 1 stand for nothing.
    """

    def __init__(self) -> None:
        self.kept: list[Kept] = []

    def seen(self, keys: Tensor, values: Tensor) -> tuple[Kept, list[Kept], Bool[Tensor, "S T"]]:
        """Take in a turn; keys and values of the first one, those of one row each of the later ones, what is hidden."""
        self.kept.append((keys, values))
        first, *later = self.kept
        count, turn = keys.shape[2], len(self.kept)
        hidden = torch.ones(count, count, dtype=torch.bool, device=keys.device).tril(1 - turn).logical_not()
        last = len(later) - 1
        return first, [(behind(k, last - u), behind(v, last - u)) for u, (k, v) in enumerate(later)], hidden


class Chains:
    """What a row sees where only the rows ``begins`` of a text begin blocks: a row a block, turn by turn.

    It sees the first turn's rows up to the one that begins its block, and its block's own later ones.
    """

    def __init__(self, first: Kept, begins: Int[Tensor, "N"]) -> None:
        self.first = first
        self.hidden = torch.arange(first[0].shape[2]) > begins[:, None]
        self.later: list[Kept] = []

    def seen(self, keys: Tensor, values: Tensor) -> tuple[Kept, list[Kept], Bool[Tensor, "S T"]]:
        self.later.append((keys, values))
        return self.first, self.later, self.hidden


def behind(x: Float[Tensor, "B H S D"], rows: int) -> Float[Tensor, "B H S D"]:
    """``x`` with each row ``rows`` places later; zeros come in."""
    return F.pad(x, (0, 0, rows, 0))[:, :, : x.shape[2]]


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
    """A decoder layer; without ``input_norm`` its attention reads its input as it is."""

    def __init__(self, spec: ModelSpec, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.hidden_size, spec.norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(spec, spec.hidden_size)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.norm_eps)
        self.mlp = Mlp(spec)

    def forward(
        self, x: Float[Tensor, "B S E"], angles: tuple[Tensor, Tensor], mask: Float[Tensor, "S S"] | None = None
    ) -> Float[Tensor, "B S E"]:
        x = x + self.self_attn(self.input_layernorm(x), angles, mask)
        return x + self.mlp(self.post_attention_layernorm(x))

    def unrolled(
        self, x: Float[Tensor, "B S E"], angles: tuple[Tensor, Tensor], past: "Turns | Chains"
    ) -> Float[Tensor, "B S E"]:
        """As ``Attention.unrolled``."""
        x = x + self.self_attn.unrolled(self.input_layernorm(x), angles, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class FusedLayer(nn.Module):
    """A decoder layer of EAGLE-3: its attention reads token and state, each normed, and is added to the state."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.hidden_size, spec.norm_eps)
        self.hidden_norm = Norm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec, 2 * spec.hidden_size)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.norm_eps)
        self.mlp = Mlp(spec)

    def unrolled(
        self,
        embedded: Float[Tensor, "B S E"],
        states: Float[Tensor, "B S E"],
        angles: tuple[Tensor, Tensor],
        past: "Turns | Chains",
    ) -> Float[Tensor, "B S E"]:
        """As ``Attention.unrolled``."""
        read = torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), -1)
        x = states + self.self_attn.unrolled(read, angles, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Sized(nn.Linear):
    """A linear map without bias, trained as if each input had size 1 and stored for inputs as they are.

    ``sizes`` are rounded to powers of 2, so that storing and reading again changes nothing.
    """

    def __init__(self, sizes: Float[Tensor, "F"], width: int) -> None:
        super().__init__(len(sizes), width, bias=False)
        self.sizes = torch.exp2(torch.log2(sizes).round())
        self.register_state_dict_post_hook(self.store)
        self.register_load_state_dict_pre_hook(self.read)

    def forward(self, x: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows E"]:
        return super().forward(x / self.sizes)

    @staticmethod
    def store(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        assert isinstance(module, Sized)
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / module.sizes

    @staticmethod
    def read(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        assert isinstance(module, Sized)
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * module.sizes


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
