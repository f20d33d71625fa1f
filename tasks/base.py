"""What all sets share: settings, rows made into examples, and the worked examples shown before them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from random import Random
from typing import Any, ClassVar

from harness.errors import UserError, unknown
from harness.records import DataSource, Example, Shot
from tasks.source import SOURCES, Dataset, RowError, Rows, digest, load_rows, notice

POOL = 1000
"""Rows of the train split, from its beginning, that shots are drawn from."""


class Task(ABC):
    """A set with its prompt and metrics. A subclass sets the class attributes and ``parse``.

    ``group``  the YAML of ``conf/task`` that selects this set among others of its kind.
    ``metrics``  names in ``harness.scoring.METRICS``; the first is the primary.
    ``columns``  of the dataset that are read; the digest covers them alone.
    ``template``  the prompt, with ``{input}`` where the row's text goes.
    ``plain``  one worked example for a model without a chat template, with ``{input}`` and ``{answer}``. A prompt with
    shots is a series of them, the last one ending where its answer begins.
    ``continues``  the input begins its answer: without a chat template ``plain`` is used even without shots.
    ``shots``  worked examples shown before each input; the class has the paper's number, or that of Faster Cascades
    (2405.19261) where the paper has none, else 0.
    ``stop``  strings that end a generation. None by default: a small chat model ends its turn with its
    end-of-sequence token, and a stop at a line end would cut a worked answer.

    ``load`` and ``calibration`` take the first ``limit`` rows in file order whatever the seed, so that the same ids
    meet in every run; shots follow ``shots_seed`` alone, so that every run shows the same. Both raise UserError for bad
    settings or rows.
    """

    name: ClassVar[str]
    group: ClassVar[str]
    metrics: tuple[str, ...]
    dataset: Dataset
    columns: tuple[str, ...]
    continues: ClassVar[bool] = False
    template: str
    plain: str = "Question: {input}\nAnswer: {answer}"
    max_input_tokens: int = 512
    shots: int = 0
    stop: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        source: str = "auto",
        data_dir: str | None = None,
        revision: str = "main",
        max_input_tokens: int | None = None,
        template: str | None = None,
        plain: str | None = None,
        shots: int | None = None,
        shots_seed: int = 0,
        stop: str | Sequence[str] = (),
    ) -> None:
        """``source`` is one of ``tasks.source.SOURCES``; None for a setting takes the class's own value."""
        if source not in SOURCES:
            raise unknown("source", source, SOURCES)
        self.source, self.data_dir, self.revision = source, data_dir, revision
        self.max_input_tokens = self.max_input_tokens if max_input_tokens is None else max_input_tokens
        self.template = self.template if template is None else template
        self.plain = self.plain if plain is None else plain
        self.shots, self.shots_seed = self.shots if shots is None else shots, shots_seed
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if self.max_input_tokens < 1:
            raise UserError(f"{self.name}: max_input_tokens {self.max_input_tokens}: want at least 1")
        if self.shots < 0:
            raise UserError(f"{self.name}: shots {self.shots}: want 0 or more")
        if "{input}" not in self.template:
            raise UserError(f"{self.name}: template {self.template!r} lacks {{input}}: put it where the text belongs")
        if not 0 <= self.plain.find("{input}") < self.plain.find("{answer}"):
            raise UserError(f"{self.name}: plain {self.plain!r}: want {{input}} and, behind it, {{answer}}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(f"{self.name}: stop {list(self.stop)}: want texts that are not empty, or [] for none")

    @abstractmethod
    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        """Input and references of a row, text untouched. Raises RowError for a column that is missing or wrong."""

    def answer(self, row: Mapping[str, Any]) -> str:
        """What a shot shows as the row's answer."""
        return next(filter(str.strip, self.parse(row)[1]))

    def meta(self, row: Mapping[str, Any]) -> dict[str, str]:
        """``Example.meta`` of a row."""
        return {}

    def load(self, limit: int, seed: int) -> tuple[list[Example], DataSource]:
        """The first ``limit`` test rows."""
        return self._examples(limit, calibration=False)

    def calibration(self, limit: int, seed: int) -> tuple[list[Example], DataSource]:
        """The first ``limit`` rows of another split that are no shots; never test rows."""
        return self._examples(limit, calibration=True)

    def shown(self) -> tuple[Shot, ...]:
        """The shots, in the order in which every prompt shows them."""
        return self._shots[0]

    def prediction(self, text: str) -> str:
        """What is scored of a generated text."""
        return text.strip()

    def program(self, example: Example, text: str) -> str:
        """What is run of a generated text, where a metric runs programs: the prediction, unless the row adds to it."""
        return self.prediction(text)

    @property
    def plain_stop(self) -> tuple[str, ...]:
        """Strings that end an answer in plain form: what ``plain`` has behind it, else how the next example begins."""
        before, after = self.plain.split("{input}", 1)[0].strip(), self.plain.split("{answer}", 1)[1].strip()
        return (*self.stop, after or (f"\n{before}" if before else "\n\n"))

    def rows(self, splits: tuple[str, ...], limit: int) -> Rows:
        """The first ``limit`` rows of the first of ``splits`` that there is."""
        return load_rows(
            self.name,
            self.dataset,
            splits=splits,
            source=self.source,
            data_dir=self.data_dir,
            revision=self.revision,
            limit=limit,
        )

    @cached_property
    def _shots(self) -> tuple[tuple[Shot, ...], DataSource | None]:
        if not self.shots:
            return (), None
        rows = self.rows(self.dataset.shots, POOL)
        pool = [row for place, row in zip(rows.places, rows.rows, strict=True) if self._of(row, place, "")]
        if len(pool) < self.shots:
            raise UserError(
                f"{self.name}: {rows.location} has {len(pool)} rows for {self.shots} shots: lower "
                f"tasks.{self.name}.shots, or take a source with more {rows.split} rows"
            )
        drawn = Random(f"shots/{self.shots_seed}/{self.name}").sample(pool, self.shots)
        shots = tuple(Shot(self.parse(row)[0], self.answer(row)) for row in drawn)
        return shots, described(rows, [self._read(row) for row in drawn])

    def _examples(self, limit: int, calibration: bool) -> tuple[list[Example], DataSource]:
        if limit < 1:
            raise UserError(f"{self.name}: limit {limit}: want at least 1 row a task")
        shots, shots_source = self._shots
        splits = self.dataset.calibration if calibration else (self.dataset.test,)
        rows = self.rows(splits, limit + len(shots) if calibration else limit)
        if len(rows.rows) < limit:
            notice(f"{self.name}: {rows.location} has {len(rows.rows)} {rows.split} rows, {limit} asked: using all")
        examples, used = self._parsed(rows, limit, {shot.input for shot in shots} if calibration else set())
        if not examples:
            raise UserError(f"{self.name}: {rows.location} holds no row with a text and an answer: mend or replace it")
        return examples, replace(described(rows, used), shots=shots_source)

    def _parsed(self, rows: Rows, limit: int, shown: set[str]) -> tuple[list[Example], list[dict[str, Any]]]:
        """Examples of ``limit`` rows at most, and the columns they were made of.

        A row that is among the shots is passed over; one without input or without any answer is left out, said.
        """
        examples: list[Example] = []
        used: list[dict[str, Any]] = []
        left_out = 0
        for place, row, number in zip(rows.places, rows.rows, rows.numbers, strict=False):
            if len(used) + left_out == limit:
                break
            made = self._of(row, place, f"{rows.prefix}-{number}")
            if made and made[0].input in shown:
                continue
            examples += made
            if made:
                used.append(self._read(row))
            else:
                left_out += 1
        if left_out:
            notice(f"{self.name}: left out {left_out} rows of {rows.location} without a text or an answer")
        return examples, used

    def _of(self, row: Mapping[str, Any], place: str, example_id: str) -> list[Example]:
        try:
            return self.examples(row, example_id)
        except RowError as error:
            raise UserError(f"{place}: {error}: {self.name} needs {', '.join(self.columns)}") from error

    def examples(self, row: Mapping[str, Any], example_id: str) -> list[Example]:
        """The example of a row; none where it has no text or no answer. A row of several turns has one for each."""
        text, found = self.parse(row)
        references = tuple(reference for reference in found if reference.strip())
        return [Example(example_id, text, references, self.meta(row))] if text.strip() and references else []

    def _read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: row[name] for name in self.columns if name in row}


def described(rows: Rows, used: list[dict[str, Any]]) -> DataSource:
    return DataSource(
        kind=rows.kind,
        location=rows.location,
        split=rows.split,
        revision=rows.revision,
        commit=rows.commit,
        sha256=digest(used),
        rows=len(used),
    )
