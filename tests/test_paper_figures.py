"""The counterparts of the paper's figures: our numbers in their places, the paper's points where they compare."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness import compare
from harness.report.choice import figures_of
from harness.report.lines import RunReport
from harness.report.paper_figures import paper_figure, twin_figures
from harness.report.paper_points import MARKS
from tests.pictures import made_run

GAMMAS = {f"gamma_{gamma}": 1 + gamma / 10 for gamma in (1, 12, 5)}


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RESAMPLES", 50)


def drawn(report: RunReport) -> Figure:
    figure = paper_figure(report)
    assert figure is not None
    return figure


def strictness(alpha1: float, alpha2: float) -> dict[str, Any]:
    return {"gate": {"_target_": "harness.decode.gate.thresholds.Strictness", "alpha1": alpha1, "alpha2": alpha2}}


def thresholds_run(name: str, **how: Any) -> RunReport:
    points = [(0.5, 0.3), (0.5, 0.5), (0.7, 0.3)]
    methods = {f"strictness_{one * 100:.0f}_{other * 100:.0f}": strictness(one, other) for one, other in points}
    return made_run(name, {arm: 1.5 for arm in methods}, methods=methods, **how)


def marks(axes: Axes, papers: bool) -> list[Line2D]:
    """Lines with markers: the paper's, or ours."""
    known = [line for line in axes.lines if line.get_marker() not in ("None", "", None)]
    return [line for line in known if (str(line.get_marker()) in MARKS) == papers]


def points(axes: Axes, papers: bool) -> list[tuple[float, float]]:
    return [
        (round(float(x), 6), round(float(y), 6))
        for line in marks(axes, papers)
        for x, y in zip(np.atleast_1d(line.get_xdata()), np.atleast_1d(line.get_ydata()), strict=True)
    ]


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


ALL = {
    "fig2": lambda **how: made_run(
        "fig2", {"speculative": 1.2, "via_sd_paper": 1.1}, **{"tasks": ("xsum", "wmt14_en_de")} | how
    ),
    "fig4": lambda **how: made_run("fig4", {"speculative": 1.2, "even_25": 1.1, "even_5": 0.9, "dimr_45": 1.3}, **how),
    "fig5": lambda **how: made_run("fig5", {"eagle": 1.2, "eagle_via_sd": 1.5}, **how),
    "fig6": lambda **how: thresholds_run("fig6", **how),
    "fig7": lambda **how: thresholds_run("fig7", **how),
    "fig8": lambda **how: thresholds_run("fig8", **how),
    "fig9": lambda **how: made_run("fig9", {"speculative": 1.2, **GAMMAS}, **how),
}


def test_gamma_is_the_axis_of_figure_9_and_the_papers_points_are_those_of_the_set() -> None:
    figure = drawn(ALL["fig9"]())
    gsm8k, web = figure.axes
    assert points(gsm8k, papers=False) == [(1, 1.1), (5, 1.5), (12, 2.2)]
    found = points(web, papers=True)
    assert len(found) == 20 and (5, 1.95) in found and (5, 2.1) not in found, "both pairs; not those of GSM8K"
    assert "via_sd (lossy)" in labels(figure) and "two tiers" in labels(figure)


@pytest.mark.parametrize("name", list(ALL))
def test_the_papers_points_are_named_by_pair_and_never_joined(name: str) -> None:
    figure = drawn(ALL[name]())
    papers = [line for axes in figure.axes for line in marks(axes, papers=True)]
    assert papers and all(line.get_linestyle() == "None" for line in papers)
    named = [label for label in labels(figure) if label.startswith("paper")]
    assert {str(line.get_label()) for line in papers} == set(named)
    assert all("Gemma" in label or label == "paper, pair not stated, read off" for label in named)
    assert all(line.get_color() == "#777777" and line.get_zorder() == 1 for line in papers)


@pytest.mark.parametrize("name", sorted(set(ALL) - {"fig2", "fig5"}))
def test_points_of_another_temperature_are_not_drawn_and_the_figure_says_so(name: str) -> None:
    figure = drawn(ALL[name](temperature=0.0))
    assert not [line for axes in figure.axes for line in marks(axes, papers=True)]
    assert "no points to set beside" in figure.legends[0].get_title().get_text().replace("\n", " ")


@pytest.mark.parametrize(
    ("full", "pairs"),
    [
        ("google/gemma-2-9b", {"Gemma2 2B, 9B"}),
        ("/models/gemma-2-27b-it", {"Gemma2 2B, 27B"}),
        ("embedded", {"Gemma2 2B, 9B", "Gemma2 2B, 27B"}),
        ("google/gemma-2-2b", {"Gemma2 2B, 9B", "Gemma2 2B, 27B"}),
    ],
)
def test_a_run_of_one_of_the_papers_pairs_is_set_beside_that_pair_alone(full: str, pairs: set[str]) -> None:
    named = [label for label in labels(drawn(ALL["fig9"](full=full))) if label.startswith("paper")]
    assert {label.removeprefix("paper, ").removesuffix(", read off") for label in named} == pairs


