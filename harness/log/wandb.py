"""One Weights & Biases run for each run of the bench: what is compared side by side in a dashboard.

Its id is the cell's, so that a cell that is measured on, or sent again, is the same W&B run. Each start sends
everything from the beginning and replaces what W&B had: the samples of two measurements never mix there.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.errors import unknown
from harness.log.content import (
    Live,
    axes,
    identifier,
    measured_arms,
    sample_columns,
    sample_row,
    summary,
)
from harness.log.guard import Guard, say
from harness.records import MetricRow, RunRecord, SampleRecord

MODES = ("offline", "online", "disabled")
SYNC = "wandb sync"
TAG_LENGTH = 64


class WandbLogger:
    """Numbers, samples, tables and figures of a run to Weights & Biases.

    Nothing it does is between two clock reads, and nothing that W&B does stops a run: the first error, or an answer
    that takes longer than ``wait_s``, prints one line and ends the logging of that run. ``job=relog`` sends it later.
    """

    def __init__(
        self,
        project: str = "harness",
        entity: str | None = None,
        group: str | None = None,
        sweep: str | None = None,
        tags: Sequence[str] = (),
        mode: str = "offline",
        dir: str | None = None,
        texts: bool = True,
        live_s: float = 5.0,
        wait_s: float = 60.0,
    ) -> None:
        """``group`` None: the sweep that the run, or else its config, names, and ``sweep`` where there is none.

        ``live_s``: seconds from one line of running numbers to the next. ``texts``: outputs in the table of samples.

        Raises:
            UserError: an unknown mode. That the package is missing or broken is no error here, but said.
        """
        if mode not in MODES:
            raise unknown("log.mode", mode, MODES)
        self._project, self._entity, self._group, self._tags = project, entity, group, tuple(tags)
        self._sweep = sweep
        self._mode, self._texts, self._live_s, self._wait_s = mode, texts, live_s, wait_s
        self._dir = Path(dir or ".").resolve()
        self._guard = Guard("wandb", self._remedy)
        self._identity: RunRecord | None = None
        self._run: Any = None
        self._wandb: ModuleType | None = None
        if mode != "disabled":
            try:  # here, before anything is measured: importing it takes a second of the interpreter's time
                import wandb

                self._wandb = wandb
            except Exception as error:
                self._guard.fail(error)

    def start(self, run: RunRecord, config: Mapping[str, Any]) -> None:
        """Open the W&B run. ``config``: the resolved ``config.yaml``, kept whole under ``settings``."""
        if self._wandb is None:
            return
        wandb = self._wandb
        self._guard.reset()
        self._identity = run
        self._live, self._rows, self._said_at = Live(), list[list[Any]](), time.monotonic()
        self._columns = sample_columns(run, self._texts)

        def open_run() -> Any:
            self._dir.mkdir(parents=True, exist_ok=True)
            # What an artifact waits in until it is sent: beside the runs, not in the home folder.
            os.environ.setdefault("WANDB_DATA_DIR", str(self._dir / "wandb"))
            opened = wandb.init(
                project=self._project,
                entity=self._entity,
                id=identifier(run),
                name=run.run_id,
                group=self._group or run.sweep or sweep_of(config) or self._sweep,
                job_type="bench" if run.arms else "train_drafter",
                tags=tags_of(run, self._tags),
                mode=self._reachable(wandb),
                dir=str(self._dir),
                config={**axes(run, config), "run": asdict(run), "settings": dict(config)},
                reinit="create_new",
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_git=True,
                    init_timeout=self._wait_s,
                    finish_timeout=self._wait_s,
                    x_disable_stats=True,  # a sampler of CPU and GPU beside the measurement
                    x_save_requirements=False,  # the versions that matter are in the record
                ),
            )
            opened.define_metric("live/samples", hidden=True, summary="none")
            opened.define_metric("live/*", step_metric="live/samples", summary="none")
            return opened

        self._run = self._guard(open_run, 2 * self._wait_s)

    def sample(self, record: SampleRecord) -> None:
        """A row of the table of samples, and now and then the running rates."""
        if self._run is None:
            return
        self._live.add(record)
        self._rows.append(sample_row(record, self._columns))
        if time.monotonic() - self._said_at >= self._live_s:
            step, values = self._live.samples, self._live.values()
            self._guard(lambda: self._run.log(values, step=step), self._wait_s)
            self._said_at = time.monotonic()

    def summary(self, rows: Sequence[MetricRow]) -> None:
        """Each number in the W&B summary; all of them as a table, and one of the samples."""
        if self._run is None or self._wandb is None or self._identity is None:
            return
        table, run = self._wandb.Table, self._identity
        metrics = [asdict(row) for row in rows]
        columns = [name for name in metrics[0] if name != "run_id"] if metrics else []

        def send() -> None:
            self._run.summary.update(summary(run, rows))
            tables = {"tables/samples": table(columns=self._columns, data=self._rows, allow_mixed_types=True)}
            if metrics:
                data = [[row[name] for name in columns] for row in metrics]
                tables["tables/metrics"] = table(columns=columns, data=data, allow_mixed_types=True)
            self._run.log(self._live.values() | tables, step=self._live.samples)

        self._guard(send, self._wait_s)

    def files(self, folder: Path, reports: Sequence[Path]) -> None:
        """The run folder, tables and figures as one artifact; figures also to look at."""
        if self._run is None or self._wandb is None or self._identity is None:
            return
        wandb, run = self._wandb, self._identity

        def send() -> None:
            artifact = wandb.Artifact(f"results-{identifier(run)}", "results", metadata={"run_id": run.run_id})
            for path in sorted(folder.iterdir()):
                if path.is_file() and (self._texts or path.name != "samples.jsonl"):
                    artifact.add_file(str(path), name=f"run/{path.name}")
            for path in reports:
                artifact.add_file(str(path), name=f"{path.parent.name}/{path.name}")
            self._run.log_artifact(artifact)
            figures = {
                f"figures/{path.stem}": wandb.Image(str(path)) for path in reports if path.suffix in (".png", ".jpg")
            }
            if figures:
                self._run.log(figures, step=self._live.samples)

        self._guard(send, self._wait_s)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a training at a step."""
        if self._run is not None:
            self._guard(lambda: self._run.log(dict(values), step=step), self._wait_s)

    def close(self, failed: bool = False) -> None:
        """End the W&B run; what is not uploaded ``wait_s`` later stays on disk for ``wandb sync``."""
        if self._run is not None:
            self._guard(lambda: self._run.finish(exit_code=int(failed)), 2 * self._wait_s)
        self._run = None

    def ok(self) -> bool:
        """Whether W&B took all that it was given."""
        return self._guard.working

    def _reachable(self, wandb: ModuleType) -> str:
        """The mode; offline, which is said once, instead of online where there is no key."""
        if self._mode == "online" and not has_key(wandb):
            self._mode = "offline"
            say(f"wandb has no key here and logs offline; send it with: {SYNC} {self._dir}/wandb/offline-run-*")
        return self._mode

    def _remedy(self) -> str:
        if self._identity is None:
            return "send it later with job=relog."
        return f"send it later: python -m harness job=relog run={self._identity.run_id} log=wandb"


def sweep_of(config: Mapping[str, Any]) -> str | None:
    """The sweep that a run was part of; the experiment's name where it was not logged then."""
    log = config.get("log")
    return (log.get("sweep") if isinstance(log, Mapping) else None) or config.get("name")


def has_key(wandb: ModuleType) -> bool:
    """Whether W&B could log in here without asking anybody; asks no server."""
    from wandb.sdk.lib.wbauth import authenticate_session

    host = wandb.setup().settings.base_url
    return authenticate_session(host=host, source="log=wandb", prompt=False, update_session=False) is not None


def tags_of(run: RunRecord, more: Sequence[str]) -> list[str]:
    """Model, tasks and arms, each once and no longer than W&B takes."""
    found = dict.fromkeys((run.model, *run.task_metrics, *measured_arms(run), *more))
    return [tag[:TAG_LENGTH] for tag in found if tag]
