"""How tokens are drawn: the distribution that logits become, and the source of randomness."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from harness.errors import UserError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How logits become the distribution that is sampled from: temperature, then top-k, then top-p.

    ``temperature`` 0 is greedy: all mass on the largest logit. ``top_k`` 0 and ``top_p`` 1 are off.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature={self.temperature}: want 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: want more than 0 and at most 1 (1 is off).")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k}: want 0 (off) or more.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def warp(self, logits: Float[Tensor, "G V"]) -> Float[Tensor, "G V"]:
        """Distributions to sample from, in at least float32; greedy ones are exactly one-hot."""
        if self.greedy:
            wide = torch.promote_types(logits.dtype, torch.float32)
            return torch.zeros_like(logits, dtype=wide).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
        wide_logits = widen(logits)
        # The largest becomes 0 first: nothing overflows, however small the temperature.
        scaled = (wide_logits - wide_logits.amax(dim=-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            # Not a comparison with the k-th value: low precision has ties, and k tokens mean k tokens.
            rest = scaled.sort(dim=-1, descending=True, stable=True).indices[..., self.top_k :]
            scaled = scaled.scatter(-1, rest, float("-inf"))
        probs = torch.softmax(scaled, dim=-1)
        if self.top_p < 1:
            ordered, order = probs.sort(dim=-1, descending=True, stable=True)
            # A token stays while the mass before it is below top_p, so the one that crosses the bound stays too.
            drop = ordered.cumsum(dim=-1) - ordered >= self.top_p
            probs = probs.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), 0.0)
            probs = probs / probs.sum(dim=-1, keepdim=True)
        return probs


def widen(x: Tensor) -> Tensor:
    """``x`` in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@runtime_checkable
class Chooser(Protocol):
    """Where every random decision of a decoder is made, so that a test can enumerate them all."""

    def accept(self, probability: Float[Tensor, "G"]) -> Bool[Tensor, "G"]:
        """Independent coin flips, True with the given probabilities; values of 1 and more are certain."""
        ...

    def draw(self, probs: Float[Tensor, "V"]) -> int:
        """One token from a distribution."""
        ...


class RandomChooser:
    """Seeded draws. A one-hot distribution gives its token whatever the seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def accept(self, probability: Float[Tensor, "G"]) -> Bool[Tensor, "G"]:
        uniform = torch.rand(
            probability.shape, generator=self.generator, dtype=probability.dtype, device=probability.device
        )
        return uniform < probability

    def draw(self, probs: Float[Tensor, "V"]) -> int:
        return int(torch.multinomial(probs, 1, generator=self.generator))


class GreedyChooser:
    """For one-hot distributions: nothing is left to chance."""

    def accept(self, probability: Float[Tensor, "G"]) -> Bool[Tensor, "G"]:
        return probability >= 1

    def draw(self, probs: Float[Tensor, "V"]) -> int:
        return int(probs.argmax())


def certain_or_sampled(sampling: Sampling, seed: int, device: torch.device) -> Chooser:
    """The chooser that fits the sampling mode."""
    return GreedyChooser() if sampling.greedy else RandomChooser(seed, device)
