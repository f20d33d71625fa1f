"""Runs on disk are sent to a logger as the bench sends them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.jobs.relog import relog
from harness.log import NullLogger
from harness.records import MetricRow, RunRecord, SampleRecord
from harness.store import RunFolder
from tests.rows import run_record, sample, two_arms
from tests.runs import refused


class Recorder(NullLogger):
    """Remembers what it is told; ``takes`` says whether it admits to have taken it."""

    def __init__(self, takes: bool = True) -> None:
        self.takes, self.told = takes, list[tuple[str, Any]]()

    def start(self, run: RunRecord, config: Mapping[str, Any]) -> None:
        self.told.append(("start", (run.run_id, config.get("gamma"))))

    def sample(self, record: SampleRecord) -> None:
        self.told.append(("sample", record))

    def summary(self, rows: Sequence[MetricRow]) -> None:
        self.told.append(("summary", len(rows)))

    def files(self, folder: Path, reports: Sequence[Path]) -> None:
        assert all(path.stat().st_size for path in reports)
        self.told.append(("files", (folder.name, sorted(path.name for path in reports))))

    def close(self, failed: bool = False) -> None:
        self.told.append(("close", failed))

    def ok(self) -> bool:
        return self.takes

    def of(self, name: str) -> list[Any]:
        return [value for called, value in self.told if called == name]


def write(results: Path, run_id: str, samples: Sequence[SampleRecord], finished: bool = True) -> None:
    folder = RunFolder.create(results, replace(run_record(), run_id=run_id), {"name": "mine", "gamma": 5})
    for one in samples:
        folder.append(replace(one, run_id=run_id))
    if finished:
        folder.finish({})


def test_a_run_is_sent_whole_and_in_order(tmp_path: Path) -> None:
    write(tmp_path, "a", two_arms())
    log = Recorder()
    assert relog(str(tmp_path), log) == ["a"]
    assert [name for name, _ in log.told] == ["start", *["sample"] * 4, "summary", "files", "close"]
    assert log.of("start") == [("a", 5)] and log.of("close") == [False]
    files = ["mine.csv", "mine.md", "mine.pdf", "mine.png", "mine_positions.csv"]
    assert log.of("files") == [("a", files)]
    assert not (tmp_path / "tables").exists(), "tables on disk stay as they are"


def test_all_runs_are_sent_those_that_cannot_be_read_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", two_arms())
    write(tmp_path, "b", [*two_arms(), sample(tokens=3, example="3")], finished=False)
    write(tmp_path, "c", [], finished=False)
    log = Recorder()
    assert relog(str(tmp_path), log, "all") == ["a", "b"]
    assert len(log.of("sample")) == 4 + 5, "of a run that did not finish, all that there is"
    assert "left out c: run 'c' has no prompt" in capsys.readouterr().err
    with pytest.raises(UserError, match="no prompt that all arms decoded"):
        relog(str(tmp_path), log, "c")


def test_a_logger_that_did_not_take_a_run_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "a", two_arms())
    with pytest.raises(UserError, match="a was not sent whole"):
        relog(str(tmp_path), Recorder(takes=False))


@pytest.mark.parametrize("runs", [None, "all", "x"])
def test_no_run_is_one_line(runs: str | None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no (finished )?run"):
        relog(str(tmp_path), Recorder(), runs)


def test_no_logger_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "add log=wandb" in refused(monkeypatch, capsys, "job=relog", f"results_dir={tmp_path}")
