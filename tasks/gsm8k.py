"""Grade-school arithmetic, GSM8K, scored by the final number."""

from collections.abc import Mapping
from typing import Any

from harness.scoring import final_number
from tasks.base import Task
from tasks.source import Dataset, RowError, column


class Gsm8k(Task):
    """One word problem a prompt; the reference is what follows ``####`` in the worked answer."""

    name = "gsm8k"
    metrics = ("accuracy",)
    dataset = Dataset("openai/gsm8k", "main", "gsm8k_main", "gsm8k", calibration=("train",))
    columns = ("question", "answer")
    template = "Solve this problem step by step. End with the final number after ####.\n\n{input}"

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        answer = column(row, "answer")
        _, mark, final = answer.rpartition("####")
        if answer.strip() and (not mark or final_number(final) is None):
            raise RowError("column 'answer' does not end in #### and a number")
        return column(row, "question"), (final.strip(),)

    def prediction(self, text: str) -> str:
        """The final number; empty when there is none."""
        return final_number(text) or ""
