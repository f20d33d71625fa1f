"""Where a third tier pays: points of stored runs and of the paper, against the numbers they are made of."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from harness import compare
from harness.jobs.plausibility import report_plausibility
from harness.report.break_even import (
    Point,
    agreement,
    break_even_figure,
    implied_points,
    measured_points,
    pairs_figure,
    table,
)
from harness.report.lines import RunReport
from harness.report.load import load
from harness.report.paper_numbers import read_numbers, read_shapes
from harness.report.plausibility import Assumptions, plausibility

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "results" / "paper"
QUICKSTART = ROOT / "results" / "reference" / "quickstart"
ARMS, TIERS = ("via_sd", "autoregressive"), ("slim", "full")


@pytest.fixture(scope="module", autouse=True)
def few_resamples() -> Iterator[None]:
    with patch.object(compare, "RESAMPLES", 50):
        yield


@pytest.fixture(scope="module")
def stored() -> RunReport:
    (folder,) = (QUICKSTART / "runs").iterdir()
    return load(folder)


def test_a_measured_point_is_made_of_its_runs_numbers(stored: RunReport) -> None:
    known = {(row.task, row.arm, row.metric): row.value for row in stored.rows}
    points = measured_points([stored])
    assert [point.task for point in points] == list(stored.run.task_metrics)
    for point in points:
        slim, full = (known[point.task, arm, f"{tier}_pass_ms"] for arm, tier in zip(ARMS, TIERS, strict=True))
        two, three = (known[point.task, arm, "speedup_decode"] for arm in ("speculative", "via_sd"))
        assert None not in (slim, full, two, three)
        assert point.slim_cost == pytest.approx(slim / full)  # type: ignore[operator]
        assert point.escalating == known[point.task, "via_sd", "drafting_block_full_rate"]
        assert point.gain == pytest.approx(three / two)  # type: ignore[operator]


def test_two_tiers_are_no_point(stored: RunReport) -> None:
    assert {point.label for point in measured_points([stored])} == {"via_sd"}


def test_an_implied_share_gives_back_the_published_speedup() -> None:
    shapes, read_in = read_shapes(PAPER)
    found = plausibility(read_numbers(PAPER), shapes, read_in, Assumptions())
    points = implied_points(found)
    assert len(points) == 18
    rows = found[(found["source"] == "table8") & (found["method"] == "via_sd")].to_dict("records")
    for point, row in zip(points, rows, strict=True):
        kept = 1 - reject_rate(row["pair"], row["task"])
        tokens = sum(kept**place for place in range(6))
        assert tokens / (5 * row["c"] + row["c_slim"] + point.escalating) == pytest.approx(row["published"])


def reject_rate(pair: str, task: str) -> float:
    numbers = read_numbers(PAPER)
    chosen = numbers[
        (numbers["source"] == "table8")
        & (numbers["pair"] == pair)
        & (numbers["method"] == "via_sd")
        & (numbers["task"] == task)
        & (numbers["metric"] == "reject_rate")
    ]
    (value,) = chosen["value"]
    return float(value)


@pytest.mark.parametrize(
    ("escalating", "said"), [(0.29, "pays"), (0.31, "does not pay"), (-0.01, "no X gives this"), (0.0, "pays")]
)
def test_the_rule_at_its_edges(escalating: float, said: str) -> None:
    (line,) = table([Point("a", "t", 0.7, escalating, None, True)]).to_dict("records")
    assert line["third tier by this rule"] == said


def test_every_point_is_in_the_figure_once() -> None:
    points = [
        Point("faster", "t", 0.5, 0.2, 1.2, True),
        Point("slower", "t", 0.5, 0.9, 0.8, True),
        Point("equal", "t", 0.5, 0.5, 1.0, True),
        Point("alone", "t", 0.5, 0.5, None, True),
        Point("paper", "t", 0.5, -0.5, None, False),
    ]
    (axes,) = break_even_figure(points).axes
    marks = {line.get_label(): np.size(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "None"}
    assert sorted(marks.values()) == [1, 1, 1, 2]
    assert axes.get_ylim()[0] < -0.5


def test_a_slim_pass_dearer_than_a_full_one_is_in_both_figures() -> None:
    points = [Point("toy", "t", 1.4, 0.2, 0.8, True, "p", None)]
    for figure in (break_even_figure(points), pairs_figure(points)):
        assert figure.axes[0].get_xlim()[1] > 1.4


def test_the_job_puts_a_run_beside_the_paper(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(QUICKSTART / "runs")
    paths = report_plausibility(str(tmp_path), paper=str(PAPER))
    text = (tmp_path / "tables" / "break_even.md").read_text()
    assert text.count("our run") == 4
    assert text.count("the paper's values") == 18
    assert all(path.stat().st_size > 0 for path in paths)


def test_without_a_run_the_paper_stands_alone(tmp_path: Path) -> None:
    report_plausibility(str(tmp_path), paper=str(PAPER))
    assert "our run" not in (tmp_path / "tables" / "break_even.md").read_text()


def test_an_edge_is_where_this_arm_would_be_as_fast_as_two_tiers(stored: RunReport) -> None:
    """By the numbers of the run: tokens a block over gamma c + c' + X are those of two tiers over gamma c + 1."""
    known = {(row.task, row.arm, row.metric): row.value or 0.0 for row in stored.rows}
    costs = {(one.task, one.arm): one for one in stored.predicted}
    for point in measured_points([stored]):
        drafted = known[point.task, "via_sd", "mean_drafted"] * (costs[point.task, "via_sd"].draft_cost or 0.0)
        three, two = (known[point.task, arm, "mean_accept_length"] for arm in ("via_sd", "speculative"))
        assert point.edge is not None and point.pair.endswith("small_lm(embedded_small_lm)")
        assert three / (drafted + point.slim_cost + point.edge) == pytest.approx(two / (drafted + 1))


