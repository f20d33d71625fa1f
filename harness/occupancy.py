"""Which processes measure on this machine, on which cores and devices: so that no timing is disturbed unnoticed.

A measuring process holds a locked file in a folder that all processes of this user share. The kernel drops the lock
with the process, so a file that can be locked is left over and is removed. Who comes into a place that is taken tells
those who are there, in a file beside theirs: however short the visit was, they find it. Imports no torch.

Not covered: programs that are not this harness, other users, and other containers unless ``HARNESS_OCCUPANCY`` names a
folder that they share. The load average of a run's table tells of programs of any kind.
"""

import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from harness.errors import UserError

FOLDER = "HARNESS_OCCUPANCY"
"""Environment variable that names another folder."""
POLL_S = 0.5
HELD, MET, LOCK = ".held", ".met", "lock"


@dataclass(frozen=True, slots=True)
class Other:
    """Another live process and where it measures."""

    name: str
    pid: int
    cores: tuple[int, ...]
    devices: tuple[str, ...]
    exclusive: bool


@dataclass
class Place:
    """The cores and devices of this process, and the file that says so."""

    folder: Path
    cores: tuple[int, ...]
    exclusive: bool = False
    devices: tuple[str, ...] = ()
    name: str = field(default_factory=lambda: f"{os.getpid()}-{secrets.token_hex(4)}")
    file: IO[str] | None = None

    def use(self, devices: Sequence[str]) -> None:
        """Say which devices are measured on, beside the cores."""
        if set(devices) != set(self.devices):
            self.devices = tuple(devices)
            with locked(self.folder):
                self.announce()

    def announce(self) -> None:
        """Write down where this process is and tell those whom it meets there. The folder is locked."""
        if self.file is None:
            self.file = (self.folder / f"{self.name}{HELD}").open("w+")
            fcntl.flock(self.file, fcntl.LOCK_EX)
        said = {"pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
        self.file.seek(0)
        self.file.truncate()
        json.dump(said | {"cores": self.cores, "devices": self.devices, "exclusive": self.exclusive}, self.file)
        self.file.flush()
        for other in live(self.folder, self.name):
            if reason := overlap(self, other.cores, other.devices):
                with (self.folder / f"{other.name}{MET}").open("a") as met:
                    met.write(f"process {os.getpid()} on {reason}\n")

    def begin(self) -> tuple[list[str], int]:
        """To be read before the clock starts: who is here, and how many have come so far."""
        with locked(self.folder):
            present = [
                f"process {other.pid} on {reason}"
                for other in live(self.folder, self.name)
                if (reason := overlap(self, other.cores, other.devices))
            ]
            return present, len(self.met())

    def end(self, begun: tuple[list[str], int]) -> str | None:
        """To be read after the clock has stopped: who else was here meanwhile; None when nobody was."""
        present, count = begun
        with locked(self.folder):
            return "; ".join(sorted({*present, *self.met()[count:]})) or None

    def met(self) -> list[str]:
        path = self.folder / f"{self.name}{MET}"
        return path.read_text().splitlines() if path.is_file() else []

    def leave(self) -> None:
        with locked(self.folder):
            if self.file is not None:
                self.file.close()
            for ending in (HELD, MET):
                (self.folder / f"{self.name}{ending}").unlink(missing_ok=True)


_place: Place | None = None
"""Where this process is."""


@contextmanager
def occupying(
    cores: str | Sequence[int] | None = None,
    threads: int | None = None,
    exclusive: bool = False,
    notify: Callable[[str], None] = lambda line: None,
    devices: Sequence[str] = (),
) -> Iterator[Place]:
    """This process's place for the time of the context; within another one, that one.

    Args:
        cores: None measures where the process may run; numbers pin it, all its threads, to these cores; ``auto`` pins
            it to the first ``threads`` cores that no other process has, and waits for them. When ``threads`` is None
            these are all cores, or with ``devices`` a device's share of them.
        devices: with ``auto`` the first of these that no other process has is this one's, which waits for it.
        exclusive: wait until no other process measures; ``auto`` and ``exclusive`` of others then wait for this one.
        notify: is told once, when there is something to wait for.

    Raises:
        UserError: cores that this process may not use, or a folder that cannot be written.
    """
    global _place
    if _place is not None:
        yield _place
        return
    folder = shared_folder()
    allowed = usable_cores()
    if isinstance(cores, Sequence) and not isinstance(cores, str) and not set(cores) <= set(allowed):
        raise UserError(f"cores={list(cores)}: this process may run on {listed(allowed)} only.")
    if cores is not None and not hasattr(os, "sched_setaffinity"):
        raise UserError(f"cores={cores}: this system cannot pin a process: leave cores=null.")
    count = max(1, len(allowed) // max(1, len(devices))) if threads is None else threads
    if cores == "auto" and count > len(allowed):
        raise UserError(f"cores=auto: {count} threads want as many cores, this process may run on {len(allowed)}.")
    place = waited_for(folder, cores, count, allowed, exclusive, notify, devices if cores == "auto" else ())
    try:
        if cores is not None:
            pin(place.cores)
        _place = place
        yield place
    finally:
        _place = None
        if cores is not None:
            pin(allowed)
        place.leave()


def waited_for(
    folder: Path,
    cores: str | Sequence[int] | None,
    count: int,
    allowed: Sequence[int],
    exclusive: bool,
    notify: Callable[[str], None],
    devices: Sequence[str],
) -> Place:
    """A place that has been announced, once it is free."""
    told = False
    while True:
        with locked(folder):
            others = live(folder)
            patient = exclusive or cores == "auto"
            in_the_way = others if exclusive else [other for other in others if patient and other.exclusive]
            taken = {core for other in others for core in other.cores} if cores == "auto" else set()
            free = [core for core in allowed if core not in taken][:count]
            chosen = allowed if cores is None else free if isinstance(cores, str) else cores
            idle = [device for device in devices if all(device not in other.devices for other in others)][:1]
            if not in_the_way and (cores != "auto" or len(free) == count) and (idle or not devices):
                place = Place(folder, tuple(chosen), exclusive, tuple(idle))
                place.announce()
                return place
        if not told:
            names = ", ".join(
                f"process {other.pid} on {' and '.join([listed(other.cores), *other.devices])}" for other in others
            )
            wanted = f"{count} cores" + (" and a device" if devices else "")
            notify(f"waiting for {'the machine' if exclusive else wanted}: {names} measures there")
            told = True
        time.sleep(POLL_S)


def live(folder: Path, but: str = "") -> list[Other]:
    """Every process that holds a place, ``but`` this one; what others have left behind is removed. Lock the folder."""
    found = []
    for path in sorted(folder.glob(f"*{HELD}")):
        name = path.name.removesuffix(HELD)
        if name == but:
            continue
        with path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                said = json.load(file)
                devices = tuple(said["devices"])
                found.append(Other(name, said["pid"], tuple(said["cores"]), devices, said["exclusive"]))
                continue
        path.unlink(missing_ok=True)
        path.with_name(f"{name}{MET}").unlink(missing_ok=True)
    return found


def overlap(place: Place, cores: Collection[int], devices: Collection[str]) -> str:
    """The cores and devices that both have, in words; empty when there are none."""
    shared = sorted(set(place.cores) & set(cores))
    parts = [listed(shared)] if shared else []
    return " and ".join([*parts, *sorted(set(place.devices) & set(devices))])


def listed(cores: Sequence[int]) -> str:
    """
    >>> listed([0, 1, 2, 5])
    'cores 0-2, 5'
    """
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    words = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
    return ("core " if len(cores) == 1 else "cores ") + ", ".join(words)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; for moments only."""
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def shared_folder() -> Path:
    """Where the processes of this user on this machine find each other.

    Raises:
        UserError: it cannot be made or written.
    """
    folder = Path(os.environ.get(FOLDER) or Path(tempfile.gettempdir()) / f"harness-cores-{os.getuid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            return folder
    except OSError as error:
        raise UserError(
            f"cannot write in {str(folder)!r} ({error.strerror or error}), where measuring processes tell each other: "
            f"name another folder in {FOLDER}."
        ) from error


def usable_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def pin(cores: Collection[int]) -> None:
    """Let all threads of this process run on these cores only."""
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:  # it has ended meanwhile
            continue
