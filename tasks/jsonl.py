"""A user's own rows: a JSON Lines file, a template and a metric, all set in YAML or on the command line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import UserError, unknown
from harness.scoring import METRICS
from tasks.base import Task
from tasks.source import Dataset, RowError, Rows, column, read_jsonl


class Jsonl(Task):
    """One row a prompt: column ``input`` into the template, column ``reference`` (a text or a list of texts) scored.

    A name with dots is a column inside another, ``answer.value``.
    """

    name = "jsonl"
    group = "mixed"
    dataset = Dataset("", "default", "jsonl", "jsonl", "", shots=())
    template = "{input}"

    def __init__(
        self,
        *,
        path: str,
        input: str = "input",
        reference: str = "reference",
        metric: str | Sequence[str] = "f1",
        train_path: str | None = None,
        first_line: bool = False,
        **settings: Any,
    ) -> None:
        """Settings besides those of ``Task``, of which ``source``, ``data_dir`` and ``revision`` have no use here.

        ``path``  the test rows. ``train_path``  rows for shots and calibration. ``metric``  of
        ``harness.scoring.METRICS``, one or several, the first the primary. ``first_line``  score the first line alone.
        """
        super().__init__(**settings)
        self.path, self.train_path, self.first_line = path, train_path, first_line
        self.input, self.reference = input, reference
        self.columns = (input.split(".")[0], reference.split(".")[0])
        self.metrics = (metric,) if isinstance(metric, str) else tuple(metric)
        if not self.metrics:
            raise UserError(f"{path}: metric []: want at least one of {', '.join(sorted(METRICS))}")
        for name in self.metrics:
            if name not in METRICS:
                raise unknown("metric", name, METRICS)
            if METRICS[name].executes:
                raise UserError(f"{path}: metric {name}: it runs programs, for which rows need a set of their own")

    def rows(self, splits: tuple[str, ...], limit: int) -> Rows:
        """Rows of ``path``, or of ``train_path`` for shots and calibration. Raises UserError where that is not set."""
        test = splits == (self.dataset.test,)
        name = self.path if test else self.train_path
        if name is None:
            raise UserError(f"{self.path}: shots and calibration need other rows: set train_path=FILE, or shots=0")
        path = Path(name).expanduser()
        rows, places = read_jsonl(path, limit)
        split = "test" if test else "train"
        prefix = path.stem if test else f"{path.stem}-train"
        return Rows("local", str(path), split, None, None, prefix, tuple(rows), tuple(places))

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        found = column(row, self.reference, str | list)
        references = (found,) if isinstance(found, str) else tuple(found)
        if not all(isinstance(text, str) for text in references):
            raise RowError(f"column {self.reference!r} holds something other than texts")
        return column(row, self.input), references

    def prediction(self, text: str) -> str:
        """The text, or its first line."""
        return text.strip().partition("\n")[0].strip() if self.first_line else text.strip()
