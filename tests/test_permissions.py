"""What a user may not read or write is said in one line, by the operating system's own refusal and not by a fake."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.help import one_line_errors
from harness.model.slim import read_mask
from harness.preflight import lines, missing_masks, refusal
from harness.store import check_writable
from tasks.web_questions import WebQuestions

NOBODY = 65534
ROW = '{"question": "q?", "answers": ["a"], "url": "u"}\n'


@pytest.fixture
def folder() -> Iterator[Path]:
    """Readable to all down to its root, which pytest's own folders are not; with what only its owner may use inside."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        for part, mode in (("open", 0o555), ("closed", 0o000)):
            (root / part).mkdir()
            for file in ("web_questions_test.jsonl", "mask.json"):
                (root / part / file).write_text(ROW)
                (root / part / file).chmod(0o000)
            (root / part).chmod(mode)
        yield root
        for part in ("open", "closed"):
            (root / part).chmod(0o755)


def without_rights(action: Callable[[], Any]) -> str:
    """What ``action`` raises in a process of a user without rights, by name and text; empty where it does not."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        said = ""
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            action()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


def rows_of(folder: Path) -> Callable[[], Any]:
    return lambda: WebQuestions(source="local", data_dir=str(folder), shots=0).load(1, 0)


def test_the_owner_of_all_is_refused_nothing_that_another_is(folder: Path) -> None:
    (folder / "open" / "web_questions_test.jsonl").chmod(0o644)
    assert without_rights(rows_of(folder / "open")) == ""


@pytest.mark.parametrize("part", ["open", "closed", "closed/further"])
def test_results_that_cannot_be_written_are_a_user_error(folder: Path, part: str) -> None:
    said = without_rights(lambda: check_writable(folder / part))
    assert said.startswith(f"UserError: cannot write in '{folder}/{part}' (Permission denied)")


def test_rows_that_cannot_be_read_name_the_file(folder: Path) -> None:
    said = without_rights(rows_of(folder / "open"))
    assert said == (
        f"UserError: {folder}/open/web_questions_test.jsonl cannot be read (Permission denied): check the path and its "
        "permissions"
    )


@pytest.mark.parametrize("action", [rows_of, lambda folder: lambda: read_mask(str(folder / "mask.json"), 4)])
def test_a_folder_that_cannot_be_looked_into_is_one_line_too(
    folder: Path, action: Callable[[Path], Callable[[], Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    closed = folder / "closed"

    def run() -> None:
        with one_line_errors():
            action(closed)()

    assert without_rights(run) == "SystemExit: 2"

    def listed() -> None:
        raise UserError(" ".join(refusal(action(closed))))

    said = without_rights(listed)
    assert said.startswith(f"UserError: {closed}/") and "Permission denied: check its permissions" in said


def test_preflight_lists_a_mask_that_it_may_not_see(folder: Path) -> None:
    mask = str(folder / "closed" / "mask.json")

    def listed() -> None:
        config = {"model": {"slim_mask": mask, "_target_": "m"}, "methods": {}}
        raise UserError(" ".join(lines(missing_masks, config)))

    assert f"{mask}: Permission denied: check its permissions" in without_rights(listed)
