"""The W&B workspace is built and checked without asking W&B."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.compare import BASELINE
from harness.errors import UserError
from harness.jobs import workspace as job
from harness.log.content import axes, flat, summary
from harness.metrics import rows
from tests.rows import run_record, two_arms
from tests.runs import main
from tests.test_log_content import known, quickstart

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # wandb-workspaces, of pydantic
assert quickstart  # a fixture


@pytest.fixture
def made() -> Any:
    from harness.log.workspace import build

    return build("team", "harness", "Tiers", ["translation"], ["via_sd"])


def kinds(made: Any) -> dict[str, list[str]]:
    return {section.name: [type(panel).__name__ for panel in section.panels] for section in made.sections}


def test_panels_answer_what_a_sweep_asks(made: Any) -> None:
    found = kinds(made)
    assert set(found) >= {"Speedup against quality", "Thresholds", "Drafters", "Routes", "Depth", "Runs"}
    assert set(found["Speedup against quality"]) == {"ScatterPlot"} and set(found["Drafters"]) == {"BarPlot"}
    assert "ParallelCoordinatesPlot" in found["Thresholds"] and len(found["Arms, by task"]) == 2
    assert {"RunComparer", "WeavePanelSummaryTable"} == set(found["Runs"])


def test_panels_read_only_what_is_sent(made: Any, quickstart: dict[str, Any]) -> None:
    from harness.log.workspace import definition, keys_of

    config = flat(axes(known(run_record()), quickstart))
    numbers = summary(run_record(), rows(run_record(), two_arms()))
    sent = {f"config:{key}" for key in config} | {f"summary:{key}" for key in numbers}
    read = set(keys_of(definition(made)))
    assert read <= sent and len(read) > 15
    assert {"config:gate.alpha1", "config:skip_ratio", "config:drafter", "summary:headline/speedup_decode"} <= read


def test_a_definition_is_what_wandb_reads_back(made: Any) -> None:
    from wandb_workspaces.workspaces import Workspace
    from wandb_workspaces.workspaces.internal import View, WorkspaceViewspec

    from harness.log.workspace import definition

    text = json.dumps(definition(made))
    spec = WorkspaceViewspec.model_validate(json.loads(text))
    view = View(entity="team", project="harness", display_name="Tiers", name="", id="", spec=spec)
    again = Workspace._from_model(view)
    assert kinds(again) == kinds(made)
    assert again.runset_settings.pinned_columns == made.runset_settings.pinned_columns


def test_the_job_writes_the_definition_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    main(monkeypatch, "job=workspace", "+experiment=quickstart", "job.mode=offline", f"results_dir={tmp_path}")
    found = json.loads((tmp_path / "wandb" / "workspace.json").read_text())
    sections = found["spec"]["section"]["panelBankConfig"]["sections"]
    names = [section["name"] for section in sections]
    assert "Depth" in names and found["url"] is None
    text = json.dumps(found["spec"])
    assert "gsm8k/via_sd/speedup_decode" in text and f"/{BASELINE}/" not in text


def call(folder: Path, **changed: Any) -> Path:
    settings: dict[str, Any] = {"project": "p", "entity": "team", "name": "n", "tasks": ["t"], "arms": ["via_sd"]}
    return job.workspace(str(folder), **settings | changed)


def test_saved_again_it_replaces_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str | None] = []

    def saved(made: Any, url: str | None) -> str:
        asked.append(url)
        return "https://wandb.ai/team/p?nw=1"

    monkeypatch.setattr(job, "saved", saved)
    for _ in range(2):
        call(tmp_path)
    call(tmp_path, mode="offline")
    call(tmp_path)
    call(tmp_path, project="other")
    assert asked == [None, "https://wandb.ai/team/p?nw=1", "https://wandb.ai/team/p?nw=1", None]


def test_what_is_saved_goes_where_it_was(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb_workspaces.workspaces as ws

    there = ws.Workspace(entity="team", project="harness", name="old")
    stored: list[Any] = []

    def save(self: Any) -> Any:
        stored.append(self)
        return self

    monkeypatch.setattr(ws.Workspace, "from_url", lambda url: there)
    monkeypatch.setattr(ws.Workspace, "save", save)
    monkeypatch.setattr(ws.Workspace, "url", property(lambda self: "address"))
    assert job.saved(made, "address") == "address" and stored == [there]
    assert there.name == "Tiers" and kinds(there) == kinds(made)
    job.saved(made, None)
    assert stored[1] is made


def test_what_wandb_refuses_is_one_line(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb_workspaces.workspaces as ws

    def refuse(self: Any) -> Any:
        raise ValueError("no\nkey")

    monkeypatch.setattr(ws.Workspace, "save", refuse)
    with pytest.raises(UserError, match=r"\(no key\): run wandb login, or set job.mode=offline"):
        job.saved(made, None)


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'offline'"):
        call(tmp_path, mode="ofline")
