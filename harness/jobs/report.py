"""Tables and figures from run folders, without measuring anything: ``python -m harness job=report``."""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Target:
    """Where a report goes, under which name, and what is written of it.

    Args:
        formats: further files of the tables.
        further: also the figures beside the main one.
    """

    tables: Path
    figures: Path
    name: str
    formats: Sequence[str] = ()
    further: bool = False

    @classmethod
    def below(cls, folder: Path, name: str, formats: Sequence[str] = (), further: bool = False) -> "Target":
        """In a results folder, or in that of a run."""
        return cls(folder / "tables", folder / "figures", name, formats, further)

    def named(self, ending: str) -> str:
        return f"{self.name}_{ending}" if ending else self.name

    @property
    def possible(self) -> list[Path]:
        """All that a report of that name may write besides its main tables."""
        figures = [self.figures / f"{self.named(one)}.{kind}" for one in choice.ENDINGS for kind in ("png", "pdf")]
        return [*(self.tables / f"{self.name}{ending}" for ending in ("_predicted.csv", ".html", ".tex")), *figures]


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
    return write_reports(reports, Target.below(Path(results_dir), name, formats, further=True))


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
    write_reports(reports, Target.below(results, name))
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


def write_reports(reports: Sequence[RunReport], target: Target) -> list[Path]:
    """Print the tables, write all files, return their paths.

    Raises:
        UserError: the name is no plain file name, or a folder cannot be written.
    """
    check_name(target.name)
    for folder in (target.tables, target.figures):
        check_writable(folder)
    screen = Console()
    if not screen.is_terminal:
        screen.width = WIDTH
    for table in console(reports):
        screen.print(table)
    paths = report_files(reports, target)
    for path in paths:
        screen.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    if target.figures / f"{target.name}.png" not in paths:
        screen.print(f"no figure of {len(reports)} runs: {choice.MOST_RUNS} can be told apart; a sweep has its own")
    if line := differences(reports):
        screen.print(line, soft_wrap=True)
    return paths


def report_files(reports: Sequence[RunReport], target: Target) -> list[Path]:
    """Write tables and figures without a word; their paths. What an earlier report wrote besides goes."""
    drawn = choice.figures_of(reports, target.further)
    with writing(target.tables):
        paths = write_tables(reports, target.tables, target.name)
        for ending, figure in drawn.items():
            paths += save(figure, target.figures, target.named(ending))
        paths += write_exports(reports, drawn, target.tables, target.name, target.formats)
        remove_stale(target.possible, paths)
        return paths
