"""Questions on a passage, SQuAD 2.0, scored by exact match and F1, also where the passage has no answer."""

from collections.abc import Mapping
from typing import Any

from harness.records import Example
from harness.scoring import normalize_answer
from tasks.qa import ShortAnswer, texts
from tasks.source import Dataset, column

NO_ANSWER = "unanswerable"
"""What the prompt asks for where the passage has no answer, which is scored as the official empty text."""


class SquadV2(ShortAnswer):
    """A question and its passage, the question first: a cut takes of the passage alone. No public test split.

    By the official rule a row without an answer has the empty text as its only right one.
    """

    name = "squad_v2"
    dataset = Dataset("rajpurkar/squad_v2", "squad_v2", "squad_v2", "squad_v2", "squad_v2", test="validation")
    columns = ("question", "context", "answers")
    template = (
        "Answer the question with a few words from the passage, or with "
        f'"{NO_ANSWER}" if the passage has no answer.\n\n{{input}}'
    )
    max_input_tokens = 1024

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        question, passage = column(row, "question").strip(), column(row, "context")
        found = texts(column(row, "answers", dict), "text")
        return f"{question}\n\nPassage: {passage}", tuple(dict.fromkeys(filter(str.strip, found))) or ("",)

    def answer(self, row: Mapping[str, Any]) -> str:
        return self.parse(row)[1][0] or NO_ANSWER

    def prediction(self, text: str) -> str:
        """The first line; empty where it says that there is no answer."""
        line = super().prediction(text)
        return "" if normalize_answer(line) == NO_ANSWER else line

    def examples(self, row: Mapping[str, Any], example_id: str) -> list[Example]:
        """As in the base, but the empty text is a reference too."""
        text, references = self.parse(row)
        return [Example(example_id, text, references)] if column(row, "question").strip() else []
