"""The figures of the runs of ``conf/experiment/paper`` that sweep one quantity: its Fig. 4, 6, 7 and 8.

A figure is chosen by the run's name and drawn from its arms alone; the paper's own points stand behind it in grey where
they are of the same set, from ``results/paper/numbers.csv``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.records import MetricRow
from harness.report.figures import MARKERS, METRIC_LABELS, STYLE, speed_quality_figure
from harness.report.tables import Line, RunReport, lines

NUMBERS = Path(__file__).resolve().parents[2] / "results" / "paper" / "numbers.csv"
"""The paper's numbers, each with its ``origin``: printed in a table, or read off a plot."""

SETS = {
    "webq": "web_questions",
    "nq": "nq_open",
    "triviaqa": "trivia_qa",
    "squad2": "squad_v2",
    "cnndm": "cnn_dailymail",
    "wmt14": "wmt14_en_de",
}
"""The sets' names in that file, where ours are others."""

SOURCES = {"dimr": "DIMR's mask", "even": "evenly spaced", "random": "random"}
READINGS = ("strictness", "literal")
RELIANCE = {
    "escalate_share": "Examined drafts escalated",
    "reject_rate": "Examined drafts not kept",
    "full_rate": "Full passes per token",
    "block_full_rate": "Blocks with a full pass",
}
"""What reliance on the full verifier may mean: the paper's Fig. 6 does not say."""

PAPER: dict[str, Any] = {"color": "#777777", "linestyle": "", "marker": "x", "markersize": 4.5, "zorder": 1}
BARS = "Bars: 95 % intervals over prompts."


@dataclass(frozen=True, slots=True)
class Series:
    """Points that a line joins: ``hollow`` those where no token can be regenerated."""

    label: str
    look: int
    points: tuple[tuple[float, MetricRow, bool], ...]


def paper_figure(reports: Sequence[RunReport]) -> Figure | None:
    """The figure of one run of such an experiment; speed beside quality where it sweeps nothing; None of other runs."""
    drawn = {"fig4": skip_figure, "fig6": reliance_figure, "fig7": thresholds_figure, "fig8": thresholds_figure}
    name = str(reports[0].settings.get("name"))
    if len(reports) == 1 and name in drawn and has_points(reports[0]):
        return drawn[name](reports[0])
    return speed_quality_figure(reports) if re.fullmatch(r"(table|fig)\d+", name) else None


def has_points(report: RunReport) -> bool:
    """Whether the run still has what the figure is about: arms can be dropped."""
    arms = [arm.arm for arm in report.run.arms]
    return any(by_skip(arm) for arm in arms) or any(thresholds(report.settings, arm) for arm in arms)


def by_skip(arm: str) -> tuple[str, int] | None:
    """Source of the mask and percent of layers skipped, of an arm that is named for them."""
    found = re.fullmatch(rf"({'|'.join(SOURCES)})_(\d+)", arm)
    return (found[1], int(found[2])) if found else None


def thresholds(settings: Mapping[str, Any], arm: str) -> tuple[float, float] | None:
    """From which ratio an arm's gate accepts, and below which it escalates; None without such a gate."""
    gate = (settings.get("methods") or {}).get(arm, {}).get("gate") or {}
    name = str(gate.get("_target_", "")).rpartition(".")[2].lower()
    return reading_at(name, gate["alpha1"], gate["alpha2"]) if name in READINGS else None


def reading_at(reading: str, alpha1: float, alpha2: float) -> tuple[float, float]:
    """(accept from, escalate below) of a reading, as ``harness.decode.gate.thresholds``: escalation is asked first."""
    accept, keep = (alpha1, alpha2) if reading == "strictness" else (1 - alpha1, 1 - alpha2)
    return round(max(accept, keep), 6), round(keep, 6)


def grid(report: RunReport) -> tuple[list[float], list[float]]:
    """All alpha1 and all alpha2 of the run's gates."""
    gates = [
        node["gate"]
        for arm, node in (report.settings.get("methods") or {}).items()
        if thresholds(report.settings, arm) is not None
    ]
    return sorted({gate["alpha1"] for gate in gates}), sorted({gate["alpha2"] for gate in gates})


