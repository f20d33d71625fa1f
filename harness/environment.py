"""What a run ran on: git state, machine and library versions. Imports no torch; the bench adds the device's facts."""

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "sacrebleu",
    "rouge-score",
    "numpy",
    "scipy",
    "hydra-core",
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
PRODUCED = (
    "results/runs",
    "results/baselines",
    "results/claims",
    "results/sweeps",
    "results/tables",
    "results/figures",
    "results/speed",
    "results/training",
    "results/reference",
)
"""Folders a run writes and never reads: a change there does not make the code dirty."""


def _git(root: Path, *arguments: str) -> str | None:
    """Output of one git command, None when git is missing or refuses."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=root,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_state(root: Path = CHECKOUT) -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout at ``root``; (None, None) when ``root`` is not the top of one.

    An installed copy inside some other project's checkout therefore never reports that project's commit.
    Untracked files count as dirty, except under the folders that runs write.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None, None
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None, None
    status = _git(root, "status", "--porcelain", "--", ".", *(f":(exclude){folder}" for folder in PRODUCED))
    return commit, None if status is None else bool(status)


def _cpu_model() -> str:
    """Marketing name of the CPU; ``platform.processor()`` is empty or an architecture on most Linux systems."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def version(distribution: str) -> str | None:
    """Of what is installed, looked up once a process; None where it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, str]:
    """Snapshot for ``RunRecord.env``; a fact this system does not give is absent, never guessed.

    ``load_average`` is the 1-minute load before the run: above the core count, timings are not to be trusted.
    """
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": str(_usable_cores()),
    }
    if hasattr(os, "getloadavg"):
        facts["load_average"] = f"{os.getloadavg()[0]:.2f}"
    for package in PACKAGES:
        if (found := version(package)) is not None:
            facts[package] = found
    facts |= {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    return facts
