"""The run folder: ``config.yaml``, ``run.json``, a file of lines for each kind of record and, last, ``summary.json``.

A sample is on disk before the next one is measured, so a killed run keeps what it had. ``summary.json`` is written
after everything else: its presence means the run is done. Not covered: two processes writing one folder; ``create``
gives each run a folder of its own.
"""

import json
import os
import re
import secrets
import tempfile
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import yaml
from omegaconf import OmegaConf

from harness.errors import UserError, unknown
from harness.records import SCHEMA, Divergence, FidelityRecord, RunRecord, SampleRecord

CONFIG, RUN, SUMMARY = "config.yaml", "run.json", "summary.json"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The first, which not every build of PyYAML has, takes a tenth of the time."""
SAMPLES, DIVERGENCES, FIDELITY = "samples.jsonl", "divergences.jsonl", "fidelity.jsonl"

Line = SampleRecord | Divergence | FidelityRecord
FILES: dict[type[Line], str] = {SampleRecord: SAMPLES, Divergence: DIVERGENCES, FidelityRecord: FIDELITY}
"""Where each kind of record goes, one a line."""
Record = TypeVar("Record", SampleRecord, Divergence, FidelityRecord)


class RunData(NamedTuple):
    """A run as read back. ``dropped`` counts half-written last lines of ``samples.jsonl`` (0 or 1)."""

    run: RunRecord
    samples: tuple[SampleRecord, ...]
    dropped: int
    divergences: tuple[Divergence, ...]
    fidelity: tuple[FidelityRecord, ...] = ()


def new_run_id(name: str, now: datetime | None = None, cell: str | None = None) -> str:
    """UTC time, the cell or a random suffix, the run's name: ``20260131T091500Z-3f9a1c-quickstart``; sorts by time."""
    now = now or datetime.now(UTC)
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[:80] or "run"
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{cell or secrets.token_hex(3)}-{slug}"


def check_writable(folder: str | Path) -> None:
    """Prove that a file can be written in ``folder``, or in what it will be made in, before anything is measured.

    Leaves nothing behind.

    Raises:
        UserError: it cannot.
    """
    place = Path(folder)
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"probe")
            probe.flush()
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot write in {str(folder)!r} ({reason}): choose another folder with results_dir=PATH."
        ) from error


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write the whole file or leave the old one: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # a pid may be another machine's too
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporaries(folder: Path, name: str = "*") -> None:
    """Remove what ``write_atomic`` left of ``name`` when its process was killed; nobody else may be writing there."""
    for path in folder.glob(f".{name}.*.tmp"):
        path.unlink(missing_ok=True)


def to_json(value: Any) -> Any:
    """Records, enums, paths, tuples and mappings as plain JSON values.

    Raises:
        TypeError: a type that ``from_json`` could not give back.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"cannot store a {type(value).__name__}: {value!r}")


def write_measured(record: Any, path: Path, numbers: Sequence[Any] = ()) -> None:
    """A record that a job fills as it measures, and under ``rows`` the numbers made of it once all is there."""
    text = json.dumps(to_json(record) | {"rows": to_json(tuple(numbers))}, indent=1, allow_nan=False)
    write_atomic(path, text + "\n")


def from_json(kind: Any, value: Any) -> Any:
    """Inverse of ``to_json`` for the annotated type ``kind``; strict about missing and unknown fields.

    Raises:
        ValueError: ``value`` does not fit ``kind``, or the record refuses it.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        return None if value is None else from_json(inner[0], value)
    if origin is tuple and isinstance(value, list):
        return tuple(from_json(arguments[0], item) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: from_json(arguments[1], item) for key, item in value.items()}
    if isinstance(kind, type):
        if is_dataclass(kind) and isinstance(value, dict):
            return _record(kind, value)
        if issubclass(kind, Enum):
            return kind(value)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is kind:
            return value
    raise ValueError(f"want {kind}, got {value!r:.80}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _record(kind: Any, value: dict[str, Any]) -> Any:
    """A field with a default may be missing: it is younger than the file."""
    hints = _hints(kind)
    needed = {item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING}
    if not needed <= value.keys() <= hints.keys():
        missing, extra = sorted(needed - value.keys()), sorted(value.keys() - hints.keys())
        raise ValueError(f"{kind.__name__}: missing fields {missing}, unknown fields {extra}")
    return kind(**{name: from_json(hints[name], item) for name, item in value.items()})


def _dump(value: Any, indent: int | None = None) -> str:
    # allow_nan=False: NaN is not JSON; an undefined number is None.
    return json.dumps(to_json(value), indent=indent, allow_nan=False) + "\n"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a refusal to write results into one line that says what stays.

    Raises:
        UserError: an OSError inside.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, error.strerror or error) from error


