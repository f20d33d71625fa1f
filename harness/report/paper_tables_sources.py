"""What ours in the paper's tables is read from: finished runs, cards of searched masks, and failures of sweeps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness import sweeps
from harness.errors import UserError
from harness.records import commit_text
from harness.report.lines import DASH, RunReport
from harness.report.load import load_if_any
from harness.report.paper_tables_spec import PaperTable
from harness.report.predicted import predicted_rows, unpredicted
from harness.store import RUN, is_finished, read_config

SEARCHED = 0.45
"""Share of layers that the masks of Table 4 skip."""


class Number(NamedTuple):
    """A value in our unit with its 95 % interval, over ``n`` prompts; None where there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None


@dataclass(frozen=True)
class Source:
    """What was measured: a finished run, or a search of a mask.

    ``values``  by (arm, task, metric), predicted speedups and ceilings among them; ``unpredicted``: why others are not.
    ``full`` and ``drafter`` as they were chosen, ``prompts`` a task.
    """

    name: str
    model: str
    full: str
    drafter: str | None
    temperature: float | None
    gamma: int | None
    seed: int
    device: str
    commit: str
    values: Mapping[tuple[str, str, str], Number]
    prompts: Mapping[str, int] = field(default_factory=dict)
    lossy: frozenset[str] = frozenset()
    not_run: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    unpredicted: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """What stands under the table."""
        prompts = ", ".join(f"{task} {count}" for task, count in self.prompts.items())
        facts = [
            f"`{self.name}`: {self.model}",
            f"drafter {self.drafter}" if self.drafter else "",
            f"examples: {prompts}" if prompts else "",
            f"seed {self.seed}",
            f"temperature {self.temperature:g}" if self.temperature is not None else "",
            f"gamma {self.gamma}" if self.gamma is not None else "",
            f"device {self.device}",
            f"commit {self.commit}",
        ]
        return "; ".join(filter(None, facts))


def read_sources(results_dir: Path, tables: Sequence[PaperTable]) -> dict[str, list[Source]]:
    """The finished runs named after each table, newest first; of ``table4`` the masks searched at its skip ratio.

    Raises:
        UserError: a run or a card that cannot be read.
    """
    found: dict[str, list[Source]] = {table.name: [] for table in tables}
    for path in sorted((results_dir / "runs").glob(f"*/{RUN}"), reverse=True):
        folder = path.parent
        named = is_finished(folder) and (name := str(read_config(folder).get("name"))) in found
        if named and (report := load_if_any(folder)):
            found[name].append(of_run(report))
    if "table4" in found:
        found["table4"] = [
            source
            for folder in (results_dir / "paper" / "table4" / "masks", results_dir / "masks")
            for path in sorted(folder.glob("*.json"))
            if (source := of_card(path)) is not None
        ]
    return found


def of_run(report: RunReport) -> Source:
    run, settings = report.run, report.settings
    env = run.env
    drafter = settings.get("drafter") or {}
    rows = (*report.rows, *predicted_rows(report.rows, report.predicted))
    values = {(row.arm, row.task, row.metric): Number(row.value, row.low, row.high, row.n) for row in rows}
    commit = commit_text(run.git_commit, run.git_dirty)
    return Source(
        name=run.run_id,
        model=run.model,
        full=str((settings.get("model") or {}).get("full") or run.model),
        drafter=drafter.get("path") or str(drafter.get("_target_", "")).rpartition(".")[2] or None,
        temperature=run.temperature,
        gamma=settings.get("gamma"),
        seed=run.seed,
        device=", ".join(env[key] for key in ("device", "gpu", "cpu") if key in env) or DASH,
        commit=commit,
        values=values,
        prompts={row.task: row.n for row in report.rows},
        lossy=frozenset(arm.arm for arm in run.arms if not arm.lossless),
        not_run=report.not_run,
        note=report.remark,
        unpredicted=tuple(unpredicted(report.predicted)),
    )


def of_card(path: Path) -> Source | None:
    """A mask's card; None of one searched at another skip ratio, in other units or for another cache mode.

    Raises:
        UserError: it is not readable.
    """
    try:
        card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no readable card of a mask ({error}): restore or delete it.") from error
    kind = (card.get("skip_ratio"), card.get("units"), card.get("cache_mode"))
    if kind != (SEARCHED, "layers", "shared") or "search_s" not in card:
        return None
    commit = commit_text(card.get("git_commit"), card.get("git_dirty"))
    calibration = {task: int(data["rows"]) for task, data in card.get("calibration", {}).items()}
    minutes = Number(card["search_s"] / 60)
    return Source(
        *(path.name, card["model"], card["model"], None, None, None, int(card["seed"]), DASH, commit),
        values={("dimr", "", "search_minutes"): minutes},
        prompts=calibration,
        note=f"{path.name}: {card['evaluations']} masks evaluated",
    )


def read_failures(results_dir: Path, tables: Sequence[PaperTable]) -> dict[str, dict[str, str]]:
    """Why cells of each table's sweeps failed, by the name of the model.

    Raises:
        UserError: a sweep that cannot be read.
    """
    cells: dict[str, list[sweeps.CellRecord]] = {table.name: [] for table in tables}
    for path in (results_dir / sweeps.FOLDER).glob(f"*/{sweeps.SWEEP}"):
        if (name := sweeps.read_sweep(path.parent).name) in cells:
            cells[name] += sweeps.read_cells(path.parent)
    return {name: failures_of(mine) for name, mine in cells.items()}


def failures_of(cells: Sequence[sweeps.CellRecord]) -> dict[str, str]:
    """By the name of the model; of several failures the last one launched counts."""
    found = {}
    for cell in sorted(cells, key=lambda cell: cell.launch):
        models = [part.partition("=")[2] for part in cell.overrides.split() if part.startswith("model=")]
        if models and cell.state == "failed" and cell.error:
            found[models[-1]] = cell.error
    return found
