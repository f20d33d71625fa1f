"""One table and one figure over the cells of a sweep: every arm on every task at every swept value."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness import sweeps
from harness.compare import BASELINE
from harness.errors import UserError, unknown
from harness.metrics import DIFFERENCE
from harness.report.figures import LEVEL, MARKERS, STYLE, colour, save
from harness.report.predicted import CEILING, PREDICTED, REMARK, unpredicted
from harness.report.swept import identity, swept_values, unswept_arms
from harness.report.tables import DASH, Line, RunReport, lines, markdown_table
from harness.store import RUN, is_finished, read_config, read_run, write_atomic, writing

RATES = ("mean_accept_length", "reject_rate", "full_rate", "block_full_rate")
INTERVALS = ("speedup_decode", "speedup_end_to_end", "token_agreement", *RATES)
"""Metrics of the table, with their intervals in the CSV."""


@dataclass(frozen=True)
class Cell:
    """A run of a sweep with the values it was swept to."""

    report: RunReport
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The hash of everything that can change its numbers; of a run from before there was one, its id."""
        return self.report.run.cell or self.report.run.run_id


def write_sweep(results_dir: str | Path, reports: Sequence[RunReport | None], name: str) -> list[Path]:
    """Write ``tables/<name>_sweep.md`` and ``.csv`` and ``figures/<name>_sweep.*``; return their paths.

    ``reports``: the cells, finished or not; None for one without a prompt that all its arms decoded: it is left out,
    and the table says how many are.

    Raises:
        UserError: no cell has a prompt, or a folder cannot be written.
    """
    loaded = [found for found in reports if found is not None]
    if not loaded:
        raise UserError(f"sweep {name!r}: none of its {len(reports)} cells has a prompt that all arms decoded.")
    values = swept_values([report.settings for report in loaded])
    cells = [Cell(report, value) for report, value in zip(loaded, values, strict=True)]
    cells.sort(key=lambda cell: [order(value) for value in cell.values.values()])
    tables, figures = Path(results_dir) / "tables", Path(results_dir) / "figures"
    files = {
        tables / f"{name}_sweep.md": markdown(cells, name, len(reports) - len(loaded)),
        tables / f"{name}_sweep.csv": tidy_frame(cells).to_csv(index=False, lineterminator="\n"),
    }
    with writing(tables):
        for path, text in files.items():
            write_atomic(path, text)
        return [*files, *save(sweep_figure(cells), figures, f"{name}_sweep")]


def cells_of_sweep(results_dir: str | Path, name: str) -> list[Path]:
    """``named_cells`` of a sweep that there is.

    Raises:
        UserError: there is none, or a run folder cannot be read.
    """
    cells, known = named_cells(results_dir, name)
    if not cells:
        raise unknown("sweep", name, known)
    return cells


def named_cells(results_dir: str | Path, name: str) -> tuple[list[Path], set[str]]:
    """The run folders of the sweep ``name``, by its experiment's ``name`` or its own id; and the names of all sweeps.

    Of runs with the same settings, by whatever code, the newest counts; one that is finished goes before a newer one
    that is not.

    Raises:
        UserError: a run folder cannot be read.
    """
    root = Path(results_dir) / "runs"
    listed, known = runs_of_sweeps(results_dir, name)
    newest: dict[str, tuple[tuple[bool, str], Path]] = {}
    for path in sorted(root.glob(f"*/{RUN}")):
        folder, config = path.parent, read_config(path.parent)
        run = read_run(folder)
        names = {str(config.get("name")), str(run.sweep)} - {"None"}
        known |= names
        if name not in names and folder.name not in listed:
            continue
        same = repr(identity(config))
        rank = (is_finished(folder), run.run_id)
        if same not in newest or rank > newest[same][0]:
            newest[same] = rank, folder
    return [folder for _, folder in newest.values()], known


def overrides_of_cells(results_dir: str | Path) -> dict[str, str]:
    """By id of the run that a cell of some sweep has come to, what of its overrides not all cells of that have."""
    found: dict[str, str] = {}
    for path in sorted((Path(results_dir) / sweeps.FOLDER).glob(f"*/{sweeps.SWEEP}")):
        every = sweeps.read_sweep(path.parent).overrides
        cells = sweeps.read_cells(path.parent)
        found |= {cell.run_id: sweeps.told_apart(cell.overrides, every) for cell in cells if cell.run_id}
    return found


