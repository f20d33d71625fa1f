"""Who measures a cell: a file that one process at a time can hold, so that no two write into one run folder.

A claim names its process and is touched while that lives. It is stale, and may be taken over, when its process is gone
(seen at once on the same machine, by pid and time of start) or when it was last touched ``STALE_S`` ago by a process of
another machine. It is created exclusively (``O_EXCL``), and looked at and replaced under a file lock, which the kernel
drops with its process: of several that find a stale claim, one takes it over. Ages are told by the file system's clock.

Not covered: file systems that have neither exclusive creation nor locks; a process that was stopped for longer than
``STALE_S`` and goes on finds its claim lost (``check``) and ends.
"""

import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from harness.errors import UserError
from harness.store import from_json, to_json

FOLDER = "claims"
BEAT_S = 20.0
STALE_S = 300.0
"""Fifteen beats: a network file system may be slow to show a touch, and a machine to run a thread."""
LOCK_TIMEOUT_S = 60.0


class Busy(UserError):
    """Another process has the claim, and lives."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process. ``place`` tells machines, and process namespaces of one, apart; ``born`` a pid from its reuse."""

    host: str
    place: str
    pid: int
    born: str
    token: str

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Owner:
    """A new owner: this process, with a token of its own."""
    pid = os.getpid()
    return Owner(socket.gethostname(), this_place(), pid, born(pid) or "", secrets.token_hex(8))


def this_place() -> str:
    """Boot and pid namespace, in which a pid means something; the host's name where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def born(pid: int) -> str | None:
    """When a live process began, in the kernel's ticks; None of one that is gone, "" where only that can be told."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
    except OSError:
        return None
    else:
        return None if after_name[0] in "ZX" else after_name[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""


def lives(owner: Owner) -> bool | None:
    """Whether a process of this machine is there still; None of another machine's, which cannot be asked."""
    return born(owner.pid) == owner.born if owner.place == this_place() else None


class Claim:
    """A cell that this process holds. ``check`` before every write; ``release`` at the end."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path = path
        self.owner = owner
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._beats, name="claim", daemon=True)
        self._beat.start()

    def _beats(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                if self.holds():
                    os.utime(self.path)
            except OSError:  # the next beat may reach it
                pass

    def holds(self) -> bool:
        """Whether it is this process' still."""
        found = read(self.path)
        return found is not None and found.token == self.owner.token

    def check(self) -> None:
        """Raises UserError when another process has taken the claim over: this one must write no more."""
        if not self.holds():
            found = read(self.path)
            by = f" by {found.name}" if found else ""
            raise UserError(
                f"{self.path}: this process' claim was taken over{by}, as it had not been touched for {STALE_S:g} s; "
                "what it measured is kept."
            )

    def release(self) -> None:
        self._ended.set()
        self._beat.join()
        if self.holds():
            self.path.unlink(missing_ok=True)


def path_of(results: Path, cell: str) -> Path:
    return results / FOLDER / f"{cell}.json"


def read(path: Path) -> Owner | None:
    """Who a claim names; None where there is none, or one that was never written to its end."""
    try:
        found: Owner = from_json(Owner, json.loads(path.read_text(encoding="utf-8")))
        return found
    except (FileNotFoundError, ValueError):
        return None


def alive(path: Path) -> Owner | None:
    """The owner of a claim that holds; None of one that is stale or not there."""
    owner = read(path)
    try:
        if owner is None:
            return None
        if (known := lives(owner)) is not None:
            return owner if known else None
        return owner if now_in(path.parent) - path.stat().st_mtime < STALE_S else None
    except FileNotFoundError:
        return None


def now_in(folder: Path) -> float:
    """The time by the clock that stamps files in ``folder``; this machine's where nothing may be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def take(results: Path, cell: str, what: str | None = None) -> Claim:
    """The claim of a cell, or of what is named and said of it in ``what``.

    Raises:
        Busy: a live process has it.
        UserError: the folder cannot be written or locked.
    """
    path, what = path_of(results, cell), what or f"cell {cell} is being measured"
    owner = this_process()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / ".lock", timeout=LOCK_TIMEOUT_S):
            if (other := alive(path)) is not None:
                raise Busy(f"{what} by {other.name}: leave it to that, or wait.")
            path.unlink(missing_ok=True)  # stale
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(to_json(owner)))
                file.flush()
                os.fsync(file.fileno())
    except FileExistsError as error:  # locks do not hold here, and another was faster
        raise Busy(f"{what} by another process since just now: leave it to that, or wait.") from error
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"cannot claim {str(path)!r} ({error}): choose another folder with results_dir=PATH."
        ) from error
    return Claim(path, owner)


@contextmanager
def claimed(results: Path, cell: str, what: str | None = None) -> Iterator[Claim]:
    """``take``, released at the end however that comes."""
    found = take(results, cell, what)
    try:
        yield found
    finally:
        found.release()
