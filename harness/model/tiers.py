"""Tiers: whose forward runs, over which layers, with which cache. Only this module knows."""

from collections.abc import Sequence
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from harness.model.cache import CacheView, KVCache, Tail
from harness.model.transformer import Transformer


class Tier:
    """A model forward over some layers, with a cache of its own or a provisional tail.

    ``forwards`` counts calls, prefill excluded; ``seconds`` is the time in them, which means something on a CPU only:
    an accelerator runs ahead of the clock, and waiting for it would cost time.
    """

    def __init__(self, name: str, model: Transformer, cache: CacheView, layers: Sequence[int]) -> None:
        self.name = name
        self.model = model
        self.cache = cache
        self.layers = tuple(layers)
        self.forwards = 0
        self.seconds = 0.0

    @property
    def length(self) -> int:
        """Positions of the sequence this tier has processed."""
        return self.cache.length

    def forward(self, sequence: Sequence[int], rows: int) -> Float[Tensor, "R V"]:
        """Catch up with ``sequence`` in one call; return the logits after each of its last ``rows`` tokens.

        Raises:
            ValueError: ``rows`` reaches back to tokens already processed, whose logits are gone.
        """
        begun = perf_counter()
        fresh = sequence[self.length :]
        if rows > len(fresh):
            raise ValueError(f"{self.name}: {rows} rows wanted, {len(fresh)} tokens are new")
        tokens = torch.tensor(fresh, dtype=torch.long, device=self.model.input_device)
        logits = self.model.forward(tokens, self.cache, self.layers, rows)
        self.forwards += 1
        self.seconds += perf_counter() - begun
        return logits

    def prefill(self, sequence: Sequence[int]) -> None:
        """Process ``sequence`` from where the cache ends, without logits; not counted as a forward."""
        fresh = sequence[self.length :]
        if fresh:
            tokens = torch.tensor(fresh, dtype=torch.long, device=self.model.input_device)
            self.model.prefill(tokens, self.cache, self.layers)


class Tiers:
    """The full verifier and every other tier of one arm, rolled back together.

    Tiers made by ``provisional`` run fewer layers of the full verifier over its committed cache entries
    (``shared`` cache mode); ``independent`` ones have their own model and cache.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.full = Tier("full", model, cache, range(model.spec.layers))
        self.others: list[Tier] = []

    @property
    def every(self) -> tuple[Tier, ...]:
        return (self.full, *self.others)

    @property
    def prefilled(self) -> tuple[Tier, ...]:
        """Tiers with a cache of their own."""
        return tuple(tier for tier in self.every if not isinstance(tier.cache, Tail))

    def provisional(self, name: str, layers: Sequence[int]) -> Tier:
        tier = Tier(name, self.model, Tail(self.cache), layers)
        self.others.append(tier)
        return tier

    def independent(self, name: str, model: Transformer) -> Tier:
        cache = model.new_cache(self.cache.capacity)
        tier = Tier(name, model, cache, range(model.spec.layers))
        self.others.append(tier)
        return tier

    def prefill(self, prompt: Sequence[int]) -> None:
        """Start a new prompt. Its last token stays pending: the first decoding step processes it.

        Every tier with a cache of its own is filled here too, so that drafting does not pay for the prompt.
        """
        self.rollback(0)
        for tier in self.prefilled:
            tier.prefill(prompt[:-1])

    def rollback(self, length: int) -> None:
        """Cut every tier to at most ``length`` positions."""
        for tier in self.every:
            tier.cache.rollback(length)
