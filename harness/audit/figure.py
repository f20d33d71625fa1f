"""The figure of an audit: share of wrong tokens by confidence, place and position, and what prompts lost."""

from collections.abc import Sequence

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness.audit.records import GROUPS, SLIM, AuditedOutput, Share, natural, shares
from harness.report.figures import PAGE_WIDTH, STYLE, small_look

PANELS = tuple(name for name in GROUPS if name not in ("all", "route", SLIM))
"""Groups with a panel each; routes and slim verifiers are told apart in the table."""


def audit_figure(outputs: Sequence[AuditedOutput]) -> Figure:
    """A line for each task and arm; in the last panel a point for each prompt with wrong tokens."""
    found = shares(outputs)
    cells = list(dict.fromkeys((output.task, output.arm) for output in outputs))
    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH, 5.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 2).flatten()
        for panel, by in zip(axes, PANELS, strict=False):
            share_panel(panel, [one for one in found if one.by == by], by, cells)
        loss_panel(axes[-1], outputs, cells)
        handles, labels = axes[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)))
    return figure


def share_panel(axes: Axes, found: Sequence[Share], by: str, cells: Sequence[tuple[str, str]]) -> None:
    """Wrong / decided for each value; a value without tokens has no point."""
    values = sorted({one.value for one in found}, key=natural)
    for index, cell in enumerate(cells):
        mine = [one for one in found if (one.task, one.arm) == cell and one.share is not None]
        points = [values.index(one.value) for one in mine]
        axes.plot(points, [one.share or 0.0 for one in mine], label=", ".join(cell), **small_look(index))
    step = max(1, -(-len(values) // 8))
    axes.set_xticks(range(0, len(values), step), values[::step], rotation=30, ha="right", fontsize=7)
    axes.set_ylim(0, 1.08 * max([one.share or 0.0 for one in found], default=0.0) or 1.0)
    axes.set_ylabel("wrong / decided by slim")
    axes.set_title(f"By {by}")


def loss_panel(axes: Axes, outputs: Sequence[AuditedOutput], cells: Sequence[tuple[str, str]]) -> None:
    """Score change against the largest gap of the prompt."""
    axes.axhline(0.0, color="#777777", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    for index, cell in enumerate(cells):
        mine = [
            (output.largest_gap, change)
            for output in outputs
            if (output.task, output.arm) == cell and output.wrong and (change := output.score_change) is not None
        ]
        style = small_look(index) | {"linestyle": ""}
        axes.plot([gap for gap, _ in mine], [change for _, change in mine], **style)
    axes.set_xlabel("largest gap of a wrong token (nats)")
    axes.set_ylabel("score - baseline's")
    axes.set_title("Prompts with wrong tokens")
