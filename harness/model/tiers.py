"""Tiers: whose forward runs, over which layers, with which cache. Only this module knows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from harness.model.cache import CacheView, KVCache, Tail
from harness.model.replay import Replay
from harness.model.transfer import to_device
from harness.model.transformer import PREFILL_CHUNK, Transformer

Pick = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits [1, V] and a uniform number [] -> a token [1] and the distribution [1, V] it was drawn from."""

GRAPH_STEP = 8
"""Forwards of up to this many tokens have a graph each, longer ones are padded to a multiple of it."""

LONGEST_GRAPH = 64
"""Tokens up to which there are graphs; catching up with more is rare."""


class Tier:
    """A model forward over some layers, with a cache of its own or a provisional tail.

    ``block``: run every forward at this number of rows, the last ones padding, over the whole cache, masked. Then
    nothing depends on how many tokens there are, nor on where a token stands in its block. ``graphs``: replay CUDA
    graphs, one for each number of rows. Neither changes what is computed but for rounding.

    ``features``, where ``watch`` asked for them, has the hidden states of the last forward that processed a position,
    by position; those from ``length`` on are void.

    ``forwards`` counts forwards that were asked for, prefill excluded; ``seconds`` is the time in them, which means
    something on a CPU only: an accelerator runs ahead of the clock, and waiting for it would cost time.
    """

    def __init__(
        self,
        name: str,
        model: Transformer,
        cache: CacheView,
        layers: Sequence[int],
        block: int | None = None,
        graphs: bool = False,
    ) -> None:
        self.name = name
        self.model = model
        self.cache = cache
        self.layers = tuple(layers)
        self.changed = False  # whether other layers ran before
        self.block = block
        self.graphs = graphs and [device.type for device in model.devices] == ["cuda"]
        self.replays: dict[tuple[int, ...], Replay] = {}
        self.taps: tuple[int, ...] = ()
        self.features = torch.empty(0)
        self.forwards = 0
        self.seconds = 0.0

    @property
    def length(self) -> int:
        """Positions of the sequence this tier has processed."""
        return self.cache.length

    def watch(self, taps: Sequence[int]) -> None:
        """Keep the hidden states at ``taps``, as ``Transformer.run`` has them, of every position from now on."""
        self.taps = tuple(taps)
        shape = (self.cache.capacity, len(taps) * self.model.spec.hidden_size)
        self.features = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    def change_layers(self, layers: Sequence[int], model: Transformer | None = None) -> None:
        """Run other ``layers`` from now on, by ``model`` where it is given, which has the same weights.

        Only where every entry that this tier reads was made by all layers, which the full verifier's are: a tail made
        by the old layers would have holes. Graphs of the old layers are dropped; new ones are captured when needed.

        Raises:
            ValueError: the tier has entries of its own.
        """
        if not isinstance(self.cache, Tail) or self.length > self.cache.cache.length:
            raise ValueError(f"{self.name}: other layers made the entries from {self.length - 1} back")
        self.layers = tuple(layers)
        self.model = model or self.model
        self.changed = True
        self.replays.clear()

    def forward(
        self, sequence: Sequence[int], rows: int, drafts: Int[Tensor, "G"] | None = None
    ) -> Float[Tensor, "R V"]:
        """Catch up with ``sequence`` and ``drafts`` behind it in one call; return the logits after the last ``rows``.

        Raises:
            ValueError: ``rows`` reaches back to tokens already processed, whose logits are gone.
        """
        begun = perf_counter()
        tokens = self.fresh(sequence, drafts)
        if rows > len(tokens):
            raise ValueError(f"{self.name}: {rows} rows wanted, {len(tokens)} tokens are new")
        if self.block is None and not (self.graphs and len(tokens) <= LONGEST_GRAPH):
            logits = self.plain_forward(tokens, rows)
        else:
            logits = self.fixed_forward(tokens, rows)
        self.forwards += 1
        self.seconds += perf_counter() - begun
        return logits

    def fresh(self, sequence: Sequence[int], drafts: Int[Tensor, "G"] | None) -> Int[Tensor, "S"]:
        """What this tier has not processed yet, on the model's first device."""
        tokens = to_device(sequence[self.length :], self.model.input_device)
        if drafts is None:
            return tokens
        behind = drafts[max(0, self.length - len(sequence)) :].to(self.model.input_device)
        return torch.cat((tokens, behind)) if len(tokens) else behind

    def plain_forward(self, tokens: Int[Tensor, "S"], rows: int) -> Float[Tensor, "R V"]:
        """In one call, of whatever shape."""
        logits, states = self.model.observe(tokens, self.cache, self.layers, rows, self.taps)
        if states is not None:
            self.features[self.length - len(tokens) : self.length] = states
        return logits

    def fixed_forward(self, tokens: Int[Tensor, "S"], rows: int) -> Float[Tensor, "R V"]:
        """In blocks of one shape, the short one first, so that the last one has all the rows that are wanted."""
        size = self.block or padded_size(len(tokens))
        for end in range((len(tokens) - 1) % size + 1, len(tokens) + 1, size):
            chunk = tokens[max(0, end - size) : end]
            start = self.cache.begin(size)
            self.model.check_positions(start + len(chunk))
            logits, states = self.replayed((size,), self.padded, chunk_of(chunk, size), scalar(start, tokens.device))
            self.cache.append(len(chunk))
            if states is not None:
                self.features[start : start + len(chunk)] = states[: len(chunk)]
        return logits[len(chunk) - rows : len(chunk)]

    def padded(
        self, tokens: Int[Tensor, "S"], start: Int[Tensor, ""]
    ) -> tuple[Float[Tensor, "S V"], Float[Tensor, "S F"] | None]:
        return self.model.fixed_forward(tokens, start, self.cache.layers, self.layers, self.taps)

    def extend(
        self, sequence: Sequence[int], count: int, pick: Pick, uniforms: Float[Tensor, "G"]
    ) -> tuple[Int[Tensor, "G"], Float[Tensor, "G V"]]:
        """Draft ``count`` tokens, at least 1, one by one; return them and what they were drawn from.

        With graphs all forwards and draws together are one graph. The last draft itself is not processed.
        """
        if self.graphs and self.block is None:
            return self.extend_by_graph(sequence, count, pick, uniforms)
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        for uniform in uniforms[:count]:
            token, drawn_from = pick(self.forward(sequence, 1, torch.cat(drafts) if drafts else None), uniform)
            drafts.append(token)
            probs.append(drawn_from)
        return torch.cat(drafts), torch.cat(probs)

    def extend_by_graph(
        self, sequence: Sequence[int], count: int, pick: Pick, uniforms: Float[Tensor, "G"]
    ) -> tuple[Int[Tensor, "G"], Float[Tensor, "G V"]]:
        tokens = self.fresh(sequence, None)
        written = len(tokens) + count - 1
        start = self.cache.begin(written)
        self.model.check_positions(start + written)

        def whole(
            tokens: Int[Tensor, "S"], start: Int[Tensor, ""], uniforms: Float[Tensor, "G"]
        ) -> tuple[Int[Tensor, "G"], Float[Tensor, "G V"]]:
            drafts: list[Tensor] = []
            probs: list[Tensor] = []
            for uniform in uniforms:
                token, drawn_from = pick(self.padded(tokens, start)[0][-1:], uniform)
                drafts.append(token)
                probs.append(drawn_from)
                start = start + len(tokens)
                tokens = token
            return torch.cat(drafts), torch.cat(probs)

        key = (len(tokens), count)
        drafts, probs = self.replayed(key, whole, tokens, scalar(start, tokens.device), uniforms[:count])
        self.cache.append(written)
        self.forwards += count
        return drafts, probs

    def replayed(self, key: tuple[int, ...], function: Callable[..., object], *inputs: Tensor) -> Any:
        """``function`` called, or its graph replayed where there are graphs; ``key`` are the sizes of its inputs."""
        if not self.graphs:
            return function(*inputs)
        if key not in self.replays:
            self.replays[key] = Replay(function, *inputs)
        return self.replays[key](*inputs)

    def prefill(self, sequence: Sequence[int]) -> None:
        """Process ``sequence`` from where the cache ends, without logits; not counted as a forward."""
        tokens = to_device(sequence[self.length :], self.model.input_device)
        for chunk in tokens.split(PREFILL_CHUNK) if len(tokens) else ():
            self.plain_forward(chunk, rows=0)

    def rollback(self, length: int) -> None:
        """Cut to at most ``length`` positions."""
        self.cache.rollback(length)


