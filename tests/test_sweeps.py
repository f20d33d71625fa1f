"""Sweeps from the command line: skipping, shards, failures, one model for all, and what ``job=status`` says of them."""

import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness import __main__ as command
from harness import claims, compare, launch, measuring, rehearsal, sweeps
from harness.config import RunSettings
from harness.decode.base import Decoder
from harness.errors import UserError
from harness.jobs import bench as bench_module
from harness.jobs import models
from harness.jobs.status import duration
from harness.live import Tally
from harness.model.load import Model
from harness.model.toy import toy_model
from harness.records import SCHEMA
from harness.store import find_runs, read
from tests.runs import files, main, refused
from tests.toys import shapes_unchecked

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

SMALL = ("task=web_questions", "tasks.web_questions.shots=0", "limit=1", "max_new_tokens=4", "method=speculative")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compare, "RESAMPLES", 20)
    with shapes_unchecked():
        yield


def sweep(patched: pytest.MonkeyPatch, results: Path, *arguments: str, code: int = 0) -> None:
    """A sweep over two gammas unless ``arguments`` say otherwise; its exit code must be ``code``."""
    swept = () if any("," in one for one in arguments) else ("gamma=2,3",)
    command = ("-m", *SMALL, *swept, f"results_dir={results}", *arguments)
    if code:
        with pytest.raises(SystemExit) as caught:
            main(patched, *command)
        assert caught.value.code == code
    else:
        main(patched, *command)


def cells_of(results: Path) -> list[sweeps.CellRecord]:
    (folder,) = (results / "sweeps").iterdir()
    return sweeps.read_cells(folder)


def states(results: Path) -> list[str]:
    return [one.state for one in cells_of(results)]


def status(patched: pytest.MonkeyPatch, results: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    main(patched, "job=status", f"results_dir={results}", *arguments)
    return capsys.readouterr().out


def test_a_sweep_is_measured_once_and_its_tables_name_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(monkeypatch, tmp_path)
    said = capsys.readouterr()
    assert said.out.count("wrote ") == 5, "tables and figure once, at the end"
    assert states(tmp_path) == ["finished", "finished"]
    runs = [read(path).run for path in sorted((tmp_path / "runs").iterdir())]
    assert {run.run_id for run in runs} == {one.run_id for one in cells_of(tmp_path)}
    assert {run.cell for run in runs} == {one.cell for one in cells_of(tmp_path)} and len(runs) == 2
    (folder,) = (tmp_path / "sweeps").iterdir()
    assert [run.sweep for run in runs] == [folder.name] * 2 and f"sweep {folder.name}: 2 finished" in said.err
    page, csv = ((tmp_path / "tables" / name).read_text() for name in ("run.md", "run.csv"))
    for run in runs:
        lines = [line for line in page.splitlines() if run.run_id in line and line.startswith("|")]
        assert lines and all(str(run.cell) in line for line in lines), "at least in its id"
        assert f"cell `{run.cell}`" in page
        assert all(line.count(str(run.cell)) == 2 for line in csv.splitlines() if run.run_id in line)

    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path) if name.startswith("runs/")}
    sweep(monkeypatch, tmp_path)
    said = capsys.readouterr()
    assert said.err.count("(rerun=true measures it again)") == 2 and "2 skipped" in said.err
    assert states(tmp_path) == ["skipped", "skipped"]
    assert before == {name: (tmp_path / name).read_bytes() for name in files(tmp_path) if name.startswith("runs/")}
    sweep(monkeypatch, tmp_path, "gamma=2,3,4")
    assert len(list((tmp_path / "runs").iterdir())) == 3, "a larger sweep measures what is new"
    sweep(monkeypatch, tmp_path, "rerun=true")
    assert len(list((tmp_path / "runs").iterdir())) == 5
    assert "done" in status(monkeypatch, tmp_path, capsys)


