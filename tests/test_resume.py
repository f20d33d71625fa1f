"""Runs that are killed, and gone on with: nothing that was measured is lost, and the end is the same."""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness import claims
from harness.config import RunSettings
from harness.decode.gate import Strictness
from harness.decode.speculative import Speculative
from harness.decode.swift import Plan, Swift
from harness.decode.via_sd import ViaSD
from harness.drafters.retrieval import Retrieval
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.jobs.bench import bench
from harness.log import NullLogger
from harness.model.toy import toy_model
from harness.records import SCHEMA, FidelityRecord, SampleRecord
from harness.resume import finished_or_begun, mend, runs_of_cell
from harness.store import RunFolder, read
from tests.runs import Slip, outcome, qa, unreported

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

ARMS: dict[str, partial[Any]] = {
    "via_sd": partial(ViaSD, gamma=4, drafter=SelfSkip, gate=Strictness()),
    "slip": partial(Slip),  # differs from greedy: has divergences
    "retrieval": partial(Speculative, gamma=3, drafter=partial(Retrieval, own_output="run")),
    "swift": partial(Swift, gamma=3, plan=Plan(context=2, bayes_every=None)),
}
PROMPTS = 3
SAMPLES = PROMPTS * (1 + len(ARMS))
TIMED = re.compile(r".*(_s|_ms|_time_share)|speedup_.*")


def run(folder: Path, rerun: bool = False, arms: dict[str, partial[Any]] | None = None, **settings: Any) -> Path:
    """A toy run in float64, as the command line would start it."""
    settings = {"pairing": "once"} | settings
    chosen = RunSettings(results_dir=str(folder), limit=PROMPTS, max_new_tokens=6, **settings)
    with unreported():
        config = f"name: run\nrerun: {str(rerun).lower()}\n"
        return bench(chosen, toy_model, arms or ARMS, {"qa": qa()}, NullLogger(), config, rerun=rerun)


