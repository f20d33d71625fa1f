"""Short factual questions, WebQuestions, scored by exact match and F1."""

from collections.abc import Mapping
from typing import Any

from tasks.qa import ShortAnswer, texts
from tasks.source import Dataset, column


class WebQuestions(ShortAnswer):
    """Lower-case questions with one to ten answers. One shot (Faster Cascades, 2405.19261)."""

    name = "web_questions"
    dataset = Dataset("stanfordnlp/web_questions", "default", "web_questions", "web_questions", "web_questions")
    columns = ("question", "answers")
    shots = 1

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        return column(row, "question"), texts(row, "answers")
