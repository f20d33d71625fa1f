"""Who measures where: real processes on the same core and on others, killed ones, and those that wait."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from harness import measuring, occupancy
from harness.config import RunSettings
from harness.errors import UserError
from harness.occupancy import FOLDER, listed, live, occupying, usable_cores

ROOT = Path(__file__).resolve().parents[1]
CORES = usable_cores()

# Holds a place, says that it does, and leaves when its input ends.
HOLD = """
import sys
from harness.occupancy import occupying, usable_cores
cores, threads, exclusive, devices = eval(sys.argv[1])
def notify(line):
    print("waits:", line, flush=True)
with occupying(cores, threads, exclusive, notify, devices) as place:
    print("has", list(place.cores), list(usable_cores()), *place.devices, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(occupancy, "POLL_S", 0.02)
    return tmp_path


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for one in started:
        one.kill()
        one.communicate()


def holder(
    processes: list[subprocess.Popen[str]],
    cores: object = None,
    threads: int | None = None,
    exclusive: bool = False,
    devices: tuple[str, ...] = (),
) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", HOLD, repr((cores, threads, exclusive, devices))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    one = subprocess.Popen(arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    processes.append(one)
    return one


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_cores_in_words() -> None:
    assert listed([0, 1, 2, 5]) == "cores 0-2, 5" and listed([3]) == "core 3"


def test_alone_nothing_is_contended_and_nothing_is_left(folder: Path) -> None:
    with occupying() as place:
        assert place.cores == CORES
        assert place.end(place.begin()) is None
        with occupying([CORES[0]]) as inner:
            assert inner is place, "one process has one place"
    assert [path.name for path in folder.iterdir()] == [occupancy.LOCK]


def test_another_process_on_the_same_core_is_seen(processes: list[subprocess.Popen[str]]) -> None:
    other = holder(processes, [CORES[0]])
    assert said(other) == f"has [{CORES[0]}] [{CORES[0]}]", "it runs where it says"
    with occupying() as place:
        assert place.end(place.begin()) == f"process {other.pid} on core {CORES[0]}"
        other.communicate("")
        assert place.end(place.begin()) is None


def test_who_came_and_went_while_a_clock_ran_is_seen(processes: list[subprocess.Popen[str]]) -> None:
    with occupying() as place:
        begun = place.begin()
        other = holder(processes, [CORES[-1]])
        other.communicate("")
        assert place.end(begun) == f"process {other.pid} on core {CORES[-1]}"
        assert place.end(place.begin()) is None, "only of the timing that it disturbed"


@pytest.mark.skipif(len(CORES) < 2, reason="wants two cores")
def test_processes_on_different_cores_do_not_disturb_each_other(processes: list[subprocess.Popen[str]]) -> None:
    assert said(holder(processes, [CORES[1]])).startswith("has")
    with occupying([CORES[0]]) as place:
        assert usable_cores() == (CORES[0],)
        assert place.end(place.begin()) is None
        place.use(["GPU a"])
        assert place.end(place.begin()) is None
    assert usable_cores() == CORES, "as before"


def test_one_device_is_enough_to_meet(folder: Path) -> None:
    with occupying() as place:
        other = occupancy.Place(folder, cores=(10**6,), devices=("GPU a",))
        place.use(["GPU a", "GPU b"])
        begun = place.begin()
        with occupancy.locked(folder):
            other.announce()
        assert place.end(begun) == f"process {os.getpid()} on GPU a"
        other.leave()


@pytest.mark.skipif(len(CORES) < 2, reason="wants two cores")
def test_auto_takes_the_first_free_cores_and_waits_for_some(processes: list[subprocess.Popen[str]]) -> None:
    first, second = (holder(processes, "auto", 1) for _ in range(2))
    taken = sorted(eval(said(one).removeprefix("has ").split("] ")[0] + "]") for one in (first, second))
    assert taken == [[CORES[0]], [CORES[1]]]
    third = holder(processes, "auto", len(CORES))
    assert said(third).startswith("waits: waiting for")
    first.communicate("")
    second.communicate("")
    assert said(third) == f"has {list(CORES)} {list(CORES)}"


@pytest.mark.skipif(len(CORES) < 2, reason="wants two cores")
def test_auto_takes_a_device_that_nobody_has_and_its_share_of_the_cores(
    processes: list[subprocess.Popen[str]],
) -> None:
    devices = ("GPU a", "GPU b")
    first = holder(processes, "auto", devices=devices)
    assert said(first).endswith("GPU a") and len(CORES) // 2 == said_cores(processes, devices)
    third = holder(processes, "auto", 1, devices=devices)
    assert "cores and a device: process" in (line := said(third)) and "GPU a" in line and "GPU b" in line
    first.communicate("")
    assert said(third).endswith("GPU a"), "the one that has become free"


def said_cores(processes: list[subprocess.Popen[str]], devices: tuple[str, ...]) -> int:
    """Cores of a second holder, which gets the other device."""
    line = said(holder(processes, "auto", devices=devices))
    assert line.endswith("GPU b")
    return len(eval(line.removeprefix("has ").split("] ")[0] + "]"))


@pytest.mark.parametrize(
    ("cores", "asked", "placed"),
    [
        ("auto", {"device": "auto"}, "cuda:1"),
        ("auto", {"device": "cpu"}, "cpu"),
        ("auto", {"device": "auto", "devices": ["cuda:0", "cuda:1"]}, "auto"),
        (None, {"device": "auto"}, "auto"),
    ],
)
def test_a_job_loads_its_model_on_the_device_that_it_has(
    cores: str | None, asked: dict[str, object], placed: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "gpus_of_machine", lambda: {"GPU a": "cuda:0", "GPU b": "cuda:1"})
    other = occupancy.Place(folder, cores=(10**6,), devices=("GPU a",))
    with occupancy.locked(folder):
        other.announce()

    @measuring.occupied
    def job(settings: RunSettings, model: Callable[..., object]) -> object:
        return model()

    assert (
        job(RunSettings(cores=cores), partial(lambda device, threads, devices=None: device, threads=1, **asked))
        == placed
    )
    other.leave()


def test_exclusive_is_one_at_a_time(processes: list[subprocess.Popen[str]]) -> None:
    first, lines = holder(processes, exclusive=True), []
    assert said(first).startswith("has")
    second = holder(processes, exclusive=True)
    lines.append(said(second))
    assert lines[0].startswith("waits: ") and f"process {first.pid}" in lines[0]
    first.communicate("")
    assert said(second).startswith("has")


def test_a_killed_process_leaves_no_claim(folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    other = holder(processes)
    assert said(other).startswith("has")
    assert len(live(folder)) == 1
    other.send_signal(signal.SIGKILL)
    other.wait()
    deadline = time.monotonic() + 60
    while live(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(folder.glob("*.held")) == []


def test_what_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cores=\[1000000\]: this process may run on"), occupying([10**6]):
        pass
    with pytest.raises(UserError, match=r"1000000 threads want as many cores"), occupying("auto", 10**6):
        pass
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match=FOLDER), occupying():
        pass
