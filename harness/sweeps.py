"""A sweep on disk: ``results/sweeps/<id>/`` with what its cells are, and a file for each cell that a launch has begun.

Cells of a sweep may run in other processes and on other machines (joblib, Slurm, Ray), so what became of them is read
from here and from nowhere else. The id is a hash of the code and of the cells' configs: the same sweep, again or in
shards, has the same folder, and several launches of it may run at once. Each writes files of its own about its cells.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import claims
from harness.cells import EXCLUDED, code_sha, digest
from harness.errors import UserError
from harness.records import SCHEMA
from harness.store import from_json, results_of, to_json, write_atomic, writing

FOLDER, SWEEP, CELLS = "sweeps", "sweep.json", "cells"
VARIABLE = "HARNESS_SWEEP"
"""Of the processes that run cells: the sweep's folder and the launch, with a bar between them."""


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """``sweep.json``: what is swept. ``overrides`` has a line for each cell."""

    sweep: str
    schema: int
    created: str
    name: str
    results_dir: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CellRecord:
    """What a launch made of a cell, ``cells/<index>-<launch>.json``.

    ``state``  ``running``; ``finished``, measured in this launch; ``skipped``, finished before; ``busy``, with another
    worker; ``failed``, with ``error`` in one line and whether it is the user's to mend.
    ``cell`` and ``run_id`` are None until the run has got that far, and of jobs that are no bench. ``process`` is None
    of a cell from before it was written down.
    """

    index: int
    launch: str
    state: str
    overrides: str
    started: str
    ended: str | None = None
    cell: str | None = None
    run_id: str | None = None
    error: str | None = None
    mendable: bool = False
    process: claims.Owner | None = None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def begun(configs: Sequence[Mapping[str, Any]], overrides: Sequence[Sequence[str]], root: Path) -> Path:
    """Write what the sweep is into ``root/<id>``; its folder.

    ``configs`` are the cells', resolved; ``overrides`` theirs as on the command line.

    Raises:
        UserError: it cannot be written.
    """
    first = configs[0]
    sweep = f"{first['name']}-{digest([code_sha(), *map(counted, configs)])[:12]}"
    folder = root / sweep
    lines = tuple(" ".join(one) for one in overrides)
    record = SweepRecord(sweep, SCHEMA, now(), str(first["name"]), str(first["results_dir"]), lines)
    with writing(folder):
        write_atomic(folder / SWEEP, json.dumps(to_json(record), indent=1) + "\n")
    return folder


