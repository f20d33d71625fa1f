"""Two figures of the roofline: speedups by context for pairs that do not fit here, and it beside measured forwards."""

from collections.abc import Sequence
from typing import Any

import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.report.figures import LEVEL, MARKERS, PAGE_WIDTH, STYLE, colour
from harness.report.scale import ScaleRow
from harness.roofline import Machine, Timed, errors

DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")


def scale_figure(rows: Sequence[ScaleRow]) -> Figure:
    """A panel a pair: predicted speedup over cached tokens, a colour for each arm, a line style for each machine."""
    pairs, machines = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("pair", "machine"))
    arms = {(row.run_id, row.arm): row for row in rows}
    several = len({row.run_id for row in rows}) > 1
    contexts = sorted({row.context for row in rows})
    with matplotlib.style.context(STYLE):
        columns = min(2, len(pairs))
        height = -(-len(pairs) // columns)
        legend_rows = -(-(len(arms) + len(machines)) // 4)
        figure = Figure(
            figsize=(PAGE_WIDTH / 2 * columns, 2.3 * height + 0.22 * legend_rows + 0.4), layout="constrained"
        )
        FigureCanvasAgg(figure)
        grid = figure.subplots(height, columns, squeeze=False, sharex=True, sharey=True).flatten()
        handles = []
        for place, (arm, known) in enumerate(arms.items()):
            name = f"{known.arm}, {known.run_id}" if several else known.arm
            shade = colour(1 + place)
            style: dict[str, Any] = {
                "color": shade,
                "marker": MARKERS[place % len(MARKERS)],
                "markersize": 4,
                "markerfacecolor": shade if known.lossless else "white",
            }
            handles.append(Line2D([], [], linestyle="", label=name if known.lossless else f"{name} (lossy)", **style))
            for axes, pair in zip(grid, pairs, strict=False):
                for dash, machine in enumerate(machines):
                    mine = [
                        row for row in rows if (row.run_id, row.arm, row.pair, row.machine) == (*arm, pair, machine)
                    ]
                    axes.plot(
                        [row.context for row in mine],
                        [row.speedup for row in mine],
                        linestyle=DASHES[dash % len(DASHES)],
                        linewidth=1.1,
                        **style,
                    )
        for axes, pair in zip(grid, pairs, strict=False):
            axes.axhline(1.0, **LEVEL)
            axes.set_title(pair)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(contexts))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("cached tokens")
        for axes in grid[len(pairs) :]:
            axes.set_axis_off()
        for axes in grid[::columns]:
            axes.set_ylabel("Predicted speedup")
        grid[0].set_ylim(bottom=0)
        handles += [
            Line2D([], [], color="#777777", linestyle=DASHES[place % len(DASHES)], label=machine)
            for place, machine in enumerate(machines)
        ]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=min(4, len(handles)),
            title="Roofline under measured traces; nothing here was measured.",
            title_fontsize=8,
        )
    return figure


def thousands(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def validation_figure(checks: Sequence[tuple[str, Machine, Sequence[Timed]]]) -> Figure:
    """A panel for each set of constants: predicted over measured milliseconds of a forward, a colour for each tier."""
    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(PAGE_WIDTH / 2 * len(checks), 3.7), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(checks), squeeze=False, sharex=True, sharey=True)[0]
        tiers = list(dict.fromkeys(one.tier for _, _, timed in checks for one in timed))
        for axes, (name, machine, timed) in zip(panels, checks, strict=True):
            found = errors(machine, timed)
            values = [
                (1e3 * one.seconds, 1e3 * one.seconds * (1 + error)) for one, error in zip(timed, found, strict=True)
            ]
            for place, tier in enumerate(tiers):
                mine = [value for value, one in zip(values, timed, strict=True) if one.tier == tier]
                axes.plot(
                    [measured for measured, _ in mine],
                    [predicted for _, predicted in mine],
                    linestyle="",
                    marker=MARKERS[place % len(MARKERS)],
                    color=colour(1 + place),
                    markersize=4,
                    label=tier,
                )
            ends = [min(min(pair) for pair in values) / 1.3, 1.3 * max(max(pair) for pair in values)]
            axes.plot(ends, ends, **LEVEL)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_title(f"Constants: {name}")
            axes.set_xlabel("Measured, ms a forward")
        panels[0].set_ylabel("Roofline, ms a forward")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)))
    return figure
