"""Short factual questions, WebQuestions, scored by exact match and F1."""

from collections.abc import Mapping
from typing import Any

from tasks.base import Task
from tasks.source import Dataset, RowError, column


class WebQuestions(Task):
    """One question a prompt, without context; every listed answer is equally right."""

    name = "web_questions"
    metrics = ("exact_match", "f1")
    dataset = Dataset("stanfordnlp/web_questions", "default", "web_questions", "web_questions", calibration=("train",))
    columns = ("question", "answers")
    template = "Answer this question in a few words.\n\n{input}"

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        answers = column(row, "answers", list)
        if not all(isinstance(answer, str) for answer in answers):
            raise RowError("column 'answers' holds something other than texts")
        return column(row, "question"), tuple(answers)

    def prediction(self, text: str) -> str:
        """The first line: an answer is a few words, what follows is talk."""
        return text.strip().partition("\n")[0].strip()
