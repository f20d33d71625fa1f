"""Tables and figures from run folders, without measuring anything: ``python -m harness job=report``."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.config import FILE_NAME
from harness.errors import UserError
from harness.metrics import complete_prompts
from harness.records import SampleRecord
from harness.report.choice import figures_of, main_figure
from harness.report.figures import save
from harness.report.sweep import cells_of_sweep, write_sweep
from harness.report.tables import RunReport, build, console, differences, write_tables
from harness.store import RunData, check_writable, find_runs, read, read_config, writing

WIDTH = 120
"""Columns of the printed tables where there is no terminal to ask, such as a log file."""


def report(
    results_dir: str, runs: str | Sequence[str] | None = None, name: str | None = None, sweep: str | None = None
) -> list[Path]:
    """Rebuild ``results/tables/<name>*`` and ``results/figures/<name>*``, print the tables, return the paths.

    ``name``: by default the name that the (first) run was made under.

    ``runs``: one run id or several; by default the newest finished run. A run that did not finish can be named: only
    the prompts that all its arms decoded are used, and the tables say so.

    ``sweep``: instead of runs the name of a sweep's experiment; one table and one figure over its cells.

    Raises:
        UserError: no such run or sweep, both of them named, or a run that cannot be read or written.
    """
    if sweep is not None:
        if runs is not None:
            raise UserError(f"run={runs} and sweep={sweep} both choose runs: name one.")
        return report_sweep(results_dir, sweep, name or sweep)
    reports = [load(folder) for folder in find_runs(results_dir, run_ids(runs))]
    name = name or str(reports[0].settings.get("name", "run"))
    return write_reports(reports, Path(results_dir) / "tables", Path(results_dir) / "figures", name, further=True)


def report_sweep(results_dir: str, sweep: str, name: str) -> list[Path]:
    """The table and the figure of a sweep's cells, and where they are."""
    if not FILE_NAME.fullmatch(name):
        raise UserError(f"name={name!r}: want a plain file name of letters, digits, '_', '-' and '.'.")
    paths = write_sweep(results_dir, cells_of_sweep(results_dir, sweep), name)
    for path in paths:
        print(f"wrote {path}")
    return paths


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


def load(folder: Path) -> RunReport:
    """A run's tables from its folder; of one that did not finish, of the prompts that all arms decoded.

    Raises:
        UserError: it cannot be read, or there is no such prompt.
    """
    data: RunData = read(folder)
    samples: Sequence[SampleRecord] = data.samples
    note = ""
    if data.run.status != "finished":
        samples = complete_prompts(data.run, samples)
        left = len(data.samples) - len(samples) + data.dropped
        note = f"this run did not finish: only prompts decoded by all arms are shown, {left} samples are left out"
    if not samples:
        raise UserError(f"run {data.run.run_id!r} has no prompt that all arms decoded: run it again.")
    return build(data.run, samples, read_config(folder), note, data.divergences, data.fidelity)


def write_reports(
    reports: Sequence[RunReport], tables_dir: Path, figures_dir: Path, name: str, further: bool = False
) -> list[Path]:
    """Print the tables, write all files, return their paths; ``further`` as in ``report_files``.

    Raises:
        UserError: ``name`` is no plain file name, or a folder cannot be written.
    """
    if not FILE_NAME.fullmatch(name):
        raise UserError(
            f"name={name!r}: want a plain file name of letters, digits, '_', '-' and '.', as in quickstart."
        )
    for folder in (tables_dir, figures_dir):
        check_writable(folder)
    screen = Console()
    if not screen.is_terminal:
        screen.width = WIDTH
    for table in console(reports):
        screen.print(table)
    paths = report_files(reports, tables_dir, figures_dir, name, further)
    for path in paths:
        screen.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    if line := differences(reports):
        screen.print(line, soft_wrap=True)
    return paths


def report_files(
    reports: Sequence[RunReport], tables_dir: Path, figures_dir: Path, name: str, further: bool = False
) -> list[Path]:
    """Write tables and figure without a word; their paths. ``further``: also the figures beside the main one."""
    drawn = figures_of(reports) if further else {"": main_figure(reports)}
    with writing(tables_dir):
        paths = write_tables(reports, tables_dir, name)
        for ending, figure in drawn.items():
            paths += save(figure, figures_dir, f"{name}_{ending}" if ending else name)
    return paths
