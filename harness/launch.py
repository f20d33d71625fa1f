"""Between composing a config and running its job: it is checked, and a bench run starts only with all that it needs.

A sweep (``-m``) is checked whole before its first run: Hydra composes each run only when its turn has come. What fails
in one of its cells is written down, and the sweep goes on: the closing list and the exit code are made from disk.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, read_write
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import sweeps
from harness.claims import Busy
from harness.config import check_calls, checked_plain, locate, shard_of
from harness.errors import UserError
from harness.help import mendable, one_line, one_line_errors
from harness.preflight import listed, missing_packages, require
from harness.runs_of_sweep import plain_cells, runs_of, swept
from harness.workers import IN_PLACE, chosen

BENCH = "harness.jobs.bench.bench"
SEARCH = "harness.jobs.search.search"
REPORT = "harness.jobs.report.report_cells"
WIDTH = 120
FAILED, REFUSED = 1, 2
"""Exit codes of a sweep with failures: one at least that only a developer can mend, or none."""
LOST = "its process is gone: killed by the system, as where memory is full, or by hand; the same sweep goes on with it"


def run_one(job: Callable[[DictConfig], None], cfg: DictConfig) -> None:
    """Call ``job``. In a sweep note what becomes of it, and let no failure but an interrupt out.

    Raises:
        UserError: a shard of what is no sweep, or the sweep's folder cannot be written; in a single run, ``job``'s own.
    """
    launched = sweeps.launched()
    if launched is None:
        if cfg.get("shard") is not None:
            raise UserError(f"shard={cfg.shard} divides the cells of a sweep, and this is a single run: leave it out.")
        job(cfg)
        return
    folder, launch = launched
    hydra = HydraConfig.get()
    index, overrides = int(hydra.job.num), " ".join(hydra.overrides.task)
    if cfg.get("shard") is not None and not sweeps.wanted(index, shard_of(cfg.shard)):
        return
    if cfg.get("fail_fast") and sweeps.failures(folder, launch):
        return
    with sweeps.cell_at(folder, launch, index, overrides) as cell:
        cell.note("running")
        try:
            job(cfg)
        except Busy as busy:
            say(f"{busy} The sweep goes on.")
            cell.note("busy")
        except Exception as error:
            line = mendable(error)
            if line is None:
                traceback.print_exception(error)
            text = line or one_line(f"{type(error).__name__}: {error}")
            say(f"cell {index + 1} failed ({overrides}): {text}")
            cell.note("failed", error=text, mendable=line is not None)
        else:
            if cell.record.state == "running":
                cell.note("finished")


def say(line: str) -> None:
    print(f"harness: {one_line(line)}", file=sys.stderr)


def ready(cfg: DictConfig) -> bool:
    """Check a composed config; of a bench run also that nothing is missing. False of a dry run, which is printed.

    Raises:
        UserError: what is wrong with the config, or what is missing.
    """
    raw, resolved = checked_plain(cfg)
    job, dry = resolved["job"]["_target_"], resolved["dry_run"]
    if dry and job not in (BENCH, SEARCH):
        raise UserError("dry_run=true is for job=bench and job=search: leave it out, or choose one of them.")
    if job != BENCH and not dry:
        check_calls(raw, resolved)
        return True
    if missing := missing_packages(resolved):
        raise listed(missing)
    check_calls(raw, resolved)
    if dry:
        if not in_sweep():  # of a sweep all plans have been printed together
            from harness.plan import print_plan

            print_plan(resolved)
        return False
    if not (in_sweep() and chosen() == IN_PLACE):  # then this process has asked for all cells
        require([resolved])
    return True


def in_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


class PreflightOfSweep(Callback):
    """Composes every run of the sweep, checks it, and asks once what all bench runs together miss.

    Then it opens the sweep's folder and tells it to the processes that will run cells; at the end it reads there what
    became of them, writes the tables of all, lists failures and ends with an exit code.

    Covers what the command line and ``hydra.sweeper.params`` sweep, for Hydra's own sweeper. Not covered: sweepers that
    choose later runs by the results of earlier ones.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with one_line_errors(), bugs_end_it():
            runs = runs_of(swept(config))
            cells = list(plain_cells(config, runs))
            benches = [cell for cell in cells if cell["job"]["_target_"] == BENCH and not cell["dry_run"]]
            require(benches)
            if missing := [line for cell in cells if cell["dry_run"] for line in missing_packages(cell)]:
                raise listed(list(dict.fromkeys(missing)))
            if dry := [index for index, cell in enumerate(cells) if cell["dry_run"]]:
                from harness.plan import print_plans

                print_plans([cells[index] for index in dry], [" ".join(runs[index]) for index in dry])
            self.measures = bool(benches)
            root = Path(cells[0]["results_dir"]) if benches else Path(str(config.hydra.sweep.dir))
            self.folder = sweeps.begun(cells, runs, (root / sweeps.FOLDER).absolute())
            self.launch = sweeps.launch_id()
            tell(config, f"{self.folder}|{self.launch}")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        # The launcher keeps what each job returned until all are done: with its configs memory would grow by the cell.
        if sweeps.VARIABLE in (config.hydra.job.env_set or {}):
            job_return.cfg = job_return.hydra_cfg = None

    def on_multirun_end(self, config: DictConfig, error: Exception | None = None, **kwargs: Any) -> None:
        """``error`` ended the launcher before its cells: a worker that the system killed, as where memory is full."""
        with one_line_errors(), bugs_end_it():
            if error is not None:
                say(f"the sweep ended early, {type(error).__name__}: {error}")
                write_down_lost(self.folder, self.launch)
            failed = sweeps.failures(self.folder, self.launch)
            try:
                if self.measures:
                    report_of(self.folder)
                    close(self.folder, self.launch)
            finally:  # also when there are no tables
                if failed:
                    screen().print(failure_list(failed, sweeps.read_sweep(self.folder)))
        if failed:
            raise SystemExit(REFUSED if all(one.mendable for one in failed) else FAILED)