def at_points(
    report: RunReport, task_lines: Sequence[Line], reading: str, points: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float, Line, bool]]:
    """The line that measured each point (alpha1, alpha2) of a reading, and whether it leaves nothing to regenerate.

    Points with the same thresholds share an arm, also across readings.
    """
    measured = {thresholds(report.settings, line.arm.arm): line for line in task_lines}
    for alpha1, alpha2 in points:
        accept, keep = reading_at(reading, alpha1, alpha2)
        if line := measured.get((accept, keep)):
            yield alpha1, alpha2, line, accept == keep


def skip_figure(report: RunReport) -> Figure:
    """Fig. 4: speedup and rejection over the share of layers skipped, one line a source of masks."""
    rows = {"speedup_decode": "Decode speedup", "reject_rate": "Examined drafts not kept"}

    def series(task_lines: Sequence[Line], metric: str) -> Iterator[Series]:
        for index, (source, label) in enumerate(SOURCES.items(), 1):
            found = [(place[1], line) for line in task_lines if (place := by_skip(line.arm.arm)) and place[0] == source]
            yield Series(label, index, tuple((x, line.metrics[metric], False) for x, line in sorted(found, key=first)))

    def paper(axes: Axes, task: str, metric: str) -> None:
        known = numbers("fig4", task)
        known = known[known.metric == {"speedup_decode": "speedup"}.get(metric, metric)]
        axes.plot(known.method.str.extract(r"skip=(\d+)")[0].astype(float), known.value, **PAPER)

    return panels(report, rows, series, paper, "Layers skipped (%)", f"Paper: Gemma2 2B with 9B. {BARS}")


def reliance_figure(report: RunReport) -> Figure:
    """Fig. 6: the rates that reliance on the full verifier may mean, over alpha2, one line a reading."""
    alphas1, alphas2 = grid(report)

    def series(task_lines: Sequence[Line], metric: str) -> Iterator[Series]:
        for index, reading in enumerate(READINGS, 1):
            for alpha1 in alphas1:
                points = at_points(report, task_lines, reading, [(alpha1, alpha2) for alpha2 in alphas2])
                made = tuple((alpha2, line.metrics[metric], bare) for _, alpha2, line, bare in points)
                yield Series(f"{reading}, alpha1 {alpha1:g}", index, made)

    def paper(axes: Axes, task: str, metric: str) -> None:
        known = numbers("fig6", None)
        axes.plot(known.method.str.extract(r"alpha2=([\d.]+)")[0].astype(float), known.value, **PAPER)

    remark = f"Hollow: no token can be regenerated. Paper: set, pair and rate not stated. {BARS}"
    return panels(report, RELIANCE, series, paper, "alpha2", remark)


def thresholds_figure(report: RunReport) -> Figure:
    """Fig. 7 and 8: speedup and quality over alpha1, one line an alpha2, each reading in rows of its own."""
    alphas1, alphas2 = grid(report)
    kinds = {"speedup_decode": "Speedup", "quality": ""}
    rows = {f"{metric}:{reading}": f"{label},{reading}" for metric, label in kinds.items() for reading in READINGS}

    def series(task_lines: Sequence[Line], key: str) -> Iterator[Series]:
        metric, _, reading = key.partition(":")
        chosen = task_lines[0].run.task_metrics[task_lines[0].task][0] if metric == "quality" else metric
        for index, alpha2 in enumerate(alphas2, 1):
            points = at_points(report, task_lines, reading, [(alpha1, alpha2) for alpha1 in alphas1])
            made = tuple((alpha1, line.metrics[chosen], bare) for alpha1, _, line, bare in points)
            yield Series(f"alpha2 {alpha2:g}", index, made)

    def paper(axes: Axes, task: str, key: str) -> None:
        if key.startswith("speedup"):
            known = numbers(str(report.settings["name"]), task)
            axes.plot(known.method.str.extract(r"alpha1=([\d.]+)")[0].astype(float), known.value, **PAPER)

    remark = f"Hollow: no token can be regenerated, so that alpha1 does not matter. Paper: temperature 1. {BARS}"
    return panels(report, rows, series, paper, "alpha1", remark)


