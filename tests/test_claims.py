"""One process at a time has a cell: among real ones, after deaths, and across machines."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from harness import claims
from harness.claims import STALE_S, Busy, Claim, Owner, alive, born, claimed, path_of, take, this_process
from harness.errors import UserError
from harness.store import to_json

CELL = "0123456789abcdef"
FORK: Any = multiprocessing.get_context("fork")
WORKERS, MANY = 4, 25

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def gone() -> int:
    """The pid of a process that has ended."""
    done = subprocess.Popen(["true"])
    done.wait()
    return done.pid


def left_by(results: Path, owner: Owner, cell: str = CELL, age: float = 0.0) -> Path:
    path = path_of(results, cell)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(to_json(owner)))
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_a_claim_is_refused_to_the_next_one_until_it_is_released(tmp_path: Path) -> None:
    with claimed(tmp_path, CELL) as mine:
        mine.check()
        with pytest.raises(Busy, match=rf"cell {CELL} is being measured by process {os.getpid()} on "):
            take(tmp_path, CELL)
        with claimed(tmp_path, "fedcba9876543210"):
            pass
    assert not path_of(tmp_path, CELL).exists()
    take(tmp_path, CELL).release()


def test_it_is_released_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claimed(tmp_path, CELL):
        raise ZeroDivisionError
    assert not path_of(tmp_path, CELL).exists()


@pytest.mark.parametrize(
    ("change", "holds"),
    {
        "this very process": ({}, True),
        "dead": ({"pid": 0}, False),
        "another process with its pid": ({"born": "1"}, False),
        "another machine": ({"place": "elsewhere", "pid": 1}, True),
    }.values(),
    ids=["alive", "dead", "pid used again", "another machine"],
)
def test_whether_a_claim_holds(change: dict[str, Any], holds: bool, tmp_path: Path) -> None:
    owner = replace(this_process(), **({"pid": gone()} if change.get("pid") == 0 else change))
    path = left_by(tmp_path, owner)
    assert (alive(path) == owner) is holds
    if holds:
        with pytest.raises(Busy):
            take(tmp_path, CELL)
    else:
        take(tmp_path, CELL).release()


@pytest.mark.parametrize(("age", "holds"), [(STALE_S - 60, True), (STALE_S + 60, False)])
def test_of_another_machine_a_claim_holds_as_long_as_it_is_touched(age: float, holds: bool, tmp_path: Path) -> None:
    path = left_by(tmp_path, replace(this_process(), place="elsewhere"), age=age)
    assert (alive(path) is not None) is holds


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}'])
def test_a_claim_that_was_never_written_to_its_end_is_nobodys(text: str, tmp_path: Path) -> None:
    path = path_of(tmp_path, CELL)
    path.parent.mkdir()
    path.write_text(text)
    take(tmp_path, CELL).release()


def test_a_claim_is_touched_while_its_process_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 0.01)
    with claimed(tmp_path, CELL) as claim:
        os.utime(claim.path, (0, 0))
        end = time.monotonic() + 60
        while claim.path.stat().st_mtime < 1 and time.monotonic() < end:
            time.sleep(0.01)
        assert claim.path.stat().st_mtime > 1


def test_one_whose_claim_was_taken_over_is_told_and_leaves_the_others_alone(tmp_path: Path) -> None:
    slow = take(tmp_path, CELL)
    other = left_by(tmp_path, replace(this_process(), place="elsewhere", host="node7"))
    with pytest.raises(UserError, match=r"taken over by process .* on node7"):
        slow.check()
    slow.release()
    assert other.exists()
    other.unlink()
    with pytest.raises(UserError, match="taken over"):
        slow.check()


def race(results: Path, channel: Connection) -> None:
    """A worker: tries every cell, keeps what it gets, says which."""
    channel.recv()
    held = []
    for number in range(MANY):
        with suppress(Busy):
            held.append((number, take(results, f"{number:016x}")))
    channel.send([number for number, _ in held])
    channel.recv()


def workers(target: Callable[..., None], *arguments: Any) -> list[tuple[Any, Connection]]:
    started = []
    for _ in range(WORKERS):
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=target, args=(*arguments, theirs))
        process.start()
        started.append((process, ours))
    return started


@pytest.mark.parametrize("stale", [False, True], ids=["new", "taken over"])
def test_of_processes_that_want_the_same_cells_each_gets_its_own(stale: bool, tmp_path: Path) -> None:
    if stale:
        dead = replace(this_process(), pid=gone())
        for number in range(MANY):
            left_by(tmp_path, dead, f"{number:016x}")
    started = workers(race, tmp_path)
    for _, channel in started:
        channel.send("go")
    got = [channel.recv() for _, channel in started]
    for process, channel in started:
        channel.send("end")
        process.join()
    assert sorted(number for numbers in got for number in numbers) == list(range(MANY))


def test_a_killed_process_leaves_a_claim_that_is_taken_over(tmp_path: Path) -> None:
    (process, channel), *others = workers(race, tmp_path)
    for other, _ in others:
        other.kill()
        other.join()
    channel.send("go")
    assert channel.recv() == list(range(MANY))
    with pytest.raises(Busy):
        take(tmp_path, f"{0:016x}")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    claim = take(tmp_path, f"{0:016x}")
    assert isinstance(claim, Claim)
    claim.release()


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    end = time.monotonic() + 60
    while born(child.pid) is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert born(child.pid) is None
    child.wait()
    assert born(os.getpid())


def test_a_folder_that_cannot_be_claimed_in_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match=r"cannot claim .* choose another folder with results_dir"):
        take(file, CELL)
