"""One table and one figure over the cells of a sweep: every arm on every task at every swept value; and their page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness import sweeps
from harness.compare import BASELINE
from harness.errors import UserError, unknown
from harness.metrics import DIFFERENCE
from harness.records import commit_text
from harness.report.exports import sweep_exports
from harness.report.figures import save
from harness.report.lines import DASH, Line, RunReport, lines
from harness.report.predicted import CEILING, PREDICTED, REMARK, unpredicted
from harness.report.stale import remove_stale
from harness.report.sweep_figure import Cell, order, sweep_figure
from harness.report.swept import identity, swept_values
from harness.report.tables import markdown_table
from harness.store import RUN, is_finished, read_config, read_run, write_atomic, writing

RATES = ("mean_accept_length", "reject_rate", "full_rate", "block_full_rate")
INTERVALS = ("speedup_decode", "speedup_end_to_end", "token_agreement", *RATES)
"""Metrics of the table, with their intervals in the CSV."""


def write_sweep(
    results_dir: str | Path, reports: Sequence[RunReport | None], name: str, formats: Sequence[str] = ()
) -> list[Path]:
    """Write ``tables/<name>_sweep.md`` and ``.csv`` and ``figures/<name>_sweep.*``; return their paths.

    Further ``formats`` of an earlier report of that name go where they are not written again.

    Args:
        reports: the cells, finished or not; None for one without a prompt that all its arms decoded: it is left out,
            and the table says how many are.
        formats: ``html``: also a page of table and figure; ``latex``: also the table to paste.

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
    said, shown, figure = facts(cells, len(reports) - len(loaded)), results_frame(cells), sweep_figure(cells)
    files = {
        tables / f"{name}_sweep.md": markdown(said, shown, name),
        tables / f"{name}_sweep.csv": tidy_frame(cells).to_csv(index=False, lineterminator="\n"),
    } | {
        tables / f"{name}_sweep.{suffix}": text
        for suffix, text in sweep_exports(said, shown, figure, name, formats).items()
    }
    with writing(tables):
        for path, text in files.items():
            write_atomic(path, text)
        remove_stale([tables / f"{name}_sweep.{suffix}" for suffix in ("html", "tex")], files)
        return [*files, *save(figure, figures, f"{name}_sweep")]


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


def facts(cells: Sequence[Cell], left_out: int) -> list[str]:
    """What was swept, on what, how to read the table, and what is missing in it; one a line."""
    swept = ", ".join(f"`{key}`" for key in cells[0].values) or "nothing: there is one cell"
    unfinished = sum(bool(cell.report.note) for cell in cells)
    runs = [cell.report.run for cell in cells]
    env = runs[0].env
    found = [
        f"{len(cells)} cells; swept: {swept}.",
        f"model {runs[0].model}; machine: {env.get('cpu', DASH)}, {env.get('device', DASH)}; "
        f"commits {', '.join(sorted({commit_text(run.git_commit, run.git_dirty) for run in runs}))}.",
        *dict.fromkeys(remark for cell in cells for remark in cell.report.remarks),
        "Each speedup is over the baseline of the same cell, unless it says unpaired. Brackets: 95 % bootstrap over "
        "prompts. Quality on a 0-100 scale, its difference from the baseline paired. A lossy arm's speed is worth what "
        "its quality is.",
        REMARK,
        *unpredicted([one for cell in cells for one in cell.report.predicted]),
    ]
    if left_out:
        found.append(f"**{left_out} cells are left out: no prompt of theirs was decoded by all arms.**")
    if unfinished:
        found.append(f"**{unfinished} cells did not finish: only prompts decoded by all arms are used.**")
    return found


def markdown(said: Sequence[str], shown: pd.DataFrame, name: str) -> str:
    return "\n\n".join([f"# Sweep {name}", "\n".join(f"- {fact}" for fact in said), markdown_table(shown)]) + "\n"
