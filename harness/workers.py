"""Cells of a sweep in worker processes: what must be there for it, and each cell's output in a file of its own.

Hydra's launchers do the work; ``launcher=NAME`` chooses one of ``conf/launcher``.
"""

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from harness.errors import UserError
from harness.help import one_line_errors

IN_PLACE = "basic"
"""Hydra's own launcher: one cell after the other in this process."""


def chosen() -> str:
    """The launcher of ``conf/launcher`` that this cell of a sweep was sent by; outside of a sweep ``basic``."""
    own = HydraConfig.get() if HydraConfig.initialized() else None
    if own is None or OmegaConf.is_missing(own.job, "num"):
        return IN_PLACE
    return str(own.runtime.choices.get("launcher", IN_PLACE))


class CheckLauncher(Callback):
    """Before a run or a sweep starts: its launcher is for it, and has what it needs."""

    # Hydra turns exceptions of callbacks into warnings; the SystemExit of one_line_errors passes.

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with one_line_errors():
            if (name := config.hydra.runtime.choices.launcher) != IN_PLACE:
                raise UserError(f"launcher={name} is for sweeps: add -m, or leave it out.")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read when Ray is imported: lines of two cells look alike to it
        with one_line_errors():
            if config.hydra.runtime.choices.launcher == "submitit_slurm":
                if config.hydra.launcher.partition is None:
                    raise UserError(
                        "hydra.launcher.partition has no value: add hydra.launcher.partition=NAME; sinfo lists them."
                    )
                if shutil.which("sbatch") is None:
                    raise UserError(
                        "launcher=submitit_slurm needs sbatch, which is not found: start it where Slurm is."
                    )


@contextmanager
def own_log(cfg: DictConfig) -> Iterator[None]:
    """In a worker, what the cell ``cfg`` prints is added to its file; two lines say where, and how long it took.

    The file is ``logs/<name>/<number of the cell>.log`` in the results folder. In the process that was started by hand
    nothing changes.
    """
    if chosen() == IN_PLACE:
        yield
        return
    own = HydraConfig.get()
    path = Path(cfg.results_dir) / "logs" / cfg.name / f"{own.job.num + 1:03d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    cell = f"cell {own.job.num + 1} ({' '.join(own.overrides.task)})"
    say(f"{cell}: started on {platform.node()}, process {os.getpid()}, output in {path}")
    begun = time.perf_counter()
    try:
        with printed_to(path):
            yield
    finally:
        say(f"{cell}: ended after {time.perf_counter() - begun:.0f} s")


def say(line: str) -> None:
    """One write a line: those of several workers do not mix."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """All that this process prints, and what it starts, is added to ``path``: by descriptor, both streams."""
    streams = (sys.stdout, sys.stderr)
    with path.open("ab") as file:
        kept = {descriptor: os.dup(descriptor) for descriptor in {1, 2, *(stream.fileno() for stream in streams)}}
        try:
            for stream in streams:
                stream.flush()
            for descriptor in kept:
                os.dup2(file.fileno(), descriptor)
            yield
        finally:
            for stream in streams:
                stream.flush()
            for descriptor, copy in kept.items():
                os.dup2(copy, descriptor)
                os.close(copy)
