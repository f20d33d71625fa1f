"""What W&B wrote on disk in offline mode, read back: the file that ``wandb sync`` sends."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

FILE_HEADER, BLOCK, RECORD_HEADER = 7, 32768, 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Record]:
    """The records of a ``.wandb`` file, in LevelDB's log format behind a header of W&B's own."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, body = FILE_HEADER, b""
    while place + RECORD_HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < RECORD_HEADER:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        assert kind in (WHOLE, FIRST, MIDDLE, LAST)
        body += data[place + RECORD_HEADER : place + RECORD_HEADER + length]
        place += RECORD_HEADER + length
        if kind in (WHOLE, LAST):
            yield Record.FromString(body)
            body = b""


@dataclass
class Sent:
    """A run as W&B would get it."""

    id: str = ""
    group: str = ""
    job_type: str = ""
    project: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    artifacts: dict[str, set[str]] = field(default_factory=dict)
    exit_code: int | None = None


def sent(folder: Path) -> Sent:
    """What lies in one ``offline-run-*`` folder."""
    (path,) = folder.glob("*.wandb")
    found = Sent()
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            found.id, found.group, found.job_type, found.project = run.run_id, run.run_group, run.job_type, run.project
            found.tags = list(run.tags)
            found.config |= {item.key: json.loads(item.value_json) for item in run.config.update}
        elif kind == "summary":
            found.summary |= values(record.summary.update)
        elif kind == "history":
            found.history.append(values(record.history.item))
        elif kind == "artifact":
            contents = record.artifact.manifest.contents
            found.artifacts.setdefault(record.artifact.type, set()).update(item.path for item in contents)
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def values(items: Any) -> dict[str, Any]:
    """By key; what is written key by key, such as a table, as one value again."""
    found: dict[str, Any] = {}
    for item in items:
        *outer, last = item.nested_key or [item.key]
        place = found
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
    return found


def offline_runs(folder: Path) -> list[Sent]:
    """Every run below ``<folder>/wandb``, in the order in which they were started."""
    return [sent(path) for path in sorted((folder / "wandb").glob("offline-run-*"))]