def test_an_implied_edge_is_where_the_published_two_tiers_would_be_met() -> None:
    shapes, read_in = read_shapes(PAPER)
    found = plausibility(read_numbers(PAPER), shapes, read_in, Assumptions())
    two = found[(found["source"] == "table8") & (found["method"] == "speculative")].set_index(["pair", "task"])
    for point in implied_points(found):
        kept, cost = 1 - reject_rate(point.pair, point.task), 5 * two.loc[(point.pair, point.task), "c"]
        tokens = sum(kept**place for place in range(6))
        assert point.edge is not None
        assert tokens / (cost + point.slim_cost + point.edge) == pytest.approx(
            two.loc[(point.pair, point.task), "at_rejection"]
        )


def test_rule_and_edge_are_counted_against_what_was_measured() -> None:
    points = [
        Point("both right", "t", 0.5, 0.2, 1.2, True, "p", 0.4),
        Point("rule wrong, edge right", "t", 0.5, 0.6, 1.1, True, "p", 0.7),
        Point("not measured", "t", 0.5, 0.6, None, True, "p", 0.7),
    ]
    assert agreement(points) == (2, 1, 2)


def test_each_pair_has_a_panel_and_each_task_in_it_a_line() -> None:
    points = [
        Point("a", "t", 0.5, 0.2, 1.2, True, "p", 0.4),
        Point("a", "u", 0.5, 0.9, 0.8, True, "p", 0.3),
        Point("a", "t", 0.6, 0.5, None, False, "q", None),
    ]
    first, second = [axes for axes in pairs_figure(points).axes if axes.get_title(loc="left")]
    dots = [line for line in first.lines if line.get_linestyle() == "None"]
    assert len(dots) == 2 and len(first.lines) == 2 + 2 + 1  # points, edges, the axis of no escalation
    assert len([line for line in second.lines if line.get_linestyle() == "None"]) == 1


def test_reference_runs_stand_in_where_there_is_none_of_ones_own(tmp_path: Path) -> None:
    reference = ROOT / "results" / "reference" / "quickstart"
    report_plausibility(str(tmp_path), paper=str(PAPER), reference=str(reference))
    text = (tmp_path / "tables" / "break_even.md").read_text()
    assert text.count("our run") == 4 and "measured points the rule is right on" in text
