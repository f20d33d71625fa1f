"""Runs from disk and from exports of W&B in one frame: the same numbers, the same settings, one figure."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness import compare
from harness.compare import BASELINE
from harness.errors import UserError
from harness.log.content import axes, flat, summary
from harness.report.explorer import Explored, explore, explored_figure, from_reports, from_wandb, settings_of
from harness.report.lines import RunReport
from harness.store import to_json
from tests.pictures import made_run

METRIC = "speedup_decode"


@pytest.fixture(scope="module")
def reports() -> list[RunReport]:
    """Two runs that differ in gamma."""
    made = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compare, "RESAMPLES", 50)
        for gamma, speed in ((3, 1.5), (5, 1.25)):
            report = made_run("mine", {"speculative": 1.2, "via_sd": speed}, run_id=f"gamma{gamma}")
            report.settings["gamma"] = gamma  # type: ignore[index]
            made.append(report)
    return made


def sent(report: RunReport) -> dict[str, Any]:
    """What ``log=wandb`` gives W&B of a run: its name, config and summary."""
    config = {**axes(report.run, report.settings), "run": to_json(report.run), "settings": dict(report.settings)}
    return {"name": report.run.run_id, "config": config, "summary": summary(report.run, report.rows)}


def columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the CSV of W&B's table of runs: nested keys with dots, lists as JSON."""
    record = row["config"]["run"]
    arms = {"run.arms": json.dumps(record["arms"]), "run.run_id": record["run_id"]}
    return {"Name": row["name"], "State": "finished", **flat(row["config"]), **arms, **row["summary"]}


def export(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"{kind}.{'json' if kind.startswith('json') else 'csv'}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "json of files":  # what W&B keeps in a run's config.yaml has values in dicts of their own
        wrapped = [row | {"config": {key: {"value": value} for key, value in row["config"].items()}} for row in rows]
        path.write_text(json.dumps(wrapped))
    else:
        pd.DataFrame(rows if kind == "api" else list(map(columns, rows))).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("kind", ["json", "json of files", "api", "table"])
def test_an_export_says_what_the_folders_say(kind: str, reports: list[RunReport], tmp_path: Path) -> None:
    disk = explore(from_reports(reports))
    exported = explore(from_wandb(export(tmp_path, kind, [sent(report) for report in reports])))
    assert settings_of(disk) == settings_of(exported) == ["gamma"]
    keys = ["run", "experiment", "task", "arm", "lossless", "metric", "gamma"]
    assert len(disk) == len(exported) > 50
    both = disk.merge(exported, on=keys, suffixes=("", "_exported"))
    assert len(both) == len(disk)
    assert both["value"].to_list() == pytest.approx(both["value_exported"].to_list())
    assert set(disk["lossless"]) == {True, False} and exported["low"].isna().all() and disk["low"].notna().any()


def test_runs_of_both_kinds_stand_beside_each_other(reports: list[RunReport], tmp_path: Path) -> None:
    runs = [*from_reports(reports[:1]), *from_wandb(export(tmp_path, "table", [sent(reports[1])]))]
    frame = explore(runs)
    assert settings_of(frame) == ["gamma"] and set(frame["run"]) == {"gamma3", "gamma5"}


def test_a_setting_that_is_a_number_is_an_axis_and_runs_are_rows(reports: list[RunReport]) -> None:
    frame = explore(from_reports(reports))
    figure = explored_figure(frame, "speedup_decode", "gamma")
    for panel in figure.axes:
        drawn = {line.get_label(): line for line in panel.lines if line.get_marker() not in ("None", "", None)}
        assert [list(map(float, line.get_ydata())) for line in drawn.values()] == [[1.2, 1.2], [1.5, 1.25]]  # type: ignore[arg-type]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["gsm8k", "web_questions"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["speculative", "via_sd (lossy)"]
    rows = explored_figure(frame, "reject_rate").axes[0]
    assert [label.get_text() for label in rows.get_yticklabels()] == ["gamma3", "gamma5"]


def test_an_arm_that_does_not_say_whether_it_is_lossless_is_not_called_so() -> None:
    frame = explore([Explored("run", {}, {}, (("qa", "arm", "speedup_decode", 1.5, None, None),))])
    (text,) = explored_figure(frame).legends[0].get_texts()
    assert text.get_text() == "arm (lossless or not: not said)"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.csv", None, "is not there"),
        ("empty.csv", "", "cannot be read"),
        ("broken.json", "{", "cannot be read"),
        ("other.csv", "a,b\n1,2\n", "no number named TASK/ARM/METRIC"),
        ("other.json", '{"a": 1}', "no number named TASK/ARM/METRIC"),
    ],
)
def test_what_is_no_export_is_one_line(name: str, text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        from_wandb(tmp_path / name)


def test_an_unknown_metric_or_setting_is_named_with_those_there_are(reports: list[RunReport]) -> None:
    frame = explore(from_reports(reports))
    with pytest.raises(UserError, match="speedup_decode"):
        explored_figure(frame, "speedup")
    with pytest.raises(UserError, match="gamma"):
        explored_figure(frame, x="gama")


def run_at(gamma: int, seed: int) -> Explored:
    """A run whose one arm is as fast as gamma says."""
    numbers = (("qa", "a", METRIC, 1.0 * gamma, None, None),)
    return Explored(f"{gamma}-{seed}", {"gamma": gamma, "top_k": seed}, {}, numbers)


@pytest.mark.parametrize(("runs", "style"), [([(3, 0), (5, 0)], "-"), ([(3, 0), (5, 0), (3, 1)], "None")])
def test_marks_are_joined_where_nothing_but_the_axis_differs(runs: list[tuple[int, int]], style: str) -> None:
    (axes,) = explored_figure(explore([run_at(*one) for one in runs]), METRIC, "gamma").axes
    (line,) = [line for line in axes.lines if line.get_marker() not in ("None", "", None)]
    assert line.get_linestyle() == style


def test_a_baseline_alone_has_no_speedup_and_no_runs_have_no_number() -> None:
    numbers = [("qa", BASELINE, name, value, None, None) for name, value in ((METRIC, 1.0), ("f1", 9.0))]
    alone = Explored("run", {}, {}, tuple(numbers))
    with pytest.raises(UserError, match=r"unknown metric 'speedup_decode': Available: f1\."):
        explored_figure(explore([alone]))
    with pytest.raises(UserError, match="no number to draw"):
        explored_figure(explore([]))


def test_an_export_whose_settings_were_cut_is_still_read(tmp_path: Path) -> None:
    row = {"Name": "cut", "settings": '{"gamma": 5, "meth', "run.arms": '[{"arm": "a"}]', "qa/a/f1": 9.0}
    pd.DataFrame([row]).to_csv(tmp_path / "cut.csv", index=False)
    (found,) = from_wandb(tmp_path / "cut.csv")
    assert (found.run, found.config, found.lossless) == ("cut", {}, {})
