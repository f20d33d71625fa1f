"""Where a third tier beats two: below c' + X = 1, c' a slim pass in full ones and X the share of blocks that escalate.

That line is for equal tokens per block, where the drafter's cost cancels (``harness.cost.break_even``). Of a pair and
task with other tokens per block, T3 and T2, the edge is at T3 / (gamma c + c' + X) = T2 / (gamma c + 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from textwrap import fill

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.compare import BASELINE, divide
from harness.cost import Costs, break_even, break_even_at
from harness.report.figures import LEVEL, PAGE_WIDTH, STYLE, colour
from harness.report.lines import DASH, Line, RunReport, lines
from harness.report.paper_points import SETS
from harness.report.tables import markdown_table


@dataclass(frozen=True, slots=True)
class Point:
    """``slim_cost`` is c'; ``escalating`` X; ``gain`` the speed of three tiers over that of two, None if not known.

    ``escalating`` below 0 is no share: then the published speedup is above what its rejection allows. ``pair`` names
    verifier and drafter; ``edge`` is the X at which both would be equally fast with their own tokens per block, None
    where there are no two tiers beside it.
    """

    label: str
    task: str
    slim_cost: float
    escalating: float
    gain: float | None
    measured: bool
    pair: str = ""
    edge: float | None = None


def measured_points(reports: Sequence[RunReport]) -> list[Point]:
    """Of every arm with a slim verifier; its gain is over the ``speculative`` arm with the same drafter, in its run."""
    points = []
    for report in reports:
        found = list(lines([report]))
        for line in found:
            blocks, cost = _value(line, "drafting_block_full_rate"), report.prediction.get((line.task, line.arm.arm))
            if line.arm.arm == BASELINE or cost is None or cost.slim_cost is None or blocks is None:
                continue
            two = _two_tiers(line, found)
            mine, theirs = _value(line, "speedup_decode"), None if two is None else _value(two, "speedup_decode")
            gain = None if mine is None or theirs is None else divide(mine, theirs)
            edge = None if two is None else _edge(line, two, cost.draft_cost or 0.0, cost.slim_cost)
            pair = f"{line.run.model}, {line.arm.drafter or DASH}"
            points.append(Point(line.arm.arm, line.task, cost.slim_cost, blocks, gain, True, pair, edge))
    return points


def _value(line: Line, metric: str) -> float | None:
    row = line.metrics.get(metric)
    return None if row is None else row.value


def _two_tiers(line: Line, found: Sequence[Line]) -> Line | None:
    for other in found:
        same = (other.task, other.arm.drafter) == (line.task, line.arm.drafter)
        if same and other.arm.method == "speculative":
            return other
    return None


def _edge(line: Line, two: Line, draft_cost: float, slim_cost: float) -> float | None:
    """By the tokens per block of both, and the drafts a block of the three-tier arm."""
    mine, theirs, drafted = (
        _value(line, "mean_accept_length"),
        _value(two, "mean_accept_length"),
        _value(line, "mean_drafted"),
    )
    if mine is None or not theirs or drafted is None:
        return None
    return break_even_at(mine / theirs, drafted, Costs(draft_cost, slim_cost))


def implied_points(found: pd.DataFrame) -> list[Point]:
    """Of the paper's three-tier rows with a rejection rate: X = tokens per block / speedup - gamma c - c'.

    ``found`` is what ``plausibility`` makes; tokens per block follow from 1 - rejection, with a bonus token.
    """
    table8 = found[found["source"] == "table8"]
    two = table8[table8["method"] == "speculative"].set_index(["pair", "task"])["at_rejection"].to_dict()
    points = []
    for row in table8[table8["method"] == "via_sd"].to_dict("records"):
        if pd.isna(row["at_rejection"]):
            continue
        cost = row["gamma"] * row["c"] + row["c_slim"]
        tokens = row["at_rejection"] * cost  # no full pass: all of the cost
        left = tokens / row["published"] - cost
        at = two.get((row["pair"], row["task"]))
        edge = None if at is None or pd.isna(at) else tokens / at - cost
        points.append(Point("via_sd", row["task"], row["c_slim"], left, None, False, row["pair"], edge))
    return points


def table(points: Sequence[Point]) -> pd.DataFrame:
    """A line a point, as text."""
    return pd.DataFrame(
        [
            {
                "pair": point.pair or DASH,
                "what": point.label,
                "task": point.task,
                "from": "our run" if point.measured else "the paper's values",
                "c'": f"{point.slim_cost:.2f}",
                "blocks escalating": f"{point.escalating:.2f}",
                "c' + X": f"{point.slim_cost + point.escalating:.2f}",
                "third tier by this rule": _said(point.escalating, break_even(point.slim_cost)),
                "edge at its tokens per block": DASH if point.edge is None else f"{point.edge:.2f}",
                "third tier by this edge": DASH if point.edge is None else _said(point.escalating, point.edge),
                "three tiers over two, measured": DASH if point.gain is None else f"{point.gain:.2f}",
            }
            for point in points
        ]
    )


def _said(escalating: float, edge: float) -> str:
    if escalating < 0:
        return "no X gives this"
    return "pays" if escalating < edge else "does not pay"


def agreement(points: Sequence[Point]) -> tuple[int, int, int]:
    """Points whose gain is measured, and for how many of them the rule and the edge say what was measured."""
    known = [(point, point.gain) for point in points if point.gain is not None and point.edge is not None]
    by_rule = sum((point.escalating < break_even(point.slim_cost)) == (gain > 1) for point, gain in known)
    by_edge = sum((point.escalating < (point.edge or 0.0)) == (gain > 1) for point, gain in known)
    return len(known), by_rule, by_edge


def page(points: Sequence[Point]) -> str:
    """The table with the rule it applies."""
    count, by_rule, by_edge = agreement(points)
    checked = (
        [f"Of {count} measured points the rule is right on {by_rule}, the edge on {by_edge}.", ""] if count else []
    )
    return "\n".join(
        (
            "# Where a third tier beats two",
            "",
            "By the rule that c' + X < 1, at equal tokens per block: c' is a slim pass in full passes over one token, "
            "X the share of drafting blocks with a full pass. The edge is the X at which both are equally fast with "
            "the tokens per block that each had. Ours are measured; a three-tier method is lossy and may end its "
            "outputs elsewhere. The paper's X is what its speedup leaves: tokens per block by its rejection, bonus "
            "token included, over its speedup, less gamma c and c'. No share of escalations is below 0.",
            "",
            *checked,
            markdown_table(table(points)),
            "",
        )
    )


KINDS = (
    ("our runs, three tiers faster than two", "#009E73", "o", True),
    ("our runs, three tiers slower", "#D55E00", "s", False),
    ("our runs, no two tiers beside them", "#999999", "D", False),
    ("implied by the paper's table 8", "#000000", "x", True),
)
"""Label, colour, marker, and whether it is filled, of each kind of point."""


def _kind(point: Point) -> str:
    if not point.measured:
        return KINDS[3][0]
    return KINDS[2 if point.gain is None else 0 if point.gain > 1 else 1][0]


def break_even_figure(points: Sequence[Point]) -> Figure:
    """The region, and every point; ours are filled where three tiers were the faster ones."""
    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(4.6, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        slim = np.linspace(0, 1, 2)
        lowest = min([0.0, *(point.escalating for point in points)])
        axes.fill_between(slim, 0, 1 - slim, color="#56B4E9", alpha=0.18, linewidth=0)
        if lowest < 0:
            axes.fill_between(slim, lowest * 1.05, 0, color="#999999", alpha=0.25, linewidth=0)
            axes.text(0.04, lowest, "no share of escalations is below 0", color="#555555", fontsize=8)
        axes.plot(slim, 1 - slim, **LEVEL)
        axes.text(0.04, 0.05, "a third tier pays", color="#00557F", fontsize=8)
        for label, shade, marker, filled in KINDS:
            if group := [point for point in points if _kind(point) == label]:
                axes.plot(
                    [point.slim_cost for point in group],
                    [point.escalating for point in group],
                    linestyle="",
                    marker=marker,
                    color=shade,
                    markerfacecolor=shade if filled else "white",
                    markersize=5,
                    label=f"{label} ({len(group)})",
                )
        axes.set_xlim(0, widest(points, 1.0))
        axes.set_ylim(min(-0.02, lowest * 1.05), 1.05)
        axes.set_xlabel("c' (slim pass / full pass)")
        axes.set_ylabel("X (share of blocks with a full pass)")
        figure.legend(loc="outside lower center", ncols=1)
    return figure


def widest(points: Sequence[Point], least: float) -> float:
    """End of the axis of c': no point is beyond it, where a slim pass takes longer than a full one either."""
    return max([least, *(1.05 * point.slim_cost for point in points)])