@dataclass(frozen=True, slots=True)
class TierGroup:
    """Tiers that records count as one."""

    tiers: tuple[Tier, ...]

    @property
    def forwards(self) -> int:
        return sum(tier.forwards for tier in self.tiers)

    @property
    def seconds(self) -> float:
        return sum(tier.seconds for tier in self.tiers)


def chunk_of(tokens: Int[Tensor, "S"], size: int) -> Int[Tensor, "B"]:
    """``tokens`` and as much padding behind them as makes ``size``."""
    return F.pad(tokens, (0, size - len(tokens)))


def padded_size(count: int) -> int:
    """Rows of the graph that takes ``count`` tokens."""
    return count if count <= GRAPH_STEP else -(-count // GRAPH_STEP) * GRAPH_STEP


def scalar(value: int, device: torch.device) -> Int[Tensor, ""]:
    return torch.full((), value, dtype=torch.long, device=device)


class Tiers:
    """The full verifier and every other tier of one arm, rolled back together.

    Tiers made by ``provisional`` run fewer layers of the full verifier over its committed cache entries
    (``shared`` cache mode); those of ``separate`` run them over keys and values of their own, which they must make of
    every token, the prompt's included (``own`` cache mode); ``independent`` ones have their own model too. ``block``
    and ``graphs`` are those of each tier; a cache needs room for ``block``, or with graphs ``GRAPH_STEP``, positions
    more than the sequence has.

    ``aside_s`` counts the seconds that were spent on them outside the clock.
    """

    def __init__(self, model: Transformer, cache: KVCache, block: int | None = None, graphs: bool = False) -> None:
        self.model = model
        self.cache = cache
        self.block = block
        self.graphs = graphs
        self.full = Tier("full", model, cache, range(model.spec.layers), block, graphs)
        self.others: list[Tier] = []
        self.aside_s = 0.0

    @property
    def every(self) -> tuple[Tier, ...]:
        return (self.full, *self.others)

    @property
    def prefilled(self) -> tuple[Tier, ...]:
        """Tiers with a cache of their own."""
        return tuple(tier for tier in self.every if not isinstance(tier.cache, Tail))

    def provisional(self, name: str, layers: Sequence[int], model: Transformer | None = None) -> Tier:
        """``model``, where it is given, runs the full verifier's weights in a way of its own."""
        return self.added(Tier(name, model or self.model, Tail(self.cache), layers, self.block, self.graphs))

    def separate(
        self, name: str, layers: Sequence[int], model: Transformer | None = None, attending: Sequence[int] | None = None
    ) -> Tier:
        """``attending``: those of ``layers`` that need room in the cache, None for all of them."""
        cache = self.model.new_cache(self.cache.capacity, layers if attending is None else attending)
        return self.added(Tier(name, model or self.model, cache, layers, self.block, self.graphs))

    def independent(self, name: str, model: Transformer) -> Tier:
        cache = model.new_cache(self.cache.capacity)
        return self.added(Tier(name, model, cache, range(model.spec.layers), self.block, self.graphs))

    def added(self, tier: Tier) -> Tier:
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
            tier.rollback(length)
