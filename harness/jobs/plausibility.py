"""The paper's speedups beside their ceilings, and where a third tier pays: ``job=plausibility``. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.errors import UserError
from harness.jobs.report import run_ids
from harness.report.break_even import break_even_figure, implied_points, measured_points, page, pairs_figure
from harness.report.figures import save
from harness.report.load import load
from harness.report.paper_numbers import read_numbers, read_shapes
from harness.report.plausibility import (
    VERDICTS,
    Assumptions,
    markdown,
    plausibility,
    write,
)
from harness.store import SUMMARY, check_writable, find_runs, write_atomic


def report_plausibility(
    results_dir: str,
    runs: str | Sequence[str] | None = None,
    gamma: int = 5,
    skip_ratio: float = 0.45,
    draft_bytes: float = 1.0,
    paper: str = "results/paper",
    reference: str | None = None,
) -> list[Path]:
    """Write tables ``paper_plausibility`` and ``break_even`` and two figures under ``results_dir``; return the paths.

    Args:
        runs: ids of runs whose three-tier arms are put beside the paper's; None: the newest finished one,
            else those below ``reference``.
        gamma, skip_ratio, draft_bytes: see ``harness.report.plausibility.Assumptions``.
        paper: folder with ``numbers.csv`` and ``configs.csv``.

    Raises:
        UserError: an assumption out of bounds, no such run, or the folder lacks a file.
    """
    assumed = Assumptions(gamma, skip_ratio, draft_bytes)
    tables, figures = Path(results_dir) / "tables", Path(results_dir) / "figures"
    for folder in (tables, figures):
        check_writable(folder)
    shapes, read_in = read_shapes(Path(paper))
    found = plausibility(read_numbers(Path(paper)), shapes, read_in, assumed)
    points = [
        *measured_points([load(folder) for folder in chosen(results_dir, runs, reference)]),
        *implied_points(found),
    ]

    screen = Console()
    counts = found["verdict"].value_counts()
    for verdict in VERDICTS:
        screen.print(f"{int(counts.get(verdict, 0)):4d}  {verdict}", highlight=False)
    paths = [*write(tables, found, markdown(found, assumed, read_in)), tables / "break_even.md"]
    write_atomic(paths[-1], page(points))
    paths += save(break_even_figure(points), figures, "break_even")
    paths += save(pairs_figure(points), figures, "break_even_pairs")
    for path in paths:
        screen.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    return paths


def chosen(results_dir: str, runs: str | Sequence[str] | None, reference: str | None) -> list[Path]:
    """Folders of the runs asked for; None: the newest finished one, else all finished ones below ``reference``."""
    if runs is not None:
        return find_runs(results_dir, run_ids(runs))
    try:
        return find_runs(results_dir)
    except UserError:
        return [] if reference is None else finished_below(Path(reference))


def finished_below(folder: Path) -> list[Path]:
    """Finished runs of a results folder, or of those in it."""
    return sorted(path.parent for depth in ("", "*/") for path in folder.glob(f"{depth}runs/*/{SUMMARY}"))
