"""The run folder: exact round trips, killed runs, newer and broken files."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness.environment import environment, git_state
from harness.errors import UserError
from harness.records import (
    SCHEMA,
    ArmRecord,
    BlockTrace,
    DataSource,
    Divergence,
    Example,
    Generation,
    MetricRow,
    Route,
    RunRecord,
    SampleRecord,
    StopReason,
)
from harness.store import (
    RunFolder,
    check_writable,
    find_runs,
    from_json,
    is_finished,
    new_run_id,
    read,
    read_config,
    to_json,
    write_atomic,
)

BLOCK = BlockTrace(0, 4, 3, (Route.ACCEPT, Route.ESCALATE, Route.REGENERATE), 2, 3, 0, 3, 1, 1)
GENERATION = Generation((5, 6, 7), (BLOCK,), StopReason.STOP_STRING)
ARM = ArmRecord("via_sd", "via_sd", "prompt_lookup", "strictness", False)
SOURCE = DataSource("builtin", "tasks/builtin/web_questions.jsonl", "test", None, None, "ab" * 32, 24)
RUN = RunRecord(
    run_id="run-1",
    schema=SCHEMA,
    created="2026-01-31T09:15:00Z",
    model="toy",
    temperature=0.0,
    seed=3,
    arms=(ARM, replace(ARM, arm="autoregressive", drafter=None, gate=None, lossless=True)),
    data={"qa": SOURCE},
    prompts_sha={"qa": "cd" * 32},
    task_metrics={"qa": ("f1", "exact_match")},
    git_commit=None,
    git_dirty=None,
    env={"cpu": "any"},
    status="running",
)
SAMPLE = SampleRecord(
    run_id="run-1",
    arm="via_sd",
    task="qa",
    example_id="qa-1",
    prompt_tokens=40,
    input_cut=0,
    prompt_sha="ef" * 32,
    text='Grüße\n"quoted"\u2028\U0001f600 \ufffd \ud800',
    prediction="Grüße",
    references=("a", "b"),
    scores={"f1": 1 / 3, "exact_match": None},
    prefill_s=0.1,
    decode_s=1e-17,
    peak_bytes=None,
    generation=GENERATION,
)
DIVERGENCE = Divergence("run-1", "qa", "qa-1", "via_sd", 2, 7, 8, 0.1 + 0.2, 0.5, 25.25, 0.75, True)
ROW = MetricRow("run-1", "via_sd", "toy", "qa", "f1", "F1", None, 0.1 + 0.2, None, None, 8, "ours")


@pytest.mark.parametrize(
    "record",
    [
        BLOCK,
        GENERATION,
        ARM,
        SOURCE,
        RUN,
        SAMPLE,
        ROW,
        Example("1", "question", ("answer",), {"key": "value"}),
        DIVERGENCE,
        replace(SAMPLE, peak_bytes=2**40, scores={}),
        replace(DIVERGENCE, arm_token=None, gap=None, distance=None, largest_logit=None, bound=None, near_tie=False),
        replace(RUN, git_commit="abc", git_dirty=True),
        replace(RUN, data={"web_questions": replace(SOURCE, shots=replace(SOURCE, split="train", rows=1))}),
    ],
    ids=lambda record: type(record).__name__,
)
def test_round_trip_is_exact(record: Any) -> None:
    assert from_json(type(record), json.loads(json.dumps(to_json(record), allow_nan=False))) == record


def test_a_file_from_before_a_field_with_a_default_is_read() -> None:
    old = to_json(SOURCE)
    del old["shots"]
    assert from_json(DataSource, old) == SOURCE
    del old["rows"]
    with pytest.raises(ValueError, match=r"missing fields \['rows'\]"):
        from_json(DataSource, old)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": None}, "want"),
        ({"seed": True}, "want"),
        ({"extra": 1}, "unknown fields .'extra'"),
        ({"arms": "via_sd"}, "want"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(change: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        from_json(RunRecord, to_json(RUN) | change)


def test_unknown_types_are_not_stored() -> None:
    with pytest.raises(TypeError, match="cannot store a set"):
        to_json({"key": {1}})


def made(tmp_path: Path, count: int = 2) -> RunFolder:
    folder = RunFolder.create(tmp_path, RUN, {"gamma": 4, "tasks": {"qa": ["a"]}})
    for index in range(count):
        folder.append(replace(SAMPLE, example_id=f"qa-{index}"))
    return folder


def test_a_run_reads_back_and_ends_with_its_summary(tmp_path: Path) -> None:
    folder = made(tmp_path)
    assert not is_finished(folder.path) and read(folder.path).run == RUN
    folder.finish({"rows": [ROW]})
    run, samples, dropped, *_ = read(folder.path)
    assert run == replace(RUN, status="finished") and dropped == 0
    assert [sample.example_id for sample in samples] == ["qa-0", "qa-1"] and samples[0].text == SAMPLE.text
    assert is_finished(folder.path)
    assert json.loads((folder.path / "summary.json").read_text())["rows"][0]["value"] == 0.1 + 0.2
    assert read_config(folder.path) == {"gamma": 4, "tasks": {"qa": ["a"]}}
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "config.yaml",
        "divergences.jsonl",
        "fidelity.jsonl",
        "run.json",
        "samples.jsonl",
        "summary.json",
    ]


def test_config_text_is_kept_as_given(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, RUN, "# note\ngamma: 4\n")
    assert (folder.path / "config.yaml").read_text() == "# note\ngamma: 4\n"


def test_a_folder_is_claimed_once(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with pytest.raises(UserError, match="exists already"):
        RunFolder.create(tmp_path, RUN, {})
    assert len(read(folder.path).samples) == 2


def test_undefined_numbers_never_become_nan(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        folder.finish({"value": float("nan")})
    assert not is_finished(folder.path) and read(folder.path).run.status == "running"


def test_a_failed_run_keeps_its_samples(tmp_path: Path) -> None:
    folder = made(tmp_path)
    folder.fail()
    run, samples, *_ = read(folder.path)
    assert run.status == "failed" and len(samples) == 2 and not is_finished(folder.path)


def test_a_sample_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with pytest.raises(ValueError, match="other"):
        folder.append(replace(SAMPLE, run_id="other"))
    with pytest.raises(ValueError, match="other"):
        folder.append(replace(DIVERGENCE, run_id="other"))


@pytest.mark.parametrize("keep", [1, 40, -2])
def test_a_half_written_last_line_is_dropped_and_counted(tmp_path: Path, keep: int) -> None:
    folder = made(tmp_path)
    path = folder.path / "samples.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:keep])
    run, samples, dropped, *_ = read(folder.path)
    assert (len(samples), dropped) == (1, 1) and run == RUN


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    folder = made(tmp_path)
    path = folder.path / "samples.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert (len(read(folder.path).samples), read(folder.path).dropped) == (2, 0)


@pytest.mark.parametrize("broken", ["{", "[]", "", '{"run_id": 1}', "\x00\x00"])
def test_a_broken_line_in_the_middle_names_file_and_line(tmp_path: Path, broken: str) -> None:
    folder = made(tmp_path)
    path = folder.path / "samples.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + broken + "\n" + second)
    with pytest.raises(UserError, match=r"samples\.jsonl, line 2"):
        read(folder.path)


def test_divergences_are_kept_beside_the_samples(tmp_path: Path) -> None:
    folder = made(tmp_path)
    assert read(folder.path).divergences == ()
    other = replace(DIVERGENCE, example_id="qa-2", distance=1.5, near_tie=False)
    for record in (DIVERGENCE, SAMPLE, other):
        folder.append(record)
    data = read(folder.path)
    assert data.divergences == (DIVERGENCE, other) and len(data.samples) == 3
    path = folder.path / "divergences.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    assert read(folder.path).divergences == (DIVERGENCE,), "a half-written line is no record"
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(UserError, match=r"divergences\.jsonl, line 1: not a divergence"):
        read(folder.path)


def test_a_run_from_before_divergences_were_judged_has_none(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder.path / "divergences.jsonl").unlink()
    assert read(folder.path).divergences == () and len(read(folder.path).samples) == 2


@pytest.mark.parametrize("change", [{"near_tie": False}, {"distance": 0.75}, {"bound": None}, {"arm_token": 7}])
def test_a_divergence_that_contradicts_itself_is_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"near-tie|difference"):
        replace(DIVERGENCE, **change)


def test_a_broken_block_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path)
    path = folder.path / "samples.jsonl"
    path.write_text(path.read_text().replace('"kept": 2', '"kept": 9'))
    with pytest.raises(UserError, match="kept <= examined"):
        read(folder.path)


def test_a_sample_from_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path)
    path = folder.path / "samples.jsonl"
    path.write_text(path.read_text().replace('"run-1"', '"run-2"'))
    with pytest.raises(UserError, match=r"line 1: sample of run 'run-2'"):
        read(folder.path)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("run.json", json.dumps({"schema": SCHEMA + 1, "new": 1}), f"schema {SCHEMA + 1}.*update the harness"),
        ("run.json", "{", "not valid JSON"),
        ("run.json", "[]", "not a run record"),
        ("run.json", None, "no readable run"),
        ("samples.jsonl", None, "no readable samples"),
    ],
)
def test_unreadable_runs_say_what_is_wrong(tmp_path: Path, name: str, content: str | None, text: str) -> None:
    path = made(tmp_path).path / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=text) as caught:
        read(path.parent)
    assert "\n" not in str(caught.value)


def test_broken_config_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder.path / "config.yaml").write_text("a: [1")
    with pytest.raises(UserError, match=r"config\.yaml"):
        read_config(folder.path)


def test_unwritable_results_fail_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    for attempt in (lambda: check_writable(file / "results"), lambda: RunFolder.create(file, RUN, {})):
        with pytest.raises(UserError, match="results_dir"):
            attempt()
    assert file.read_text() == "kept" and list(tmp_path.iterdir()) == [file]


def test_check_writable_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("harness.store.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of two machines, which may have the same pid, write at the same time."""
    path, sync = tmp_path / "file", os.fsync

    def meanwhile(descriptor: int) -> None:
        sync(descriptor)
        monkeypatch.setattr(os, "fsync", sync)
        write_atomic(path, "another's")

    monkeypatch.setattr(os, "fsync", meanwhile)
    write_atomic(path, "mine")
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]


