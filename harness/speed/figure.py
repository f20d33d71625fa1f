"""The figure of a speed measurement: times by shape above; share of the limit, ratios and comparisons below."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.report.figures import PAGE_WIDTH, STYLE, save, small_look
from harness.report.scale_figure import thousands
from harness.speed.numbers import RATIOS
from harness.speed.records import SpeedRecord, SpeedRow

DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")


def speed_figure(record: SpeedRecord, rows: Sequence[SpeedRow]) -> Figure:
    """Bars are 95 % intervals. A tier has the same colour and marker everywhere."""
    contexts = sorted({one.context for one in record.forwards})
    with matplotlib.style.context(STYLE):
        looks = {tier: small_look(index) for index, tier in enumerate(record.tiers)}
        figure = Figure(figsize=(PAGE_WIDTH, 5.2), layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
        if contexts:
            axes = above.subplots(1, len(contexts), squeeze=False, sharey=True)[0]
            for place, context in zip(axes, contexts, strict=True):
                times = [row for row in rows if row.metric == "forward_ms" and row.context == context]
                by_block(place, times, looks)
                place.set_title(f"{context} cached tokens")
            axes[0].set_ylim(bottom=0)
            axes[0].set_ylabel("ms a forward")
            axes[0].legend(loc="upper left")
        shares, ratios, pairs = below.subplots(1, 3)
        share_panel(shares, rows, looks)
        ratio_panel(ratios, rows, looks)
        comparison_panel(pairs, rows)
    return figure


def bars(rows: Sequence[SpeedRow]) -> list[list[float]]:
    """Distances from the values down and up to their intervals' ends; 0 where there is none."""
    found = [(row.value or 0.0, row.low, row.high) for row in rows]
    return [
        [0.0 if low is None else value - low for value, low, _ in found],
        [0.0 if high is None else high - value for value, _, high in found],
    ]


def line(axes: Axes, x: Sequence[int], rows: Sequence[SpeedRow], label: str, **looks: Any) -> None:
    values = [row.value for row in rows if row.value is not None]  # all of them: callers left the others out
    axes.errorbar(x, values, yerr=bars(rows), label=label, linewidth=1.2, capsize=2, **looks)


def powers(axes: Axes, ticks: Sequence[int], label: str) -> None:
    """Sizes on a scale of doublings, each with its own tick."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(ticks))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))
    axes.set_xlabel(label)


def by_block(axes: Axes, rows: Sequence[SpeedRow], looks: Mapping[str, dict[str, Any]]) -> None:
    """A line for each tier."""
    for tier, style in looks.items():
        mine = [row for row in rows if row.name == tier and row.value is not None]
        if mine:
            line(axes, [row.block or 0 for row in mine], mine, tier, **style)
    powers(axes, [row.block for row in rows if row.block], "tokens in the block")


def share_panel(axes: Axes, rows: Sequence[SpeedRow], looks: Mapping[str, dict[str, Any]]) -> None:
    """How near forwards of the smallest block come to the limit, by context."""
    shares = [row for row in rows if row.metric == "bandwidth_share" and row.block and row.value is not None]
    smallest = min((row.block for row in shares if row.block), default=1)
    for tier, style in looks.items():
        mine = [row for row in shares if row.name == tier and row.block == smallest]
        if mine:
            line(axes, [row.context or 0 for row in mine], mine, tier, **style)
    powers(axes, [row.context for row in shares if row.context], "cached tokens")
    axes.axhline(1.0, color="#777777", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    axes.set_ylim(bottom=0)
    axes.set_title(f"Share of the limit, block of {smallest}")


def ratio_panel(axes: Axes, rows: Sequence[SpeedRow], looks: Mapping[str, dict[str, Any]]) -> None:
    """c and c' by block size, in the colours of the tiers above the line; a line style for each context."""
    ratios = [row for row in rows if row.metric == "time_ratio" and row.value is not None]
    styles = dict(zip(sorted({row.context for row in ratios if row.context}), cycle(DASHES)))
    names = {name: looks[RATIOS[name][0]] for name in dict.fromkeys(row.name for row in ratios)}
    for name, style in names.items():
        for context, dashes in styles.items():
            mine = [row for row in ratios if (row.name, row.context) == (name, context)]
            line(axes, [row.block or 0 for row in mine], mine, name, linestyle=dashes, **style)
    powers(axes, [row.block for row in ratios if row.block], "tokens in the block")
    axes.set_ylim(0, 1.6 * axes.get_ylim()[1])
    axes.set_title("Time beside the full tier")
    marks = [Line2D([], [], label=f"{name} ({RATIOS[name][0]})", **style) for name, style in names.items()]
    marks += [Line2D([], [], color="#777777", linestyle=dashes, label=str(n)) for n, dashes in styles.items()]
    if marks:
        axes.legend(handles=marks, ncols=2, fontsize=7, columnspacing=1.0, loc="upper left")


def comparison_panel(axes: Axes, rows: Sequence[SpeedRow]) -> None:
    """Decode speedup of ours over transformers' own, those not measured named as such."""
    speedups = [row for row in rows if row.metric == "speedup_decode"]
    for place, row in enumerate(speedups):
        if row.value is None:
            axes.annotate("not measured", (0.02, place), xycoords=("axes fraction", "data"), fontsize=7, va="center")
        else:
            axes.errorbar(row.value, place, xerr=[[side[0]] for side in bars([row])], capsize=2.5, **small_look(0))
    axes.axvline(1.0, color="#777777", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    axes.set_yticks(range(len(speedups)), [row.name for row in speedups])
    axes.set_ylim(len(speedups) - 0.5, -0.5)
    axes.set_xlim(0, 1.1 * max([1.0, *(row.high or row.value or 0 for row in speedups)]))
    axes.set_xlabel("speed, ours / transformers")
    axes.set_title("Decoding, interleaved")


def write_figure(record: SpeedRecord, rows: Sequence[SpeedRow], folder: Path, name: str) -> list[Path]:
    """``<name>.png`` and ``<name>.pdf``."""
    return save(speed_figure(record, rows), folder, name)
