"""One-sentence news summaries, XSum, scored by ROUGE-2, ROUGE-1 and ROUGE-Lsum."""

from collections.abc import Mapping
from typing import Any

from tasks.base import Task
from tasks.source import Dataset, column


class XSum(Task):
    """One article a prompt, cut at its end when too long; the reference is the sentence that introduced it."""

    name = "xsum"
    group = "summarization"
    metrics = ("rouge2", "rouge1", "rougeLsum")
    dataset = Dataset("EdinburghNLP/xsum", "default", "xsum", "xsum", "xsum", calibration=("validation", "train"))
    columns = ("document", "summary")
    template = "Summarize this article in one sentence.\n\n{input}"
    plain = "Article: {input}\nSummary: {answer}"
    max_input_tokens = 1024

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        return column(row, "document"), (column(row, "summary"),)