def test_figure_5_has_both_arms_and_what_the_second_adds() -> None:
    figure = drawn(ALL["fig5"](full="google/gemma-2-9b"))
    speed, reject, gain, cut = figure.axes
    assert [y for _, y in points(speed, papers=False)] == [1.2, 1.5] * 2
    assert [y for _, y in points(gain, papers=False)] == [pytest.approx(25.0)] * 2
    assert points(cut, papers=False) == [], "a head that drafts nothing here has no rejection to cut"
    assert {y for _, y in points(gain, papers=True)} == {10.1, 10.5, 9.6, 7.7}, "EAGLE-2 and 3, GSM8K and WebQ"
    assert not points(speed, papers=True) and not points(reject, papers=True)
    assert not [line for line in gain.lines if line.get_alpha()], "no interval is claimed"


def test_figure_2_tells_the_mask_from_the_independent_model() -> None:
    figure = drawn(ALL["fig2"]())
    speed, quality = figure.axes
    assert {label for label in labels(figure) if label.startswith("paper")} == {
        "paper, 45 % skipped, Gemma3 4B, 27B, read off",
        "paper, 12B between, Gemma3 4B, 27B, read off",
    }
    by_mark = {str(line.get_label()).split(",")[1].strip(): [] for line in marks(speed, papers=True)}  # type: ignore[var-annotated]
    for line in marks(speed, papers=True):
        by_mark[str(line.get_label()).split(",")[1].strip()].append(float(line.get_ydata()[0]))  # type: ignore[index,arg-type]
    assert by_mark == {"45 % skipped": [1.9, 3.31], "12B between": [1.73, 3.04]}
    assert sorted({y for _, y in points(quality, papers=False)}) == [-50.0, 0.0]


def test_figures_4_and_7_stand_at_their_own_values() -> None:
    speed, reject = drawn(ALL["fig4"]()).axes[:2]
    assert points(speed, papers=False) == [(45, 1.3), (5, 0.9), (25, 1.1)]
    assert all(0 < y < 1 for _, y in points(reject, papers=False))
    seven = drawn(ALL["fig7"]())
    assert len(seven.axes) == 8, "four quantities on two tasks"
    hollow = [line.get_markerfacecolor() == "white" for line in marks(seven.axes[0], papers=False)]
    assert sorted(hollow) == [False, False, True], "0.5 and 0.5 leave nothing to regenerate"


@pytest.mark.parametrize(("name", "twin"), [("fig7", "fig8"), ("fig8", "fig7")])
def test_figures_7_and_8_share_a_run_of_any_other_model(name: str, twin: str) -> None:
    report = ALL[name]()
    (found,) = twin_figures(report).items()
    assert found[0] == twin and f"as_{twin}" in figures_of([report])
    pairs = {"fig7": "9B", "fig8": "27B"}
    for figure, pair in ((drawn(report), pairs[name]), (found[1], pairs[twin])):
        named = [label for label in labels(figure) if label.startswith("paper")]
        assert named == [f"paper, alpha2 {alpha2}, Gemma2 2B, {pair}, read off" for alpha2 in (0.2, 0.3, 0.4, 0.5)]
        marked = {str(line.get_label()): line.get_marker() for line in marks(figure.axes[0], papers=True)}
        assert set(marked) == set(named) and len(set(marked.values())) == 4, "a mark for each alpha2"
        at_one = sorted(x for x, _ in points(figure.axes[0], papers=True))[:4]
        assert at_one == pytest.approx([0.27, 0.29, 0.31, 0.33]), "side by side about 0.3"
    said = found[1].legends[0].get_title().get_text().replace("\n", " ")
    assert f"Ours are those of the run {name}" in said
    assert points(found[1].axes[0], papers=False) == points(drawn(report).axes[0], papers=False)


def test_runs_of_the_papers_pairs_stand_beside_their_own_figure_alone() -> None:
    assert twin_figures(ALL["fig7"](full="google/gemma-2-9b")) == {}
    assert twin_figures(ALL["fig9"]()) == {} and twin_figures(made_run("fig7", {"speculative": 1.2})) == {}


def test_other_runs_and_runs_without_their_arms_have_no_such_figure() -> None:
    assert paper_figure(made_run("quickstart", {"speculative": 1.2})) is None
    for name in ALL:
        assert paper_figure(made_run(name, {"speculative": 1.2})) is None


def test_a_checkout_without_the_papers_numbers_draws_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("harness.report.paper_points.PAPER", tmp_path)
    for name, make in ALL.items():
        figure = drawn(make())
        assert not [line for axes in figure.axes for line in marks(axes, papers=True)], name


def test_every_figure_of_the_paper_with_numbers_is_drawn() -> None:
    from harness.report.paper_figures import DRAWN
    from harness.report.paper_numbers import read_numbers

    def figures() -> Iterator[str]:
        yield from (source for source in read_numbers().source.unique() if source.startswith("fig"))

    assert set(figures()) == set(DRAWN) == set(ALL)