def counted(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the keys that cannot change a number."""
    return {key: value for key, value in config.items() if key not in EXCLUDED} | {"job": uncopied(config.get("job"))}


def uncopied(value: Any) -> Any:
    """A job without its copies of these keys, wherever they stand, and of the whole config as text."""
    if not isinstance(value, Mapping):
        return value
    return {key: uncopied(inner) for key, inner in value.items() if key not in EXCLUDED and key != "config"}


def launch_id() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{socket.gethostname()}-{os.getpid()}"


def wanted(index: int, shard: tuple[int, int] | None) -> bool:
    """Whether the cell, counted from 0, is in this shard: every n-th, so that neighbours go to different workers."""
    return shard is None or index % shard[1] == shard[0] - 1


class SweepCell:
    """The cell of a sweep that this process is at."""

    def __init__(self, folder: Path, launch: str, index: int, overrides: str) -> None:
        self.folder = folder
        self.record = CellRecord(index, launch, "running", overrides, now(), process=claims.this_process())

    @property
    def sweep(self) -> str:
        return self.folder.name

    def note(self, state: str, **facts: Any) -> None:
        """Write what became of it so far.

        Raises:
            UserError: it cannot be written.
        """
        self.record = noted(self.folder, self.record, state, **facts)


def noted(folder: Path, record: CellRecord, state: str, **facts: Any) -> CellRecord:
    """``record`` as it stands now, written down."""
    changed = replace(record, state=state, ended=None if state == "running" else now(), **facts)
    path = folder / CELLS / f"{record.index:05}-{digest(record.launch)}.json"
    with writing(path):
        write_atomic(path, json.dumps(to_json(changed)) + "\n")
    return changed


_current: list[SweepCell] = []


@contextmanager
def cell_at(folder: Path, launch: str, index: int, overrides: str) -> Iterator[SweepCell]:
    """Be at a cell of a sweep inside."""
    _current.append(SweepCell(folder, launch, index, overrides))
    try:
        yield _current[-1]
    finally:
        _current.pop()


def current() -> SweepCell | None:
    """The cell of a sweep that this process is at; None in a single run."""
    return _current[-1] if _current else None


def progress() -> str:
    """Cells done of how many, where this is one of a sweep; else nothing."""
    if (cell := current()) is None:
        return ""
    done = sum(one.state in ("finished", "skipped") for one in read_cells(cell.folder))
    return f"{done} of {len(read_sweep(cell.folder).overrides)} cells done"


def launched() -> tuple[Path, str] | None:
    """Folder and launch of the sweep that started this process' job; None in a single run."""
    folder, bar, launch = os.environ.get(VARIABLE, "").rpartition("|")
    return (Path(folder), launch) if bar else None


def told_apart(overrides: str, every: Sequence[str]) -> str:
    """What of a cell's overrides not all cells have.

    >>> told_apart("task=qa gamma=3", ["task=qa gamma=3", "task=qa gamma=4"])
    'gamma=3'
    """
    common = set.intersection(*(set(one.split()) for one in every)) if every else set()
    return " ".join(one for one in overrides.split() if one not in common) or overrides


# Reading.


def read_sweep(folder: Path) -> SweepRecord:
    """``sweep.json``.

    Raises:
        UserError: not there, broken, or of a newer version.
    """
    path = folder / SWEEP
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and isinstance(data.get("schema"), int) and data["schema"] > SCHEMA:
            raise UserError(f"{path}: schema {data['schema']}, this version reads up to {SCHEMA}: update the harness.")
        found: SweepRecord = from_json(SweepRecord, data)
        return found
    except OSError as error:
        raise UserError(f"no readable sweep at {str(path)!r}: {error.strerror or error}.") from error
    except ValueError as error:
        raise UserError(f"{path}: not a sweep ({error}): delete the folder and start the sweep again.") from error


def read_cells(folder: Path, launch: str | None = None) -> list[CellRecord]:
    """What became of the cells that were begun, in order; in one launch where that is named, else in all together.

    Of several launches that which finished a cell counts, else the last one that did not leave it to another.

    Raises:
        UserError: a file that is broken.
    """
    found: dict[int, CellRecord] = {}
    for path in sorted((folder / CELLS).glob("*.json")):
        try:
            record: CellRecord = from_json(CellRecord, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not a cell of a sweep ({error}): delete the file.") from error
        if launch in (None, record.launch):
            found[record.index] = max(found.get(record.index, record), record, key=weight)
    return [found[index] for index in sorted(found)]


def weight(record: CellRecord) -> tuple[int, str]:
    """Larger of what says more about a cell."""
    return {"busy": 0, "running": 1, "failed": 1, "skipped": 2, "finished": 2}[record.state], record.launch


def failures(folder: Path, launch: str) -> list[CellRecord]:
    return [one for one in read_cells(folder, launch) if one.state == "failed"]


def running(folder: Path, launch: str) -> tuple[list[CellRecord], list[CellRecord]]:
    """The cells that a launch has begun and not ended: those with a process that lives, and those whose is gone."""
    results, open_ones = results_of(folder), [one for one in read_cells(folder, launch) if one.state == "running"]
    living = [one for one in open_ones if is_alive(one, results)]
    return living, [one for one in open_ones if one not in living]


def is_alive(record: CellRecord, results: Path) -> bool:
    """Whether a cell's process is there; of another machine's its claim tells."""
    known = None if record.process is None else claims.lives(record.process)
    if known is not None or record.cell is None:
        return bool(known)
    return claims.alive(claims.path_of(results, record.cell)) is not None
