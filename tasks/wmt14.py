"""German and English, WMT14 (newstest2014), scored by BLEU and chrF."""

from collections.abc import Mapping
from typing import Any

from tasks.base import Task
from tasks.source import Dataset, column


class Wmt14DeEn(Task):
    """One German sentence a prompt. Calibration on newstest2013, or on a local train file."""

    name = "wmt14_de_en"
    group = "translation"
    metrics = ("bleu", "chrf")
    dataset = Dataset("wmt/wmt14", "de-en", "wmt14_de-en", "wmt14", "wmt14_de_en", calibration=("validation", "train"))
    columns = ("translation",)
    template = "Translate this German sentence to English.\n\n{input}"
    plain = "German: {input}\nEnglish: {answer}"

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        return column(row, "translation.de"), (column(row, "translation.en"),)

    def prediction(self, text: str) -> str:
        """The whole text on one line, as BLEU takes a line a sentence."""
        return " ".join(text.split())


class Wmt14EnDe(Wmt14DeEn):
    """One English sentence a prompt, from the same rows and files as the other direction."""

    name = "wmt14_en_de"
    template = "Translate this English sentence to German.\n\n{input}"
    plain = "English: {input}\nGerman: {answer}"

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        return column(row, "translation.en"), (column(row, "translation.de"),)
