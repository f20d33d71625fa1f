"""Matrix products with weights, the part of a step that reads nearly all of its bytes.

On a CPU with bfloat16 instructions, oneDNN reads a weight faster when it lies in blocks of its own layout: with 2 cores
1.4 to 1.8 times as fast as ``F.linear`` for 1 to 16 rows. Such a weight is a tensor of layout ``torch._mkldnn``; it
still has its shape and dtype, but no rows to index. The same calls are what torch's own compiler emits for a frozen
linear layer.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

ROWS_EXPECTED = 8
"""Rows that the packed layout is chosen for; any other number works too."""


def pack(weight: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """``weight`` in the layout that is read fastest, a copy; itself where there is no better one."""
    if weight.is_mkldnn or weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not packs_bfloat16():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_EXPECTED)


def packs_bfloat16() -> bool:
    """Whether torch was built with oneDNN and this CPU multiplies bfloat16 itself."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear(
    x: Float[Tensor, "S K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None = None
) -> Float[Tensor, "S N"]:
    """x weight^T + bias, for a weight that went through ``pack`` or did not."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
