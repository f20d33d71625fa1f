"""The table and the figure of a search for speed and quality: its front, what beat what, and the front on test rows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness.compare import BASELINE
from harness.pareto.score import LOSSES, Score, Value
from harness.pareto.space import Point
from harness.records import DataSource
from harness.report.figures import STYLE, save
from harness.report.lines import DASH
from harness.report.tables import markdown_table
from harness.store import write_atomic, writing

LOSS_TEXT = {
    "greedy_share": "1 - greedy_share, the share of output tokens that are the full verifier's likeliest",
    "agreement": "1 - token_agreement with the baseline's greedy output",
    "quality": "(baseline's - arm's primary metric) / 100, a share of the metric's scale",
}


@dataclass(frozen=True)
class Search:
    """What was searched. ``limit`` test prompts a task in the run ``test_run``; 0 and None where there was none."""

    name: str
    arm: str
    loss: str
    prompts: int
    limit: int
    test_run: str | None
    model: str
    sampler: str
    sources: Mapping[str, DataSource]


@dataclass(frozen=True)
class Found:
    """A trial: its point, the scores of all its arms, and whether it is on the front."""

    number: int
    point: Point
    scores: Mapping[str, Score]
    run: str
    front: bool
    arm: str

    @property
    def scores_of_arm(self) -> Score:
        return self.scores[self.arm]


def write_pareto(results_dir: str, search: Search, found: Sequence[Found], tested: Mapping[str, Score]) -> list[Path]:
    """``tables/<name>.md`` and ``.csv``, ``figures/<name>.png`` and ``.pdf``; their paths."""
    tables, figures = Path(results_dir) / "tables", Path(results_dir) / "figures"
    files = {
        tables / f"{search.name}.md": markdown(search, found, tested),
        tables / f"{search.name}.csv": tidy_frame(search, found, tested).to_csv(index=False, lineterminator="\n"),
    }
    with writing(tables):
        for path, text in files.items():
            write_atomic(path, text)
        return [*files, *save(pareto_figure(search, found, tested), figures, search.name)]


def columns_of(prefix: str, value: Value | None) -> dict[str, float | None]:
    return {
        prefix: value.value if value else None,
        f"{prefix}_low": value.low if value else None,
        f"{prefix}_high": value.high if value else None,
    }


def numbers(score: Score | None, prefix: str = "") -> dict[str, float | None]:
    made = columns_of(f"{prefix}speedup", score.speedup if score else None)
    for loss in LOSSES:
        made |= columns_of(f"{prefix}loss_{loss}", score.losses.get(loss) if score else None)
    return made


def tidy_frame(search: Search, found: Sequence[Found], tested: Mapping[str, Score]) -> pd.DataFrame:
    """A line for each trial and arm, numbers in full: the searched arm, and those beside it in the same run."""
    rows: list[dict[str, Any]] = []
    for one in found:
        for name, score in one.scores.items():
            mine = name == search.arm
            test = tested.get(f"{search.arm}_{one.number}") if mine else None
            rows.append(
                {"trial": one.number, "arm": name, "front": one.front and mine, **asdict(one.point)}
                | {"rows": "calibration", **numbers(score), **numbers(test, "test_"), "run": one.run}
            )
    for name in tested:
        if not name.startswith(f"{search.arm}_"):
            rows.append(
                {"arm": name, "rows": "test", **numbers(None), **numbers(tested[name], "test_"), "run": search.test_run}
            )
    return pd.DataFrame(rows).astype({"trial": "Int64", "gamma": "Int64"})  # the arms on test rows have neither


def span(value: Value | None, digits: int) -> str:
    if value is None:
        return DASH
    if value.low is None or value.high is None:
        return f"{value.value:.{digits}f}"
    return f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def front_frame(search: Search, found: Sequence[Found], tested: Mapping[str, Score]) -> pd.DataFrame:
    """The front from its least lossy point to its fastest, for reading; then the arms beside it on test rows."""
    rows = []
    for one in sorted((one for one in found if one.front), key=lambda one: one.scores_of_arm.losses[search.loss].value):
        test = tested.get(f"{search.arm}_{one.number}")
        beside = {name: score.speedup for name, score in one.scores.items() if name not in (search.arm, BASELINE)}
        rows.append(
            {
                "arm": f"{search.arm}, trial {one.number}, **lossy**",
                "alpha1": f"{one.point.alpha1:.3f}",
                "alpha2": f"{one.point.alpha2:.3f}",
                "skip ratio": f"{one.point.skip_ratio:g}",
                "gamma": str(one.point.gamma),
                "speedup": span(one.scores_of_arm.speedup, 2),
                f"loss ({search.loss})": span(one.scores_of_arm.losses[search.loss], 3),
                **{f"{name}, same run": span(value, 2) for name, value in beside.items()},
                "test speedup": span(test.speedup if test else None, 2),
                **{f"test loss ({loss})": span(test.losses.get(loss) if test else None, 3) for loss in LOSSES},
                "run": one.run,
            }
        )
    for name, score in tested.items():
        if not name.startswith(f"{search.arm}_"):
            blank = dict.fromkeys(rows[0], DASH)
            losses = {f"test loss ({loss})": span(score.losses.get(loss), 3) for loss in LOSSES}
            rows.append(
                {**blank, "arm": name, "test speedup": span(score.speedup, 2), **losses, "run": str(search.test_run)}
            )
    return pd.DataFrame(rows)


def markdown(search: Search, found: Sequence[Found], tested: Mapping[str, Score]) -> str:
    front = sum(one.front for one in found)
    rows = "; ".join(f"{name}: {source.kind}, {source.location}" for name, source in search.sources.items())
    facts = [
        f"{len(found)} trials of {search.sampler}, {front} on the front: no other was faster and less lossy.",
        f"model {search.model}; trials on {search.prompts} calibration prompts a task, never test rows ({rows}).",
        "speedup: geometric mean over tasks of the decode speedup over the baseline of the same run. Loss: mean over "
        f"tasks of {LOSS_TEXT[search.loss]}. Brackets: 95 %, from the tasks' bootstraps over prompts.",
        f"{search.arm} is lossy: its law is not the full verifier's.",
        "The front is of measured values: points are on it by luck too. "
        + (
            f"The test columns are without that: {search.limit} test prompts a task, one run (`{search.test_run}`)."
            if search.test_run
            else "Nothing was measured on test rows."
        ),
    ]
    parts = [
        f"# {search.name}",
        "\n".join(f"- {fact}" for fact in facts),
        markdown_table(front_frame(search, found, tested)),
    ]
    return "\n\n".join([*parts, "All trials are in the CSV."]) + "\n"


def pareto_figure(search: Search, found: Sequence[Found], tested: Mapping[str, Score]) -> Figure:
    """Speedup over loss: all trials, the front as a line, the arms beside them, and the front on test rows."""
    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(6.0, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.axhline(1.0, color="#777777", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)

        def place(score: Score) -> tuple[float, float]:
            return score.losses[search.loss].value, score.speedup.value

        others = [place(one.scores_of_arm) for one in found if not one.front]
        front = sorted(place(one.scores_of_arm) for one in found if one.front)
        if others:
            axes.plot(
                *zip(*others, strict=True),
                "o",
                color="#999999",
                markerfacecolor="white",
                markersize=4.5,
                label=f"{search.arm}, other trials (lossy)",
            )
        axes.plot(
            *zip(*front, strict=True),
            "o-",
            color="#D55E00",
            markerfacecolor="white",
            drawstyle="steps-post",
            label=f"{search.arm}, front (lossy)",
        )
        for one in found:
            if one.front:
                bars(axes, one.scores_of_arm, search.loss, "#D55E00")
        test = {name: score for name, score in tested.items() if name.startswith(f"{search.arm}_")}
        if test:
            axes.plot(
                *zip(*map(place, test.values()), strict=True),
                "s",
                color="#0072B2",
                markerfacecolor="white",
                label=f"{search.arm}, front on test rows (lossy)",
            )
            for score in test.values():
                bars(axes, score, search.loss, "#0072B2")
        beside = [
            place(score)
            for one in found
            for name, score in one.scores.items()
            if name not in (search.arm, BASELINE) and search.loss in score.losses
        ]
        if beside:
            axes.plot(
                *zip(*beside, strict=True), "^", color="#009E73", markersize=4.5, label="arms beside it, of each trial"
            )
        axes.set_xlabel(f"Loss: {LOSS_TEXT[search.loss]}", fontsize=8)
        axes.set_ylabel("Decode speedup, geometric mean of tasks", fontsize=8)
        axes.set_title(f"{search.name}: {len(found)} trials, {search.prompts} calibration prompts a task")
        figure.legend(
            loc="outside lower center", ncols=2, title="Bars: 95 % intervals. Up and left is better.", title_fontsize=8
        )
    return figure


def bars(axes: Any, score: Score, loss: str, colour: str) -> None:
    x, y = score.losses[loss], score.speedup
    if y.low is not None and y.high is not None:
        axes.plot([x.value] * 2, [y.low, y.high], color=colour, linewidth=0.8, alpha=0.5)
    if x.low is not None and x.high is not None:
        axes.plot([x.low, x.high], [y.value] * 2, color=colour, linewidth=0.8, alpha=0.5)
