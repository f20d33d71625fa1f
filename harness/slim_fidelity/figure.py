"""The figure of a fidelity measurement: agreement and step cost by skip ratio, agreement by place in the block."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from harness.report.figures import PAGE_WIDTH, STYLE, save, small_look
from harness.slim_fidelity.records import SlimFidelityRecord, SlimFidelityRow

DASHES: dict[str, Any] = {"shared": "-", "own": "--"}


def fidelity_figure(record: SlimFidelityRecord, rows: Sequence[SlimFidelityRow]) -> Figure:
    """A colour and marker for each source, a line style for each cache mode (own is hollow); bars are 95 %."""
    with matplotlib.style.context(STYLE):
        looks = {kind: small_look(index) for index, kind in enumerate(dict.fromkeys(one.kind for one in rows))}
        figure = Figure(figsize=(PAGE_WIDTH, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        agreement, cost, place = figure.subplots(1, 3)
        by_ratio(agreement, rows, "agreement", looks)
        agreement.set_ylabel("Top-1 agreement")
        agreement.set_ylim(-0.03, 1.03)
        by_ratio(cost, rows, "cost_full_slim", looks)
        cost.set_ylabel("Step cost R (nats)")
        cost.set_ylim(bottom=0)
        by_place(place, rows, looks)
        handles = [Line2D([], [], label=kind, linestyle="", **style) for kind, style in looks.items()]
        caches = [cache for cache in DASHES if any(one.cache == cache for one in rows)]
        handles += [Line2D([], [], color="#777777", linestyle=DASHES[cache], label=cache) for cache in caches]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)))
    return figure


def drawn(
    axes: Axes, x: Sequence[float], rows: Sequence[SlimFidelityRow], cache: str, style: Mapping[str, Any]
) -> None:
    values = [row.value or 0.0 for row in rows]
    spans = [(value, row.low, row.high) for value, row in zip(values, rows, strict=True)]
    bars = [
        [0.0 if low is None else max(0.0, value - low) for value, low, _ in spans],
        [0.0 if high is None else max(0.0, high - value) for value, _, high in spans],
    ]
    axes.errorbar(
        x,
        values,
        yerr=bars,
        linewidth=1.2,
        capsize=2,
        elinewidth=0.8,
        linestyle=DASHES[cache],
        markerfacecolor=face(style["color"], cache),
        **style,
    )


def by_ratio(axes: Axes, rows: Sequence[SlimFidelityRow], metric: str, looks: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for each source and cache mode. Another model skips nothing and stands at 0."""
    for kind, style in looks.items():
        for cache in DASHES:
            mine = [one for one in rows if (one.metric, one.place, one.kind, one.cache) == (metric, None, kind, cache)]
            mine = sorted((one for one in mine if one.value is not None), key=lambda one: one.skip_ratio or 0.0)
            if mine:
                drawn(axes, [one.skip_ratio or 0.0 for one in mine], mine, cache, style)
    axes.set_xlabel("share of the model skipped")


def by_place(axes: Axes, rows: Sequence[SlimFidelityRow], looks: Mapping[str, Mapping[str, Any]]) -> None:
    """Of each source and cache mode the one that skips most."""
    placed = [one for one in rows if one.metric == "agreement" and one.place is not None and one.value is not None]
    for kind, style in looks.items():
        for cache in DASHES:
            mine = [one for one in placed if (one.kind, one.cache) == (kind, cache)]
            most = max((one.skip_ratio or 0.0 for one in mine), default=0.0)
            mine = sorted((one for one in mine if (one.skip_ratio or 0.0) == most), key=lambda one: one.place or 0)
            if mine:
                drawn(axes, [one.place or 0 for one in mine], mine, cache, style)
    axes.set_xlabel("place in the block")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("Top-1 agreement")
    axes.set_ylim(-0.03, 1.03)
    axes.set_title("largest ratio of each")


def gain_figure(rows: Sequence[SlimFidelityRow]) -> Figure:
    """Delta against the measured gain: the paper expects every point in one of the two shaded quarters."""
    with matplotlib.style.context(STYLE):
        looks = {kind: small_look(index) for index, kind in enumerate(dict.fromkeys(one.kind for one in rows))}
        figure = Figure(figsize=(5.2, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        found = {(one.slim, one.metric): one for one in rows if one.place is None}
        timed = [one for one in found.values() if one.metric == "third_tier_speedup"]
        for faster in timed:
            point(axes, found[faster.slim, "gain"], faster, looks[faster.kind])
        axes.axhline(1.0, color="#777777", linewidth=0.8)
        axes.axvline(0.0, color="#777777", linewidth=0.8)
        shade(axes)
        axes.set_xlabel("Delta (nats a position)")
        axes.set_ylabel("via_sd / speculative, tokens per s (lossy)")
        kinds = dict.fromkeys(one.kind for one in timed)
        handles = [Line2D([], [], label=kind, linestyle="", **looks[kind]) for kind in kinds]
        for cache in (cache for cache in DASHES if any(one.cache == cache for one in timed)):
            grey: dict[str, Any] = {"color": "#777777", "marker": "o", "markersize": 4, "linestyle": ""}
            handles.append(Line2D([], [], label=cache, markerfacecolor=face("#777777", cache), **grey))
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, max(1, len(handles))))
    return figure


def face(colour: str, cache: str) -> str:
    """Filled where the cache is shared, hollow where it is the slim verifier's own."""
    return colour if cache == "shared" else "white"


def point(axes: Axes, delta: SlimFidelityRow, faster: SlimFidelityRow, style: Mapping[str, Any]) -> None:
    """One slim verifier with both its intervals and the share it skips."""
    if delta.value is None or faster.value is None:
        return
    bars = [
        [[0.0 if row.low is None else max(0.0, at - row.low)], [0.0 if row.high is None else max(0.0, row.high - at)]]
        for row, at in ((delta, delta.value), (faster, faster.value))
    ]
    where = (delta.value, faster.value)
    filled = face(style["color"], faster.cache)
    axes.errorbar(*where, xerr=bars[0], yerr=bars[1], elinewidth=0.6, markerfacecolor=filled, **style)
    if faster.skip_ratio is not None:
        label = f"{faster.skip_ratio:.2f}".removeprefix("0")
        axes.annotate(label, where, xytext=(3, 3), textcoords="offset points", fontsize=6)


def shade(axes: Axes) -> None:
    """The quarters in which the signs agree."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    grey: dict[str, Any] = {"color": "#DDDDDD", "alpha": 0.5, "linewidth": 0, "zorder": 0}
    axes.fill_between([0.0, max(right, 0.0)], 1.0, max(high, 1.0), **grey)
    axes.fill_between([min(left, 0.0), 0.0], min(low, 1.0), 1.0, **grey)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)


def write_figure(record: SlimFidelityRecord, rows: Sequence[SlimFidelityRow], folder: Path, name: str) -> list[Path]:
    """Draw and write ``<name>.png`` and ``.pdf``; and ``<name>_gain`` where gains were measured."""
    written = save(fidelity_figure(record, rows), folder, name)
    return written + (save(gain_figure(rows), folder, f"{name}_gain") if record.timed else [])
