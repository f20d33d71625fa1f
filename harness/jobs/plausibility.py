"""The paper's speedups beside their ceilings: ``python -m harness job=plausibility``. Reads no run."""

from pathlib import Path

from rich.console import Console

from harness.report.plausibility import (
    VERDICTS,
    Assumptions,
    markdown,
    plausibility,
    read_numbers,
    read_shapes,
    write,
)
from harness.store import check_writable


def report_plausibility(
    results_dir: str, gamma: int = 5, skip_ratio: float = 0.45, draft_bytes: float = 1.0, paper: str = "results/paper"
) -> list[Path]:
    """Write ``tables/paper_plausibility.md`` and ``.csv`` under ``results_dir``, print the counts, return the paths.

    Args:
        gamma, skip_ratio, draft_bytes: see ``harness.report.plausibility.Assumptions``.
        paper: folder with ``numbers.csv`` and ``configs.csv``.

    Raises:
        UserError: an assumption out of bounds, or the folder lacks a file.
    """
    assumed = Assumptions(gamma, skip_ratio, draft_bytes)
    tables = Path(results_dir) / "tables"
    check_writable(tables)
    shapes, read_in = read_shapes(Path(paper))
    found = plausibility(read_numbers(Path(paper)), shapes, read_in, assumed)
    screen = Console()
    counts = found["verdict"].value_counts()
    for verdict in VERDICTS:
        screen.print(f"{int(counts.get(verdict, 0)):4d}  {verdict}", highlight=False)
    paths = list(write(tables, found, markdown(found, assumed, read_in)))
    for path in paths:
        screen.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    return paths
