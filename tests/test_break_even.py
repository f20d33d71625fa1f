"""Where a third tier pays: points of stored runs and of the paper, against the numbers they are made of."""

from pathlib import Path

import numpy as np
import pytest

from harness.jobs.plausibility import report_plausibility
from harness.report.load import load
from harness.report.break_even import Point, break_even_figure, implied_points, measured_points, table
from harness.report.plausibility import Assumptions, plausibility, read_numbers, read_shapes
from harness.report.tables import RunReport

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "results" / "paper"
QUICKSTART = ROOT / "results" / "reference" / "quickstart"
ARMS, TIERS = ("via_sd", "autoregressive"), ("slim", "full")


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
