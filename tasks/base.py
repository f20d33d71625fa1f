"""What all tasks share: settings, and rows made into examples."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from harness.errors import UserError, unknown
from harness.records import DataSource, Example
from tasks.source import SOURCES, Dataset, RowError, Rows, digest, load_rows, notice


class Task(ABC):
    """A dataset with its prompt and metrics. A subclass sets the class attributes and ``parse``.

    ``metrics``  names in ``harness.scoring.METRICS``; the first is the primary.
    ``columns``  of the dataset that are read; the digest covers them alone.
    ``template``  the prompt, with ``{input}`` where the row's text goes.
    ``stop``  strings that end a generation. None by default: a small chat model ends its turn with its
    end-of-sequence token, and a stop at a line end would cut a worked answer.

    ``load`` and ``calibration`` take the first ``limit`` rows in file order whatever the seed, so that the same ids
    meet in every run; the seed is there for a task that must draw. They raise UserError for bad settings or rows.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    dataset: ClassVar[Dataset]
    columns: ClassVar[tuple[str, ...]]
    template: str
    max_input_tokens: int = 512
    stop: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        source: str = "auto",
        data_dir: str | None = None,
        revision: str = "main",
        max_input_tokens: int | None = None,
        template: str | None = None,
        stop: str | Sequence[str] = (),
    ) -> None:
        """``source`` is one of ``tasks.source.SOURCES``; None for a setting takes the class's own value."""
        if source not in SOURCES:
            raise unknown("source", source, SOURCES)
        self.source, self.data_dir, self.revision = source, data_dir, revision
        self.max_input_tokens = self.max_input_tokens if max_input_tokens is None else max_input_tokens
        self.template = self.template if template is None else template
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if self.max_input_tokens < 1:
            raise UserError(f"{self.name}: max_input_tokens {self.max_input_tokens}: want at least 1")
        if "{input}" not in self.template:
            raise UserError(f"{self.name}: template {self.template!r} lacks {{input}}: put it where the text belongs")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(f"{self.name}: stop {list(self.stop)}: want texts that are not empty, or [] for none")

    @abstractmethod
    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        """Input and references of a row, text untouched. Raises RowError for a column that is missing or wrong."""

    def load(self, limit: int, seed: int) -> tuple[list[Example], DataSource]:
        """The first ``limit`` test rows."""
        return self._examples(limit, calibration=False)

    def calibration(self, limit: int, seed: int) -> tuple[list[Example], DataSource]:
        """The first ``limit`` rows of another split, never test rows."""
        return self._examples(limit, calibration=True)

    def prediction(self, text: str) -> str:
        """What is scored of a generated text."""
        return text.strip()

    def program(self, example: Example, text: str) -> str:
        """What is run of a generated text, where a metric runs programs: the prediction, unless the row adds to it."""
        return self.prediction(text)

    def _examples(self, limit: int, calibration: bool) -> tuple[list[Example], DataSource]:
        if limit < 1:
            raise UserError(f"{self.name}: limit {limit}: want at least 1 row a task")
        rows = load_rows(
            self.name,
            self.dataset,
            calibration=calibration,
            source=self.source,
            data_dir=self.data_dir,
            revision=self.revision,
            limit=limit,
        )
        if len(rows.rows) < limit:
            notice(f"{self.name}: {rows.location} has {len(rows.rows)} {rows.split} rows, {limit} asked: using all")
        examples, used = self._parsed(rows)
        if not examples:
            raise UserError(f"{self.name}: {rows.location} holds no row with a text and an answer: mend or replace it")
        source = DataSource(
            kind=rows.kind,
            location=rows.location,
            split=rows.split,
            revision=rows.revision,
            commit=rows.commit,
            sha256=digest(used),
            rows=len(examples),
        )
        return examples, source

    def _parsed(self, rows: Rows) -> tuple[list[Example], list[dict[str, Any]]]:
        """Examples, and the columns they were made of. A row without input or without any answer is left out, said."""
        examples: list[Example] = []
        used: list[dict[str, Any]] = []
        for index, (place, row) in enumerate(zip(rows.places, rows.rows, strict=True)):
            try:
                text, references = self.parse(row)
            except RowError as error:
                raise UserError(f"{place}: {error}: {self.name} needs {', '.join(self.columns)}") from error
            references = tuple(reference for reference in references if reference.strip())
            if text.strip() and references:
                examples.append(Example(f"{rows.prefix}-{index}", text, references))
                used.append({name: row[name] for name in self.columns})
        if left_out := len(rows.rows) - len(examples):
            notice(f"{self.name}: left out {left_out} rows of {rows.location} without a text or an answer")
        return examples, used
