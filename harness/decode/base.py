"""The loop every method shares: one prefill, one stop rule, one trace, one place where tiers are rolled back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from harness.model.tiers import Tier, TierGroup, Tiers
from harness.model.transfer import to_host
from harness.records import BlockTrace, Generation, Route, StopReason
from harness.sampling import Chooser, Law, Sampling


@dataclass(frozen=True, slots=True)
class Block:
    """What one step decided: ``kept`` drafts and at most one more token, before the stop rule.

    ``asked``, ``drafted``, ``routes``, ``looked_up`` and ``deciders`` as in ``BlockTrace``; ``bonus`` is True when the
    last token is one.
    """

    tokens: tuple[int, ...]
    asked: int = 0
    drafted: int = 0
    routes: tuple[Route, ...] = ()
    kept: int = 0
    bonus: bool = False
    looked_up: int = 0
    deciders: tuple[int, ...] = ()


@runtime_checkable
class Method(Protocol):
    """A decoding method bound to its tiers. ``step`` extends ``tokens`` (prompt and output) by one block."""

    name: str
    tiers: Tiers
    sampling: Sampling

    @property
    def lossless(self) -> bool: ...

    @property
    def drafter_name(self) -> str | None: ...

    @property
    def gate_name(self) -> str | None: ...

    def tier_roles(self) -> tuple[Tier | None, Tier | TierGroup | None]:
        """The tiers that count as draft and as slim forwards, where there are any."""
        ...

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block: ...

    def finish(self, text: Sequence[int]) -> None:
        """The last block of a prompt is done; ``text`` is the prompt with its output, empty where none is learnt."""
        ...


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stop after ``max_new_tokens``, after the first EOS, or once the text of the output contains a stop string.

    The stopping token is part of the output; nothing after it is. ``decode`` turns token ids into text and is needed
    only with stop strings.
    """

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.stop_strings and self.decode is None:
            raise ValueError("stop strings need a decode function")

    def scan(self, output: list[int], fresh: Sequence[int]) -> StopReason | None:
        """Append ``fresh`` to ``output`` until something stops it; return what did."""
        for token in fresh:
            output.append(token)
            if token in self.eos_ids:
                return StopReason.EOS
            if self.stop_strings and self.ends_in_stop_string(output):
                return StopReason.STOP_STRING
            if len(output) == self.max_new_tokens:
                return StopReason.LENGTH
        return None

    def ends_in_stop_string(self, output: Sequence[int]) -> bool:
        assert self.decode is not None
        # As many last tokens as give the longest stop string and 4 characters more, which keep a character that is
        # split over tokens whole. Special tokens give no text, so the look back grows until there is enough.
        enough = max(len(stop) for stop in self.stop_strings) + 4
        window = enough
        text = self.decode(output[-window:])
        while len(text) < enough and window < len(output):
            window *= 2
            text = self.decode(output[-window:])
        return any(stop in text for stop in self.stop_strings)


class Decoder:
    """Runs a method on one prompt at a time: ``prefill`` then ``decode``, so that each can be timed from outside."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.prompt: tuple[int, ...] = ()

    def prefill(self, prompt: Sequence[int]) -> None:
        """Process all of the prompt but its last token, which the first decoding step processes in every method.

        Raises:
            ValueError: an empty prompt.
        """
        if not prompt:
            raise ValueError("the prompt has no token")
        self.prompt = tuple(prompt)
        self.method.tiers.prefill(self.prompt)

    def decode(self, stop: StopRule, chooser: Chooser, learn: bool = True) -> Generation:
        """Decode until ``stop`` says so. Call ``prefill`` first.

        ``learn``: what remembers finished texts may remember this one; false where the prompt will be decoded again.
        """
        tiers = self.method.tiers
        output: list[int] = []
        blocks: list[BlockTrace] = []
        reason = None
        seconds = self.seconds()
        while reason is None:
            before = self.forwards()
            start = len(output)
            sequence = (*self.prompt, *output)
            block = self.method.step(sequence, stop.max_new_tokens - start, chooser)
            reason = stop.scan(output, block.tokens)
            tiers.rollback(len(self.prompt) + len(output) - 1)
            draft, slim, full = (now - then for now, then in zip(self.forwards(), before, strict=True))
            blocks.append(clipped(block, start, len(output) - start, draft, slim, full))
        self.method.finish((*self.prompt, *output) if learn else ())
        spent = tuple(now - then for now, then in zip(self.seconds(), seconds, strict=True))
        return Generation(tuple(output), tuple(blocks), reason, spent if tiers.model.device.type == "cpu" else None)

    def forwards(self) -> tuple[int, int, int]:
        """Forwards so far of the draft, slim and full tier."""
        draft, slim = self.method.tier_roles()
        return (draft.forwards if draft else 0, slim.forwards if slim else 0, self.method.tiers.full.forwards)

    def seconds(self) -> tuple[float, float, float]:
        """Seconds so far in the forwards of the draft, slim and full tier."""
        draft, slim = self.method.tier_roles()
        return (draft.seconds if draft else 0.0, slim.seconds if slim else 0.0, self.method.tiers.full.seconds)


def clipped(block: Block, start: int, emitted: int, draft: int, slim: int, full: int) -> BlockTrace:
    """The trace of a block of which the stop rule let ``emitted`` tokens through; what it cut was never rejected."""
    return BlockTrace(
        start=start,
        asked=block.asked,
        drafted=block.drafted,
        routes=block.routes[:emitted],
        kept=min(block.kept, emitted),
        emitted=emitted,
        bonus=int(block.bonus and emitted == len(block.tokens)),
        draft_forwards=draft,
        slim_forwards=slim,
        full_forwards=full,
        looked_up=block.looked_up,
        deciders=block.deciders[:emitted],
    )


@runtime_checkable
class Lawful(Protocol):
    """What tells the law that a token is drawn from: ``Sampling``, or a rule that has another target."""

    def law(self, logits: Float[Tensor, "R V"]) -> Law: ...


def plain_step(full: Tier, target: Lawful, tokens: Sequence[int], asked: int, chooser: Chooser) -> Block:
    """One autoregressive step of the full verifier: the baseline, and every method's answer to an empty draft."""
    law = target.law(full.forward(tokens, rows=1))
    (token,) = to_host(law.draw(torch.zeros((), dtype=torch.long, device=full.model.device), chooser))
    return Block(tokens=(token,), asked=asked)
