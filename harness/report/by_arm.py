"""Figures with a row for each arm: routes by place in the block, where decoding time goes, and the four named rates."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from harness.compare import BASELINE, divide
from harness.positions import PositionRow
from harness.report.figures import LEVEL, MARKERS, PAGE_WIDTH, RATES, STYLE, arm_label, colour, row_height, wrapped
from harness.report.lines import DASH, Line, RunReport, lines

ROUTES = {"accept": "#0072B2", "regenerate": "#009E73", "escalate": "#D55E00"}
TIERS = {"draft": "#0072B2", "slim": "#009E73", "full": "#D55E00", "other": "#999999"}
"""A route has the colour of the tier that it trusts."""
FILLED = 0.84
"""Share of a row that a full bar takes."""
NAME = 24
"""Letters of an arm's name in a line of its label."""


def names(found: Sequence[Line], several: bool) -> list[str]:
    """Labels of the arms in the runs' order."""
    return list(dict.fromkeys(arm_label(line, several) for line in found))


def rows_figure(arms: Sequence[str], columns: int, height: int, row: float) -> tuple[Figure, NDArray[np.object_]]:
    """``height`` rows of panels that share their axis of arms, each ``row`` inches high or as high as its label."""
    row = row_height([wrapped(arm, NAME) for arm in arms], row)
    figure = Figure(figsize=(PAGE_WIDTH, 1.1 + height * (0.65 + row * len(arms))), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(height, columns, squeeze=False, sharey=True, sharex=True)


def label_rows(panels: Iterable[Axes], arms: Sequence[str], middle: float) -> None:
    """The first arm on top; ``middle`` of a row that begins at 0."""
    for axes in panels:
        axes.set_yticks([place + middle for place in range(len(arms))], [wrapped(arm, NAME) for arm in arms[::-1]])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")


def task_panels(tasks: Sequence[str], arms: Sequence[str], row: float) -> tuple[Figure, NDArray[np.object_]]:
    """A panel for each task, three beside each other at most, or four of four."""
    columns = min(len(tasks), 4 if len(tasks) == 4 else 3)
    figure, grid = rows_figure(arms, columns, -(-len(tasks) // columns), row)
    for axes in grid.flat[len(tasks) :]:
        axes.set_axis_off()
    for index, axes in enumerate(grid.flat[: len(tasks)]):
        axes.tick_params(labelbottom=index + columns >= len(tasks))
    return figure, grid.flatten()[: len(tasks)]


def routed(report: RunReport) -> set[str]:
    """Arms that have a choice of routes: in the others every draft goes to the full verifier."""
    return {row.arm for row in report.positions if row.accept or row.regenerate}


def routes_figure(reports: Sequence[RunReport]) -> Figure | None:
    """Of the drafts at each place of a block the shares accepted, regenerated and escalated; None without a choice.

    What is left of a row's height was drafted and not examined: an earlier draft ended the block.
    """
    chosen = {report.run.run_id: routed(report) for report in reports}
    found = [line for line in lines(reports) if line.arm.arm in chosen[line.run.run_id]]
    if not found:
        return None
    rows: dict[tuple[str, str, str], list[PositionRow]] = {}
    for report in reports:
        for row in report.positions:
            if row.arm in chosen[row.run_id]:
                rows.setdefault((row.run_id, row.task, row.arm), []).append(row)
    arms, tasks = names(found, len(reports) > 1), list(dict.fromkeys(line.task for line in found))
    with matplotlib.style.context(STYLE):
        figure, panels = task_panels(tasks, arms, 0.5)
        for axes, task in zip(panels, tasks, strict=True):
            mine = [line for line in found if line.task == task]
            for line in mine:
                place = len(arms) - 1 - arms.index(arm_label(line, len(reports) > 1))
                draw_routes(axes, rows.get((line.run.run_id, task, line.arm.arm), []), place)
            axes.set_title(f"{task}\n(n = {mine[0].n})")
            axes.set_ylim(-0.05, len(arms))
            axes.set_xlabel("Place in the block")
        last = max(row.position for known in rows.values() for row in known)
        panels[0].set_xticks(range(1, last + 1, 1 + last // 8))
        label_rows(panels, arms, FILLED / 2)
        handles = [Patch(color=shade, label=route) for route, shade in ROUTES.items()]
        handles.append(Patch(facecolor="#F0F0F0", label="not examined"))
        remark = "Shares of the drafts at each place; a full bar is all of them."
        figure.legend(handles=handles, loc="outside lower center", ncols=4, title=remark, title_fontsize=8)
    return figure


def draw_routes(axes: Axes, rows: Sequence[PositionRow], place: float) -> None:
    """Stacked bars of one arm, standing on ``place``."""
    for row in rows:
        axes.bar(row.position, FILLED, 0.8, place, color="#F0F0F0", linewidth=0)
        bottom = place
        for route, shade in ROUTES.items():
            share = FILLED * (divide(getattr(row, route), row.drafted) or 0.0)
            axes.bar(row.position, share, 0.8, bottom, color=shade, linewidth=0)
            bottom += share


def split(line: Line) -> dict[str, float] | None:
    """Milliseconds an output token in each tier's forwards and beside them; None where the clock was not read there.

    A tier without a forward has none: its share is 0 of what was spent.
    """
    rate = line.metrics["decode_tokens_per_s"].value
    shares = {tier: line.metrics[f"{tier}_time_share"].value for tier in TIERS if tier != "other"}
    if not rate or all(share is None for share in shares.values()):
        return None
    known = {tier: share or 0.0 for tier, share in shares.items()}
    known["other"] = max(0.0, 1.0 - sum(known.values()))
    return {tier: 1000 * share / rate for tier, share in known.items()}


def time_figure(reports: Sequence[RunReport]) -> Figure | None:
    """Milliseconds an output token by tier, the baseline's whole time as a line; None where no arm's time is split."""
    found = list(lines(reports))
    if not any(map(split, found)):
        return None
    several = len(reports) > 1
    arms, tasks = names(found, several), list(dict.fromkeys(line.task for line in found))
    with matplotlib.style.context(STYLE):
        figure, panels = task_panels(tasks, arms, 0.26)
        for axes, task in zip(panels, tasks, strict=True):
            mine = [line for line in found if line.task == task]
            for line in mine:
                draw_split(axes, split(line), len(arms) - 1 - arms.index(arm_label(line, several)))
                if line.arm.arm == BASELINE and not several and (whole := split(line)):
                    axes.axvline(sum(whole.values()), **LEVEL | {"color": "#000000", "zorder": 3})
            axes.set_title(f"{task}\n(n = {mine[0].n})")
            axes.set_ylim(-0.5, len(arms) - 0.5)
            axes.set_xlabel("ms per token")
        panels[0].set_xlim(left=0)
        label_rows(panels, arms, 0)
        handles = [Patch(color=shade, label=tier) for tier, shade in TIERS.items()]
        remark = "Decoding time within each tier's forwards; other: gates, look-up, bookkeeping."
        if not several:
            remark += " Dashed: the baseline."
        figure.legend(handles=handles, loc="outside lower center", ncols=4, title=remark, title_fontsize=8)
    return figure


def draw_split(axes: Axes, spent: Mapping[str, float] | None, place: float) -> None:
    """A stacked bar; a dash where there is none."""
    if spent is None:
        axes.annotate(DASH, (0, place), xytext=(3, 0), textcoords="offset points", va="center")
        return
    left = 0.0
    for tier, one in spent.items():
        axes.barh(place, one, FILLED - 0.1, left, color=TIERS[tier], linewidth=0, zorder=2)
        left += one


def rates_figure(reports: Sequence[RunReport]) -> Figure | None:
    """A panel for each of the four rates, a mark for each task, lossy arms hollow; None where no arm drafts."""
    several = len(reports) > 1
    found = [line for line in lines(reports) if line.arm.arm != BASELINE]
    if not found:
        return None
    arms, tasks = names(found, several), list(dict.fromkeys(line.task for line in found))
    with matplotlib.style.context(STYLE):
        figure, grid = rows_figure(arms, len(RATES), 1, 0.16 + 0.07 * len(tasks))
        for axes, (rate, words) in zip(grid[0], RATES.items(), strict=True):
            for line in found:
                place = len(arms) - 1 - arms.index(arm_label(line, several))
                draw_rate(axes, line, rate, place, tasks)
            axes.set_title(rate)
            axes.set_xlabel(words.lower())
            axes.set_xlim(-0.04, 1.04)
            axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            axes.set_ylim(-0.5, len(arms) - 0.5)
            for edge in range(1, len(arms)):
                axes.axhline(edge - 0.5, color="#E4E4E4", linewidth=0.6, zorder=0)
        label_rows(grid[0], arms, 0)
        handles = [
            Line2D([], [], linestyle="", marker=MARKERS[i % len(MARKERS)], color=colour(i), markersize=4.5, label=task)
            for i, task in enumerate(tasks)
        ]
        columns = max(1, min(len(handles), int(PAGE_WIDTH / (0.5 + 0.08 * max(map(len, tasks))))))
        remark = "Filled: lossless. Hollow: lossy. Bars: 95 % intervals over prompts, where there are any."
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, title=remark, title_fontsize=8)
    return figure


def draw_rate(axes: Axes, line: Line, rate: str, place: float, tasks: Sequence[str]) -> None:
    """One rate of an arm on a task, beside those of its other tasks."""
    known, index = line.metrics[rate], tasks.index(line.task)
    if known.value is None:
        return
    y = place - 0.7 * ((index + 0.5) / len(tasks) - 0.5)
    if known.low is not None and known.high is not None:
        axes.plot([known.low, known.high], [y, y], color=colour(index), linewidth=0.9, zorder=2)
    face = colour(index) if line.arm.lossless else "white"
    look: dict[str, Any] = {"marker": MARKERS[index % len(MARKERS)], "color": colour(index), "markerfacecolor": face}
    axes.plot(known.value, y, linestyle="", markersize=4, zorder=3, **look)
