"""Baselines that several runs share (``pairing=shared``): a file for each, in ``results_dir/baselines``.

Its name has a digest of all that the baseline's output and times depend on: who asks for the same finds it. It is
written whole, once all prompts of its task are decoded, and only where nobody else was measuring meanwhile.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from harness.errors import UserError
from harness.records import SampleRecord
from harness.store import from_json, to_json, write_atomic, writing

FOLDER = "baselines"


def path_of(results_dir: str | Path, task: str, identity: Mapping[str, Any]) -> Path:
    """Where the baseline of ``task`` with this identity is, or will be."""
    digest = hashlib.sha256(json.dumps(to_json(identity), sort_keys=True).encode()).hexdigest()
    return Path(results_dir) / FOLDER / f"{task}-{digest[:16]}.jsonl"


@contextmanager
def claimed(path: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """For the one process that measures this baseline; others wait, and ``notify`` is told. Ends with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        notify(f"waiting for another process that measures the baseline {path}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def stored(path: Path, run_id: str) -> list[SampleRecord] | None:
    """The baseline's samples as samples of run ``run_id``, which name the run that measured them; None of none.

    Raises:
        UserError: the file is not readable as what it should be.
    """
    if not path.is_file():
        return None
    try:
        found = [from_json(SampleRecord, json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a stored baseline ({error}): delete the file.") from error
    return [replace(one, run_id=run_id, measured_in=one.run_id) for one in found]


def store(path: Path, samples: Sequence[SampleRecord]) -> None:
    """Keep a baseline for other runs, unless one of its timings is contended or another run's.

    Raises:
        UserError: it cannot be written, as on a full disk.
    """
    if not any(one.contended or one.measured_in for one in samples):
        with writing(path):
            write_atomic(path, "".join(json.dumps(to_json(one), allow_nan=False) + "\n" for one in samples))
