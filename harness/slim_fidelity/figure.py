"""The figure of a fidelity measurement: agreement and step cost by skip ratio, agreement by place in the block."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.figures import MARKERS, STYLE, save
from harness.slim_fidelity.records import FidelityRecord, FidelityRow

DASHES: dict[str, Any] = {"shared": "-", "own": "--"}


def fidelity_figure(record: FidelityRecord, rows: Sequence[FidelityRow]) -> Figure:
    """A colour and marker for each source of slim verifiers, a line style for each cache mode; bars are 95 %."""
    with matplotlib.style.context(STYLE):
        looks = {kind: look(index) for index, kind in enumerate(dict.fromkeys(one.kind for one in rows))}
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        agreement, cost, place = figure.subplots(1, 3)
        by_ratio(agreement, rows, "agreement", looks)
        agreement.set_ylabel("Top-1 agreement")
        agreement.set_ylim(0, 1)
        by_ratio(cost, rows, "cost_full_slim", looks)
        cost.set_ylabel("Step cost R (nats)")
        cost.set_ylim(bottom=0)
        by_place(place, rows, looks)
        handles = [Line2D([], [], label=kind, linestyle="", **style) for kind, style in looks.items()]
        caches = [cache for cache in DASHES if any(one.cache == cache for one in rows)]
        handles += [Line2D([], [], color="#777777", linestyle=DASHES[cache], label=cache) for cache in caches]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)))
    return figure


def look(index: int) -> dict[str, Any]:
    colours = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    colour = f"#{colours[index % len(colours)].lstrip('#')}"
    return {"color": colour, "marker": MARKERS[index % len(MARKERS)], "markersize": 4}


def drawn(axes: Axes, x: Sequence[float], rows: Sequence[FidelityRow], cache: str, style: Mapping[str, Any]) -> None:
    values = [row.value or 0.0 for row in rows]
    spans = [(value, row.low, row.high) for value, row in zip(values, rows, strict=True)]
    bars = [
        [0.0 if low is None else max(0.0, value - low) for value, low, _ in spans],
        [0.0 if high is None else max(0.0, high - value) for value, _, high in spans],
    ]
    axes.errorbar(x, values, yerr=bars, linewidth=1.2, capsize=2, elinewidth=0.8, linestyle=DASHES[cache], **style)


def by_ratio(axes: Axes, rows: Sequence[FidelityRow], metric: str, looks: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for each source and cache mode. Another model skips nothing and stands at 0."""
    for kind, style in looks.items():
        for cache in DASHES:
            mine = [one for one in rows if (one.metric, one.place, one.kind, one.cache) == (metric, None, kind, cache)]
            mine = sorted((one for one in mine if one.value is not None), key=lambda one: one.skip_ratio or 0.0)
            if mine:
                drawn(axes, [one.skip_ratio or 0.0 for one in mine], mine, cache, style)
    axes.set_xlabel("share of the model skipped")


def by_place(axes: Axes, rows: Sequence[FidelityRow], looks: Mapping[str, Mapping[str, Any]]) -> None:
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
    axes.set_ylabel("Top-1 agreement")
    axes.set_ylim(0, 1)
    axes.set_title("largest ratio of each")


def write_figure(record: FidelityRecord, rows: Sequence[FidelityRow], folder: Path, name: str) -> list[Path]:
    """Draw and write ``<name>.png`` and ``<name>.pdf``."""
    return save(fidelity_figure(record, rows), folder, name)
