"""News summaries, CNN/DailyMail 3.0.0, scored by ROUGE-2, ROUGE-1 and ROUGE-Lsum."""

from collections.abc import Mapping
from typing import Any

from tasks.base import Task
from tasks.source import Dataset, column


class CnnDailyMail(Task):
    """One article a prompt, cut at its end when too long; the reference is its bullet points, one a line."""

    name = "cnn_dailymail"
    group = "summarization"
    metrics = ("rouge2", "rouge1", "rougeLsum")
    dataset = Dataset(
        *("abisee/cnn_dailymail", "3.0.0", "cnn_dailymail_3.0.0", "cnn_dailymail", "cnn_dailymail"),
        calibration=("validation", "train"),
    )
    columns = ("article", "highlights")
    template = "Summarize this article in two or three sentences.\n\n{input}"
    plain = "Article: {input}\nSummary: {answer}"
    max_input_tokens = 1024

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        return column(row, "article"), (column(row, "highlights"),)
