"""Copies of a run for a dashboard. The record is the run folder; a logger only repeats what is on disk there.

A new logger is a class with the methods of ``Logger`` and a file in ``conf/log``.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any, Protocol

from harness.errors import UserError, unknown
from harness.records import MetricRow, RunRecord, SampleRecord

WANDB_MODES = ("offline", "online", "disabled")


class Logger(Protocol):
    """What jobs call: ``start`` once, ``close`` always; between them ``sample`` per sample and ``summary`` once, or
    ``numbers`` per line of a training.
    """

    def start(self, run: RunRecord, config: Mapping[str, Any]) -> None: ...

    def sample(self, record: SampleRecord) -> None: ...

    def summary(self, rows: Sequence[MetricRow]) -> None: ...

    def numbers(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class NullLogger:
    """Logs nothing, so that no caller needs an ``if``."""

    def start(self, run: RunRecord, config: Mapping[str, Any]) -> None:
        pass

    def sample(self, record: SampleRecord) -> None:
        pass

    def summary(self, rows: Sequence[MetricRow]) -> None:
        pass

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


def _import_wandb() -> ModuleType:
    try:
        import wandb
    except ImportError as error:
        raise UserError("log=wandb needs the package wandb: run pip install -e '.[wandb]', or log=none.") from error
    return wandb


class WandbLogger:
    """Numbers of each sample and the summary table to Weights & Biases; texts and prompts stay on disk.

    A run is never lost to its dashboard: what fails before measuring is a ``UserError``, what fails later prints one
    line and ends the logging. ``mode`` is explicit, so nothing leaves the machine unless asked.
    """

    def __init__(
        self, project: str = "harness", group: str | None = None, mode: str = "offline", dir: str | None = None
    ) -> None:
        """Raises UserError for an unknown mode or a missing package, before anything is loaded."""
        if mode not in WANDB_MODES:
            raise unknown("log.mode", mode, WANDB_MODES)
        self._wandb = _import_wandb()
        self._project, self._group, self._mode, self._dir = project, group, mode, dir
        self._run: Any = None

    def start(self, run: RunRecord, config: Mapping[str, Any]) -> None:
        """Open the W&B run under the run's own id.

        Raises:
            UserError: W&B refuses, say for want of a key.
        """
        settings = self._wandb.Settings(console="off", silent=True, disable_git=True, init_timeout=30)
        identity = asdict(run)
        try:
            self._run = self._wandb.init(
                project=self._project,
                group=self._group,
                name=run.run_id,
                mode=self._mode,
                dir=self._dir,
                config={"run": identity, **config},
                settings=settings,
            )
        except self._wandb.errors.Error as error:
            raise UserError(
                f"log=wandb cannot start ({_one_line(error)}): run wandb login, or set log.mode=offline or log=none."
            ) from error

    def sample(self, record: SampleRecord) -> None:
        """Seconds, tokens and scores of one sample, under ``<task>/<arm>/``."""
        numbers: dict[str, float | None] = {
            "prefill_s": record.prefill_s,
            "decode_s": record.decode_s,
            "output_tokens": len(record.generation.token_ids),
            **record.scores,
        }
        prefix = f"{record.task}/{record.arm}"
        self._send(
            lambda: self._run.log({f"{prefix}/{key}": value for key, value in numbers.items() if value is not None})
        )

    def summary(self, rows: Sequence[MetricRow]) -> None:
        """All rows as one table, and each value in the W&B summary."""
        if not rows:
            return

        def send() -> None:
            data = [asdict(row) for row in rows]
            columns = list(data[0])
            table = self._wandb.Table(columns=columns, data=[[row[column] for column in columns] for row in data])
            self._run.log({"metrics": table})
            self._run.summary.update(
                {f"{row.task}/{row.arm}/{row.metric}": row.value for row in rows if row.value is not None}
            )

        self._send(send)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a training at a step."""
        self._send(lambda: self._run.log(dict(values), step=step))

    def close(self) -> None:
        """End the W&B run; safe to call twice, and after a failed start."""
        self._send(lambda: self._run.finish())
        self._run = None

    def _send(self, action: Callable[[], None]) -> None:
        if self._run is None:
            return
        try:
            action()
        except (self._wandb.errors.Error, OSError) as error:  # OSError: its background process is gone
            self._run = None
            print(f"wandb stopped logging: {_one_line(error)}. The run goes on.", file=sys.stderr)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
