"""An example as the token ids that a model is given: shots, earlier turns, the instruction, the input cut to fit."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from harness.model.load import Model
from harness.model.tokenizer import Tokenizer
from harness.records import DataSource, Example, Shot

AFTER = "after"
"""Key of ``Example.meta``: the id of the example whose answer this turn goes on from."""


class Task(Protocol):
    """What the jobs ask of a task (``tasks/``)."""

    @property
    def metrics(self) -> tuple[str, ...]: ...
    @property
    def template(self) -> str: ...
    @property
    def plain(self) -> str: ...
    @property
    def continues(self) -> bool: ...
    @property
    def stop(self) -> tuple[str, ...]: ...
    @property
    def plain_stop(self) -> tuple[str, ...]: ...
    @property
    def max_input_tokens(self) -> int: ...

    def load(self, limit: int, seed: int) -> tuple[list[Example], DataSource]: ...
    def calibration(self, limit: int, seed: int) -> tuple[list[Example], DataSource]: ...
    def shown(self) -> tuple[Shot, ...]: ...
    def prediction(self, text: str) -> str: ...
    def program(self, example: Example, text: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """An example as token ids. ``name`` is the task's in this run; ``input_cut`` counts input tokens removed to fit.

    ``stop``  strings that end its generation.
    ``said``  the example's own text in the prompt, and ``turns`` what was said before: pairs of user's and model's.
    ``waits``  answers to earlier turns that are not known yet, and stand in ``turns`` as empty texts.
    """

    name: str
    task: Task
    example: Example
    ids: tuple[int, ...]
    input_cut: int
    stop: tuple[str, ...] = ()
    said: str = ""
    turns: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    waits: int = 0

    @property
    def sha(self) -> str:
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()


def make_prompt(
    model: Model, name: str, task: Task, example: Example, turns: tuple[tuple[str, str], ...] = ()
) -> Prompt:
    """The prompt of an example: a chat where the tokenizer has a template for it, else plain text.

    The input, and it alone, is cut from its end to at most ``task.max_input_tokens``. In a chat, shots and earlier
    ``turns`` are messages before the last one. Without a chat template they are a series of worked examples in the
    form of ``task.plain`` (reading: ours); without either, the filled template is the prompt.
    """
    tokenizer = model.tokenizer
    text, cut = shortened(tokenizer, example.input, task.max_input_tokens)
    said = task.template.replace("{input}", text)
    shots, stop = task.shown(), task.stop
    if tokenizer.has_chat:
        earlier = [(task.template.replace("{input}", shot.input), shot.answer) for shot in shots]
        ids = tokenizer.chat(said, [*earlier, *turns])
    elif shots or turns or task.continues:
        earlier = [(shot.input, shot.answer) for shot in shots]
        ids, stop = tokenizer.encode(series(task.plain, [*earlier, *turns], text)), task.plain_stop
    else:
        ids = tokenizer.encode(said)
    return Prompt(name, task, example, tuple(ids), cut, stop, said, turns)


def shortened(tokenizer: Tokenizer, text: str, most: int) -> tuple[str, int]:
    """``text`` cut from its end to at most ``most`` tokens, and how many tokens that took away."""
    whole = kept = tokenizer.encode(text)
    end = most
    while len(kept) > most:
        text = tokenizer.decode(whole[:end]).rstrip("\ufffd")  # half a character is no text
        kept = tokenizer.encode(text)
        end -= 1
    return text, len(whole) - len(kept)


def series(plain: str, worked: Sequence[tuple[str, str]], text: str) -> str:
    """Worked examples in the form of ``plain``, then ``text`` up to where its answer begins; blank lines between.

    >>> series("Q: {input}\\nA: {answer}", [("1 + 1?", "2")], "2 + 2?")
    'Q: 1 + 1?\\nA: 2\\n\\nQ: 2 + 2?\\nA:'
    """
    before, rest = plain.split("{input}", 1)
    between, after = rest.split("{answer}", 1)
    blocks = [f"{before}{question}{between}{answer}{after}" for question, answer in worked]
    return "\n\n".join([*blocks, f"{before}{text}{between.rstrip(' ')}"])


def make_prompts(model: Model, name: str, task: Task, examples: Sequence[Example]) -> list[Prompt]:
    """Prompts in order. A further turn of a conversation has empty answers, until ``gone_on`` puts them in."""
    made: dict[str, Prompt] = {}
    for example in examples:
        if (before := made.get(example.meta.get(AFTER, ""))) is None:
            made[example.id] = make_prompt(model, name, task, example)
        else:
            turns = (*before.turns, (before.said, ""))
            made[example.id] = replace(make_prompt(model, name, task, example, turns), waits=before.waits + 1)
    return list(made.values())


def gone_on(model: Model, prompt: Prompt, answers: Mapping[tuple[str, str], tuple[Prompt, str]], most: int) -> Prompt:
    """A further turn, with the answer to the turn before it; any other prompt as it is.

    ``answers``, by task and example, holds the prompts decoded so far with the baseline's text: all arms are asked the
    same (reading: ours; Spec-Bench lets each method go on from its own). An answer has ``most`` tokens at most, also
    where its text comes to more of them than it was written in.
    """
    key = (prompt.name, prompt.example.meta.get(AFTER, ""))
    if key not in answers:
        return prompt
    before, text = answers[key]
    answer, _ = shortened(model.tokenizer, text, most)
    return make_prompt(model, prompt.name, prompt.task, prompt.example, (*before.turns, (before.said, answer)))
