"""Predicted beside measured speedups: a point for each arm and task, the diagonal, and where the closed form lies."""

from collections.abc import Callable, Sequence

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.figures import LEVEL, MARKERS, PAGE_WIDTH, STYLE, colour
from harness.report.predicted import Prediction, median_error

NEAR = 0.1
"""Relative error up to which a prediction is near: the grey band."""

Read = Callable[[Prediction], float | None]


def predicted_figure(found: Sequence[Prediction]) -> Figure | None:
    """Left the prediction from trace and measured times, right the closed form, both over the measured speedup.

    Colour and marker stand for a task; lossy arms are hollow; bars are the 95 % intervals of what was measured. None
    where no arm could be predicted.
    """
    if not any(one.predicted is not None for one in found):
        return None
    tasks = list(dict.fromkeys(one.task for one in found))
    with matplotlib.style.context(STYLE):
        looks = {task: (colour(1 + place), MARKERS[place % len(MARKERS)]) for place, task in enumerate(tasks)}
        figure = Figure(figsize=(PAGE_WIDTH, 4.3 + 0.2 * -(-len(tasks) // 4)), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        kinds: tuple[tuple[str, Read, Read], ...] = (
            ("Trace and measured times", lambda one: one.predicted, lambda one: one.error),
            ("Closed form", lambda one: one.closed, lambda one: one.closed_error),
        )
        ends = [(value, one.measured) for one in found for _, read, _ in kinds if (value := read(one)) is not None]
        highest = 1.08 * max([1.0, *(max(value, measured or 0.0) for value, measured in ends)])
        for axes, (title, read, error) in zip(panels, kinds, strict=True):
            _draw(axes, found, looks, read, highest)
            middle = median_error(error(one) for one in found)
            axes.set_title(title if middle is None else f"{title}\nmedian error {middle:.1%}")
            axes.set_xlabel("Measured decode speedup")
        panels[0].set_xlim(0, highest)
        panels[0].set_ylim(0, highest)
        panels[0].set_ylabel("Predicted decode speedup")
        handles = [
            Line2D([], [], linestyle="", marker=mark, color=shade, markersize=5, label=task)
            for task, (shade, mark) in looks.items()
        ]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=min(4, max(1, len(handles))),
            title=f"Filled: lossless. Hollow: lossy. Bars: 95 % intervals over prompts. Band: within {NEAR:.0%}.",
            title_fontsize=8,
        )
    return figure


def _draw(
    axes: Axes, found: Sequence[Prediction], looks: dict[str, tuple[str, str]], read: Read, highest: float
) -> None:
    axes.set_aspect("equal")
    axes.fill_between(
        [0, highest], [0, (1 - NEAR) * highest], [0, (1 + NEAR) * highest], color="#999999", alpha=0.18, linewidth=0
    )
    axes.plot([0, highest], [0, highest], **LEVEL)
    for one in found:
        value = read(one)
        if value is None or one.measured is None:
            continue
        shade, mark = looks[one.task]
        if one.low is not None and one.high is not None:
            axes.plot([one.low, one.high], [value] * 2, color=shade, linewidth=0.8, alpha=0.45, zorder=2)
        axes.plot(
            one.measured,
            value,
            linestyle="",
            marker=mark,
            markersize=4.5,
            color=shade,
            markerfacecolor=shade if one.lossless else "white",
            zorder=3,
        )
