"""What a cell is: one bench run, known by a hash of everything that can change its numbers.

Two runs with the same cell would decode the same prompts with the same weights by the same code on the same kind of
machine: one of them is enough, and an unfinished one can be gone on with. What ``EXCLUDED`` does not list counts.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

from harness.environment import CHECKOUT, version
from harness.model.made import cache_dir, sha256
from harness.records import DataSource
from harness.store import write_atomic

EXCLUDED: Mapping[str, str] = {
    "name": "only names tables and figures",
    "run_name": "only labels the folder",
    "results_dir": "where results go",
    "log": "copies of what is on disk",
    "run": "is for jobs that read runs",
    "dry_run": "runs nothing",
    "rerun": "asks for the same numbers again",
    "fail_fast": "says what follows a failure",
    "shard": "says who measures, not what",
    "launcher": "says where cells run",
    "exclusive": "says who waits for whom",
    "cores": "says which cores; how many threads run on them counts by itself",
    "sweep": "is for jobs that read runs",
    "paper": "is for jobs that read runs",
    "format": "is for jobs that read runs",
    "other": "is for jobs that read runs",
    "note": "is printed beside numbers",
    "not_run": "is printed beside numbers; arms that are not run are no methods",
}
"""Root keys that cannot change a number, each with the reason. A key that is not here is part of the cell."""

COMPUTING = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "triton", "jinja2", "datasets", "gguf"),
    *("sacrebleu", "rouge-score", "nltk", "regex", "optuna"),
)
"""Distributions whose code makes, scores or counts tokens; one that is not installed counts as such."""

MACHINE = ("cpu", "python", "device", "dtype", "threads")
"""Facts of ``RunRecord.env`` that numbers depend on. The load, the kernel's version and the like are not among them."""

BLOB = re.compile(r"[0-9a-f]{64}")
LARGE = 8 * 2**20
"""Bytes from which on a file's digest is kept in the user's cache, by path, size and time of change."""
DIGESTS = "digests.json"


@dataclass(frozen=True, slots=True)
class Cell:
    """``key``: 16 hex digits, a digest of ``parts``: digests by what was hashed, to see what differs between two."""

    key: str
    parts: Mapping[str, str]


def cell_of(
    config: Mapping[str, Any],
    env: Mapping[str, str],
    data: Mapping[str, DataSource],
    prompts_sha: Mapping[str, str],
    folder: Path | None = None,
) -> Cell:
    """The cell of a run.

    Args:
        config: resolved, of plain values.
        env: as in ``RunRecord.env``.
        data: where each task's rows come from.
        prompts_sha: digests of each task's prompts.
        folder: the full verifier's checkpoint, None of a model that is made.
    """
    counted = {key: value for key, value in config.items() if key not in EXCLUDED}
    weights = {str(path): content(path) for path in dict.fromkeys([*paths_in(counted), *([folder] if folder else [])])}
    found = {
        "config": {**counted, "order": [list(counted.get(key) or ()) for key in ("methods", "tasks")]},
        "code": code_sha() | {name: sha256(path) for name, path in foreign_code(counted)},
        "versions": {name: version(name) for name in COMPUTING},
        "machine": {name: env.get(name) for name in MACHINE},
        "weights": sorted(weights.values()),
        "data": {name: [one.sha256, one.shots and one.shots.sha256] for name, one in data.items()},
        "prompts": dict(prompts_sha),
    }
    parts = {name: digest(part) for name, part in found.items()}
    return Cell(digest(parts), parts)


def digest(value: Any) -> str:
    """16 hex digits of plain values; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def code_sha(root: Path = CHECKOUT) -> dict[str, str]:
    """The digest of each file of ``harness/`` and ``tasks/`` as it is on disk; read once a process."""
    files = (path for package in ("harness", "tasks") for path in (root / package).rglob("*") if path.is_file())
    return {
        path.relative_to(root).as_posix(): sha256(path)
        for path in sorted(files)
        if "__pycache__" not in path.parts and path.suffix != ".mplstyle"
    }


def foreign_code(config: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Files of the modules that the config calls and that are not ours: tasks and methods of a user's own."""
    for name in sorted({module for module in modules_in(config) if module.split(".")[0] not in ("harness", "tasks")}):
        spec = util.find_spec(name)
        if spec is not None and spec.origin is not None and (path := Path(spec.origin)).is_file():
            yield name, path


def modules_in(value: Any) -> Iterator[str]:
    """The module of every ``_target_``."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield str(value["_target_"]).rpartition(".")[0]
        for inner in value.values():
            yield from modules_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from modules_in(inner)


# Files that a config names.


def paths_in(value: Any) -> Iterator[Path]:
    """Files, and folders with weights, that any text in ``value`` names, from here or from the checkout."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from paths_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from paths_in(inner)
    elif isinstance(value, str) and 0 < len(value) < 1000 and "\n" not in value and "{" not in value:
        for path in (Path(value).expanduser(), CHECKOUT / value):
            if is_weights(path):
                yield path.resolve()
                return


def is_weights(path: Path) -> bool:
    try:
        return path.is_file() or (path / "config.json").is_file()
    except OSError:  # a text that no path can be
        return False


def content(path: Path) -> str:
    """The digest of a file's bytes, or of a folder's files with their names; hidden ones are left out."""
    if path.is_dir():
        files = (one for one in sorted(path.rglob("*")) if one.is_file())
        relative = {one.relative_to(path): one for one in files}
        return digest({str(name): file_sha(one) for name, one in relative.items() if not str(name).startswith(".")})
    return file_sha(path)


_known: dict[tuple[str, int, int], str] = {}


def file_sha(path: Path) -> str:
    """sha256 of a file. Files of the hub's cache are named by it; of other large ones it is remembered on disk."""
    path = path.resolve()
    if path.parent.name == "blobs" and BLOB.fullmatch(path.name):
        return path.name
    about = path.stat()
    key = (str(path), about.st_size, about.st_mtime_ns)
    if key not in _known and about.st_size >= LARGE:
        _known.update(remembered())
    if key not in _known:
        _known[key] = sha256(path)
        if about.st_size >= LARGE:
            remember(key)
    return _known[key]


def remembered() -> dict[tuple[str, int, int], str]:
    """Digests of large files that earlier processes found; none where the cache cannot be read."""
    try:
        rows = json.loads((cache_dir() / DIGESTS).read_text())
        return {(str(name), int(size), int(time)): str(sha) for name, size, time, sha in rows}
    except (OSError, ValueError, TypeError):
        return {}


def remember(key: tuple[str, int, int]) -> None:
    rows = {known: sha for known, sha in remembered().items() if known[0] != key[0]} | {key: _known[key]}
    with suppress(OSError):  # the next process computes it again
        write_atomic(cache_dir() / DIGESTS, json.dumps([[*known, sha] for known, sha in rows.items()]))