def test_sweeps_of_other_models_or_by_other_code_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(layers: int, **changed: Any) -> Path:
        job = {"settings": {"cores": None} | changed, "config": f"text of {changed}"}
        config = {"name": "run", "results_dir": "results", "model": {"name": "one", "config": {"layers": layers}}}
        return sweeps.begun([config | {"job": job} | changed], [["gamma=2"]], tmp_path)

    assert begun(2) == begun(2, cores=[0]) != begun(4)
    before = begun(2)
    monkeypatch.setattr(sweeps, "code_sha", lambda: {"harness/sweeps.py": "another"})
    assert begun(2) != before


def test_shards_divide_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(monkeypatch, tmp_path, "gamma=2,3,4", "shard=2/2")
    assert [(one.index, one.overrides.count("gamma=3")) for one in cells_of(tmp_path)] == [(1, 1)]
    said = status(monkeypatch, tmp_path, capsys)
    assert "3 cells" in said
    sweep(monkeypatch, tmp_path, "gamma=2,3,4", "shard=1/2")
    assert [one.index for one in cells_of(tmp_path)] == [0, 1, 2]
    assert len(find_runs(tmp_path)) == 1 and len(list((tmp_path / "runs").iterdir())) == 3
    page = (tmp_path / "tables" / "run.md").read_text()
    assert all(str(one.run_id) in page for one in cells_of(tmp_path)), "the last shard tabulates all"


@pytest.mark.parametrize("shard", ["3/2", "0/2", "1/0", "1", "a/b", "1/2/3", "-1/2"])
def test_a_shard_that_is_none_is_refused(
    shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, "-m", "gamma=2,3", f"shard='{shard}'", f"results_dir={tmp_path}")
    assert said.startswith(f"shard={shard}: want i/n with i from 1 to n, such as shard=1/4.")
    assert files(tmp_path) == []


def test_a_shard_of_a_single_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, "shard=1/2", f"results_dir={tmp_path}")
    assert said == "shard=1/2 divides the cells of a sweep, and this is a single run: leave it out."


class Trouble:
    """Makes the run with gamma 3 fail."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.build_arms = error, bench_module.build_arms

    def __call__(self, settings: RunSettings, *rest: Any) -> Any:
        if settings.gamma == 3:
            raise self.error
        return self.build_arms(settings, *rest)


@pytest.mark.parametrize(("error", "code"), [(UserError("too long"), 2), (RuntimeError("out of memory"), 1)])
def test_a_cell_that_fails_is_written_down_and_the_sweep_goes_on(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(bench_module, "build_arms", Trouble(error))
        sweep(patched, tmp_path, "gamma=2,3,4", code=code)
    assert states(tmp_path) == ["finished", "failed", "finished"]
    failed = cells_of(tmp_path)[1]
    assert str(error) in (failed.error or "") and failed.mendable is (code == 2)
    said = capsys.readouterr().err
    assert ("Traceback" in said) is (code == 1)
    closing = said[said.index("1 failed") :]
    assert str(error) in closing and "gamma=3" in closing and "2 finished, 1 failed" in said
    assert "failed" in status(monkeypatch, tmp_path, capsys)
    sweep(monkeypatch, tmp_path, "gamma=2,3,4")
    assert states(tmp_path) == ["skipped", "finished", "skipped"], "what failed is tried again, and it alone"


def test_a_failure_in_measuring_is_in_the_runs_own_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_module, "scored_again", lambda *arguments: 1 / 0)
    sweep(monkeypatch, tmp_path, code=1)
    runs = [read(path).run for path in (tmp_path / "runs").iterdir()]
    assert [(run.status, run.error) for run in runs] == [("failed", "ZeroDivisionError: division by zero")] * 2
    assert not (tmp_path / "tables").exists()


def test_failures_are_listed_also_when_no_tables_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(folder: Path) -> None:
        raise UserError("no room for tables")

    monkeypatch.setattr(launch, "report_of", no_room)
    monkeypatch.setattr(bench_module, "build_arms", Trouble(UserError("too long")))
    sweep(monkeypatch, tmp_path, "gamma=2,3,4", code=2)
    said = capsys.readouterr().err
    assert "too long" in said[said.index("1 failed") :] and said.splitlines()[-1].endswith("no room for tables")


def test_fail_fast_begins_no_further_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(bench_module, "build_arms", Trouble(UserError("too long")))
        sweep(patched, tmp_path, "gamma=2,3,4", "fail_fast=true", code=2)
        assert states(tmp_path) == ["finished", "failed"]
    sweep(monkeypatch, tmp_path, "gamma=2,3,4", "fail_fast=true")
    assert states(tmp_path) == ["skipped", "finished", "finished"], "an earlier launch's failure stops nothing"


def test_an_interrupt_stops_a_sweep_and_keeps_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(bench_module, "build_arms", Trouble(KeyboardInterrupt()))
        sweep(patched, tmp_path, "gamma=2,3,4", code=130)
    assert states(tmp_path) == ["finished", "running"] and len(list((tmp_path / "runs").iterdir())) == 1
    sweep(monkeypatch, tmp_path, "gamma=2,3,4")
    assert states(tmp_path) == ["skipped", "finished", "finished"]


def test_a_cell_that_another_worker_has_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "first"
    sweep(monkeypatch, elsewhere)
    first, second = (str(one.cell) for one in cells_of(elsewhere))
    results = tmp_path / "second"
    with claims.claimed(results, first):
        sweep(monkeypatch, results)
    assert states(results) == ["busy", "finished"] and cells_of(results)[1].cell == second
    assert f"harness: cell {first} is being measured by process" in capsys.readouterr().err


def test_workers_at_once_share_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real processes start the same sweep: every cell is measured once, by one of them."""
    pids = []
    for _ in range(2):
        if (pid := os.fork()) == 0:
            try:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1), os.dup2(null, 2)
                sweep(monkeypatch, tmp_path, "gamma=1,2,3,4")
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    runs = [read(path).run for path in (tmp_path / "runs").iterdir()]
    assert sorted(str(run.cell) for run in runs) == sorted({str(run.cell) for run in runs}) and len(runs) == 4
    assert {run.status for run in runs} == {"finished"} and not list((tmp_path / "claims").glob("*.json"))


