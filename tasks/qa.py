"""What sets of short factual questions share: exact match and F1 over every listed answer, of the first line."""

from abc import ABC
from collections.abc import Mapping
from typing import Any

from tasks.base import Task
from tasks.source import RowError, column


class ShortAnswer(Task, ABC):
    """One question a prompt, without context; every listed answer is equally right."""

    group = "qa"
    metrics = ("exact_match", "f1")
    template = "Answer this question in a few words.\n\n{input}"

    def prediction(self, text: str) -> str:
        """The first line: an answer is a few words, what follows is talk."""
        return text.strip().partition("\n")[0].strip()


def texts(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A column that is a list of texts. Raises RowError."""
    found = column(row, name, list)
    if not all(isinstance(text, str) for text in found):
        raise RowError(f"column {name!r} holds something other than texts")
    return tuple(found)
