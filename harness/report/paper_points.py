"""The paper's points that stand behind ours: which of them a run may be set beside, and how they are named.

They come from ``results/paper/numbers.csv``, each with its ``origin``: printed in a table, or read off a plot.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import UserError
from harness.report.lines import RunReport
from harness.report.paper_numbers import PAPER, read_numbers

SETS = {
    "webq": "web_questions",
    "nq": "nq_open",
    "triviaqa": "trivia_qa",
    "squad2": "squad_v2",
    "cnndm": "cnn_dailymail",
    "wmt14": "wmt14_en_de",
}
"""The sets' names in that file, where ours are others."""

PAIRS = {
    "gemma2_2b_9b": "Gemma2 2B, 9B",
    "gemma2_2b_27b": "Gemma2 2B, 27B",
    "gemma3_4b_27b": "Gemma3 4B, 27B",
}
VERIFIERS = {"gemma-2-9b": "gemma2_2b_9b", "gemma-2-27b": "gemma2_2b_27b", "gemma-3-27b": "gemma3_4b_27b"}
"""Pairs by how the names of their full verifiers begin, without the hub's organisation."""

MARKS = "x+1234"


def paper_points(source: str, task: str | None, report: RunReport) -> pd.DataFrame:
    """Rows of one of the paper's figures on one of our tasks (None: those of no task) that the run compares with.

    Those of another temperature than the run's are left out, and those of other pairs where the run's own is among
    them. A column ``label`` names pair and origin. Empty where nothing is left, or the file is not there.
    """
    known = numbers_in(PAPER)
    named = known.task.map(lambda name: SETS.get(name, name))
    known = known[(known.source == source) & (named.isna() if task is None else named == task)]
    known = known[known.temperature.isna() | (known.temperature == report.run.temperature)]
    mine = pair_of(report.settings)
    if mine in set(known.pair):
        known = known[known.pair == mine]
    return known.assign(label=[label(pair, origin) for pair, origin in zip(known.pair, known.origin, strict=True)])


@cache
def numbers_in(folder: Path) -> pd.DataFrame:
    """The paper's numbers, or none where the file is not there: ours are drawn without."""
    try:
        return read_numbers(folder)
    except UserError:
        columns = ("source", "pair", "method", "task", "temperature", "metric", "value", "origin")
        return pd.DataFrame(columns=columns, dtype=object)


def pair_of(settings: Mapping[str, Any]) -> str | None:
    """The paper's pair that the run's full verifier is of, by its name; None of any other model."""
    name = Path(str((settings.get("model") or {}).get("full", ""))).name.lower()
    return next((pair for start, pair in VERIFIERS.items() if re.match(rf"{start}\b", name)), None)


def label(pair: Any, origin: str) -> str:
    whose = PAIRS.get(pair, str(pair)) if isinstance(pair, str) else "pair not stated"
    return f"paper, {whose}" + (", read off" if origin == "read_off_plot" else "")


def paper_look(labels: Sequence[str], chosen: str) -> dict[str, Any]:
    """Grey marks behind ours and never a line: nothing is known between the paper's points."""
    mark = MARKS[labels.index(chosen) % len(MARKS)]
    return {"color": "#777777", "linestyle": "", "marker": mark, "markersize": 5, "zorder": 1, "label": chosen}