def test_cells_with_one_model_load_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Model] = []
    models.forget()

    def noting(**arguments: Any) -> Model:
        model = toy_model(**arguments)
        if "notify" in arguments:  # the preflight's rehearsal asks for models without weights
            made.append(model)
        return model

    monkeypatch.setattr("harness.model.toy.toy_model", noting)
    sweep(monkeypatch, tmp_path, "model.seed=0,1", "gamma=2,3")
    order = [one.overrides.count("model.seed=1") for one in cells_of(tmp_path)]
    changes = sum(before != after for before, after in pairwise(order))
    assert len(made) == 1 + changes < len(order) + 1 and len(models._loaded) == 1


def test_status_tells_running_dead_and_waiting_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)

            def stuck(*arguments: Any) -> Any:
                (tmp_path / "there").touch()
                signal.pause()

            monkeypatch.setattr(bench_module, "scored_again", stuck)
            sweep(monkeypatch, tmp_path, "gamma=2,3,4")
        finally:
            os._exit(0)
    while not (tmp_path / "there").exists():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.05)
    said = status(monkeypatch, tmp_path, capsys)
    assert summary_row(said)[:6] == ["0", "1", "0", "0", "0", "2"] and "2/2" in said
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    said = status(monkeypatch, tmp_path, capsys)
    assert summary_row(said)[:6] == ["0", "0", "1", "0", "0", "2"]
    (run_id,) = (path.name for path in (tmp_path / "runs").iterdir())
    assert "dead" in status(monkeypatch, tmp_path, capsys, f"run={run_id}")


def test_status_reads_a_results_folder_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(monkeypatch, tmp_path / "there")
    results = (tmp_path / "there").rename(tmp_path / "here")
    (folder,) = (results / "sweeps").iterdir()
    (folder / "cells" / ".one.json.tmp").symlink_to("gone")  # as one that has got its name meanwhile
    said = status(monkeypatch, results, capsys)
    assert summary_row(said)[0] == "2" and said.count("2/2") == 2, "samples of both runs"


def summary_row(said: str) -> list[str]:
    """The line of counts below the head of the first table."""
    lines = said.splitlines()
    head = next(number for number, line in enumerate(lines) if line.split()[:3] == ["done", "running", "dead"])
    return next(line for line in lines[head + 1 :] if line.strip()[:1].isdigit()).split()


