"""Tables and figures from run folders, without measuring anything: ``python -m harness job=report``."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.config import FILE_NAME
from harness.errors import UserError
from harness.report import choice
from harness.report.exports import chosen_formats, write_exports
from harness.report.figures import save
from harness.report.lines import RunReport
from harness.report.load import load, load_if_any
from harness.report.paper_tables import write_paper_tables
from harness.report.stale import remove_stale
from harness.report.sweep import cells_of_sweep, write_sweep
from harness.report.tables import console, differences, write_tables
from harness.store import check_writable, find_runs, writing

WIDTH = 120
"""Columns of the printed tables where there is no terminal to ask, such as a log file."""


def report(
    results_dir: str,
    runs: str | Sequence[str] | None = None,
    name: str | None = None,
    sweep: str | None = None,
    paper: str | Sequence[str] | None = None,
    format: str | Sequence[str] | None = None,
) -> list[Path]:
    """Rebuild ``results/tables/<name>*`` and ``results/figures/<name>*``, print the tables, return the paths.

    ``name``: by default the name that the (first) run was made under.

    ``runs``: one run id or several; by default the newest finished run. A run that did not finish can be named: only
    the prompts that all its arms decoded are used, and the tables say so.

    ``sweep``: instead of runs the name of a sweep's experiment; one table and one figure over its cells.

    ``paper``: instead of runs ``all``, or tables of the paper, with ours of every finished run named after them.

    ``format``: ``html``, ``latex`` or both, besides: one page with tables and figures, and the tables to paste.

    Raises:
        UserError: no such run, sweep, table or format, two of them named, or what cannot be read or written.
    """
    formats = chosen_formats(format)
    named = {"run": runs, "sweep": sweep, "paper": paper}
    if len(both := [f"{key}={value}" for key, value in named.items() if value is not None]) > 1:
        raise UserError(f"{both[0]} and {both[1]} both choose runs: name one.")
    if sweep is not None:
        return report_sweep(results_dir, sweep, name or sweep, formats)
    if paper is not None:
        return report_paper(results_dir, paper, "html" in formats)
    reports = [load(folder) for folder in find_runs(results_dir, run_ids(runs))]
    name = name or str(reports[0].settings.get("name", "run"))
    return write_reports(reports, Path(results_dir) / "tables", Path(results_dir) / "figures", name, formats, True)


def report_sweep(results_dir: str, sweep: str, name: str, formats: Sequence[str]) -> list[Path]:
    """The table and the figure of a sweep's cells, and where they are."""
    check_name(name)
    cells = [load_if_any(one) for one in cells_of_sweep(results_dir, sweep)]
    return told(write_sweep(results_dir, cells, name, formats))


def report_cells(results_dir: str, runs: Sequence[str], name: str) -> list[Path]:
    """What a sweep ends with: the report of its finished cells, printed, then its own table and figure; their paths.

    The cells are read, and their numbers computed, once for both.

    Raises:
        UserError: no such run, or one that cannot be read or written.
    """
    results = Path(results_dir)
    reports = [load(folder) for folder in find_runs(results, runs)]
    write_reports(reports, results / "tables", results / "figures", name)
    return write_sweep(results, reports, name)


def report_paper(results_dir: str, paper: str | Sequence[str], one_page: bool) -> list[Path]:
    """The paper's tables with ours beside, and where they are."""
    return told(write_paper_tables(results_dir, paper, one_page))


def told(paths: list[Path]) -> list[Path]:
    """``paths``, said."""
    for path in paths:
        print(f"wrote {path}")
    return paths


def check_name(name: str) -> None:
    """Raises UserError: ``name`` is no plain file name."""
    if not FILE_NAME.fullmatch(name):
        raise UserError(
            f"name={name!r}: want a plain file name of letters, digits, '_', '-' and '.', as in quickstart."
        )


def run_ids(runs: object) -> list[str] | None:
    """The runs that a job was asked for; None: the newest finished one.

    Raises:
        UserError: neither a run's id nor a list of them.
    """
    wanted = [runs] if isinstance(runs, str) else runs
    if wanted is None:
        return None
    if not (isinstance(wanted, Sequence) and wanted and all(type(one) is str for one in wanted)):
        raise UserError(f"job.runs={runs!r}: want a run id, a list of them, or null for the newest finished run.")
    return list(wanted)


def write_reports(
    reports: Sequence[RunReport],
    tables_dir: Path,
    figures_dir: Path,
    name: str,
    formats: Sequence[str] = (),
    further: bool = False,
) -> list[Path]:
    """Print the tables, write all files, return their paths; ``further`` as in ``report_files``.

    Raises:
        UserError: ``name`` is no plain file name, or a folder cannot be written.
    """
    check_name(name)
    for folder in (tables_dir, figures_dir):
        check_writable(folder)
    screen = Console()
    if not screen.is_terminal:
        screen.width = WIDTH
    for table in console(reports):
        screen.print(table)
    paths = report_files(reports, tables_dir, figures_dir, name, formats, further)
    for path in paths:
        screen.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    if figures_dir / f"{name}.png" not in paths:
        screen.print(f"no figure of {len(reports)} runs: {choice.MOST_RUNS} can be told apart; a sweep has its own")
    if line := differences(reports):
        screen.print(line, soft_wrap=True)
    return paths


def report_files(
    reports: Sequence[RunReport],
    tables_dir: Path,
    figures_dir: Path,
    name: str,
    formats: Sequence[str] = (),
    further: bool = False,
) -> list[Path]:
    """Write tables and figures without a word; their paths. What an earlier report wrote besides goes.

    ``formats``: further files of the tables. ``further``: also the figures beside the main one.
    """
    drawn = choice.figures_of(reports, further)
    with writing(tables_dir):
        paths = write_tables(reports, tables_dir, name)
        for ending, figure in drawn.items():
            paths += save(figure, figures_dir, f"{name}_{ending}" if ending else name)
        paths += write_exports(reports, drawn, tables_dir, name, formats)
        remove_stale(possible_files(tables_dir, figures_dir, name), paths)
        return paths


def possible_files(tables_dir: Path, figures_dir: Path, name: str) -> list[Path]:
    """All that a report of that name may write besides its main tables."""
    named = [f"{name}_{ending}" if ending else name for ending in choice.ENDINGS]
    figures = [figures_dir / f"{one}.{suffix}" for one in named for suffix in ("png", "pdf")]
    return [*(tables_dir / f"{name}{ending}" for ending in ("_predicted.csv", ".html", ".tex")), *figures]
