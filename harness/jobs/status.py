"""What a sweep or a run is at, read from disk: ``python -m harness job=status``. Measures nothing, imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import claims, sweeps
from harness.errors import UserError, unknown
from harness.live import Tally
from harness.pairing import visits_a_prompt
from harness.report.lines import DASH
from harness.report.tables import console_table
from harness.store import RUN, SAMPLES, RunData, is_finished, read, results_of

WIDTH = 120
"""Columns where there is no terminal to ask."""
DONE = ("finished", "skipped")


@dataclass(frozen=True)
class RunState:
    """A run as it stands. ``state``: ``finished``, ``running``, ``failed``, or ``dead``: it stopped and says nothing.

    ``samples`` of ``wanted``; ``pace`` seconds a sample, None before there is one.
    """

    run_id: str
    state: str
    samples: int
    wanted: int
    tally: Tally
    pace: float | None
    error: str | None

    @property
    def left_s(self) -> float | None:
        """Seconds until all samples are there, at its pace; outputs are scored again after that."""
        return None if self.pace is None else (self.wanted - self.samples) * self.pace


def status(results_dir: str, run: str | None = None) -> None:
    """Print what became of the cells of a sweep, or what a run is at.

    Raises:
        UserError: nothing of that name, or files that cannot be read.
    """
    screen = Console()
    if not screen.is_terminal:
        screen.width = WIDTH
    place = found(Path(results_dir), run)
    for table in (
        sweep_tables(place) if (place / sweeps.SWEEP).is_file() else [run_table(place.name, [state_of(place)])]
    ):
        screen.print(table)


def found(results: Path, name: str | None) -> Path:
    """The folder of the sweep or run ``name``; by default of what was written to last.

    Raises:
        UserError: there is none.
    """
    runs = [path.parent for path in (results / "runs").glob(f"*/{RUN}")]
    swept = [path.parent for path in (results / sweeps.FOLDER).glob(f"*/{sweeps.SWEEP}")]
    if not runs and not swept:
        raise UserError(f"no run and no sweep in {str(results)!r}: start one, or set results_dir=PATH.")
    if name is None:
        return max([*swept, *runs], key=last_written)
    named = {path.name: path for path in (*runs, *swept)}
    if name not in named:
        raise unknown("run", name, named)
    return named[name]


def last_written(folder: Path) -> tuple[float, bool]:
    """When something was last written there; of a sweep and its run of that very time, the sweep is the later."""
    sweep = (folder / sweeps.SWEEP).is_file()
    paths = [folder, *(folder / sweeps.CELLS if sweep else folder).glob("*")]
    if sweep:
        ids = (one.run_id for one in sweeps.read_cells(folder) if one.run_id)
        paths += [results_of(folder) / "runs" / one / SAMPLES for one in ids]
    return max(map(changed_at, paths)), sweep


def changed_at(path: Path) -> float:
    """When a file was last written; 0 of one that is not there, as a temporary one that has got its name meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def state_of(folder: Path) -> RunState:
    """A run folder as it stands.

    Raises:
        UserError: files that cannot be read.
    """
    data = read(folder)
    tally = Tally()
    for sample in data.samples:
        tally.add(sample)
    visits = visits_a_prompt(data.run.pairing, [arm.arm for arm in data.run.arms])
    wanted = data.run.prompts * visits or len(data.samples)
    return RunState(
        data.run.run_id,
        living(folder, data),
        len(data.samples),
        wanted,
        tally,
        pace_of(data),
        data.run.error,
    )


def living(folder: Path, data: RunData) -> str:
    """A run that says it is running is dead when nobody holds its claim."""
    if is_finished(folder) or data.run.status != "running":
        return data.run.status
    cell = data.run.cell
    alive = cell is not None and claims.alive(claims.path_of(results_of(folder), cell)) is not None
    return "running" if alive else "dead"


def pace_of(data: RunData) -> float | None:
    """Seconds a sample: of prefill and decoding, as measured; what lies between samples comes on top."""
    seconds = sum(sample.prefill_s + sample.decode_s for sample in data.samples)
    return seconds / len(data.samples) if data.samples else None


def sweep_tables(folder: Path) -> list[Table]:
    """Counts of the cells by state, each that was begun, and the failures."""
    record = sweeps.read_sweep(folder)
    runs = results_of(folder) / "runs"
    cells = sweeps.read_cells(folder)
    states = [of_cell(one, runs) for one in cells]
    counted = [state for _, state, _ in states]
    waiting = len(record.overrides) - len(cells)
    known = [run for _, _, run in states if run is not None]
    paces = [run.pace * run.wanted for run in known if run.pace is not None]
    left = sum(run.left_s or 0 for (_, state, run) in states if run is not None and state not in DONE)
    left += waiting * sum(paces) / len(paces) if paces else 0
    summary = console_table(
        f"sweep {record.sweep}: {len(record.overrides)} cells",
        ("done", "running", "dead", "failed", "with another worker", "waiting", "samples", "time left"),
        "time left: of one worker, by the seconds a sample took so far, for cells not begun as long as the others",
    )
    summary.add_row(
        str(sum(state in DONE for state in counted)),
        *(str(counted.count(state)) for state in ("running", "dead", "failed", "busy")),
        str(waiting),
        str(sum(run.samples for run in known)),
        duration(left) if paces else DASH,
    )
    table = console_table(
        "Cells", ("overrides", "state", "samples", "tokens/s", "length", "reject", "left", "run or error"), ""
    )
    for cell, state, run in states:
        row = ["", DASH, DASH, DASH, DASH] if run is None else numbers(run)
        last = (cell.error if state == "failed" else None) or cell.run_id or DASH
        table.add_row(escape(sweeps.told_apart(cell.overrides, record.overrides)), state, *row, escape(last))
    return [summary, table]


def of_cell(cell: sweeps.CellRecord, runs: Path) -> tuple[sweeps.CellRecord, str, RunState | None]:
    """What became of a cell: the run folder knows better than a note that says it is running."""
    if cell.run_id is None or not (runs / cell.run_id / RUN).is_file():
        return cell, cell.state if cell.state != "running" or launcher_lives(cell.launch) else "dead", None
    run = state_of(runs / cell.run_id)
    return cell, run.state if cell.state in ("running", "busy") else cell.state, run


def launcher_lives(launch: str) -> bool:
    """Whether the process that began a sweep may still be there: true of other machines, which cannot be asked."""
    host, _, pid = launch.partition("-")[2].rpartition("-")
    return host != claims.this_process().host or claims.born(int(pid)) is not None


def run_table(title: str, runs: Sequence[RunState]) -> Table:
    table = console_table(title, ("run", "state", "samples", "tokens/s", "length", "reject", "left", "error"), "")
    for run in runs:
        table.add_row(escape(run.run_id), run.state, *numbers(run), escape(run.error or DASH))
    return table


def numbers(run: RunState) -> list[str]:
    """Samples, tokens per second of decoding, ``mean_accept_length``, ``reject_rate``, time left."""
    tally = run.tally
    rates = (tally.tokens_per_s, tally.mean_accept_length, tally.reject_rate)
    shown = [DASH if rate is None else f"{rate:.{digits}f}" for rate, digits in zip(rates, (1, 2, 2), strict=True)]
    return [f"{run.samples}/{run.wanted}", *shown, DASH if run.left_s is None else duration(run.left_s)]


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(3725)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
