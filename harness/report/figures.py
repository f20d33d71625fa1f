"""The figure of a run: speedup beside quality, one panel a task, every arm shown, losing ones included."""

import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from harness.records import MetricRow
from harness.report.lines import Line, RunReport, lines
from harness.scoring import METRICS
from harness.store import write_atomic

STYLE = Path(__file__).with_name("style.mplstyle")
PAGE_WIDTH = 7.0
"""Inches. Panels side by side are made for the width of a page of two columns, and no figure is wider."""
MARKERS = "osD^vPX<"
LEVEL: dict[str, Any] = {"color": "#777777", "linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 1}
"""The baseline's level."""
FRONT: dict[str, Any] = {"color": "#555555", "linewidth": 1.0, "zorder": 1}
GREY: dict[str, Any] = {"color": "#AAAAAA", "marker": "o", "markersize": 4, "markeredgecolor": "#AAAAAA"}
RATES = {
    "reject_rate": "Examined drafts\nnot kept",
    "escalate_share": "Examined drafts\nescalated",
    "full_rate": "Full passes\nper token",
    "block_full_rate": "Blocks with\na full pass",
}
"""The rates that are all called rejection or reliance somewhere, by their names here."""
METRIC_LABELS = {
    "bleu": "BLEU",
    "rouge2": "ROUGE-2",
    "rougeLsum": "ROUGE-Lsum",
    "exact_match": "Exact match",
    "f1": "F1",
    "accuracy": "Accuracy",
}


def arm_label(line: Line, several: bool) -> str:
    """An arm by name, the run beside it where there are several, and that it is lossy."""
    name = f"{line.arm.arm}, {line.run.run_id}" if several else line.arm.arm
    return name if line.arm.lossless else f"{name} (lossy)"


def colour(index: int) -> str:
    """A colour of the style sheet, which has to be in use; over again after the last."""
    colours = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return f"#{colours[index % len(colours)].lstrip('#')}"


def small_look(index: int) -> dict[str, Any]:
    """Colour and marker number ``index`` of a line among several in a small panel."""
    return {"color": colour(index), "marker": MARKERS[index % len(MARKERS)], "markersize": 4}


def wrapped(name: str, width: int) -> str:
    """A name in lines of ``width`` letters where it can be broken, which is after a blank, ``_``, ``(`` and ``-``.

    >>> wrapped("graft(small_lm(embedded_small_lm), 0.4)", 22)
    'graft(small_lm(\\nembedded_small_lm),\\n0.4)'
    """
    lines = [""]
    for part in re.findall(r"[^\s_(-]*[\s_(-]?", name):
        if len((lines[-1] + part).rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def row_height(labels: Sequence[str], least: float) -> float:
    """Inches that rows need for these labels, which may have several lines, not to touch those of their neighbours."""
    sizes = [label.count("\n") + 1 for label in labels]
    return max([least, *(0.15 * (one + other) / 2 for one, other in pairwise(sizes))])


def _look(index: int, lossless: bool) -> dict[str, Any]:
    """Colour and marker of an arm, other pairs of them in each round; lossy arms are hollow."""
    return {
        "color": colour(index),
        "marker": MARKERS[(index + index // len(MARKERS)) % len(MARKERS)],
        "markerfacecolor": colour(index) if lossless else "white",
        "markeredgecolor": colour(index),
        "markeredgewidth": 1.3,
    }


TIE_POINTS = 5.0
"""Typographic points between markers that would hide one another; the quality axis is not touched."""
PANEL_POINTS = 120
"""Typographic points that a panel is high at least: room for those markers below the lowest value."""
CROWD = 12
"""Arms in a figure above which those on no front are grey and share a line of the legend."""


@dataclass(frozen=True)
class Point:
    """An arm in a panel. ``x`` speedup and ``y`` quality with their intervals; ``shift`` moves it off a tie, in y."""

    label: str
    x: float
    x_low: float
    x_high: float
    y: float
    y_low: float
    y_high: float
    shift: float = 0.0


def _points(task_lines: Sequence[Line], several: bool) -> list[Point]:
    found = []
    for line in task_lines:
        speed, score = line.metrics["speedup_decode"], line.metrics[_quality(line)]
        if speed.value is not None and score.value is not None:
            found.append(Point(arm_label(line, several), *_bounds(speed, speed.value), *_bounds(score, score.value)))
    return found


def _quality(line: Line) -> str:
    """The first metric of its task."""
    return line.run.task_metrics[line.task][0]


def _bounds(row: MetricRow, value: float) -> tuple[float, float, float]:
    """Value, low, high; without an interval both ends are the value, and no line is drawn."""
    return value, value if row.low is None else row.low, value if row.high is None else row.high


def front(points: Sequence[Point], higher_is_better: bool = True) -> list[Point]:
    """Pareto front of a task by the values alone: the points that none beats in one and equals in the other; by speed.

    >>> a, b, c = (Point(name, x, x, x, y, y, y) for name, x, y in (("a", 1, 9), ("b", 2, 5), ("c", 1.5, 5)))
    >>> [point.label for point in front([a, b, c])]
    ['a', 'b']
    """
    sign = 1 if higher_is_better else -1

    def beaten(one: Point) -> bool:
        mine = (one.x, sign * one.y)
        others = ((other.x, sign * other.y) for other in points)
        return any(other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in others)

    return sorted((one for one in points if not beaten(one)), key=lambda one: one.x)


def _fronts(task_lines: Sequence[Line], several: bool) -> list[list[Point]]:
    """The front of each model and temperature: arms of others are no alternative to one another."""
    alike: dict[tuple[str, float], list[Line]] = {}
    for line in task_lines:
        alike.setdefault((line.run.model, line.run.temperature), []).append(line)
    better = METRICS[_quality(task_lines[0])].higher_is_better
    return [front(_points(group, several), better) for group in alike.values()]


def _part_ties(points: Sequence[Point]) -> list[Point]:
    """Shift points of the same quality whose speed intervals overlap by some typographic points: else one hides."""
    rank = dict.fromkeys((point.label for point in points), 0)
    for index, point in enumerate(points):
        taken = {
            rank[other.label]
            for other in points[:index]
            if math.isclose(other.y, point.y) and other.x_low <= point.x_high and point.x_low <= other.x_high
        }
        rank[point.label] = next(place for place in range(len(points)) if place not in taken)
    return [replace(point, shift=TIE_POINTS * rank[point.label]) for point in points]


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """Entries a row that fit ``width`` inches, at most three."""
    entry = 0.5 + 0.075 * max(len(label) for label in labels)
    return max(1, min(3, len(labels), int(width / entry)))


def _panel(axes: Axes, task_lines: Sequence[Line], looks: Mapping[str, dict[str, Any]], several: bool) -> bool:
    """Draw one task; True when points were moved apart."""
    first = task_lines[0]
    metric = METRICS[_quality(first)]
    points = _points(task_lines, several)
    low = min((min(point.y_low, point.y) for point in points), default=0.0)
    high = max((max(point.y_high, point.y) for point in points), default=1.0)
    span = max(high - low, 2.0)
    axes.axvline(1.0, **LEVEL)
    for best in _fronts(task_lines, several):
        axes.plot([point.x for point in best], [point.y for point in best], drawstyle="steps-pre", **FRONT)
    parted = _part_ties(points)
    for point in parted:
        look = looks[point.label]
        place = axes.transData + ScaledTranslation(0, -point.shift / 72, axes.figure.dpi_scale_trans)
        axes.plot([point.x] * 2, [point.y_low, point.y_high], color=look["color"], alpha=0.3, linewidth=0.9, zorder=2)
        x_error = [[max(0.0, point.x - point.x_low)], [max(0.0, point.x_high - point.x)]]
        axes.errorbar(
            point.x, point.y, xerr=x_error, capsize=2.5, elinewidth=1.2, zorder=3, linestyle="", transform=place, **look
        )
    axes.update_datalim([(x, point.y) for point in parted for x in (point.x_low, point.x_high)])
    axes.autoscale_view()
    below = max(0.2, (max((point.shift for point in parted), default=0.0) + 10) / PANEL_POINTS)
    axes.set_ylim(low - below * span, high + 0.12 * span)
    ticks = MaxNLocator(nbins=6, min_n_ticks=3, steps=[1, 2, 2.5, 5, 10]).tick_values(*axes.get_ylim())
    least = min(0.0, low)  # the room below is for points that are moved apart
    axes.set_yticks([tick for tick in ticks if least <= tick <= axes.get_ylim()[1]])
    source = first.run.data.get(first.task)
    kind = f", {source.kind} data" if source else ""
    axes.set_title(f"{first.task} (n = {first.n}{kind})")
    axes.set_ylabel(METRIC_LABELS.get(metric.name, metric.name) + (" (%)" if metric.unit == "%" else ""))
    shown = {point.label for point in points}
    hidden = [label for line in task_lines if (label := arm_label(line, several)) not in shown]
    if hidden:
        text = textwrap.fill("no value: " + ", ".join(hidden), 44, max_lines=2, placeholder=" …")
        axes.annotate(text, (0.02, 0.02), xycoords="axes fraction", fontsize=6.5, color="#555555")
    return any(point.shift for point in parted)


def _looks(all_lines: Sequence[Line], several: bool) -> tuple[dict[str, dict[str, Any]], list[Line2D]]:
    """Colour and marker of each arm by its label, and the entries of the legend; of a crowd all that matter."""
    labels = {arm_label(line, several): line.arm.lossless for line in all_lines}
    shown = list(labels)
    if len(labels) > CROWD:
        by_task: dict[str, list[Line]] = {}
        for line in all_lines:
            by_task.setdefault(line.task, []).append(line)
        on_front = {point.label for task in by_task.values() for best in _fronts(task, several) for point in best}
        shown = [label for label in labels if label in on_front]
    looks = {label: _look(index, labels[label]) for index, label in enumerate(shown)}
    handles = [Line2D([], [], linestyle="", label=label, **look) for label, look in looks.items()]
    others = [label for label in labels if label not in looks]
    looks |= {label: GREY | {"markerfacecolor": "#AAAAAA" if labels[label] else "white"} for label in others}
    if others:
        handles.append(Line2D([], [], linestyle="", label=f"{len(others)} others, on no front", **looks[others[0]]))
    return looks, handles


def speed_quality_figure(reports: Sequence[RunReport]) -> Figure:
    """Decode speedup with its 95 % interval (x) beside the primary quality metric (y, interval pale).

    A line is the front of a model at a temperature. Colour and marker stand for the same arm in all panels; lossy arms
    are hollow. Points that would hide each other are drawn slightly apart.
    """
    all_lines = list(lines(reports))
    several = len(reports) > 1
    with matplotlib.style.context(STYLE):
        looks, handles = _looks(all_lines, several)
        tasks = list(dict.fromkeys(line.task for line in all_lines))
        columns = min(2, len(tasks))
        height = -(-len(tasks) // columns)
        width = max(3.5 * columns, 5.0)
        handles.append(Line2D([], [], label="front: none is better in both", **FRONT))
        per_row = _legend_columns([str(handle.get_label()) for handle in handles], width)
        legend_rows = -(-len(handles) // per_row)
        figure = Figure(figsize=(width, 2.5 * height + 0.2 * legend_rows + 0.4), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(height, columns, squeeze=False, sharex=True).flatten()
        remark = "Filled: lossless. Hollow: lossy. Bars: 95 % intervals over prompts."
        parted = False
        for index, (axes, task) in enumerate(zip(grid, tasks, strict=False)):
            parted |= _panel(axes, [line for line in all_lines if line.task == task], looks, several)
            axes.tick_params(labelbottom=True)
            if index + columns >= len(tasks):
                axes.set_xlabel("Decode speedup over autoregressive (×)")  # noqa: RUF001  the sign meant
        for axes in grid[len(tasks) :]:
            axes.set_axis_off()
        grid[0].margins(x=0.08)
        legend = figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=per_row,
            columnspacing=1.4,
            handletextpad=0.4,
            title=f"{remark}\nArms of equal quality and overlapping speed are drawn apart." if parted else remark,
            title_fontsize=8,
        )
        legend.get_title().set_color("#444444")
    return figure


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """``<name>.png`` (200 dpi) and ``<name>.pdf``, each whole or not at all."""
    found = []
    with matplotlib.style.context(STYLE):
        for suffix, metadata in (("png", {}), ("pdf", {"CreationDate": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, metadata=metadata)
            path = folder / f"{name}.{suffix}"
            write_atomic(path, buffer.getvalue())
            found.append(path)
    return found
