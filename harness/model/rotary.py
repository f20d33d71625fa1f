"""Rotary position embedding: frequencies, tables and the turn itself."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from harness.model.spec import Rope


def frequencies(rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "D2"]:
    """Radians per position of each pair of a head, computed in ``dtype``.

    ``transformers`` has the same formulas in ``ROPE_INIT_FUNCTIONS``, where they run in float32 whatever the model.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim
    plain = rope.theta**-exponent
    scaling = rope.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    turns = scaling.original_positions * plain / (2 * math.pi)  # within the positions of the first training
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)  # 0: slow, divided; 1: fast, left alone
    return (1 - share) * plain / scaling.factor + share * plain


def rotary_table(
    rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "P D"], Float[Tensor, "P D"]]:
    """Cosine and sine of position times frequency for every position of the model, laid out for ``rotate``."""
    turned = frequencies(rope, head_dim, dtype, device)
    angle = torch.arange(positions, dtype=dtype, device=device)[:, None] * turned
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Float[Tensor, "N S D"], cos: Float[Tensor, "S D"], sin: Float[Tensor, "S D"]) -> Float[Tensor, "N S D"]:
    """Rotary embedding, first half against second half of each head, in the dtype of the table.

    With halves (a, b): (a cos - b sin, b cos + a sin).
    """
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)
