"""Texts that a drafter learns from: files named in its config, never test rows."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.model.slim import CHECKOUT

BUILTIN = CHECKOUT / "tasks" / "builtin"


def read_texts(files: Iterable[str]) -> Iterator[str]:
    """The whole of a text file; of JSON Lines (``.jsonl``) every string of each row, in order.

    A relative path that does not exist is looked for in the project's folder, whatever folder is the current one.

    Raises:
        UserError: a file that is missing or unreadable, or holds test rows by its name.
    """
    for name in files:
        path = Path(name).expanduser()
        if not path.exists() and not path.is_absolute():
            path = CHECKOUT / path
        check_no_test_rows(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
            lines = [line for line in text.split("\n") if line.strip()]
            rows = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else text
        except (OSError, ValueError) as error:
            raise UserError(f"drafter.text: {name!r} cannot be read ({error}): want a text or JSON Lines.") from error
        yield from strings(rows)


def check_no_test_rows(path: Path) -> None:
    """By the names that tasks give their files: ``<dataset>_test.jsonl``, and the built-in rows for tests."""
    builtin_test = path.resolve().parent == BUILTIN and not path.stem.endswith("_calibration")
    if builtin_test or path.name.endswith("_test.jsonl"):
        raise UserError(f"drafter.text: {str(path)!r} holds test rows: name files of another split.")


def strings(value: Any) -> Iterator[str]:
    """Every string in a value as JSON has them, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)
