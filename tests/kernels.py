"""Inputs for the kernels, and the implementations that are compared.

Where there is no CUDA device Triton's interpreter runs the kernels (tests/conftest.py); where there is one, they run
there.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.kernels.gate import Routed, route_block_reference, route_block_triton
from harness.kernels.residual import sample_residual_reference, sample_residual_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton, which is published for Linux alone")

SIZES = (1, 2, 31, 97, 1000, 1025, 4099)
ROUTERS: dict[str, Callable[..., Routed]] = {
    "reference": route_block_reference,
    "triton": route_block_triton,
    "triton, small blocks": partial(route_block_triton, block=256),
}
RACES: dict[str, Callable[..., Tensor]] = {
    "reference": sample_residual_reference,
    "triton": sample_residual_triton,
    "triton, small blocks": partial(sample_residual_triton, block=256),
}


def implementations(table: dict[str, Any]) -> pytest.MarkDecorator:
    marks = [
        pytest.param(item, id=name, marks=() if name == "reference" else needs_triton) for name, item in table.items()
    ]
    return pytest.mark.parametrize("run", marks)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def block_of(
    seed: int, gamma: int, vocabulary: int, dtype: torch.dtype, masked: bool, tied: bool
) -> tuple[Tensor, Tensor]:
    """Scores and drafted tokens. Half of the tokens are likely ones, so that every route occurs."""
    generator = seeded(seed)
    scores = torch.randn(gamma, vocabulary, generator=generator)
    tokens = torch.randint(vocabulary, (gamma,), generator=generator)
    near = torch.arange(gamma) % 2 == 0
    close = scores.amax(-1) - 2 * torch.rand(gamma, generator=generator)
    scores[near, tokens[near]] = close[near]
    if masked:
        banned = torch.rand(gamma, vocabulary, generator=generator) < 0.4
        banned.scatter_(-1, scores.argmax(-1, keepdim=True), False)
        scores = scores.masked_fill(banned, -torch.inf)
    if tied:
        again = torch.randint(vocabulary, (gamma, 3), generator=generator)
        scores.scatter_(-1, again, scores.amax(-1, keepdim=True).expand(-1, 3))
    return scores.to(DEVICE, dtype), tokens.to(DEVICE)


def as_read(routed: Routed) -> dict[str, Any]:
    return {name: getattr(routed, name).tolist() for name in ("ratio", "top", "codes", "stop")}


def race_of(seed: int, gamma: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Verifier and draft, tokens and noise. Every third probability is 0, as after top-k."""
    generator = seeded(seed)
    logits = torch.randn(2 * gamma + 1, vocabulary, generator=generator, dtype=torch.float64)
    logits[:, 2::3] = -torch.inf
    probs = logits.softmax(-1).to(DEVICE, dtype)
    tokens = torch.randint(vocabulary, (gamma,), generator=generator).to(DEVICE)
    noise = torch.empty(vocabulary, dtype=dtype).exponential_(generator=generator).to(DEVICE)
    return probs[: gamma + 1], probs[gamma + 1 :], tokens, noise


def at(stop: int) -> Tensor:
    return torch.tensor(stop, device=DEVICE)