def pairs_figure(points: Sequence[Point]) -> Figure:
    """A panel a pair: its points, a colour for each task, and the task's edge, the mean over its arms, as a line.

    Below its line a third tier pays on that task; the shaded region is that of equal tokens per block.
    """
    pairs = list(dict.fromkeys(point.pair for point in points))
    tasks = list(dict.fromkeys(_set(point.task) for point in points))
    with matplotlib.style.context(STYLE):
        colour_of = {task: colour(1 + place) for place, task in enumerate(tasks)}
        columns = min(3, len(pairs))
        height = -(-len(pairs) // columns)
        figure = Figure(figsize=(PAGE_WIDTH / 3 * columns, 2.1 * height + 0.9), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(height, columns, squeeze=False, sharex=True).flatten()
        for axes, pair in zip(grid, pairs, strict=False):
            _pair_panel(axes, [point for point in points if point.pair == pair], colour_of)
            axes.set_title("\n".join(fill(part, 34) for part in pair.split(", ", 1)), fontsize=7.5)
        for axes in grid[len(pairs) :]:
            axes.set_axis_off()
        for place, axes in enumerate(grid[: len(pairs)]):
            axes.tick_params(labelbottom=place + columns >= len(pairs))
            if place + columns >= len(pairs):
                axes.set_xlabel("c'")
        for axes in grid[::columns]:
            axes.set_ylabel("X")
        grid[0].set_xlim(0, widest(points, 1.1))
        handles = [Line2D([], [], color=shade, label=task) for task, shade in colour_of.items()]
        marks = {KINDS[0][0]: True, KINDS[1][0]: False}
        handles += [
            Line2D([], [], linestyle="", marker="o", color="#555555", markerfacecolor=_face(filled), label=label)
            for label, filled in marks.items()
        ]
        handles.append(Line2D([], [], linestyle="", marker="x", color="#555555", label=KINDS[3][0]))
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=3,
            title="Lines: equally fast, at each one's tokens per block. Below: a third tier pays.",
            title_fontsize=8,
        )
    return figure


def _set(task: str) -> str:
    """The set's name here, where the paper has another."""
    return SETS.get(task, task)


def _face(filled: bool) -> str:
    return "#555555" if filled else "white"


def _pair_panel(axes: Axes, points: Sequence[Point], colour_of: dict[str, str]) -> None:
    slim = np.linspace(0, 1, 2)
    axes.fill_between(slim, 0, 1 - slim, color="#56B4E9", alpha=0.18, linewidth=0)
    axes.axhline(0, color="#777777", linewidth=0.6)
    axes.set_ylim(min([-0.05, *(point.escalating - 0.1 for point in points)]), 1.25)
    for task, shade in colour_of.items():
        mine = [point for point in points if _set(point.task) == task]
        sums = [point.slim_cost + point.edge for point in mine if point.edge is not None]
        if sums:
            axes.plot([0, 1.1], [fmean(sums), fmean(sums) - 1.1], color=shade, linewidth=0.9)
        for point in mine:
            filled = point.gain is not None and point.gain > 1
            axes.plot(
                point.slim_cost,
                point.escalating,
                linestyle="",
                marker="o" if point.measured else "x",
                markersize=4,
                color=shade,
                markerfacecolor=shade if filled else "white",
                zorder=3,
            )
