"""Trivia questions, TriviaQA rc.nocontext, scored by exact match and F1 over all aliases."""

from collections.abc import Mapping
from typing import Any

from tasks.qa import ShortAnswer, texts
from tasks.source import Dataset, column


class TriviaQa(ShortAnswer):
    """Questions with up to 137 aliases of the answer, some in other scripts. The test split has no answers."""

    name = "trivia_qa"
    dataset = Dataset(
        "mandarjoshi/trivia_qa", "rc.nocontext", "trivia_qa_rc.nocontext", "trivia_qa", "trivia_qa", test="validation"
    )
    columns = ("question", "answer")

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        answer = column(row, "answer", dict)
        aliases = (column(answer, "value"), *texts(answer, "aliases"))
        return column(row, "question"), tuple(dict.fromkeys(aliases))