def test_run_ids_sort_by_time_and_differ() -> None:
    now = datetime(2026, 1, 31, 9, 15, tzinfo=UTC)
    first, second = new_run_id("quick start/1", now), new_run_id("quick start/1", now)
    assert first != second and first.startswith("20260131T091500Z-") and first.endswith("-quick-start-1")
    assert new_run_id("a", datetime(2026, 2, 1, tzinfo=UTC)) > first
    assert "/" not in new_run_id("../..", now)


def finished(tmp_path: Path, run_id: str, count: int = 1) -> None:
    folder = RunFolder.create(tmp_path, replace(RUN, run_id=run_id), {})
    for _ in range(count):
        folder.append(replace(SAMPLE, run_id=run_id))
    folder.finish({})


def test_the_newest_finished_run_with_samples_is_found(tmp_path: Path) -> None:
    finished(tmp_path, "20260101T000000Z-a")
    finished(tmp_path, "20260102T000000Z-b")
    finished(tmp_path, "20260103T000000Z-empty", count=0)
    RunFolder.create(tmp_path, replace(RUN, run_id="20260104T000000Z-running"), {})
    assert [path.name for path in find_runs(tmp_path)] == ["20260102T000000Z-b"]
    wanted = ["20260104T000000Z-running", "20260101T000000Z-a"]
    assert [path.name for path in find_runs(tmp_path, wanted)] == wanted
    with pytest.raises(UserError, match="did you mean '20260101T000000Z-a'"):
        find_runs(tmp_path, ["20260101T000000Z-aa"])


@pytest.mark.parametrize("run_ids", [None, ["some"]])
def test_no_runs_names_the_command_to_run(tmp_path: Path, run_ids: list[str] | None) -> None:
    with pytest.raises(UserError, match=r"python -m harness \+experiment=quickstart"):
        find_runs(tmp_path, run_ids)


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_git_state_says_commit_and_dirty(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    assert git_state(root) == (None, None)
    git(root, "init", "-q")
    assert git_state(root) == (None, None)
    (root / "code.py").write_text("1")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    commit = git(root, "rev-parse", "HEAD")
    assert git_state(root) == (commit, False)
    (root / "results" / "runs").mkdir(parents=True)
    (root / "results" / "runs" / "out").write_text("1")
    assert git_state(root) == (commit, False)
    (root / "new.py").write_text("1")
    assert git_state(root) == (commit, True)
    # A package installed inside somebody's checkout is not that checkout.
    inner = root / "site-packages"
    inner.mkdir()
    assert git_state(inner) == (None, None)


def test_environment_names_machine_and_versions() -> None:
    facts = environment()
    assert {"python", "platform", "cpu", "cores", "numpy", "scipy"} <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())
