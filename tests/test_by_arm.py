"""Rows by arm: heights and lengths of bars, and marks, against counts made by hand."""

from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from harness import compare
from harness.report.by_arm import FILLED, RATES, ROUTES, TIERS, rates_figure, routes_figure, split, time_figure
from harness.report.lines import DASH, lines
from tests.pictures import made_run

SPLIT = (0.25, 0.5, 1.0)
"""Seconds in the forwards of the three tiers."""


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RESAMPLES", 50)


def bars(axes: Axes, shade: str) -> list[Any]:
    return [patch for patch in axes.patches if to_hex(patch.get_facecolor()).upper() == shade]


def test_heights_are_shares_of_the_drafts_at_that_place() -> None:
    figure = routes_figure([made_run("run", {"speculative": 1.2, "via_sd": 1.5}, ["gsm8k"])])
    assert figure is not None
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["via_sd (lossy)"], "two tiers have no choice"
    # Routes of the three blocks that drafted 4, 3 and 2 tokens: AEAR, E, AA.
    want = {"accept": (2 / 3, 1 / 3, 1 / 2, 0), "regenerate": (0, 0, 0, 1), "escalate": (1 / 3, 1 / 3, 0, 0)}
    for route, shares in want.items():
        heights = [bar.get_height() / FILLED for bar in bars(axes, ROUTES[route])]
        assert heights == pytest.approx(list(shares)), route
    assert len(bars(axes, "#F0F0F0")) == 4, "a pale bar behind each place"


def test_there_are_no_routes_without_a_choice_and_no_times_without_a_clock() -> None:
    report = made_run("run", {"speculative": 1.2}, ["gsm8k"])
    assert routes_figure([report]) is None and time_figure([report]) is None
    assert rates_figure([made_run("run", {}, ["gsm8k"])]) is None


def test_the_first_arm_is_on_top() -> None:
    report = made_run("run", {"speculative": 1.2, "via_sd": 1.5, "other": 1.0}, ["gsm8k"], tier_s=SPLIT)
    for figure, top in ((routes_figure([report]), "via_sd (lossy)"), (time_figure([report]), "autoregressive")):
        assert figure is not None
        ticks = dict(zip(figure.axes[0].get_yticks(), figure.axes[0].get_yticklabels(), strict=True))
        assert ticks[max(ticks)].get_text() == top


def test_time_is_split_by_tier_and_the_rest_is_other() -> None:
    report = made_run("run", {"via_sd": 1.0}, ["gsm8k"], tier_s=SPLIT)
    spent = {line.arm.arm: split(line) for line in lines([report])}
    # Two seconds for eight tokens: 250 ms a token. The baseline has full passes alone.
    assert spent["via_sd"] == pytest.approx({"draft": 31.25, "slim": 62.5, "full": 125.0, "other": 31.25})
    assert spent["autoregressive"] == pytest.approx({"draft": 0, "slim": 0, "full": 125.0, "other": 125.0})
    figure = time_figure([report])
    assert figure is not None
    (axes,) = figure.axes
    ends = [bar.get_x() + bar.get_width() for bar in bars(axes, TIERS["other"])]
    assert ends == pytest.approx([250.0, 250.0])
    (level,) = axes.lines
    assert level.get_xdata()[0] == pytest.approx(250.0)  # type: ignore[index]


def test_an_arm_whose_time_is_not_known_has_a_dash() -> None:
    known, unknown = made_run("run", {"via_sd": 1.0}, ["gsm8k"], tier_s=SPLIT), made_run("run", {}, ["gsm8k"])
    figure = time_figure([known, unknown])
    assert figure is not None and [text.get_text() for text in figure.axes[0].texts] == [DASH]


def test_each_rate_has_a_panel_and_each_task_a_mark_in_it() -> None:
    report = made_run("run", {"speculative": 1.2, "via_sd": 1.5}, ["gsm8k", "web_questions"])
    figure = rates_figure([report])
    assert figure is not None
    known = {(row.task, row.arm, row.metric): row.value for row in report.rows}
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(RATES)
    for axes in figure.axes:
        rate = axes.get_title(loc="left")
        marks = [line for line in axes.lines if line.get_marker() not in ("None", "", None)]
        found = sorted(float(line.get_xdata()[0]) for line in marks)  # type: ignore[index,arg-type]
        values = [known[task, arm, rate] for task in report.run.task_metrics for arm in ("speculative", "via_sd")]
        assert found == sorted(value for value in values if value is not None)
        hollow = {line.get_xdata()[0] for line in marks if line.get_markerfacecolor() == "white"}  # type: ignore[index]
        assert hollow == {known["gsm8k", "via_sd", rate]}
    assert known["gsm8k", "speculative", "reject_rate"] is None, "0/0 has no mark"
