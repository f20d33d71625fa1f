"""Runs on disk to a logger, finished or not: ``python -m harness job=relog run=ID log=wandb``. Imports no torch.

A logger knows a run by its cell, so what is sent twice is there once.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.errors import UserError
from harness.jobs.report import run_ids
from harness.log import Logger, NullLogger
from harness.report.choice import main_figure
from harness.report.figures import save
from harness.report.load import load
from harness.report.tables import write_tables
from harness.store import RUN, find_runs, read, writing

ALL = "all"


def relog(results_dir: str, log: Logger, runs: str | Sequence[str] | None = None) -> list[str]:
    """Send runs in the order of their ids; the ids of those sent.

    ``runs``: one id or several, ``all``, or None for the newest finished run. Of a run that did not finish all samples
    are sent, and the numbers of the prompts that all arms decoded.

    Raises:
        UserError: no logger, no such run, one that cannot be read, or a logger that did not take it. Of ``all``, what
            cannot be read is named and left out.
    """
    if type(log) is NullLogger:
        raise UserError("job=relog sends runs to a logger: add log=wandb or log=tensorboard.")
    screen = Console(stderr=True)
    folders = every_run(results_dir) if runs == ALL else find_runs(results_dir, run_ids(runs))
    sent: list[str] = []
    for folder in folders:
        try:
            with writing(Path(tempfile.gettempdir())):
                send(folder, log)
        except UserError as error:
            if runs != ALL:
                raise
            screen.print(f"left out {folder.name}: {error}", style="yellow", markup=False, soft_wrap=True)
            continue
        if not log.ok():
            raise UserError(f"{folder.name} was not sent whole, the line above says why; {len(sent)} runs were.")
        sent.append(folder.name)
        screen.print(f"sent {folder.name}", style="dim", highlight=False, markup=False, soft_wrap=True)
    return sent


def every_run(results_dir: str) -> list[Path]:
    """All run folders, by id.

    Raises:
        UserError: there is none.
    """
    found = sorted(path.parent for path in (Path(results_dir) / "runs").glob(f"*/{RUN}"))
    return found or find_runs(results_dir)


def send(folder: Path, log: Logger) -> None:
    """One run, as the bench would have sent it; its tables and figures are made anew.

    Raises:
        UserError: it cannot be read, or no prompt was decoded by all arms.
    """
    report, samples = load(folder), read(folder).samples
    with tempfile.TemporaryDirectory(prefix="harness-relog-") as made:
        name = str(report.settings.get("name", "run"))
        files = write_tables([report], Path(made) / "tables", name)
        files += save(main_figure([report]), Path(made) / "figures", name)
        log.start(report.run, report.settings)
        try:
            for sample in samples:
                log.sample(sample)
            log.summary(report.rows)
            log.files(folder, files)
        finally:
            log.close(failed=report.run.status == "failed")
