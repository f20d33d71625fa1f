"""German to English, WMT14 (newstest2014), scored by BLEU."""

from collections.abc import Mapping
from typing import Any

from tasks.base import Task
from tasks.source import Dataset, column


class Wmt14DeEn(Task):
    """One sentence a prompt. Calibration on newstest2013, or on a local train file."""

    name = "wmt14_de_en"
    metrics = ("bleu",)
    dataset = Dataset("wmt/wmt14", "de-en", "wmt14_de-en", "wmt14", calibration=("validation", "train"))
    columns = ("translation",)
    template = "Translate this German sentence to English.\n\n{input}"

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        return column(row, "translation.de"), (column(row, "translation.en"),)

    def prediction(self, text: str) -> str:
        """The whole text on one line, as BLEU takes a line a sentence."""
        return " ".join(text.split())
