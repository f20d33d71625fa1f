"""Event files for TensorBoard: hyperparameters, scalars, texts and figures, one folder for each run of the bench.

Written by TensorBoard's own package, so that a run can also be sent from where torch is not installed.
"""

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.log.content import (
    HEADLINE,
    OVERALL,
    QUALITY,
    Live,
    axes,
    flat,
    identifier,
    sample_columns,
    sample_row,
    summary,
)
from harness.log.guard import Guard
from harness.records import MetricRow, RunRecord, SampleRecord


class TensorBoardLogger:
    """``<dir>/<cell>/`` with the events of a run; a later start of the same cell replaces them.

    Like every logger it stops at its first error, says so in one line, and never stops the run.
    """

    def __init__(
        self, dir: str = "results/tensorboard", texts: bool = True, live_s: float = 5.0, wait_s: float = 60.0
    ) -> None:
        """``live_s``: seconds from one point of running numbers to the next. ``texts``: also outputs."""
        self._dir, self._texts, self._live_s, self._wait_s = Path(dir), texts, live_s, wait_s
        self._guard = Guard("tensorboard", self._remedy)
        self._identity: RunRecord | None = None
        self._events: Events | None = None
        try:  # before anything is measured
            from tensorboard.plugins.hparams import summary_v2  # noqa: F401

            self._found = True
        except Exception as error:
            self._found = False
            self._guard.fail(error)

    def start(self, run: RunRecord, config: Mapping[str, Any]) -> None:
        """Open the event file and write what the run is: its hyperparameters, and ``config.yaml`` as text."""
        if not self._found:
            return
        self._guard.reset()
        self._identity = run
        self._live, self._samples, self._said_at = Live(), list[SampleRecord](), time.monotonic()

        def open_file() -> Events:
            events = Events(self._dir / identifier(run))
            metrics = [f"{HEADLINE}/{name}" for name in (*OVERALL, QUALITY)] if run.arms else []
            events.settings(flat(axes(run, config)), metrics, identifier(run))
            events.text("settings", "".join(f"    {key}: {value}\n" for key, value in flat(config).items()), 0)
            return events

        self._events = self._guard(open_file, self._wait_s)

    def sample(self, record: SampleRecord) -> None:
        """Keep the sample, and now and then write the running rates."""
        if self._events is None:
            return
        self._live.add(record)
        self._samples.append(record)
        if time.monotonic() - self._said_at >= self._live_s:
            self._send(lambda events: events.scalars(self._live.values(), self._live.samples))
            self._said_at = time.monotonic()

    def summary(self, rows: Sequence[MetricRow]) -> None:
        """Every number as a scalar at the last sample; with ``texts`` each output at its own."""
        run = self._identity

        def send(events: "Events") -> None:
            assert run is not None
            step = self._live.samples
            events.scalars(self._live.values() | summary(run, rows), step)
            columns = sample_columns(run, self._texts)
            for place, record in enumerate(self._samples, start=1) if self._texts else ():
                row = dict(zip(columns, sample_row(record, columns), strict=True))
                events.text(f"samples/{record.task}/{record.arm}", table(row), place)

        self._send(send)

    def files(self, folder: Path, reports: Sequence[Path]) -> None:
        """The Markdown tables as text and the figures as images; the run folder stays where it is."""

        def send(events: "Events") -> None:
            for path in reports:
                if path.suffix == ".md":
                    events.text(f"tables/{path.stem}", path.read_text(encoding="utf-8"), self._live.samples)
                elif path.suffix == ".png":
                    events.image(f"figures/{path.stem}", path.read_bytes(), self._live.samples)

        self._send(send)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a training at a step."""
        self._send(lambda events: events.scalars(values, step))

    def close(self, failed: bool = False) -> None:
        """End the event file."""
        self._send(lambda events: events.close(failed))
        self._events = None

    def ok(self) -> bool:
        """Whether the file has all that it was given."""
        return self._guard.working

    def _send(self, action: "Callable[[Events], None]") -> None:
        events = self._events
        if events is not None:
            self._guard(lambda: action(events), self._wait_s)

    def _remedy(self) -> str:
        if self._identity is None:
            return "pip install -e '.[tensorboard]', then send it with job=relog."
        return f"send it later: python -m harness job=relog run={self._identity.run_id} log=tensorboard"


class Events:
    """One event file. What a call writes is on its way to the disk when it returns: no thread goes on writing."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = EventFileWriter(str(folder))

    def settings(self, values: Mapping[str, str | bool | int | float], metrics: Sequence[str], name: str) -> None:
        """Hyperparameters, and the scalars that a table of runs shows beside them."""
        from tensorboard.plugins.hparams import summary_v2 as hparams

        columns = [hparams.HParam(key) for key in values]
        self._add(hparams.hparams_config_pb(columns, [hparams.Metric(metric) for metric in metrics]), 0)
        self._add(hparams.hparams_pb(dict(values), trial_id=name), 0)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        made = [Summary.Value(tag=key, simple_value=float(value)) for key, value in values.items()]
        self._add(Summary(value=made), step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(text_pb(tag, markdown), step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = struct.unpack(">II", png[16:24])  # of the IHDR chunk, always the first
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        self._add(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def close(self, failed: bool) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        ended = SessionEndInfo(status=api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS)
        about = metadata.create_summary_metadata(HParamsPluginData(session_end_info=ended))
        self._add(Summary(value=[Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about)]), 0)
        self._writer.close()

    def _add(self, content: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=content))
        self._writer.flush()


def table(row: Mapping[str, Any]) -> str:
    """One sample as a Markdown list; its texts, which may have any character, as code."""
    lines = []
    for key, value in row.items():
        shown = "".join(f"\n        {line}" for line in value.splitlines()) if isinstance(value, str) else f" {value}"
        lines.append(f"- {key}:{shown}\n" if "\n" not in shown else f"- {key}:\n{shown}\n")
    return "\n".join(lines)
