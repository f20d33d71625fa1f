"""Jobs on a full disk: one line that says so, and what was measured before is gone on with."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.jobs import audit as audit_module
from harness.jobs import search as search_module
from harness.jobs import workspace as workspace_module
from harness.jobs.pareto import keeping, opened
from harness.jobs.relog import relog
from harness.report import tables
from harness.store import write_atomic
from tests.rows import two_arms
from tests.runs import refused
from tests.test_audit import run_toy
from tests.test_relog import Recorder, write
from tests.test_search import SETTINGS, rows_of, search_toy, untimed
from tests.test_workspace import call

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # wandb-workspaces, of pydantic

FULL = r"cannot write '.*' \(No space left on device\): what was measured is kept; make room"


@contextmanager
def full(monkeypatch: pytest.MonkeyPatch, module: Any, files: int = 0) -> Iterator[None]:
    """After ``files`` files nothing more that ``module`` writes fits inside."""
    left = iter(range(files))

    def limited(path: Path, data: str | bytes) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_atomic(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_atomic", limited)
        yield


@pytest.mark.parametrize("files", [0, 3, SETTINGS["evaluations"] + 1])
def test_a_search_goes_on_once_there_is_room(files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full(monkeypatch, search_module, files), pytest.raises(UserError, match=FULL):
        search_toy(tmp_path / "full")
    if files > 1:
        assert len(rows_of(tmp_path / "full" / "masks" / "toy_skip30")) == files - 1  # the first one says of what it is
    assert untimed(search_toy(tmp_path / "full")) == untimed(search_toy(tmp_path / "whole"))


def test_a_workspace_that_cannot_be_kept_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full(monkeypatch, workspace_module), pytest.raises(UserError, match=FULL):
        call(tmp_path, mode="offline")


def test_an_audit_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_toy(monkeypatch, tmp_path)
    with full(monkeypatch, audit_module, 1):
        said = refused(monkeypatch, capsys, "job=audit", f"results_dir={tmp_path}")
    assert said.startswith("cannot write '") and "No space left on device" in said


def test_a_run_whose_tables_cannot_be_made_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a", two_arms())
    log = Recorder()
    with full(monkeypatch, tables), pytest.raises(UserError, match=FULL):
        relog(str(tmp_path), log)
    assert log.told == []


def test_a_study_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    refusal = pytest.raises(UserError, match=r"cannot write '.*study.db' \(.+\): what was measured is kept")
    with refusal, keeping(path), opened(path, {"arm": "via_sd"}, False, "pareto") as study:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            study.set_user_attr("test", "scores")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with keeping(path), opened(path, {"arm": "via_sd"}, False, "pareto") as study:
        assert study.user_attrs == {"identity": {"arm": "via_sd"}}