def test_status_of_nothing_and_of_a_newer_version_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, "job=status", f"results_dir={tmp_path}")
    assert said.startswith(f"no run and no sweep in '{tmp_path}'")
    path = tmp_path / "sweeps" / "some" / "sweep.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema": SCHEMA + 1}))
    assert f"schema {SCHEMA + 1}" in refused(monkeypatch, capsys, "job=status", f"results_dir={tmp_path}")
    assert "unknown run 'any'" in refused(monkeypatch, capsys, "job=status", "run=any", f"results_dir={tmp_path}")


def test_the_live_rates_are_those_of_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(monkeypatch, *SMALL, f"results_dir={tmp_path}", "limit=2", "drafter=self_skip", "max_new_tokens=8")
    (folder,) = find_runs(tmp_path)
    tally = Tally("1 of 4 cells done")
    for sample in read(folder).samples:
        if sample.arm == "speculative":
            text = tally.add(sample)
    values = {
        row["metric"]: row["value"]
        for row in json.loads((folder / "summary.json").read_text())["rows"]
        if row["arm"] == "speculative"
    }
    assert tally.tokens_per_s == pytest.approx(values["decode_tokens_per_s"])
    assert tally.mean_accept_length == pytest.approx(values["mean_accept_length"])
    assert tally.reject_rate == pytest.approx(values["reject_rate"])
    assert text.startswith("1 of 4 cells done, ") and "tokens/s" in text
    assert duration(3725.4) == "1:02:05"


@pytest.mark.slow
def test_memory_does_not_grow_over_200_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    note = sweeps.SweepCell.note

    def weighed(self: sweeps.SweepCell, state: str, **facts: Any) -> None:
        note(self, state, **facts)
        if state == "finished":
            sizes.append(psutil.Process().memory_info().rss)

    monkeypatch.setattr(sweeps.SweepCell, "note", weighed)
    monkeypatch.setattr("harness.launch.report_of", lambda folder: None)
    values = ",".join(map(str, range(200)))
    sweep(monkeypatch, tmp_path, f"seed={values}", "fidelity=false", "max_new_tokens=2")
    assert len(sizes) == 200
    early, late = min(sizes[40:60]), min(sizes[180:])
    assert late - early < 16 * 2**20, f"{(late - early) / 2**20:.1f} MiB more after 140 cells"


@pytest.mark.slow
def test_a_small_cell_of_the_embedded_model_spends_little_outside_decoding_and_scoring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds of this process, which a busy machine does not change; what a sweep does once is not a cell's."""
    inside, once = Stopwatch(), Stopwatch()
    for owner, name in (
        *((measuring, name) for name in ("timed", "warm", "scored")),
        *((bench_module, "fidelity_records"), (Decoder, "prefill")),
    ):
        inside.hold(monkeypatch, owner, name)
    for owner, name in ((bench_module, "loaded_once"), (rehearsal, "bare_model"), (launch, "report_of")):
        once.hold(monkeypatch, owner, name)
    begun = time.process_time()
    monkeypatch.setattr(sys, "argv", ["harness", "-m", "source=builtin", "task=web_questions", "limit=1", *CELLS])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.chdir(tmp_path)
    command.main()
    whole = time.process_time() - begun - once.seconds
    assert states(tmp_path / "results") == ["finished"] * 8
    assert 1 - inside.seconds / whole < 0.1, f"{inside.seconds:.1f} of {whole:.1f} s"


CELLS = ("model.threads=1", "max_new_tokens=16", "gamma=2,3,4,5", "gate.alpha1=0.5,0.7")


class Stopwatch:
    """Seconds of this process in the functions that it holds, and in what they yield; one in another counts once."""

    def __init__(self) -> None:
        self.seconds, self.running = 0.0, False

    def hold(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: self.call(lambda: function(*given, **named)))

    def call(self, action: Any) -> Any:
        if self.running:
            return action()
        self.running, begun = True, time.process_time()
        try:
            made = action()
            return iter(list(made)) if inspect.isgenerator(made) else made
        finally:
            self.running = False
            self.seconds += time.process_time() - begun
