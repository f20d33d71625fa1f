"""Every figure: its labels do not cover each other and stay on the page; and the front of speed and quality."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness import compare
from harness.report.by_arm import rates_figure, routes_figure, time_figure
from harness.report.choice import figures_of
from harness.report.drafters import drafters_figure
from harness.report.explorer import explore, explored_figure, from_reports
from harness.report.figures import CROWD, Point, front, speed_quality_figure
from harness.report.lines import RunReport
from harness.report.load import load_if_any
from harness.report.sweep_figure import Cell, sweep_figure
from tests.pictures import faults, made_run
from tests.test_paper_figures import ALL

REFERENCE = Path(__file__).resolve().parents[1] / "results" / "reference"
SETS = ("gsm8k", "squad_v2", "web_questions", "nq_open", "trivia_qa", "mbpp")
SPLIT = (0.25, 0.5, 1.0)


@pytest.fixture(scope="module", autouse=True)
def few_resamples() -> object:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compare, "RESAMPLES", 50)
        yield


@pytest.fixture(scope="module")
def stored() -> dict[str, RunReport]:
    """The reference runs by the names of their folders."""
    found = {path.parents[1].name: load_if_any(path) for path in sorted(REFERENCE.glob("*/runs/*"))}
    return {name: report for name, report in found.items() if report}


def test_labels_that_cover_each_other_or_leave_the_page_are_found() -> None:
    figure = Figure(figsize=(2, 1))
    FigureCanvasAgg(figure)
    figure.text(0.1, 0.5, "one")
    figure.text(0.12, 0.55, "two")
    figure.text(0.1, 0.1, "apart")
    assert faults(figure) == ["'one' on 'two'"]
    figure.text(0.9, 0.1, "beyond it all")
    assert faults(figure)[-1] == "'beyond it all' beyond the edge"


def test_labels_of_stored_runs_are_readable(stored: dict[str, RunReport]) -> None:
    assert {"quickstart", "drafters"} <= set(stored)
    for name, report in stored.items():
        for ending, figure in figures_of([report]).items():
            assert faults(figure) == [], (name, ending)


def test_a_quality_axis_has_no_values_that_cannot_be(stored: dict[str, RunReport]) -> None:
    """Below 0 there is room for points that are moved apart, and no number."""
    for name, report in stored.items():
        for axes in filter(Axes.get_title, speed_quality_figure([report]).axes):
            ticks = axes.get_yticks()
            assert len(ticks) >= 2 and min(ticks) >= 0, (name, axes.get_title())


@pytest.mark.parametrize("tasks", [SETS, SETS[:1]], ids=len)
@pytest.mark.parametrize("name", list(ALL))
def test_labels_of_the_papers_figures_are_readable(name: str, tasks: Sequence[str]) -> None:
    assert faults(figures_of([ALL[name](tasks=tasks)], further=False)[""]) == []


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


MADE: dict[str, Callable[[], Figure]] = {
    "crowd": lambda: speed_quality_figure([crowd()]),
    "two runs": lambda: speed_quality_figure(two_runs()),
    "rows of two runs": lambda: drawn(rates_figure(two_runs())),
    "time of two runs": lambda: drawn(time_figure(two_runs())),
    "six tasks": lambda: drawn(routes_figure([made_run("run", {"via_sd": 1.2}, SETS)])),
    "runs explored": lambda: explored_figure(explore(from_reports(two_runs()))),
    "settings explored": lambda: explored_figure(explore(from_reports(two_runs())), "reject_rate", "gamma"),
    "sweep": lambda: sweep_figure([Cell(run, {"gamma": run.settings["gamma"]}) for run in two_runs()]),
    "sweep of lists": lambda: sweep_of_masks("model_skip30", "model_skip45 + model_skip30 + model_skip20"),
}


def crowd() -> RunReport:
    return made_run("run", {f"arm_{index}_of_a_crowd": 1 + index / 10 for index in range(CROWD + 3)}, SETS[:4])


def sweep_of_masks(*values: str) -> Figure:
    return sweep_figure([Cell(run, {"slim.masks": value}) for run, value in zip(two_runs(), values, strict=True)])


def test_a_list_of_names_leaves_a_panel_its_room() -> None:
    """A name a line, without what all of them begin with, which the axis has."""
    figure = sweep_of_masks("model_skip30", "model_skip45 + model_skip30 + model_skip20")
    panel = figure.axes[0]
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["skip30", "skip45\n+ skip30\n+ skip20"]
    assert panel.get_xlabel() == "slim.masks (model_…)"
    figure.draw_without_rendering()
    assert panel.get_position().height * figure.get_figheight() > 1.4


def two_runs() -> list[RunReport]:
    ids = [f"20260131T09150{gamma}Z-3f9a1c-run" for gamma in (3, 5)]
    arms = {"speculative": 1.2, "via_sd": 1.5}
    made = [made_run("run", arms, SETS[:3], run_id=one, tier_s=SPLIT) for one in ids]
    for one, gamma in zip(made, (3, 5), strict=True):
        one.settings["gamma"] = gamma  # type: ignore[index]
    return made


@pytest.mark.parametrize("name", list(MADE))
def test_labels_of_made_runs_are_readable(name: str) -> None:
    assert faults(MADE[name]()) == []


def point(label: str, x: float, y: float) -> Point:
    return Point(label, x, x, x, y, y, y)


def test_the_front_has_what_nothing_beats_in_both() -> None:
    points = [point("slow", 0.5, 50), point("base", 1, 50), point("fast", 2, 30), point("lost", 1.5, 20)]
    assert [one.label for one in front(points)] == ["base", "fast"]
    assert [one.label for one in front(points, higher_is_better=False)] == ["lost", "fast"]
    assert [one.label for one in front([point("a", 1, 1), point("b", 1, 1)])] == ["a", "b"], "equal ones both stay"
    assert front([]) == []


@pytest.mark.parametrize(("temperatures", "count"), [((1.0, 1.0), 1), ((1.0, 0.0), 2)])
def test_runs_share_a_front_only_at_one_temperature(temperatures: Sequence[float], count: int) -> None:
    runs = [made_run("run", {"via_sd": 1.5}, run_id=f"run{i}", temperature=one) for i, one in enumerate(temperatures)]
    for axes in speed_quality_figure(runs).axes:
        assert [line.get_drawstyle() for line in axes.lines].count("steps-pre") == count


def test_arms_of_a_crowd_that_are_on_no_front_share_a_line_of_the_legend() -> None:
    figure = speed_quality_figure([crowd()])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert f"arm_{CROWD + 2}_of_a_crowd (lossy)" in labels and "autoregressive" in labels
    assert f"{CROWD + 2} others, on no front" in labels and len(labels) == 4


def test_every_drafter_of_the_stored_run_has_its_row(stored: dict[str, RunReport]) -> None:
    rows = [
        label.get_text().replace("\n", " ") for label in drafters_figure(stored["drafters"]).axes[0].get_yticklabels()
    ]
    assert len(rows) == 8 and "prompt_lookup" in rows