def unwritable(path: Path, reason: object) -> UserError:
    """An error for results that cannot be written."""
    return UserError(
        f"cannot write {str(path)!r} ({reason}): what was measured is kept; make room, and the same command goes on "
        "from there."
    )


class RunFolder:
    """Writer of one run folder. Use ``create``; then ``append`` per record; then ``finish`` or ``fail``."""

    def __init__(self, path: Path, run: RunRecord) -> None:
        self.path = path
        self.run = run

    @classmethod
    def create(cls, results_dir: str | Path, run: RunRecord, config: str | Mapping[str, Any]) -> "RunFolder":
        """Claim ``results_dir/runs/<run_id>`` and write the run's identity into it.

        Raises:
            UserError: the folder exists already or cannot be written.
        """
        path = Path(results_dir) / "runs" / run.run_id
        check_writable(path.parent)
        try:
            path.mkdir(parents=True, exist_ok=False)
        except FileExistsError as error:
            raise UserError(
                f"run folder {str(path)!r} exists already: delete it or choose another run_name."
            ) from error
        text = config if isinstance(config, str) else OmegaConf.to_yaml(OmegaConf.create(to_json(config)))
        folder = cls(path, replace(run, schema=SCHEMA, status="running"))
        with writing(path):
            write_atomic(path / CONFIG, text)
            for name in FILES.values():
                (path / name).touch()
            folder._write_run()
        return folder

    def append(self, record: Line) -> None:
        """Add one line to the file of its kind and wait until it is on disk.

        Raises:
            UserError: it cannot be written, as on a full disk; the file ends with a whole line as far as that goes.
        """
        if record.run_id != self.run.run_id:
            raise ValueError(f"record of run {record.run_id!r} in the folder of {self.run.run_id!r}")
        line = _dump(record).encode()
        path = self.path / FILES[type(record)]
        with writing(path), path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                if (written := file.write(line)) < len(line):
                    file.write(line[written:])  # says why the first write stopped
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Mark the run finished, then write ``summary.json``: the last file of a run."""
        text = _dump(summary, indent=2)
        with writing(self.path):
            self.set_status("finished")
            write_atomic(self.path / SUMMARY, text)

    def fail(self, error: str | None = None) -> None:
        """Mark the run failed, and why; what was measured stays readable. On a full disk the mark alone is lost."""
        with suppress(OSError):
            self.set_status("failed", error)

    def set_status(self, status: str, error: str | None = None) -> None:
        self.run = replace(self.run, status=status, error=error)
        self._write_run()

    def _write_run(self) -> None:
        write_atomic(self.path / RUN, _dump(self.run, indent=2))


def is_finished(folder: Path) -> bool:
    """Whether the run in ``folder`` wrote its summary."""
    return (folder / SUMMARY).is_file()


def read_run(folder: Path) -> RunRecord:
    """``run.json`` of a run folder.

    Raises:
        UserError: it is not there, corrupt, or of a newer schema.
    """
    path = folder / RUN
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"no readable run at {str(path)!r}: {error.strerror or error}.") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}): restore the file or delete the run folder.") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise UserError(f"{path}: schema {schema}, this version reads up to {SCHEMA}: update the harness.")
    try:
        return cast(RunRecord, from_json(RunRecord, data))
    except ValueError as error:
        raise UserError(f"{path}: not a run record ({error}): restore the file or delete the run folder.") from error


def _read_lines(path: Path, kind: type[Record], run_id: str) -> tuple[tuple[Record, ...], int]:
    """The records of a run and the count of half-written last lines.

    A line without its newline is the trace of a killed run: it is dropped unless it is whole. Any other line that
    does not parse is corruption, and refused.
    """
    records: list[Record] = []
    noun = kind.__name__.removesuffix("Record").lower()
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"no readable {noun}s at {str(path)!r}: {error.strerror or error}.") from error
    for number, line in enumerate(lines, start=1):
        is_tail = number == len(lines)
        if is_tail and not line:
            break
        try:
            record = from_json(kind, json.loads(line))
        except ValueError as error:
            if is_tail:
                return tuple(records), 1
            raise UserError(f"{path}, line {number}: not a {noun} ({error}): delete the line or the run.") from error
        if record.run_id != run_id:
            raise UserError(f"{path}, line {number}: {noun} of run {record.run_id!r}, want {run_id!r}.")
        records.append(record)
    return tuple(records), 0


def read(folder: str | Path) -> RunData:
    """A run folder, finished or not. One from before differences were judged or outputs scored again has none of them.

    Raises:
        UserError: files are missing, corrupt, of a newer schema, or of another run.
    """
    folder = Path(folder)
    run = read_run(folder)
    samples, dropped = _read_lines(folder / SAMPLES, SampleRecord, run.run_id)
    path = folder / DIVERGENCES
    divergences, _ = _read_lines(path, Divergence, run.run_id) if path.is_file() else ((), 0)
    path = folder / FIDELITY
    fidelity, _ = _read_lines(path, FidelityRecord, run.run_id) if path.is_file() else ((), 0)
    return RunData(run, samples, dropped, divergences, fidelity)


def read_config(folder: str | Path) -> dict[str, Any]:
    """``config.yaml`` of a run as plain values; empty when the file is missing.

    Raises:
        UserError: it is there and not readable as YAML.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        return {}
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as YAML: restore the file or delete the run folder.") from error