def runs_of_sweeps(results_dir: str | Path, name: str) -> tuple[set[str], set[str]]:
    """Ids of the runs that cells of the sweep ``name`` came to, whoever measured them; and the names of all sweeps."""
    found: set[str] = set()
    known: set[str] = set()
    for path in (Path(results_dir) / sweeps.FOLDER).glob(f"*/{sweeps.SWEEP}"):
        record = sweeps.read_sweep(path.parent)
        names = {record.name, record.sweep}
        known |= names
        if name in names:
            cells = sweeps.read_cells(path.parent)
            found |= {cell.run_id for cell in cells if cell.run_id and cell.state in ("finished", "skipped")}
    return found, known


def order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then texts."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, str(value))


def tidy_frame(cells: Sequence[Cell]) -> pd.DataFrame:
    """One line for each cell, task and arm, numbers in full; empty where undefined."""
    found: list[dict[str, Any]] = []
    for cell in cells:
        for line in lines([cell.report]):
            primary = line.run.task_metrics[line.task][0]
            row: dict[str, Any] = {
                "cell": cell.name,
                **cell.values,
                "task": line.task,
                "arm": line.arm.arm,
                "n": line.n,
            }
            row["lossless"] = line.arm.lossless
            row["quality_metric"] = primary
            for column, metric in {
                "quality": primary,
                "quality_difference": primary + DIFFERENCE,
                **{one: one for one in INTERVALS},
            }.items():
                number = line.metrics.get(metric)
                row |= {
                    column: number and number.value,
                    f"{column}_low": number and number.low,
                    f"{column}_high": number and number.high,
                }
            foretold = cell.report.prediction.get((line.task, line.arm.arm))
            row |= {PREDICTED: foretold and foretold.predicted, CEILING: foretold and foretold.ceiling}
            found.append(row | {"run": line.run.run_id, "status": line.run.status, "pairing": line.run.pairing})
    return pd.DataFrame(found)


def results_frame(cells: Sequence[Cell]) -> pd.DataFrame:
    """The same for reading: tasks apart, in each task the arms by swept value; rounded."""
    found = []
    for cell in cells:
        for line in lines([cell.report]):
            found.append(
                {
                    "task": line.task,
                    "arm": line.arm.arm,
                    **{key: str(value) for key, value in cell.values.items()},
                    "n": str(line.n) + (" (did not finish)" if cell.report.note else ""),
                    "lossless": "yes" if line.arm.lossless else "**lossy**",
                    "speedup, decode": line.speedup("speedup_decode"),
                    **line.foretold(),
                    "quality": line.quality(line.run.task_metrics[line.task][:1], interval=True),
                    "difference": difference(line),
                    "agreement with greedy": line.value("token_agreement"),
                    **{rate: line.value(rate) for rate in RATES},
                    "cell": cell.name,
                }
            )
    tasks = list(dict.fromkeys(row["task"] for row in found))
    found.sort(key=lambda row: tasks.index(row["task"]))
    return pd.DataFrame(found)


def difference(line: Line) -> str:
    """Quality minus the baseline's, with its interval."""
    if line.arm.arm == BASELINE:
        return DASH
    row = line.metrics.get(line.run.task_metrics[line.task][0] + DIFFERENCE)
    if row is None or row.value is None:
        return DASH
    return f"{row.value:+.1f}" + ("" if row.low is None or row.high is None else f" [{row.low:+.1f}, {row.high:+.1f}]")


def markdown(cells: Sequence[Cell], name: str, left_out: int) -> str:
    swept = ", ".join(f"`{key}`" for key in cells[0].values) or "nothing: there is one cell"
    unfinished = sum(bool(cell.report.note) for cell in cells)
    first = cells[0].report
    facts = [
        f"{len(cells)} cells; swept: {swept}.",
        f"model {first.run.model}; machine: {first.run.env.get('cpu', DASH)}, {first.run.env.get('device', DASH)}; "
        f"commits {', '.join(sorted({(cell.report.run.git_commit or DASH)[:12] for cell in cells}))}.",
        *dict.fromkeys(remark for cell in cells for remark in cell.report.remarks),
        "Each speedup is over the baseline of the same cell, unless it says unpaired. Brackets: 95 % bootstrap over "
        "prompts. Quality on a 0-100 scale, its difference from the baseline paired. A lossy arm's speed is worth what "
        "its quality is.",
        REMARK,
        *unpredicted([one for cell in cells for one in cell.report.predicted]),
    ]
    if left_out:
        facts.append(f"**{left_out} cells are left out: no prompt of theirs was decoded by all arms.**")
    if unfinished:
        facts.append(f"**{unfinished} cells did not finish: only prompts decoded by all arms are used.**")
    return (
        "\n\n".join([f"# Sweep {name}", "\n".join(f"- {fact}" for fact in facts), markdown_table(results_frame(cells))])
        + "\n"
    )


# The figure.


@dataclass(frozen=True)
class Mark:
    x: float
    y: float
    low: float | None
    high: float | None


