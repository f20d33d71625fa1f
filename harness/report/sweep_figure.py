"""The figure of a sweep: decode speedup over what was swept, every arm on every task."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonpath
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.compare import BASELINE
from harness.report.figures import LEVEL, MARKERS, PAGE_WIDTH, STYLE, colour
from harness.report.lines import Line, RunReport, lines
from harness.report.swept import unswept_arms

CROWDED = 36
"""Letters along an axis above which its labels are turned."""


@dataclass(frozen=True)
class Cell:
    """A run of a sweep with the values it was swept to."""

    report: RunReport
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The hash of everything that can change its numbers; of a run from before there was one, its id."""
        return self.report.run.cell or self.report.run.run_id


def order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then texts."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, str(value))


@dataclass(frozen=True)
class Mark:
    x: float
    y: float
    low: float | None
    high: float | None


def sweep_figure(cells: Sequence[Cell]) -> Figure:
    """Decode speedup against the swept value, a panel a task; one line for each arm and value of the other settings.

    The setting with the most values is the x axis. An arm that the sweep did not change is drawn without a line: its
    marks differ by measurement alone. Lossy arms are hollow.
    """
    keys = list(cells[0].values)
    axis = max(keys, key=lambda key: len({repr(cell.values[key]) for cell in cells}), default="")
    ticks = sorted({cell.values.get(axis, "one cell") for cell in cells}, key=order)
    numeric = all(order(tick)[0] == 0 for tick in ticks)
    found = [(cell, line) for cell in cells for line in lines([cell.report]) if line.arm.arm != BASELINE]
    fixed = unswept_arms([cell.report.settings for cell in cells])
    series: dict[str, tuple[bool, bool]] = {}
    labels, shared = tick_labels([str(tick) for tick in ticks])
    panels: dict[str, dict[str, list[Mark]]] = {}
    counts: dict[str, int] = {}
    for cell, line in found:
        label = series_label(cell, line, axis, line.arm.arm in fixed)
        series[label] = line.arm.lossless, line.arm.arm in fixed
        speed = line.metrics["speedup_decode"]
        place = cell.values.get(axis, "one cell")
        marks = panels.setdefault(line.task, {}).setdefault(label, [])
        counts[line.task] = max(counts.get(line.task, 0), line.n)
        if speed.value is not None:
            marks.append(Mark(float(place) if numeric else ticks.index(place), speed.value, speed.low, speed.high))
    with matplotlib.style.context(STYLE):
        looks = {label: look(index, *kind) for index, (label, kind) in enumerate(series.items(), 1)}
        columns = 2 if len(panels) == 4 else min(3, len(panels))
        height = -(-len(panels) // columns)
        figure = Figure(
            figsize=(min(PAGE_WIDTH, max(3.2 * columns, 5.0)), 2.4 * height + 0.22 * len(looks) / 2 + 0.5),
            layout="constrained",
        )
        FigureCanvasAgg(figure)
        grid = figure.subplots(height, columns, squeeze=False, sharex=True).flatten()
        for panel, (task, lines_of) in zip(grid, panels.items(), strict=False):
            draw(panel, lines_of, looks, span(ticks, numeric))
            panel.set_title(f"{task} (n = {counts[task]} a cell)")
            panel.tick_params(labelbottom=True)
            panel.set_xticks([float(tick) if numeric else index for index, tick in enumerate(ticks)], labels)
            if not numeric and max(len(part) for label in labels for part in label.split("\n")) * len(ticks) > CROWDED:
                panel.tick_params(axis="x", rotation=20)
            panel.set_xlabel(f"{axis} ({shared}…)" if shared else axis)
        for panel in grid[len(panels) :]:
            panel.set_axis_off()
        for panel in grid[::columns]:
            panel.set_ylabel("Decode speedup")
        handles = [Line2D([], [], label=label, **style) for label, style in looks.items()]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=max(
                1, min(len(handles), int(figure.get_figwidth() / (0.6 + 0.075 * max(map(len, looks), default=1))))
            ),
            title="Filled: lossless. Hollow: lossy. Bars: 95 % intervals over prompts. No line: not swept.",
            title_fontsize=8,
        )
    return figure


def series_label(cell: Cell, line: Line, axis: str, fixed: bool) -> str:
    others = [] if fixed else [f"{key.rpartition('.')[2]} {value}" for key, value in cell.values.items() if key != axis]
    return ", ".join([line.arm.arm, *others]) + ("" if line.arm.lossless else " (lossy)")


def look(index: int, lossless: bool, fixed: bool) -> dict[str, Any]:
    shade = colour(index)
    return {
        "color": shade,
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
        "markerfacecolor": shade if lossless else "white",
        "markeredgecolor": shade,
        "linestyle": "" if fixed else "-",
        "linewidth": 1.1,
    }


def tick_labels(ticks: Sequence[str]) -> tuple[list[str], str]:
    """Lists of names as a name a line, and what all these names begin with, which is left out of them.

    >>> tick_labels(["model_skip30", "model_skip45 + model_skip30"])
    (['skip30', 'skip45\\n+ skip30'], 'model_')
    >>> tick_labels(["at_random", "at_once"])
    (['at_random', 'at_once'], '')
    """
    parts = [tick.split(" + ") for tick in ticks]
    words = [name.replace("_", "/") for names in parts for name in names]
    shared = commonpath(words).replace("/", "_") + "_" if max(map(len, parts)) > 1 else ""
    if shared == "_" or not all(name.startswith(shared) for names in parts for name in names):
        shared = ""
    return ["\n+ ".join(name.removeprefix(shared) for name in names) for names in parts], shared


def span(ticks: Sequence[Any], numeric: bool) -> float:
    """Width of the x axis in its own units, for the marks of several lines to stand side by side."""
    return float(ticks[-1]) - float(ticks[0]) if numeric and len(ticks) > 1 else float(max(1, len(ticks) - 1))


def draw(panel: Axes, marks: Mapping[str, Sequence[Mark]], looks: Mapping[str, dict[str, Any]], width: float) -> None:
    panel.axhline(1.0, **LEVEL)
    for label, style in looks.items():
        aside = 0.008 * width * (list(looks).index(label) - (len(looks) - 1) / 2)
        found = sorted(marks.get(label, ()), key=lambda mark: mark.x)
        for mark in found:
            if mark.low is not None and mark.high is not None and math.isfinite(mark.high):
                panel.plot([mark.x + aside] * 2, [mark.low, mark.high], color=style["color"], linewidth=0.8, alpha=0.5)
        panel.plot([mark.x + aside for mark in found], [mark.y for mark in found], zorder=3, **style)