def parsed(config: str) -> dict[str, Any]:
    """The text of a ``config.yaml`` as plain values; of anything but a mapping an empty one."""
    data = yaml.load(config, Loader=LOADER)
    return data if isinstance(data, dict) else {}


def find_runs(results_dir: str | Path, run_ids: Sequence[str] | None = None) -> list[Path]:
    """Run folders by id, in the order asked; by default the newest finished run that has samples.

    Raises:
        UserError: there is no such run.
    """
    root = Path(results_dir) / "runs"
    folders = {path.parent.name: path.parent for path in sorted(root.glob(f"*/{RUN}"))}
    if run_ids is None:
        done = [path for path in folders.values() if is_finished(path) and _has_samples(path)]
        if not done:
            raise _nothing("no finished run with samples", root)
        return done[-1:]
    if not folders:
        raise _nothing(f"no run {', '.join(run_ids)}", root)
    for run_id in run_ids:
        if run_id not in folders:
            raise unknown("run", run_id, folders)
    return [folders[run_id] for run_id in dict.fromkeys(run_ids)]


def results_of(folder: Path) -> Path:
    """The results folder that the folder of a run or a sweep is in, which may have been moved since it was written."""
    return folder.resolve().parents[1]


def _has_samples(folder: Path) -> bool:
    path = folder / SAMPLES
    return path.is_file() and path.stat().st_size > 0


def _nothing(what: str, root: Path) -> UserError:
    return UserError(f"{what} in {str(root)!r}: run `python -m harness +experiment=quickstart` first.")
