"""The figure of a run that compares drafters: one row each, speedup and mean accepted length, one column a task."""

from collections.abc import Sequence
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.figures import LEVEL, MARKERS, PAGE_WIDTH, STYLE, colour, row_height, wrapped
from harness.report.lines import Line, RunReport, lines

SHOWN = {
    "speedup_decode": "Decode speedup over autoregressive",
    "mean_accept_length": "Output tokens per block (mean_accept_length)",
}
ENOUGH_DRAFTERS = 3
"""Drafters in a run from which on it gets this figure in place of speed beside quality, which has too few markers."""


def compares_drafters(reports: Sequence[RunReport]) -> bool:
    """One run with enough drafters: the names of several runs' arms would not tell them apart."""
    return len(reports) == 1 and len(_drafters(list(lines(reports)))) >= ENOUGH_DRAFTERS


def _drafters(found: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.arm.drafter for line in found if line.arm.drafter))


def _looks(found: Sequence[Line]) -> dict[tuple[str, bool], dict[str, Any]]:
    """Colour and marker of each method, by its name and losslessness; lossy ones are hollow."""
    methods = list(dict.fromkeys((line.arm.method, line.arm.lossless) for line in found if line.arm.drafter))
    return {
        key: {
            "color": colour(index),
            "marker": MARKERS[index % len(MARKERS)],
            "markerfacecolor": colour(index) if key[1] else "white",
            "markeredgecolor": colour(index),
        }
        for index, key in enumerate(methods, 1)
    }


def drafters_figure(report: RunReport) -> Figure:
    """Each drafter under each method: speedup above, tokens per block below, with 95 % intervals where there are any.

    Methods of a drafter lie side by side; an arm without a value has no mark.
    """
    found = list(lines([report]))
    tasks = list(dict.fromkeys(line.task for line in found))
    drafters = _drafters(found)
    with matplotlib.style.context(STYLE):
        looks = _looks(found)
        names = [wrapped(name, 24) for name in drafters]
        row = row_height(names, 0.27)
        size = (min(PAGE_WIDTH, 1.8 + 1.4 * max(2, len(tasks))), 1.4 + 2 * (0.6 + row * len(drafters)))
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(SHOWN), len(tasks), squeeze=False, sharey=True, sharex="row")
        for row, (metric, label) in zip(grid, SHOWN.items(), strict=True):
            for axes, task in zip(row, tasks, strict=True):
                n = _panel(axes, [line for line in found if line.task == task], metric, drafters, looks)
                axes.set_title(f"{task}\n(n = {n})")
            row[0].set_yticks(range(len(drafters)), names)
            row[0].set_ylim(len(drafters) - 0.5, -0.5)
            row[(len(tasks) - 1) // 2].set_xlabel(label)
        handles = [
            Line2D([], [], linestyle="", label=name if lossless else f"{name} (lossy)", **look)
            for (name, lossless), look in looks.items()
        ]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=max(1, min(len(handles), int(size[0] / 1.7))),
            title="Bars: 95 % intervals over prompts.",
            title_fontsize=8,
        )
    return figure


def _panel(
    axes: Axes,
    task_lines: Sequence[Line],
    metric: str,
    drafters: Sequence[str],
    looks: dict[tuple[str, bool], dict[str, Any]],
) -> int:
    """Draw one metric of one task; the number of prompts."""
    axes.axvline(1.0, **LEVEL)
    step = 0.5 / max(1, len(looks))
    for line in task_lines:
        value = line.metrics[metric]
        if line.arm.drafter is None or value.value is None:
            continue
        place = list(looks).index((line.arm.method, line.arm.lossless))
        y = drafters.index(line.arm.drafter) + step * (place - (len(looks) - 1) / 2)
        look = looks[line.arm.method, line.arm.lossless]
        if value.low is not None and value.high is not None:
            axes.plot([value.low, value.high], [y, y], color=look["color"], linewidth=1.1, zorder=2)
        axes.plot(value.value, y, linestyle="", markersize=5, zorder=3, **look)
    return task_lines[0].n
