"""Short factual questions, NaturalQuestions open, scored by exact match and F1."""

from collections.abc import Mapping
from typing import Any

from tasks.qa import ShortAnswer, texts
from tasks.source import Dataset, column


class NqOpen(ShortAnswer):
    """Lower-case questions without a question mark. One shot (Faster Cascades, 2405.19261). No public test split."""

    name = "nq_open"
    dataset = Dataset("google-research-datasets/nq_open", "nq_open", "nq_open", "nq_open", "nq_open", test="validation")
    columns = ("question", "answer")
    shots = 1

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        return column(row, "question"), texts(row, "answer")