def killed(folder: Path, count: int, how: str, **settings: Any) -> None:
    """Start the run in a process of its own, which is killed at its ``count``-th line: ``before`` it is written, when
    ``half`` of it is, or ``after`` it.
    """
    pid = os.fork()
    if pid == 0:
        try:
            append, written = RunFolder.append, iter(range(10_000))

            def dying(self: RunFolder, record: Any) -> None:
                if last := next(written) == count:
                    if how == "half":
                        place = {SampleRecord: "samples", FidelityRecord: "fidelity"}.get(type(record), "divergences")
                        with (self.path / f"{place}.jsonl").open("a") as file:
                            file.write('{"run_id": "' + self.run.run_id + '", "arm": "vi')
                    if how != "after":
                        os.kill(os.getpid(), signal.SIGKILL)
                append(self, record)
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)

            RunFolder.append = dying  # type: ignore[method-assign]
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            run(folder, **settings)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "it was killed, not done"


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """The numbers of a finished run that no clock has made."""
    found = json.loads((folder / "summary.json").read_text())["rows"]
    names = ("arm", "task", "metric", "value", "low", "high", "n")
    return [tuple(row[name] for name in names) for row in found if not TIMED.fullmatch(row["metric"])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as it is when nobody kills it."""
    return run(tmp_path_factory.mktemp("whole"))


def test_the_same_run_twice_has_the_same_numbers_but_for_times(whole: Path, tmp_path: Path) -> None:
    again = run(tmp_path)
    assert rows(again) == rows(whole) and len(rows(whole)) > 50
    assert outcome(again) == outcome(whole)
    first, second = read(whole).run, read(again).run
    assert first.cell == second.cell and first.parts == second.parts and first.run_id != second.run_id
    assert str(first.cell) in whole.name and json.loads((whole / "summary.json").read_text())["cell"] == first.cell
    assert {row["cell"] for row in json.loads((whole / "summary.json").read_text())["rows"]} == {first.cell}


KILLS = [(0, "half"), (2, "after"), (1, "before"), (1, "half"), (3, "half"), (0, "before"), (6, "after"), (4, "half")]
"""Line of each process at which it is killed, and how; each goes on from where the one before was killed."""


def test_a_run_killed_at_many_instants_loses_nothing_but_the_sample_in_flight(whole: Path, tmp_path: Path) -> None:
    kept: list[SampleRecord] = []
    lines = {"half": 0, "before": 0, "after": 1}
    expected = 0
    for count, how in KILLS:
        killed(tmp_path, count, how)
        (folder,) = (tmp_path / "runs").iterdir()
        assert not list(folder.glob(".*.tmp")), "what the kill before left of a write"
        (folder / f".run.json.{count}.tmp").write_text("half")
        data = read(folder)
        assert list(data.samples[: len(kept)]) == kept, "what was there is left as it was"
        expected += count + lines[how]
        assert len(data.samples) + len(data.divergences) + len(data.fidelity) == expected
        kept = list(data.samples)
    assert len(kept) == SAMPLES, "the last kills are among the second scores"
    done = run(tmp_path)
    assert done == folder and done.parent.name == "runs" and not list(folder.glob(".*.tmp"))
    data, never_killed = read(done), read(whole)
    assert list(data.samples) == kept
    order = [(one.task, one.example_id, one.arm) for one in never_killed.samples]
    assert [(one.task, one.example_id, one.arm) for one in data.samples] == order
    assert outcome(done) == outcome(whole) and rows(done) == rows(whole)
    assert sorted(map(repr, strip(data.divergences))) == sorted(map(repr, strip(never_killed.divergences)))
    assert len(data.divergences) > 0 and strip(data.fidelity) == strip(never_killed.fidelity)
    assert data.run.status == "finished" and data.run.error is None
    assert data.run.resumed == len(KILLS)
    assert data.run.dropped == sum(how == "half" for _, how in KILLS)
    split = {one.example_id for one in data.samples if one.resumed}
    assert data.run.split == len(split) >= 2
    assert not [one for one in never_killed.samples if one.resumed] and never_killed.run.split == 0


def strip(records: Any) -> list[tuple[Any, ...]]:
    """Records without the id of their run."""
    return [tuple(getattr(one, name) for name in type(one).__slots__ if name != "run_id") for one in records]


def test_a_finished_run_is_left_alone_unless_it_is_asked_for_again(
    whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = whole.parents[1]
    before = {path: path.read_bytes() for path in whole.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr("harness.jobs.bench.build_arms", lambda *arguments: pytest.fail("built"))
        assert run(results) == whole
    said = capsys.readouterr().err
    assert f"{whole} (rerun=true measures it again)" in said and said.count("\n") == 1
    assert {path: path.read_bytes() for path in whole.iterdir()} == before
    cell = read(whole).run.cell or ""
    again = run(results, rerun=True)
    assert again != whole and again.name > whole.name and runs_of_cell(results, cell) == [again, whole]
    assert finished_or_begun(results, cell) == (again, None)
    assert run(results) == again


def test_a_rerun_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    killed(tmp_path, 3, "after")
    (first,) = (tmp_path / "runs").iterdir()
    lines = (first / "samples.jsonl").read_bytes()
    killed(tmp_path, 6, "half", rerun=True)
    (again,) = (path for path in (tmp_path / "runs").iterdir() if path != first)
    before = read(again).samples
    assert len(before) > len(read(first).samples) > 0, "anew, not where the first one was killed"
    assert run(tmp_path, rerun=True) == again
    assert read(again).samples[: len(before)] == before and len(read(again).samples) == SAMPLES
    assert read(again).run.resumed == 1 and (first / "samples.jsonl").read_bytes() == lines
    third = run(tmp_path, rerun=True)
    assert third not in (first, again) and read(third).run.resumed == 0, "a finished one is measured again"


def test_a_run_that_failed_says_why_and_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("harness.jobs.bench.scored_again", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    failed = read(folder)
    assert (failed.run.status, failed.run.error) == ("failed", "ZeroDivisionError: division by zero")
    assert not list((tmp_path / "claims").glob("*.json")), "the claim is given back"
    assert run(tmp_path) == folder
    data = read(folder)
    assert data.samples == failed.samples and (data.run.resumed, data.run.split, data.run.error) == (1, 0, None)


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path: Path, whole: Path) -> None:
    cell = read(whole).run.cell or ""
    with claims.claimed(tmp_path, cell), pytest.raises(claims.Busy, match=f"cell {cell} is being measured by process"):
        run(tmp_path)
    assert not (tmp_path / "runs").exists()


def test_one_whose_claim_is_taken_over_writes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = RunFolder.append

    def losing(self: RunFolder, record: Any) -> None:
        append(self, record)
        for path in (tmp_path / "claims").glob("*.json"):
            path.unlink()

    monkeypatch.setattr(RunFolder, "append", losing)
    with pytest.raises(UserError, match="taken over"):
        run(tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    data = read(folder)
    assert len(data.samples) == 1 and data.run.status == "running", "it is not this one's to say that it failed"


def test_a_folder_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    killed(tmp_path, 1, "after")
    (folder,) = (tmp_path / "runs").iterdir()
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": SCHEMA + 1, "new": 1}))
    with pytest.raises(UserError, match=f"schema {SCHEMA + 1}.*update the harness"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("text", "left", "count"),
    [
        (b"", b"", 0),
        (b'{"a": 1}\n', b'{"a": 1}\n', 0),
        (b'{"a": 1}\n{"b"', b'{"a": 1}\n', 1),
        (b"{", b"", 1),
        (b'{"a": 1}\n{"b": 2}', b'{"a": 1}\n{"b": 2}\n', 0),
        (b'{"a": 1}\n\xc3', b'{"a": 1}\n', 1),
    ],
)
def test_half_a_line_is_cut_off_and_a_whole_one_is_ended(text: bytes, left: bytes, count: int, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(text)
    assert (mend(path), path.read_bytes()) == (count, left)


def limited(action: Callable[[], object], size: int) -> str:
    """What ``action`` says in a process that can write files of ``size`` bytes at most: a disk that is full."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        try:
            action()
        except BaseException as error:
            os.write(send, f"{type(error).__name__}: {error}".encode()[:2000])
        os._exit(0)
    os.close(send)
    os.waitpid(pid, 0)
    with os.fdopen(receive, "rb") as said:
        return said.read().decode()


def test_a_full_disk_is_one_line_and_loses_nothing(whole: Path, tmp_path: Path) -> None:
    size = (whole / "samples.jsonl").stat().st_size // 2
    said = limited(partial(run, tmp_path), size)
    assert said.startswith("UserError: cannot write ") and "samples.jsonl" in said and "File too large" in said
    assert "what was measured is kept; make room" in said and "\n" not in said
    (folder,) = (tmp_path / "runs").iterdir()
    data = read(folder)
    assert 0 < len(data.samples) < SAMPLES and data.dropped == 0
    assert (folder / "samples.jsonl").read_bytes().endswith(b"}\n")
    assert data.run.status == "failed" and "File too large" in (data.run.error or "")
    assert run(tmp_path) == folder and outcome(folder) == outcome(whole)
    assert read(folder).run.dropped == 0


@pytest.mark.parametrize("pairing", ["abba1", "shared"])
def test_a_run_with_its_baseline_measured_otherwise_goes_on_too(pairing: str, tmp_path: Path) -> None:
    arms = {name: ARMS[name] for name in ("via_sd", "retrieval")}
    unkilled = run(tmp_path / "unkilled", arms=arms, pairing=pairing)
    wanted = PROMPTS * (8 if pairing == "abba1" else 3)
    assert len(read(unkilled).samples) == wanted
    for count, how in ((5, "half"), (2, "after")):
        killed(tmp_path / "killed", count, how, arms=arms, pairing=pairing)
    folder = run(tmp_path / "killed", arms=arms, pairing=pairing)
    found = read(folder)
    assert found.run.resumed == 2 and found.run.dropped == 1 and len(found.samples) == wanted
    assert outcome(folder) == outcome(unkilled)
    assert found.run.split <= 2, "at most the prompt that was in flight at each kill"
