"""What runs within the sandbox: gives up what is left of root, sets the limits, runs one program, says how it ended.

Started by ``harness.execution.sandbox`` as a script, with the standard library alone and nothing of ours to import.
Standard input is JSON with ``program``, ``tests``, ``limits`` (resource name to number) and ``user`` (a user id to
become, or null). Standard output is the report: ``ready`` once every limit holds, then one more line, ``passed`` or
``failed: REASON``. Neither is written by a process that was killed.
"""

import json
import os
import resource
import sys


def contain(limits: dict[str, int], user: int | None) -> None:
    """Become ``user`` and lower the limits, soft and hard, so that nothing run from here can raise them again.

    The processor's time alone gets a second between the two: the first ends the program with SIGXCPU, which says why.
    """
    if user is not None:  # limits on the number of processes never hold for the real root
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for name, value in limits.items():
        hard = value + 1 if name == "RLIMIT_CPU" else value
        resource.setrlimit(getattr(resource, name), (value, hard))


def run(program: str, tests: str) -> str:
    """The report's last line: whether the program and then its tests ran to their end."""
    module = {"__name__": "__main__"}
    try:
        exec(compile(program, "program", "exec"), module)
        exec(compile(tests, "tests", "exec"), module)
    except BaseException as error:  # SystemExit too: a program that leaves early has passed no test
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return f"failed: {text.encode('ascii', 'backslashreplace').decode()[:200]}"
    return "passed"


def main() -> None:
    task = json.load(sys.stdin)
    report = os.dup(1)  # not inherited by what the program executes
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    contain(task["limits"], task["user"])
    os.write(report, b"ready\n")
    mine = os.getpid()
    verdict = run(task["program"], task["tests"])
    if os.getpid() == mine:  # a forked copy that comes this far has nothing to report
        os.write(report, verdict.encode() + b"\n")
    os._exit(0)  # threads and exit handlers of the program are not waited for


if __name__ == "__main__":
    main()
