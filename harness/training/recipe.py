"""Which prompts the full verifier continues: calibration rows, and prompts that it writes itself.

A prompt of its own is sampled from a stem, as in Magpie (arXiv 2406.08464): the chat template up to where the user
speaks, then nothing, or a task's instruction and the first few tokens of a calibration input. Or, as in Self-Instruct
(arXiv 2212.10560), it is the line that follows some calibration inputs of a task, put into that task's prompt. Nothing
is read of any test row. Every sequence has a seed of its own, so that it depends on no other.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.errors import UserError
from harness.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Recipe:
    """How much is written, and how.

    Args:
        sequences: prompts with their continuations, held-out ones besides.
        held_out: sequences that are never trained on, written first.
        calibration: calibration rows asked of each task; a quarter of them, at least one, goes to the held-out ones.
        prompt_tokens: of a prompt that the verifier writes, at most, its stem besides.
        reply_tokens: of a continuation, at most.
        prompt_temperature: of sampling prompts.
        sampled: share of continuations that are sampled at temperature 1; the others are greedy.
        plain: share of own prompts that start from no task's instruction.
        opening: tokens of a calibration input that a stem has, at most.
        shown_tokens: of calibration inputs shown to the writer of a task's prompt, at most; of a task whose inputs are
            longer prompts are written from stems, and of every task with 0.
        batch: sequences written side by side.
        shard: sequences of a file; an interrupted writer starts its last file again.
        skip: of the verifier's own prompts, those left out: texts that no drafter of a smaller recipe has seen.
        taps: layers of the verifier behind which its hidden states are kept too, for heads that read them (``fused``).
    """

    sequences: int = 4096
    held_out: int = 64
    calibration: int = 12
    prompt_tokens: int = 80
    reply_tokens: int = 96
    prompt_temperature: float = 1.0
    sampled: float = 0.2
    plain: float = 0.2
    opening: int = 8
    batch: int = 128
    shard: int = 1024
    skip: int = 0
    taps: tuple[int, ...] = ()
    shown_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))  # Hydra gives a list
        for name in ("sequences", "held_out", "calibration", "prompt_tokens", "reply_tokens", "batch", "shard"):
            if getattr(self, name) < 1:
                raise UserError(f"job.data.{name}={getattr(self, name)}: want at least 1.")
        for name in ("sampled", "plain"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"job.data.{name}={getattr(self, name)}: want a share, 0 to 1.")
        for name, unit in (("skip", "sequences"), ("shown_tokens", "tokens")):
            if getattr(self, name) < 0:
                raise UserError(f"job.data.{name}={getattr(self, name)}: want 0 or more {unit}.")
        if self.opening < 0 or not self.prompt_temperature > 0:
            raise UserError(
                f"job.data.opening={self.opening}, prompt_temperature={self.prompt_temperature}: want 0 or more tokens "
                "and a temperature above 0."
            )


@dataclass(frozen=True, slots=True)
class Source:
    """A task as its prompts are made: what stands before and behind the input, the rows' inputs, their prompts."""

    name: str
    instruction: str
    inputs: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    closing: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to write: ``given`` tokens, then a prompt's rest where ``writes_prompt``, then the continuation.

    Where ``around`` is not None, ``given`` is only shown: the line written behind it, between these two, is the prompt.
    """

    index: int
    given: tuple[int, ...]
    writes_prompt: bool
    sampled: bool
    around: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def longest(self) -> int:
        """Tokens that stand before what is written, at most."""
        return max(len(self.given), sum(map(len, self.around or ())))

    def random(self, seed: int) -> random.Random:
        return random.Random(f"draws/{seed}/{self.index}")


@dataclass(frozen=True, slots=True)
class Frame:
    """The chat template: what stands before the user's text and behind it. Both are empty where there is none."""

    before: tuple[int, ...]
    behind: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Frame":
        one, other = tokenizer.chat("a"), tokenizer.chat("b")
        before = next(index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        return cls(tuple(one[:before]), tuple(one[before + 1 :]))


def split(source: Source) -> tuple[Source, Source]:
    """Held-out rows and rows to train on: the first quarter, at least one where there are two, and the rest."""
    count = max(1, len(source.inputs) // 4) if len(source.inputs) > 1 else 0
    return (
        replace(source, inputs=source.inputs[:count], prompts=source.prompts[:count]),
        replace(source, inputs=source.inputs[count:], prompts=source.prompts[count:]),
    )


def requests(recipe: Recipe, tokenizer: Tokenizer, sources: Sequence[Source], seed: int) -> list[Request]:
    """Held-out sequences first, then those to train on; in each part the calibration prompts lead."""
    kept, trained = zip(*(split(source) for source in sources), strict=True)
    made: list[Request] = []
    for part, count in ((kept, recipe.held_out), (trained, recipe.sequences)):
        given = [prompt for source in part for prompt in source.prompts][:count]
        made += [Request(len(made) + index, prompt, False, False) for index, prompt in enumerate(given)]
        skipped = recipe.skip if part is trained else 0
        for _ in range(count - len(given)):
            made.append(own_prompt(recipe, tokenizer, part, len(made) + skipped, seed))
    return made


def own_prompt(recipe: Recipe, tokenizer: Tokenizer, sources: Sequence[Source], index: int, seed: int) -> Request:
    """A prompt that the verifier writes, from a stem or behind others of its kind."""
    draw = random.Random(f"stem/{seed}/{index}")
    frame = Frame.of(tokenizer)

    def bare(text: str) -> list[int]:
        return tokenizer.encode(text)[len(tokenizer.encode("")) :]

    stem: list[int] = []
    if draw.random() >= recipe.plain:
        source = draw.choice(sources)
        if shown := drawn_lines(recipe, tokenizer, source, draw):
            around = (*frame.before, *bare(source.instruction)), (*bare(source.closing), *frame.behind)
            return Request(index, shown, True, draw.random() < recipe.sampled, around)
        stem = bare(source.instruction)
        if source.inputs:
            stem = bare(source.instruction + draw.choice(source.inputs))[: len(stem) + draw.randint(0, recipe.opening)]
    given = (*frame.before, *stem) or (min(tokenizer.eos_ids, default=0),)  # something must come first
    return Request(index, given, True, draw.random() < recipe.sampled)


def drawn_lines(recipe: Recipe, tokenizer: Tokenizer, source: Source, draw: random.Random) -> tuple[int, ...]:
    """Inputs of ``source``, one a line, as many as fit, as the beginning of a text; empty where none does."""
    if not recipe.shown_tokens:
        return ()
    lines = [" ".join(text.split()) + "\n" for text in source.inputs]
    text = ""
    for line in draw.sample(lines, len(lines)):
        if len(tokenizer.encode(text + line)) <= recipe.shown_tokens:
            text += line
    return tuple(tokenizer.encode(text)) if text else ()
