"""Where a task's rows come from: a folder of JSON Lines, the Hugging Face hub or its cache, or the built-in rows.

The order is the same for every task and ``Rows`` says what was read. Rows keep the columns and the text of the
Hugging Face dataset, whichever way they came.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any

from harness.errors import UserError
from tasks import hub

SOURCES = ("auto", "local", "hub", "builtin")
BUILTIN = Path(__file__).parent / "builtin"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Names of one dataset.

    ``path`` and ``config`` as on the hub, ``path`` empty for a set that is not there; ``stem`` begins the local file
    names, ``<stem>_<split>.jsonl``, but for the test rows where ``test_file`` names them; ``prefix`` begins the example
    ids; ``builtin`` begins the names of the built-in files. ``calibration`` and ``shots`` are splits in order of
    choice, of which the hub is asked for the first; without any, the built-in calibration rows are taken.
    """

    path: str
    config: str
    stem: str
    prefix: str
    builtin: str
    calibration: tuple[str, ...] = ("train",)
    shots: tuple[str, ...] = ("train",)
    test: str = "test"
    test_file: str | None = None

    def file(self, split: str) -> str:
        """Name of a split's local file."""
        return self.test_file if self.test_file and split == self.test else f"{self.stem}_{split}.jsonl"


@dataclass(frozen=True, slots=True)
class Rows:
    """Raw rows with their origin, in the words of ``DataSource``.

    ``places`` says for each row where it stands, for error messages; ``prefix`` begins the ids of its examples, and
    ``numbers``, counted from 0 in the split, end them.
    """

    kind: str
    location: str
    split: str
    revision: str | None
    commit: str | None
    prefix: str
    rows: tuple[Mapping[str, Any], ...]
    places: tuple[str, ...]
    numbers: Sequence[int] = range(sys.maxsize)


class RowError(ValueError):
    """A row does not have what its task needs; the text names the column."""


@cache
def notice(text: str) -> None:
    """One line on stderr, once a process for the same text."""
    print(text, file=sys.stderr, flush=True)


def column(row: Mapping[str, Any], name: str, wanted: type | UnionType = str) -> Any:
    """The value of a column; ``a.b`` is column ``b`` inside ``a``. Raises RowError if missing or of another type."""
    value: Any = row
    for step in name.split("."):
        if not isinstance(value, Mapping) or step not in value:
            raise RowError(f"no column {name!r}")
        value = value[step]
    if not isinstance(value, wanted):
        kind = wanted.__name__ if isinstance(wanted, type) else str(wanted)
        raise RowError(f"column {name!r} holds {type(value).__name__}, want {kind}")
    return value


def digest(rows: list[dict[str, Any]]) -> str:
    """SHA-256 of rows as canonical JSON, the same whichever way they came (sorted keys, no spaces, UTF-8)."""
    text = json.dumps(rows, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_jsonl(path: Path, limit: int) -> tuple[list[dict[str, Any]], list[str]]:
    r"""The first ``limit`` rows of a JSON Lines file, and the place of each.

    Lines end at ``\n`` only (texts may hold other separators); ``\r\n``, blank lines and a BOM are borne.
    Raises UserError with file, line and column for what is not a JSON object in UTF-8.
    """
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if len(rows) == limit:
                    break
                if line.strip():
                    rows.append(_json_row(line.removeprefix(b"\xef\xbb\xbf"), f"{path}, line {number}"))
                    places.append(f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from error
    return rows, places


def _json_row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}, column {error.start + 1}: not UTF-8: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{place}, column {error.colno}: not valid JSON ({error.msg}): mend or delete it") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested without end
        raise UserError(f"{place}, column 1: not readable as JSON ({error}): mend or delete it") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}, column 1: holds a {type(row).__name__}, want one JSON object a line")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}, column 1: holds half of a surrogate pair: mend or delete it") from error
    return row


def load_rows(
    task: str,
    dataset: Dataset,
    *,
    splits: tuple[str, ...],
    source: str,
    data_dir: str | None,
    revision: str,
    limit: int,
) -> Rows:
    """The first ``limit`` rows of a split from the first place that has them.

    ``splits`` in order of choice: those of calibration or of shots, or the test split alone. ``auto`` tries
    ``data_dir``, then the hub or its cache, then the built-in rows; the others insist on one, except that ``local``
    takes built-in calibration rows where ``data_dir`` has no file of a split that is not the test's. Without any split
    the built-in calibration rows are taken. Raises UserError.
    """
    calibration = splits != (dataset.test,)
    if source == "local" and not data_dir:
        raise UserError("source=local needs data_dir: add data_dir=PATH, or take source=auto")
    if splits and source in ("auto", "local") and data_dir:
        found = _local_rows(dataset, splits, Path(data_dir).expanduser(), limit)
        if found is not None:
            return found
        wanted = " or ".join(map(dataset.file, splits))
        if source == "local" and not calibration:
            raise UserError(f"{task}: no {wanted} in {data_dir}: add the file, or take source=auto")
        then = "trying the Hugging Face hub" if source == "auto" else "built-in calibration rows instead"
        notice(f"{task}: no {wanted} in {data_dir}: {then}")
    if splits and not dataset.path and source == "hub":
        raise UserError(f"{task} is not on the Hugging Face hub: add data_dir=PATH with {dataset.file(splits[0])}")
    if splits and dataset.path and source in ("auto", "hub"):
        try:
            return _hub_rows(dataset, splits[0], limit, revision)
        except hub.HubUnavailable as error:
            if source == "hub":
                raise UserError(
                    f"{task}: {dataset.path} cannot be had from the Hugging Face hub ({error}) and is not in its "
                    "local cache: check the connection, or take source=auto"
                ) from error
            notice(f"Hugging Face hub not used ({error}): built-in rows instead")
    return _builtin_rows(dataset.builtin, calibration, limit)


def _local_rows(dataset: Dataset, splits: tuple[str, ...], folder: Path, limit: int) -> Rows | None:
    if not folder.is_dir():
        raise UserError(f"data_dir {str(folder)!r} is not a folder: name one with JSON Lines files, or leave it out")
    for split in splits:
        path = folder / dataset.file(split)
        if path.is_file():
            rows, places = read_jsonl(path, limit)
            prefix = _prefix(dataset, split)
            return Rows("local", str(path), split, None, None, prefix, tuple(rows), tuple(places))
    return None


def _hub_rows(dataset: Dataset, split: str, limit: int, revision: str) -> Rows:
    got = hub.fetch(dataset.path, dataset.config, split, limit, revision)
    location = f"{dataset.path} {dataset.config}"
    if got.why_cached is not None:
        location += " (local cache)"
        notice(f"Hugging Face hub not used ({got.why_cached}): rows from its local cache")
    places = tuple(f"{location}, {split} row {index}" for index in range(len(got.rows)))
    return Rows("hub", location, split, revision, got.commit, _prefix(dataset, split), tuple(got.rows), places)


def _builtin_rows(name: str, calibration: bool, limit: int) -> Rows:
    path = BUILTIN / f"{name}{'_calibration' if calibration else ''}.jsonl"
    rows, places = read_jsonl(path, limit)
    split = "calibration" if calibration else "test"
    prefix = f"builtin-{name}{'-calibration' if calibration else ''}"
    location = f"tasks/builtin/{path.name}"
    return Rows("builtin", location, split, None, None, prefix, tuple(rows), tuple(places))


def _prefix(dataset: Dataset, split: str) -> str:
    return dataset.prefix if split == dataset.test else f"{dataset.prefix}-{split}"