def sweep_figure(cells: Sequence[Cell]) -> Figure:
    """Decode speedup against the swept value, a panel a task; one line for each arm and value of the other settings.

    The setting with the most values is the x axis. An arm that the sweep did not change is drawn without a line: its
    marks differ by measurement alone. Lossy arms are hollow.
    """
    keys = list(cells[0].values)
    axis = max(keys, key=lambda key: len({repr(cell.values[key]) for cell in cells}), default="")
    ticks = sorted({cell.values.get(axis, "one cell") for cell in cells}, key=order)
    numeric = all(order(tick)[0] == 0 for tick in ticks)
    found = [(cell, line) for cell in cells for line in lines([cell.report]) if line.arm.arm != BASELINE]
    fixed = unswept_arms([cell.report.settings for cell in cells])
    series: dict[str, tuple[bool, bool]] = {}
    panels: dict[str, dict[str, list[Mark]]] = {}
    counts: dict[str, int] = {}
    for cell, line in found:
        label = series_label(cell, line, axis, line.arm.arm in fixed)
        series[label] = line.arm.lossless, line.arm.arm in fixed
        speed = line.metrics["speedup_decode"]
        place = cell.values.get(axis, "one cell")
        marks = panels.setdefault(line.task, {}).setdefault(label, [])
        counts[line.task] = max(counts.get(line.task, 0), line.n)
        if speed.value is not None:
            marks.append(Mark(float(place) if numeric else ticks.index(place), speed.value, speed.low, speed.high))
    with matplotlib.style.context(STYLE):
        looks = {label: look(index, *kind) for index, (label, kind) in enumerate(series.items(), 1)}
        columns = 2 if len(panels) == 4 else min(3, len(panels))
        height = -(-len(panels) // columns)
        figure = Figure(
            figsize=(max(3.2 * columns, 5.0), 2.4 * height + 0.22 * len(looks) / 2 + 0.5), layout="constrained"
        )
        FigureCanvasAgg(figure)
        grid = figure.subplots(height, columns, squeeze=False, sharex=True).flatten()
        for panel, (task, lines_of) in zip(grid, panels.items(), strict=False):
            draw(panel, lines_of, looks, span(ticks, numeric))
            panel.set_title(f"{task} (n = {counts[task]} a cell)")
            panel.tick_params(labelbottom=True)
            panel.set_xticks([float(tick) if numeric else index for index, tick in enumerate(ticks)], map(str, ticks))
            if not numeric:
                panel.tick_params(axis="x", rotation=20)
            panel.set_xlabel(axis)
        for panel in grid[len(panels) :]:
            panel.set_axis_off()
        for panel in grid[::columns]:
            panel.set_ylabel("Decode speedup")
        handles = [Line2D([], [], label=label, **style) for label, style in looks.items()]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=max(
                1, min(len(handles), int(figure.get_figwidth() / (0.6 + 0.075 * max(map(len, looks), default=1))))
            ),
            title="Filled: lossless. Hollow: lossy. Bars: 95 % intervals over prompts. No line: not swept.",
            title_fontsize=8,
        )
    return figure


def series_label(cell: Cell, line: Line, axis: str, fixed: bool) -> str:
    others = [] if fixed else [f"{key.rpartition('.')[2]} {value}" for key, value in cell.values.items() if key != axis]
    return ", ".join([line.arm.arm, *others]) + ("" if line.arm.lossless else " (lossy)")


def look(index: int, lossless: bool, fixed: bool) -> dict[str, Any]:
    shade = colour(index)
    return {
        "color": shade,
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
        "markerfacecolor": shade if lossless else "white",
        "markeredgecolor": shade,
        "linestyle": "" if fixed else "-",
        "linewidth": 1.1,
    }


def span(ticks: Sequence[Any], numeric: bool) -> float:
    """Width of the x axis in its own units, for the marks of several lines to stand side by side."""
    return float(ticks[-1]) - float(ticks[0]) if numeric and len(ticks) > 1 else float(max(1, len(ticks) - 1))


def draw(panel: Axes, marks: Mapping[str, Sequence[Mark]], looks: Mapping[str, dict[str, Any]], width: float) -> None:
    panel.axhline(1.0, **LEVEL)
    for label, style in looks.items():
        aside = 0.008 * width * (list(looks).index(label) - (len(looks) - 1) / 2)
        found = sorted(marks.get(label, ()), key=lambda mark: mark.x)
        for mark in found:
            if mark.low is not None and mark.high is not None and math.isfinite(mark.high):
                panel.plot([mark.x + aside] * 2, [mark.low, mark.high], color=style["color"], linewidth=0.8, alpha=0.5)
        panel.plot([mark.x + aside for mark in found], [mark.y for mark in found], zorder=3, **style)