@contextmanager
def bugs_end_it() -> Iterator[None]:
    """Hydra turns what a callback raises into a warning and goes on, without what the callback was for."""
    try:
        yield
    except Exception as error:
        if mendable(error) is not None:
            raise
        traceback.print_exc()
        raise SystemExit(FAILED) from error


def tell(config: DictConfig, value: str) -> None:
    """Let the jobs of a sweep, wherever they run, have ``value`` in their environment."""
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    with read_write(config):
        config.hydra.overrides.hydra.append(f"++hydra.job.env_set.{sweeps.VARIABLE}='{quoted}'")


def write_down_lost(folder: Path, launch: str) -> None:
    """Wait for cells that other processes are still at; those whose process is gone have failed."""
    while (found := sweeps.running(folder, launch))[0]:
        time.sleep(1)
    for one in found[1]:
        sweeps.noted(folder, one, "failed", error=LOST)


def report_of(folder: Path) -> None:
    """Tables and figure of all cells that are finished, whoever measured them and when."""
    record = sweeps.read_sweep(folder)
    runs = [one.run_id for one in sweeps.read_cells(folder) if one.state in ("finished", "skipped") and one.run_id]
    if runs:
        for path in locate(REPORT, "report")(record.results_dir, runs, record.name):
            screen().print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


def close(folder: Path, launch: str) -> None:
    """One line: what became of the cells of this launch."""
    states = [one.state for one in sweeps.read_cells(folder, launch)]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none of its cells"
    screen().print(f"sweep {folder.name}: {counts}; {folder}", highlight=False, soft_wrap=True)


def screen() -> Console:
    """Of messages; wide enough for a table where there is no terminal to ask."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def failure_list(failed: list[sweeps.CellRecord], sweep: sweeps.SweepRecord) -> Table:
    """The closing list."""
    table = Table("cell", "overrides", "error", title=f"{len(failed)} failed", title_justify="left", box=None)
    for one in failed:
        overrides = sweeps.told_apart(one.overrides, sweep.overrides)
        table.add_row(str(one.index + 1), escape(overrides), escape(one.error or ""))
    return table