def panels(report: RunReport, rows: Mapping[str, str], series: Any, paper: Any, x_label: str, remark: str) -> Figure:
    """A row of panels for each of ``rows``, a column a task, lines from ``series(lines of the task, row's key)``."""
    found = list(lines([report]))
    tasks = list(dict.fromkeys(line.task for line in found))
    with matplotlib.style.context(STYLE):
        height, width = len(rows), len(tasks)
        figure = Figure(figsize=(max(5.2, 1.2 + 2.1 * width), 0.9 + 1.75 * height), layout="constrained")
        FigureCanvasAgg(figure)
        panes = figure.subplots(height, width, squeeze=False, sharex=True)
        handles: dict[str, Line2D] = {}
        for row, (key, label) in zip(panes, rows.items(), strict=True):
            for axes, task in zip(row, tasks, strict=True):
                mine = [line for line in found if line.task == task]
                for one in series(mine, key):
                    handles[one.label] = draw(axes, one)
                if key.startswith("speedup"):
                    axes.axhline(1.0, color="#777777", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
                    handles |= two_tiers(axes, mine)
                else:
                    rate_limits(axes, key)
                paper(axes, task, key)
                metric, _, reading = label.partition(",")
                quality = mine[0].run.task_metrics[task][0]
                named = METRIC_LABELS.get(quality, quality)
                if not metric or axes is row[0]:
                    axes.set_ylabel("\n".join(filter(None, (metric or named, reading))))
        for axes, task in zip(panes[0], tasks, strict=True):
            axes.set_title(f"{task} (n = {next(line.n for line in found if line.task == task)})")
        panes[-1][width // 2].set_xlabel(x_label)
        handles["paper"] = Line2D([], [], label="paper, read off", **PAPER)
        columns = max(1, min(len(handles), int(figure.get_figwidth() / 1.5)))
        figure.legend(
            handles=list(handles.values()), loc="outside lower center", ncols=columns, title=remark, title_fontsize=8
        )
    return figure


def rate_limits(axes: Axes, key: str) -> None:
    """The whole scale of a rate, so that panels compare."""
    if key in RELIANCE:
        axes.set_ylim(-0.04, 1.04)


def draw(axes: Axes, series: Series) -> Line2D:
    """One line with its intervals; the handle of the legend."""
    colours = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    colour, marker = f"#{colours[series.look].lstrip('#')}", MARKERS[series.look]
    known = [(x, row.value, row, hollow) for x, row, hollow in series.points if row.value is not None]
    axes.plot([x for x, *_ in known], [y for _, y, *_ in known], color=colour, linewidth=1.1, zorder=3)
    for x, y, row, hollow in known:
        if row.low is not None and row.high is not None:
            axes.plot([x, x], [row.low, row.high], color=colour, linewidth=0.9, alpha=0.5, zorder=2)
        face = "white" if hollow else colour
        axes.plot(x, y, color=colour, marker=marker, markersize=4.5, markerfacecolor=face, zorder=4)
    return Line2D([], [], color=colour, marker=marker, markersize=4.5, linewidth=1.1, label=series.label)


def two_tiers(axes: Axes, task_lines: Sequence[Line]) -> dict[str, Line2D]:
    """The arm ``speculative`` of the same run, as a level: what the slim tier has to beat."""
    look: dict[str, Any] = {"color": "#000000", "linewidth": 1.0, "linestyle": (0, (1, 1.5))}
    for line in task_lines:
        speed = line.metrics["speedup_decode"].value
        if line.arm.arm == "speculative" and speed is not None:
            axes.axhline(speed, zorder=1, **look)
            return {"speculative": Line2D([], [], label="two tiers", **look)}
    return {}


def numbers(source: str, task: str | None) -> pd.DataFrame:
    """The paper's numbers of a figure for one of our tasks (None: those of no task); empty where there are none."""
    if not NUMBERS.is_file():
        return pd.DataFrame(columns=["source", "method", "metric", "value"], dtype=str)
    known = pd.read_csv(NUMBERS)
    named = known.task.map(lambda name: SETS.get(name, name))
    return known[(known.source == source) & (named.isna() if task is None else named == task)]


def first(pair: tuple[float, Line]) -> float:
    return pair[0]
