"""Where a third tier beats two: below c' + X = 1, c' a slim pass in full ones and X the share of blocks that escalate.

With equal tokens per block the drafter's cost cancels (``harness.cost.break_even``). A three-tier method that keeps
more drafts has more tokens per block and may pay a little above the line; by how much it paid is shown beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness.compare import BASELINE, divide
from harness.cost import break_even
from harness.report.figures import STYLE
from harness.report.tables import DASH, Line, RunReport, lines


@dataclass(frozen=True, slots=True)
class Point:
    """``slim_cost`` is c'; ``escalating`` X; ``gain`` the speed of three tiers over that of two, None if not known.

    ``escalating`` below 0 is no share: then the published speedup is above what its rejection allows.
    """

    label: str
    task: str
    slim_cost: float
    escalating: float
    gain: float | None
    measured: bool


def measured_points(reports: Sequence[RunReport]) -> list[Point]:
    """Of every arm with a slim verifier; its gain is over the ``speculative`` arm with the same drafter, in its run."""
    found = list(lines(reports))
    points = []
    for line in found:
        slim, full = _value(line, "slim_pass_ms"), _full_ms(line, found)
        blocks = _value(line, "drafting_block_full_rate")
        if not _value(line, "slim_rate") or slim is None or full is None or blocks is None:
            continue
        mine, theirs = _value(line, "speedup_decode"), _two_tiers(line, found)
        gain = None if mine is None or theirs is None else divide(mine, theirs)
        points.append(Point(line.arm.arm, line.task, slim / full, blocks, gain, measured=True))
    return points


def _value(line: Line, metric: str) -> float | None:
    row = line.metrics.get(metric)
    return None if row is None else row.value


def _full_ms(line: Line, found: Sequence[Line]) -> float | None:
    """Milliseconds of a full pass over one token: the baseline's, on the same task of the same run."""
    for other in found:
        if (other.run.run_id, other.task, other.arm.arm) == (line.run.run_id, line.task, BASELINE):
            return _value(other, "full_pass_ms")
    return None


def _two_tiers(line: Line, found: Sequence[Line]) -> float | None:
    for other in found:
        same = (other.run.run_id, other.task, other.arm.drafter) == (line.run.run_id, line.task, line.arm.drafter)
        if same and other.arm.method == "speculative":
            return _value(other, "speedup_decode")
    return None


def implied_points(found: pd.DataFrame) -> list[Point]:
    """Of the paper's three-tier rows with a rejection rate: X = tokens per block / speedup - gamma c - c'.

    ``found`` is what ``plausibility`` makes; tokens per block follow from 1 - rejection, with a bonus token.
    """
    points = []
    for row in found[(found["source"] == "table8") & (found["method"] == "via_sd")].to_dict("records"):
        if pd.isna(row["at_rejection"]):
            continue
        cost = row["gamma"] * row["c"] + row["c_slim"]
        tokens = row["at_rejection"] * cost  # no full pass: all of the cost
        left = tokens / row["published"] - cost
        points.append(Point(row["pair"], row["task"], row["c_slim"], left, None, measured=False))
    return points


def table(points: Sequence[Point]) -> pd.DataFrame:
    """A line a point, as text."""
    return pd.DataFrame(
        [
            {
                "what": point.label,
                "task": point.task,
                "from": "our run" if point.measured else "the paper's values",
                "c'": f"{point.slim_cost:.2f}",
                "blocks escalating": f"{point.escalating:.2f}",
                "c' + X": f"{point.slim_cost + point.escalating:.2f}",
                "third tier by this rule": _said(point),
                "three tiers over two, measured": DASH if point.gain is None else f"{point.gain:.2f}",
            }
            for point in points
        ]
    )


def _said(point: Point) -> str:
    if point.escalating < 0:
        return "no X gives this"
    return "pays" if point.escalating < break_even(point.slim_cost) else "does not pay"


def page(points: Sequence[Point]) -> str:
    """The table with the rule it applies."""
    return "\n".join(
        (
            "# Where a third tier beats two",
            "",
            "By the rule that c' + X < 1, at equal tokens per block: c' is a slim pass in full passes over one token, "
            "X the share of drafting blocks with a full pass. Ours are measured; a three-tier method is lossy and may "
            "end its outputs elsewhere. The paper's X is what its speedup leaves: tokens per block by its rejection, "
            "bonus token included, over its speedup, less gamma c and c'. No share of escalations is below 0.",
            "",
            table(points).to_markdown(index=False, disable_numparse=True),
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
        axes.plot(slim, 1 - slim, color="#777777", linewidth=0.9, linestyle=(0, (4, 3)))
        axes.text(0.04, 0.05, "a third tier pays", color="#00557F", fontsize=8)
        for label, colour, marker, filled in KINDS:
            if group := [point for point in points if _kind(point) == label]:
                axes.plot(
                    [point.slim_cost for point in group],
                    [point.escalating for point in group],
                    linestyle="",
                    marker=marker,
                    color=colour,
                    markerfacecolor=colour if filled else "white",
                    markersize=5,
                    label=f"{label} ({len(group)})",
                )
        axes.set_xlim(0, 1)
        axes.set_ylim(min(-0.02, lowest * 1.05), 1.05)
        axes.set_xlabel("c' (slim pass / full pass)")
        axes.set_ylabel("X (share of blocks with a full pass)")
        figure.legend(loc="outside lower center", ncols=1)
    return figure
