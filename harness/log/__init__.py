"""Copies of a run for a dashboard. The record is the run folder; a logger only repeats what is on disk there.

A new logger is a class with the methods of ``Logger`` in a module of this package, and a file in ``conf/log``. What it
may do to a run is decided in ``harness.log.guard``: nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from harness.records import MetricRow, RunRecord, SampleRecord


class Logger(Protocol):
    """What jobs call: ``start`` once, ``close`` always; between them ``sample`` per sample, ``summary`` and ``files``
    once each, or ``numbers`` per line of a training. No call is made while a clock runs.
    """

    def start(self, run: RunRecord, config: Mapping[str, Any]) -> None:
        """Begin to log ``run``. A logger may be started again once it is closed."""

    def sample(self, record: SampleRecord) -> None:
        """One sample, as soon as it is on disk."""

    def summary(self, rows: Sequence[MetricRow]) -> None:
        """Every number of the tables."""

    def files(self, folder: Path, reports: Sequence[Path]) -> None:
        """The run folder, and the tables and figures made of it."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a training at a step."""

    def close(self, failed: bool = False) -> None:
        """End the log; safe to call twice, and after a start that failed."""

    def ok(self) -> bool:
        """Whether all that the log was given since its start has been taken."""


class NullLogger:
    """Logs nothing, so that no caller needs an ``if``."""

    def start(self, run: RunRecord, config: Mapping[str, Any]) -> None:
        pass

    def sample(self, record: SampleRecord) -> None:
        pass

    def summary(self, rows: Sequence[MetricRow]) -> None:
        pass

    def files(self, folder: Path, reports: Sequence[Path]) -> None:
        pass

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self, failed: bool = False) -> None:
        pass

    def ok(self) -> bool:
        return True
