"""How tokens are drawn: the law that logits become, and the source of randomness. Nothing here waits for a device."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from harness.errors import UserError
from harness.kernels.residual import sample_residual


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
            return torch.zeros_like(logits, dtype=wide).scatter_(-1, top(logits)[:, None], 1.0)
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

    def law(self, logits: Float[Tensor, "R V"]) -> "Law":
        """The same distributions; greedy ones are kept as their tokens."""
        return Certain(top(logits)) if self.greedy else Dense(self.warp(logits))


def top(logits: Float[Tensor, "R V"]) -> Int[Tensor, "R"]:
    """The largest of each row, the first of equal ones: as ``argmax``, which is several times slower on a CPU."""
    return logits.max(dim=-1).indices


def widen(x: Tensor) -> Tensor:
    """``x`` in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@runtime_checkable
class Chooser(Protocol):
    """Where every random decision of a decoder is made, so that a test can enumerate them all."""

    def accept(self, probability: Float[Tensor, "G"]) -> Bool[Tensor, "G"]:
        """Independent coin flips, True with the given probabilities; values of 1 and more are certain."""
        ...

    def uniforms(self, count: int) -> Float[Tensor, "G"]:
        """Randomness for ``count`` draws, made ahead of them."""
        ...

    def draw(self, probs: Float[Tensor, "V"], uniform: Float[Tensor, ""]) -> Int[Tensor, "1"]:
        """One token from a distribution, decided by ``uniform``, a number in [0, 1), alone."""
        ...

    def replace(
        self,
        verifier: Float[Tensor, "R V"],
        draft: Float[Tensor, "G V"] | None,
        tokens: Int[Tensor, "G"],
        stop: Int[Tensor, ""],
    ) -> Int[Tensor, "1"]:
        """What follows the kept drafts; arguments and law as in ``kernels.residual.sample_residual``.

        Any token where ``stop`` lies behind the last row: there is nothing to draw.
        """
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

    def uniforms(self, count: int) -> Float[Tensor, "G"]:
        return torch.rand(count, generator=self.generator, dtype=torch.float64, device=self.device)

    def draw(self, probs: Float[Tensor, "V"], uniform: Float[Tensor, ""]) -> Int[Tensor, "1"]:
        """By the inverse of the cumulative distribution: ``multinomial`` makes a random number for every token."""
        mass = probs.cumsum(0)
        # Rounding must not lift the number to the whole mass, behind which there is no token.
        point = torch.minimum(uniform.to(mass.dtype) * mass[-1], torch.nextafter(mass[-1], mass[0]))
        return torch.searchsorted(mass, point[None], right=True)

    def replace(
        self,
        verifier: Float[Tensor, "R V"],
        draft: Float[Tensor, "G V"] | None,
        tokens: Int[Tensor, "G"],
        stop: Int[Tensor, ""],
    ) -> Int[Tensor, "1"]:
        # As Tensor.exponential_, in a fifth of its time on a CPU.
        uniform = torch.rand(verifier.shape[-1:], generator=self.generator, dtype=verifier.dtype, device=self.device)
        noise = uniform.clamp_(min=torch.finfo(uniform.dtype).tiny).log_().neg_()
        return sample_residual(verifier, draft, tokens, stop.clamp(max=len(verifier) - 1), noise)[None]


@runtime_checkable
class Law(Protocol):
    """Distributions over the next token at each of some positions."""

    def of(self, tokens: Int[Tensor, "G"]) -> Float[Tensor, "G"]:
        """Probability of one token at each of the first positions."""
        ...

    def draw(self, row: Int[Tensor, ""], chooser: Chooser) -> Int[Tensor, "1"]:
        """A token from the distribution at ``row``; token 0, for certain, where it lies behind the last one."""
        ...

    def replace(
        self, draft: Float[Tensor, "G V"] | None, tokens: Int[Tensor, "G"], stop: Int[Tensor, ""], chooser: Chooser
    ) -> Int[Tensor, "1"]:
        """What follows the kept drafts when the lossless rule stopped at ``stop``: residual, or bonus at G.

        Any token where ``stop`` lies behind the last row: there is nothing to draw.
        """
        ...


@dataclass(frozen=True, slots=True)
class Certain:
    """All mass on one token at each position, as greedy decoding has it. Needs no randomness and no table."""

    top: Int[Tensor, "R"]

    def of(self, tokens: Int[Tensor, "G"]) -> Float[Tensor, "G"]:
        return (self.top[: len(tokens)] == tokens).float()

    def draw(self, row: Int[Tensor, ""], chooser: Chooser) -> Int[Tensor, "1"]:
        return F.pad(self.top, (0, 1)).index_select(0, row.clamp(max=len(self.top))[None])

    def replace(
        self, draft: Float[Tensor, "G V"] | None, tokens: Int[Tensor, "G"], stop: Int[Tensor, ""], chooser: Chooser
    ) -> Int[Tensor, "1"]:
        return self.draw(stop, chooser)  # a refused draft had no mass here, so its residual is the whole


@dataclass(frozen=True, slots=True)
class Dense:
    """A table of probabilities."""

    probs: Float[Tensor, "R V"]

    def of(self, tokens: Int[Tensor, "G"]) -> Float[Tensor, "G"]:
        return self.probs[: len(tokens)].gather(-1, tokens[:, None])[:, 0]

    def draw(self, row: Int[Tensor, ""], chooser: Chooser) -> Int[Tensor, "1"]:
        rows = len(self.probs)
        probs = self.probs.index_select(0, row.clamp(max=rows - 1)[None])[0]
        nothing = F.pad(probs.new_ones(1), (0, len(probs) - 1))
        return chooser.draw(torch.where(row < rows, probs, nothing), chooser.uniforms(1)[0])

    def replace(
        self, draft: Float[Tensor, "G V"] | None, tokens: Int[Tensor, "G"], stop: Int[Tensor, ""], chooser: Chooser
    ) -> Int[Tensor, "1"]:
        return chooser.replace(self.probs, draft, tokens, stop)
