"""The figure of a run: speedup beside quality, one panel a task, every arm shown, losing ones included."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from harness.report.tables import Line, RunReport, lines
from harness.scoring import METRICS
from harness.store import write_atomic

STYLE = Path(__file__).with_name("style.mplstyle")
MARKERS = "osD^vPX<"
METRIC_LABELS = {
    "bleu": "BLEU",
    "rouge2": "ROUGE-2",
    "rougeLsum": "ROUGE-Lsum",
    "exact_match": "Exact match",
    "f1": "F1",
    "accuracy": "Accuracy",
}


def _label(line: Line, several: bool) -> str:
    name = f"{line.arm.arm}, {line.run.run_id}" if several else line.arm.arm
    return name if line.arm.lossless else f"{name} (lossy)"


def _look(index: int, lossless: bool) -> dict[str, Any]:
    """Colour and marker of an arm; lossy arms are hollow."""
    colours = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    colour = f"#{colours[index % len(colours)].lstrip('#')}"
    return {
        "color": colour,
        "marker": MARKERS[index % len(MARKERS)],
        "markerfacecolor": colour if lossless else "white",
        "markeredgecolor": colour,
        "markeredgewidth": 1.3,
    }


TIE_POINTS = 5.0
"""Typographic points between markers that would hide one another; the quality axis is not touched."""


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


def _points(task_lines: Sequence[Line], metric: str, several: bool) -> list[Point]:
    found = []
    for line in task_lines:
        speed, score = line.metrics["speedup_decode"], line.metrics[metric]
        if speed.value is not None and score.value is not None:
            found.append(Point(_label(line, several), *_bounds(speed, speed.value), *_bounds(score, score.value)))
    return found


def _bounds(row: MetricRow, value: float) -> tuple[float, float, float]:
    """Value, low, high; without an interval both ends are the value, and no line is drawn."""
    return value, value if row.low is None else row.low, value if row.high is None else row.high


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
    metric = first.run.task_metrics[first.task][0]
    points = _points(task_lines, metric, several)
    low = min((min(point.y_low, point.y) for point in points), default=0.0)
    high = max((max(point.y_high, point.y) for point in points), default=1.0)
    span = max(high - low, 2.0)
    axes.axvline(1.0, color="#777777", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
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
    axes.set_ylim(low - 0.2 * span, high + 0.12 * span)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=3, steps=[1, 2, 2.5, 5, 10]))
    source = first.run.data.get(first.task)
    kind = f", {source.kind} data" if source else ""
    axes.set_title(f"{first.task} (n = {first.n}{kind})")
    unit = " (%)" if METRICS[metric].unit == "%" else ""
    axes.set_ylabel(METRIC_LABELS.get(metric, metric) + unit)
    shown = {point.label for point in points}
    hidden = [label for line in task_lines if (label := _label(line, several)) not in shown]
    if hidden:
        text = "no value: " + ", ".join(hidden)
        axes.annotate(text, (0.02, 0.02), xycoords="axes fraction", fontsize=6.5, color="#555555")
    return any(point.shift for point in parted)


def speed_quality_figure(reports: Sequence[RunReport]) -> Figure:
    """Decode speedup with its 95 % interval (x) beside the primary quality metric (y, interval pale).

    Colour and marker stand for the same arm in all panels; lossy arms are hollow. Points that would hide each other
    are drawn slightly apart.
    """
    all_lines = list(lines(reports))
    several = len(reports) > 1
    with matplotlib.style.context(STYLE):
        labels = {_label(line, several): line.arm.lossless for line in all_lines}
        looks = {label: _look(index, lossless) for index, (label, lossless) in enumerate(labels.items())}
        tasks = list(dict.fromkeys(line.task for line in all_lines))
        columns = 3 if len(tasks) == 3 else min(2, len(tasks))
        height = -(-len(tasks) // columns)
        width = max(3.5 * columns, 5.0)
        per_row = _legend_columns(list(looks), width)
        legend_rows = -(-len(looks) // per_row)
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
        handles = [Line2D([], [], linestyle="", label=label, **look) for label, look in looks.items()]
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
