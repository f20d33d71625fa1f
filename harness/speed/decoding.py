"""Arms of ours and of ``transformers`` decode the same prompts in turn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from harness.compare import BASELINE
from harness.decode.base import Decoder, StopRule
from harness.memory import held_bytes
from harness.sampling import RandomChooser
from harness.speed.forwards import forward_bytes
from harness.speed.records import DecodeTime, MemoryUse
from harness.speed.stock import Stock
from harness.timing import Clock, peak_bytes, reset_peak, without_asides

WEIGHED = 16
"""Output tokens while memory is counted: caches have their full size from the start."""


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt as token ids, with the seed of its draws."""

    task: str
    example_id: str
    ids: tuple[int, ...]
    seed: int


class Arm(Protocol):
    """What takes its turn at every one of its prompts."""

    @property
    def items(self) -> Sequence[Item]: ...

    def prepare(self) -> None:
        """Run every shape that does not depend on the prompt, so that no timed forward is a shape's first."""
        ...

    @property
    def prefilled(self) -> frozenset[Any]:
        """What its prefill runs: an arm needs no warming where others have run all of it."""
        ...

    def warm(self, item: Item) -> None:
        """Run the shapes of this prompt's prefill."""
        ...

    def decode(self, item: Item) -> DecodeTime: ...


@dataclass(frozen=True, slots=True)
class Watched(StopRule):
    """A stop rule that calls ``notice`` after each block, with whether it was the first."""

    notice: Callable[[bool], object] = bool

    def scan(self, output: list[int], fresh: Sequence[int]) -> Any:
        first = not output
        reason = StopRule.scan(self, output, fresh)
        self.notice(first)
        return reason


@dataclass(frozen=True, slots=True)
class OurArm:
    """A decoder of ours; ``prepare`` as every arm has it."""

    name: str
    sampled: bool
    decoder: Decoder
    prepare: Callable[[], None]
    items: Sequence[Item]
    max_new_tokens: int
    eos_ids: frozenset[int]
    clock: Clock

    @property
    def prefilled(self) -> frozenset[Any]:
        return frozenset(tier.model for tier in self.decoder.method.tiers.prefilled)

    def warm(self, item: Item) -> None:
        self.decoder.prefill(item.ids)

    def decode(self, item: Item) -> DecodeTime:
        method = self.decoder.method
        chooser = RandomChooser(item.seed, method.tiers.model.device)
        clock = without_asides(self.clock, method.tiers)
        firsts: list[float] = []
        stop = Watched(
            self.max_new_tokens, self.eos_ids, notice=lambda first: firsts.append(clock()) if first else None
        )
        begun = clock()
        self.decoder.prefill(item.ids)
        filled = clock()
        generation = self.decoder.decode(stop, chooser)
        ended = clock()
        return DecodeTime(
            arm=self.name,
            sampled=self.sampled,
            task=item.task,
            example_id=item.example_id,
            prompt_tokens=len(item.ids),
            token_ids=generation.token_ids,
            first_tokens=generation.blocks[0].emitted,
            first_s=firsts[0] - begun,
            rest_s=ended - firsts[0],
            read_bytes=self.read_bytes(item, len(generation.token_ids)) if method.name == BASELINE else None,
            decode_s=ended - filled,
            tier_s=generation.tier_s,
        )

    def read_bytes(self, item: Item, tokens: int) -> int:
        """What the forwards of one token each, after the first, must read."""
        full, cached = self.decoder.method.tiers.full, len(item.ids) - 1
        return sum(forward_bytes(full.model, full.layers, 1, cached + place) for place in range(1, tokens))

    def weigh(self, item: Item) -> MemoryUse:
        """Most bytes that the arm holds after any of a few blocks.

        On CUDA: what it holds before the prompt, and how far the allocator's peak rises above what was allocated then.
        """
        method, held = self.decoder.method, [0]
        cuda = [device for device in method.tiers.model.devices if device.type == "cuda"]
        notice: Callable[[bool], object] = bool if cuda else lambda first: held.append(held_bytes(method))
        stop = Watched(min(self.max_new_tokens, WEIGHED), self.eos_ids, notice=notice)
        before, own = sum(torch.cuda.memory_allocated(device) for device in cuda), held_bytes(method)
        reset_peak(*cuda)
        self.decoder.prefill(item.ids)
        self.decoder.decode(stop, RandomChooser(item.seed, method.tiers.model.device))
        peak = peak_bytes(*cuda)
        return MemoryUse(self.name, max(held) if peak is None else own + peak - before)


@dataclass(frozen=True, slots=True)
class StockArm:
    """A method of ``transformers``."""

    name: str
    stock: Stock
    items: Sequence[Item]
    max_new_tokens: int
    clock: Clock

    @property
    def prefilled(self) -> frozenset[Any]:
        return frozenset((self.name,))  # the first forward of each has another length

    def prepare(self) -> None:
        self.stock.decode(self.name, self.items[0].ids, self.max_new_tokens, self.clock)

    def warm(self, item: Item) -> None:
        self.stock.decode(self.name, item.ids, self.max_new_tokens, self.clock, first_only=True)

    def decode(self, item: Item) -> DecodeTime:
        ids, first, first_s, rest_s = self.stock.decode(self.name, item.ids, self.max_new_tokens, self.clock)
        return DecodeTime(self.name, False, item.task, item.example_id, len(item.ids), ids, first, first_s, rest_s)


def decode_in_turn(arms: Sequence[Arm], advance: Callable[[], None]) -> Iterator[tuple[DecodeTime, ...]]:
    """All arms at each prompt; their order turns from prompt to prompt and after each full turn is reversed."""
    for arm in arms:
        arm.prepare()
    for index, item in enumerate(dict.fromkeys(item for arm in arms for item in arm.items)):
        here = [arm for arm in arms if item in arm.items]
        warmed: set[Any] = set()
        for arm in here:
            if not arm.prefilled <= warmed:
                arm.warm(item)
                warmed |= arm.prefilled
        turn, place = divmod(index, len(here))
        order = here[place:] + here[:place]
        done = []
        for arm in reversed(order) if turn % 2 else order:
            done.append(arm.decode(item))
            advance()
        yield tuple(done)
