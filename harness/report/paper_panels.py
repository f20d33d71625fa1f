"""Panels of the paper's figures: our series with their intervals, the paper's points behind them."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.records import MetricRow
from harness.report.figures import LEVEL, MARKERS, METRIC_LABELS, PAGE_WIDTH, STYLE, colour
from harness.report.lines import Line, RunReport, lines
from harness.report.paper_points import paper_look

WIDTHS = {1: 4.2, 2: 5.8}
"""Inches by columns of panels; with more a page's width."""
BETWEEN = 0.7
"""Share of the room between two tasks that their marks take."""


@dataclass(frozen=True, slots=True)
class Mark:
    """``low`` and ``high`` bound a 95 % interval, None without one. ``hollow``: the figure's remark says what it is."""

    x: float
    y: float
    low: float | None
    high: float | None
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """Marks that a line joins, drawn in colour and marker number ``look``."""

    label: str
    look: int
    marks: tuple[Mark, ...]


Points = Mapping[str, Sequence[tuple[float, float]]]
"""The paper's (x, y) by label."""


@dataclass(frozen=True, slots=True)
class Pane:
    """One quantity, drawn once for each task: ``series`` from a task's lines, ``paper`` from its name.

    ``label`` names the quantity; the task's first metric of quality where it ends in a line break. ``speed``: the level
    of the baseline and of two tiers are drawn. ``whole``: from 0 to 1, so that panels compare. ``zero``: a level at 0.
    """

    label: str
    series: Callable[[Sequence[Line]], Iterable[Series]]
    paper: Callable[[str], Points] = lambda task: {}
    speed: bool = False
    whole: bool = False
    zero: bool = False


def mark(x: float, row: MetricRow | None, hollow: bool = False) -> list[Mark]:
    """A measured number at ``x``; none where it is undefined."""
    return [] if row is None or row.value is None else [Mark(x, row.value, row.low, row.high, hollow)]


