"""What sets of many categories share: the categories taken in turn, and conversations of several turns."""

from abc import ABC
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, ClassVar

from harness.errors import UserError, unknown
from harness.records import DataSource, Example
from tasks.base import Task
from tasks.qa import texts
from tasks.source import RowError, Rows, column, notice

ALL = 10**9
"""More rows than a set has: categories stand one behind another, so that taking turns needs the whole file."""


class Mixed(Task, ABC):
    """Rows with a ``category`` and ``turns`` of a user. The text is the whole message: no instruction is added.

    A row of several turns is one example a turn, ``-turn2`` and on. An id has the category in it; ``Example.meta`` has
    it too, and ``after``, the id of the turn before. ``limit`` counts rows: the first of each category, then the
    second, and so on.

    ``hidden``  the text of turns that the set's owners do not publish; such rows are left out, said, and ``remedy`` is
    what an error says where no other is left.
    """

    group = "mixed"
    metrics = ("rougeLsum",)
    hidden: ClassVar[str | None] = None
    remedy: ClassVar[str] = "take another file"
    template = "{input}"
    plain = "User: {input}\n\nAssistant: {answer}"
    max_input_tokens = 2048

    def __init__(self, *, categories: Sequence[str] = (), **settings: Any) -> None:
        """``categories`` to take; [] for all. Other settings as in ``Task``."""
        super().__init__(**settings)
        self.categories = tuple(categories)
        if self.shots:
            raise UserError(f"{self.name}: shots {self.shots}: a conversation has none, set 0")

    def calibration(self, limit: int, seed: int) -> tuple[list[Example], DataSource]:
        """First turns alone: a further one goes on from an answer that only decoding gives."""
        examples, source = super().calibration(limit, seed)
        return [example for example in examples if "after" not in example.meta], source

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        return texts(row, "turns")[0], ()

    def references(self, row: Mapping[str, Any], turn: int) -> tuple[str, ...]:
        """What the answer to a turn is scored against; () where nothing is given."""
        return ()

    def examples(self, row: Mapping[str, Any], example_id: str) -> list[Example]:
        category, turns = column(row, "category"), texts(row, "turns")
        if not turns:
            raise RowError("column 'turns' is empty")
        prefix, _, number = example_id.rpartition("-")
        base = f"{prefix}-{category}-{number}"
        made: list[Example] = []
        for turn, text in enumerate(turns):
            meta = {"category": category} | ({"after": made[-1].id} if made else {})
            name = base if turn == 0 else f"{base}-turn{turn + 1}"
            made.append(Example(name, text, self.references(row, turn), meta))
        return made if all(text.strip() for text in turns) else []

    def rows(self, splits: tuple[str, ...], limit: int) -> Rows:
        """``limit`` rows, of the chosen categories in turn."""
        whole = super().rows(splits, ALL)
        kept = [index for index, row in enumerate(whole.rows) if not self._is_hidden(row)]
        if hidden := len(whole.rows) - len(kept):
            notice(f"{self.name}: left out {hidden} rows of {whole.location} whose text is not public")
        if not kept:
            raise UserError(f"{self.name}: {whole.location} has no row whose text is public: {self.remedy}")
        by_category: dict[str, list[int]] = {}
        for index in kept:
            try:
                by_category.setdefault(column(whole.rows[index], "category"), []).append(index)
            except RowError as error:
                raise UserError(f"{whole.places[index]}: {error}: {self.name} needs it") from error
        for name in self.categories:
            if name not in by_category:
                raise unknown(f"{self.name} category", name, by_category)
        chosen = [found for name, found in by_category.items() if not self.categories or name in self.categories]
        turned = [index for index in chain(*zip_longest(*chosen)) if index is not None][:limit]
        return Rows(
            **{name: getattr(whole, name) for name in ("kind", "location", "split", "revision", "commit", "prefix")},
            rows=tuple(whole.rows[index] for index in turned),
            places=tuple(whole.places[index] for index in turned),
            numbers=turned,
        )

    def _is_hidden(self, row: Mapping[str, Any]) -> bool:
        turns = row.get("turns")
        return self.hidden is not None and isinstance(turns, list) and self.hidden in turns
