"""Figures of the jobs beside the bench: labels do not cover each other, and no figure is wider than a page."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure

from harness import compare
from harness.audit.figure import audit_figure
from harness.config import plain, register
from harness.jobs.plausibility import report_plausibility
from harness.jobs.scale import report_scale
from harness.pareto.score import Score, Value
from harness.pareto.space import Point
from harness.pareto.tables import Found, Search, pareto_figure
from harness.report.sweep_figure import Cell, sweep_figure
from harness.slim_fidelity import numbers as fidelity_numbers
from harness.slim_fidelity.figure import fidelity_figure, gain_figure
from harness.slim_fidelity.records import SlimFacts, SlimFidelitySum
from harness.speed import numbers as speed_numbers
from harness.speed.figure import speed_figure
from harness.speed.records import SpeedRecord
from harness.store import from_json
from tests.pictures import faults, made_run
from tests.test_audit import CLEAN, GAIN, NO_SCORE, OUTPUT
from tests.test_slim_fidelity import record_of, timed_record

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "reference"
SETS = ("gsm8k", "squad_v2", "web_questions", "nq_open", "trivia_qa", "mbpp")


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RESAMPLES", 50)


def speed() -> Figure:
    (path,) = (REFERENCE / "speed" / "speed").glob("*.json")
    stored = json.loads(path.read_text())
    del stored["rows"]  # for readers without the harness
    record = from_json(SpeedRecord, stored)
    return speed_figure(record, speed_numbers.rows(record))


def audit() -> Figure:
    """Two tasks of two arms."""
    outputs = [
        replace(one, task=task, arm=arm)
        for task in ("wmt14_en_de", "cnn_dailymail")
        for arm in ("via_sd", "via_sd_bonus_slim")
        for one in (OUTPUT, CLEAN, NO_SCORE, GAIN)
    ]
    return audit_figure(outputs)


def pareto() -> Figure:
    search = Search("pareto", "via_sd", "greedy_share", 24, 16, "20260131T091500Z-3f9a1c", "toy", "TPE", {})

    def scored(loss: float, speedup: float) -> Score:
        return Score(Value(speedup, speedup - 0.1, speedup + 0.1), {"greedy_share": Value(loss)})

    found = [
        Found(
            number,
            Point(0.5, 0.3, 0.45, 5),
            {"via_sd": scored(number / 10, 1 + number / 8), "speculative": scored(0.0, 1.2)},
            "run",
            number % 2 == 0,
            "via_sd",
        )
        for number in range(6)
    ]
    return pareto_figure(search, found, {"via_sd_0": scored(0.05, 1.1), "via_sd_2": scored(0.25, 1.2)})


def fidelity() -> Figure:
    """Three sources in both cache modes, five ratios, eight places."""
    slims, sums = {}, []
    for kind in ("even", "random", "mask embedded"):
        for cache in ("shared", "own"):
            for ratio in (0.1, 0.2, 0.3, 0.4, 0.5):
                name = f"{kind} {cache} {ratio}"
                slims[name] = SlimFacts(name, kind, ratio, cache, "0 1", 8)
                sums += [
                    SlimFidelitySum(
                        *(name, "qa", example, place, 4),
                        dict.fromkeys(fidelity_numbers.QUANTITIES, ratio * place) | {"agreement": 4 - 4 * ratio},
                    )
                    for example in ("a", "b")
                    for place in range(1, 9)
                ]
    record = replace(record_of(*sums), slims=slims)
    return fidelity_figure(record, fidelity_numbers.rows(record))


def swept(settings: int, tasks: int) -> Figure:
    """Cells of gamma, and of a skip ratio where two settings were swept."""
    cells = []
    for gamma in (3, 5, 8):
        for ratio in (0.3, 0.45)[:settings]:
            run = made_run("run", {"speculative": 1 + gamma / 10, "via_sd_paper": 1 + ratio}, SETS[:tasks])
            run.settings["gamma"] = gamma  # type: ignore[index]
            values = {"gamma": gamma} if settings == 1 else {"gamma": gamma, "slim.skip_ratio": ratio}
            cells.append(Cell(run, values))
    return sweep_figure(cells)


MADE: dict[str, Callable[[], Figure]] = {
    "speed": speed,
    "audit": audit,
    "pareto": pareto,
    "fidelity": fidelity,
    "gain": lambda: gain_figure(fidelity_numbers.rows(timed_record(0.5, 0.2, -0.1, -0.5))),
    **{f"sweep of {tasks} tasks": lambda tasks=tasks: swept(2, tasks) for tasks in (1, 2, 3, 4, 6)},  # type: ignore[misc]
    "sweep of one setting": lambda: swept(1, 3),
}


@pytest.mark.parametrize("name", list(MADE))
def test_labels_are_readable_and_a_page_holds_the_figure(name: str) -> None:
    assert faults(MADE[name]()) == []


def saved(job: Callable[[], object]) -> list[Figure]:
    """The figures that a job saves, each once."""
    found: list[Figure] = []
    save = Figure.savefig

    def kept(self: Figure, *given: object, **how: object) -> None:
        found.append(self)
        save(self, *given, **how)  # type: ignore[arg-type]

    with patch.object(Figure, "savefig", kept):
        job()
    return list(dict.fromkeys(found))


def test_labels_of_break_even_are_readable(tmp_path: Path) -> None:
    paper = str(ROOT / "results" / "paper")
    figures = saved(lambda: report_plausibility(str(tmp_path), paper=paper, reference=str(REFERENCE / "quickstart")))
    assert len(figures) == 2
    for figure in figures:
        assert faults(figure) == []


def test_labels_of_the_roofline_are_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        job = plain(compose("config", ["job=scale"]), resolve=True)["job"]
    del job["_target_"]
    figures = saved(lambda: report_scale(**job | {"results_dir": str(tmp_path)}))
    assert len(figures) == 2
    for figure in figures:
        assert faults(figure) == []