def panels(report: RunReport, panes: Sequence[Pane], x_label: str, remark: str) -> Figure:
    """Quantities beside each other and tasks below each other; of one quantity the tasks in rows of three at most."""
    found = list(lines([report]))
    tasks = list(dict.fromkeys(line.task for line in found))
    single = len(panes) == 1
    columns = (2 if len(tasks) == 4 else min(3, len(tasks))) if single else len(panes)
    height = -(-len(tasks) // columns) if single else len(tasks)
    with matplotlib.style.context(STYLE):
        width = WIDTHS.get(columns, PAGE_WIDTH)
        figure = Figure(figsize=(width, 1.3 + (1.8 if single else 1.55) * height), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(height, columns, squeeze=False, sharex=True)
        labels = list(dict.fromkeys(label for pane in panes for task in tasks for label in pane.paper(task)))
        handles: dict[str, Artist] = {}
        for index, task in enumerate(tasks):
            mine = [line for line in found if line.task == task]
            for column, pane in enumerate(panes):
                axes = grid[divmod(index, columns)] if single else grid[index, column]
                handles |= draw_pane(axes, pane, mine)
                handles |= draw_paper(axes, pane.paper(task), labels)
                named = f"{task} (n = {mine[0].n})"
                if single:
                    axes.set_title(named)
                    axes.set_ylabel(pane.label if index % columns == 0 else "")
                else:
                    quality = quality_label(mine[0]) if pane.label.endswith("\n") else ""
                    parts = (named.replace(" (", "\n("), quality) if column == 0 else (quality,)
                    axes.set_ylabel("\n".join(filter(None, parts)))
                    axes.set_title(pane.label.strip() if index == 0 else "")
                if not single or index + columns >= len(tasks):
                    axes.tick_params(labelbottom=single or index == len(tasks) - 1)
                    axes.set_xlabel(x_label if single or index == len(tasks) - 1 else "")
        for axes in grid.flat[len(tasks) if single else len(panes) * len(tasks) :]:
            axes.set_axis_off()
        legend(figure, handles, labels, remark)
    return figure


def by_task(report: RunReport, panes: Sequence[Pane], remark: str) -> Figure:
    """A panel for each quantity, tasks along it, marks side by side; nothing is joined."""
    found = list(lines([report]))
    tasks = list(dict.fromkeys(line.task for line in found))
    with matplotlib.style.context(STYLE):
        height = -(-len(panes) // 2)
        figure = Figure(figsize=(PAGE_WIDTH, 1.5 + 2.1 * height), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(height, 2, squeeze=False, sharex=True).flatten()
        labels = list(dict.fromkeys(label for pane in panes for task in tasks for label in pane.paper(task)))
        handles: dict[str, Artist] = {}
        for axes, pane in zip(grid, panes, strict=False):
            drawn = [list(pane.series([line for line in found if line.task == task])) for task in tasks]
            known = dict.fromkeys(label for task in tasks for label in pane.paper(task))
            slots = [*dict.fromkeys(one.label for series in drawn for one in series), *known]
            for place, (task, series) in enumerate(zip(tasks, drawn, strict=True)):
                for one in series:
                    x = place + aside(slots, one.label)
                    marks = tuple(replace(each, x=x) for each in one.marks)
                    handles[one.label] = draw(axes, replace(one, marks=marks), joined=False)
                points = {
                    name: [(place + aside(slots, name), y) for _, y in given]
                    for name, given in pane.paper(task).items()
                }
                handles |= draw_paper(axes, points, labels)
            if pane.speed or pane.zero:
                axes.axhline(1.0 if pane.speed else 0.0, **LEVEL)
            axes.set_xticks(range(len(tasks)), tasks, rotation=25, ha="right", rotation_mode="anchor")
            axes.set_xlim(-0.5, len(tasks) - 0.5)
            axes.set_title(pane.label)
            limits(axes, pane)
        for axes in grid[len(panes) :]:
            axes.set_axis_off()
        counts = ", ".join(dict.fromkeys(f"{line.task} {line.n}" for line in found))
        legend(figure, handles, labels, f"{remark} Prompts: {counts}.")
    return figure


def aside(slots: Sequence[str], label: str) -> float:
    """Where a label's marks stand beside the tick of their task."""
    return BETWEEN * ((slots.index(label) + 0.5) / len(slots) - 0.5)


def quality_label(line: Line) -> str:
    name = line.run.task_metrics[line.task][0]
    return METRIC_LABELS.get(name, name)


def draw_pane(axes: Axes, pane: Pane, task_lines: Sequence[Line]) -> dict[str, Artist]:
    """Our part of a panel; the handles of its legend."""
    handles: dict[str, Artist] = {one.label: draw(axes, one) for one in pane.series(task_lines)}
    limits(axes, pane)
    if pane.speed:
        axes.axhline(1.0, **LEVEL)
        handles |= two_tiers(axes, task_lines)
    return handles


def limits(axes: Axes, pane: Pane) -> None:
    if pane.whole:
        axes.set_ylim(-0.04, 1.04)


def draw(axes: Axes, series: Series, joined: bool = True) -> Line2D:
    """One series with its intervals; the handle of the legend."""
    line, marker = colour(series.look), MARKERS[series.look % len(MARKERS)]
    style: dict[str, Any] = {"color": line, "marker": marker, "markersize": 4.5}
    if joined:
        axes.plot([one.x for one in series.marks], [one.y for one in series.marks], color=line, linewidth=1.1, zorder=3)
    for one in series.marks:
        if one.low is not None and one.high is not None:
            axes.plot([one.x, one.x], [one.low, one.high], color=line, linewidth=0.9, alpha=0.5, zorder=2)
        axes.plot(one.x, one.y, markerfacecolor="white" if one.hollow else line, zorder=4, **style)
    hollow = not joined and any(one.hollow for one in series.marks)
    style |= {"linewidth": 1.1, "linestyle": "-" if joined else "", "label": series.label}
    return Line2D([], [], markerfacecolor="white" if hollow else line, **style)


def draw_paper(axes: Axes, points: Points, labels: Sequence[str]) -> dict[str, Artist]:
    """The paper's points in a panel; handles by label."""
    handles: dict[str, Artist] = {}
    for name, known in points.items():
        look = paper_look(labels, name)
        axes.plot([x for x, _ in known], [y for _, y in known], **look)
        handles[name] = Line2D([], [], **look)
    return handles


def two_tiers(axes: Axes, task_lines: Sequence[Line]) -> dict[str, Line2D]:
    """The arm ``speculative`` of the same run, as a level: what the slim tier has to beat."""
    look: dict[str, Any] = {"color": "#000000", "linewidth": 1.0, "linestyle": (0, (1, 1.5))}
    for line in task_lines:
        speed = line.metrics["speedup_decode"].value
        if line.arm.arm == "speculative" and speed is not None:
            axes.axhline(speed, zorder=1, **look)
            return {"speculative": Line2D([], [], label="two tiers", **look)}
    return {}


def legend(figure: Figure, handles: Mapping[str, Artist], labels: Sequence[str], remark: str) -> None:
    """Below everything: ours, then the paper's ``labels``, as many a row as fit; above them the remark."""
    ordered = [*(one for name, one in handles.items() if name not in labels), *(handles[name] for name in labels)]
    width = figure.get_figwidth()
    entry = 0.55 + 0.065 * max((len(str(one.get_label())) for one in ordered), default=1)
    text = remark if labels else f"{remark} The paper has no points to set beside these."
    figure.legend(
        handles=ordered,
        loc="outside lower center",
        ncols=max(1, min(len(ordered), int(width / entry))),
        title=textwrap.fill(text, int(16 * width)),
        title_fontsize=7.5,
        fontsize=8,
    )
