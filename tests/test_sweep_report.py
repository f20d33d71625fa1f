"""The table and the figure over a sweep's cells: what was swept, right numbers in right lines, what is left out."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.compare import BASELINE
from harness.errors import UserError
from harness.jobs.report import report
from harness.records import ArmRecord, SampleRecord
from harness.report.load import load, load_if_any
from harness.report.sweep import cells_of_sweep, write_sweep
from harness.report.sweep_figure import Cell as ReportCell
from harness.report.sweep_figure import sweep_figure
from harness.report.swept import swept_values, unswept_arms
from harness.store import RunFolder
from tests.rows import run_record, sample
from tests.runs import files

ARMS = (BASELINE, "speculative", "via_sd")


def config(gamma: int = 5, alpha1: float = 0.5, **changed: Any) -> dict[str, Any]:
    """A composed config as a run folder has it: arms hold resolved copies."""
    gate = {"_target_": "harness.gate.Strictness", "alpha1": alpha1, "alpha2": 0.3}
    drafter = {"_target_": "harness.PromptLookup"}
    methods = {
        BASELINE: {"_target_": "harness.Autoregressive"},
        "speculative": {"_target_": "harness.Speculative", "gamma": gamma, "drafter": drafter},
        "via_sd": {"_target_": "harness.ViaSD", "gamma": gamma, "drafter": drafter, "gate": gate},
    }
    return {"name": "swept", "gamma": gamma, "gate": gate, "drafter": drafter, "methods": methods} | changed


def samples_of(run_id: str, seconds: dict[str, float], prompts: int = 2) -> list[SampleRecord]:
    """Eight tokens a prompt in so many seconds, by arm."""
    return [
        replace(sample(tokens=8, example=str(number), arm=arm, decode_s=each), run_id=run_id)
        for number in range(prompts)
        for arm, each in seconds.items()
    ]


def cell(results: Path, run_id: str, chosen: dict[str, Any], speculative: float, via_sd: float, **how: Any) -> Path:
    """A run folder whose arms take so many times less than the baseline's 2 seconds."""
    arms = tuple(ArmRecord(arm, arm, None, None, arm != "via_sd") for arm in ARMS)
    run = replace(run_record(ARMS), run_id=run_id, arms=arms, status="running", cell=how.get("key"))
    folder = RunFolder.create(results, run, chosen)
    made = samples_of(
        run_id, {BASELINE: 2.0, "speculative": 2 / speculative, "via_sd": 2 / via_sd}, how.get("prompts", 2)
    )
    for one in made[: how.get("kept")]:
        folder.append(one)
    if how.get("finished", True):
        folder.finish({})
    return folder.path


def lines(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_table_has_each_arm_at_each_swept_value(tmp_path: Path) -> None:
    folders = [
        cell(tmp_path, "b", config(gamma=10), speculative=0.5, via_sd=4.0),
        cell(tmp_path, "a", config(gamma=2), speculative=1.25, via_sd=2.0),
    ]
    write_sweep(tmp_path, [load_if_any(folder) for folder in folders], "mine")
    assert [name for name in files(tmp_path) if "runs/" not in name] == [
        "figures/mine_sweep.pdf",
        "figures/mine_sweep.png",
        "tables/mine_sweep.csv",
        "tables/mine_sweep.md",
    ]
    found = lines(tmp_path / "tables" / "mine_sweep.csv")
    assert [(row["cell"], row["gamma"], row["arm"], float(row["speedup_decode"])) for row in found] == [
        ("a", "2", BASELINE, 1.0),
        ("a", "2", "speculative", 1.25),
        ("a", "2", "via_sd", 2.0),
        ("b", "10", BASELINE, 1.0),
        ("b", "10", "speculative", 0.5),
        ("b", "10", "via_sd", 4.0),
    ], "cells by the swept number, not by its text or by the order given"
    assert {row["lossless"] for row in found if row["arm"] == "via_sd"} == {"False"}
    assert {row["quality"] for row in found} == {"100.0"} and {row["quality_metric"] for row in found} == {
        "exact_match"
    }
    assert all(float(row["full_rate_low"]) == float(row["full_rate"]) == 1.0 for row in found)
    text = (tmp_path / "tables" / "mine_sweep.md").read_text()
    assert "2 cells; swept: `gamma`." in text and "left out" not in text
    assert text.count("**lossy**") == 2 and "4.00 [4.00, 4.00]" in text


def test_predictions_stand_beside_the_speedups(tmp_path: Path) -> None:
    """Arms that decode plainly are predicted by their seconds a block alone."""
    methods = {arm: {"_target_": "harness.decode.autoregressive.Autoregressive"} for arm in ARMS}
    chosen = [config(gamma=gamma, methods=methods) for gamma in (2, 3)]
    folders = [cell(tmp_path, str(place), one, 1.25, 2.0) for place, one in enumerate(chosen)]
    write_sweep(tmp_path, [load_if_any(folder) for folder in folders], "mine")
    found = lines(tmp_path / "tables" / "mine_sweep.csv")
    told = [(row["arm"], row["speedup_decode_predicted"], row["speedup_decode_ceiling"]) for row in found[:3]]
    assert told[0] == (BASELINE, "", "") and [float(row[1]) for row in told[1:]] == pytest.approx([1.25, 2.0])
    text = (tmp_path / "tables" / "mine_sweep.md").read_text()
    assert text.count("2.00 (+0 %)") == 2 and "- Predicted: the decode speedup from the trace" in text


def test_a_setting_is_named_once_and_what_only_names_a_run_is_not_swept() -> None:
    cells = [config(alpha1=0.5, run_name="x", results_dir="r"), config(alpha1=0.9, run_name="y", results_dir="s")]
    assert swept_values(cells) == [{"gate.alpha1": 0.5}, {"gate.alpha1": 0.9}]
    assert swept_values([config()]) == [{}]
    both = [config(gamma=gamma, alpha1=alpha1) for gamma in (3, 5) for alpha1 in (0.5, 0.9)]
    assert swept_values(both)[1] == {"gamma": 3, "gate.alpha1": 0.9}


def test_a_setting_of_one_arm_alone_is_found_too() -> None:
    cells = [config(), config()]
    cells[1]["methods"]["via_sd"]["bonus"] = "slim"
    assert swept_values(cells) == [{"methods.via_sd.bonus": "none"}, {"methods.via_sd.bonus": "slim"}]


def test_a_swept_choice_is_named_by_its_group_without_what_comes_with_it() -> None:
    slims: Sequence[dict[str, Any]] = (
        {"_target_": "harness.decode.slim.even", "skip_ratio": 0.2},
        {"_target_": "harness.decode.slim.at_random", "skip_ratio": 0.3, "seed": 0},
    )
    assert swept_values([config(slim=slim) for slim in slims]) == [
        {"slim": "even", "slim.skip_ratio": 0.2},
        {"slim": "at_random", "slim.skip_ratio": 0.3},
    ]
    masks = [{"masks": ["results/masks/a.json"]}, {"masks": ["results/masks/b.json", "results/masks/a.json"]}]
    assert swept_values([config(slim=slim) for slim in masks]) == [{"slim.masks": "a"}, {"slim.masks": "b + a"}]


def test_arms_that_the_sweep_did_not_touch_are_told_from_those_it_did() -> None:
    assert unswept_arms([config(alpha1=0.5), config(alpha1=0.9)]) == {BASELINE, "speculative"}
    assert unswept_arms([config(gamma=2), config(gamma=5)]) == {BASELINE}
    assert unswept_arms([config(temperature=0.0), config(temperature=1.0)]) == set()
    assert unswept_arms([config(temperature=0.0), config(temperature=1.0, alpha1=0.9)]) == set()


def test_the_figure_has_a_panel_a_task_a_line_an_arm_and_its_values(tmp_path: Path) -> None:
    made = [
        (config(alpha1=alpha1, gamma=gamma), f"{gamma}{place}", speed)
        for gamma in (3, 5)
        for place, (alpha1, speed) in enumerate(((0.5, 1.5), (0.7, 1.25), (0.9, 0.75)))
    ]
    reports = [load(cell(tmp_path, run_id, chosen, 1.0, speed)) for chosen, run_id, speed in made]
    values = swept_values([chosen for chosen, *_ in made])
    figure = sweep_figure([ReportCell(one, value) for one, value in zip(reports, values, strict=True)])
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "translation (n = 2 a cell)" and axes.get_xlabel() == "gate.alpha1"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "speculative, gamma 3",
        "via_sd, gamma 3 (lossy)",
        "speculative, gamma 5",
        "via_sd, gamma 5 (lossy)",
    ]
    drawn = [line for line in axes.lines if line.get_marker() not in ("None", "")]
    assert [list(map(float, line.get_ydata())) for line in drawn] == [[1.0] * 3, [1.5, 1.25, 0.75]] * 2  # type: ignore[arg-type]
    assert list(axes.get_xticks()) == [0.5, 0.7, 0.9]
    assert [line.get_markerfacecolor() for line in drawn[1::2]] == ["white", "white"]


def test_what_did_not_finish_is_said_and_what_has_nothing_is_counted(tmp_path: Path) -> None:
    folders = [
        cell(tmp_path, "a", config(gamma=2), 1.0, 2.0),
        cell(tmp_path, "b", config(gamma=3), 1.0, 2.0, kept=4, finished=False),
        cell(tmp_path, "c", config(gamma=4), 1.0, 2.0, kept=2, finished=False),
    ]
    write_sweep(tmp_path, [load_if_any(folder) for folder in folders], "mine")
    text = (tmp_path / "tables" / "mine_sweep.md").read_text()
    assert "**1 cells are left out: no prompt of theirs was decoded by all arms.**" in text
    assert "**1 cells did not finish: only prompts decoded by all arms are used.**" in text
    found = lines(tmp_path / "tables" / "mine_sweep.csv")
    assert {(row["cell"], row["n"], row["status"]) for row in found} == {("a", "2", "finished"), ("b", "1", "running")}
    with pytest.raises(UserError, match="sweep 'mine': none of its 1 cells has a prompt that all arms decoded"):
        write_sweep(tmp_path, [load_if_any(folder) for folder in folders[2:]], "mine")


def test_tables_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "tables").write_text("a file where a folder belongs")
    with pytest.raises(UserError, match=r"cannot write .*tables"):
        write_sweep(tmp_path, [load(cell(tmp_path, "a", config(), 1.0, 2.0))], "mine")


def test_a_sweep_is_found_by_name_with_the_newest_run_of_equal_settings(tmp_path: Path) -> None:
    cell(tmp_path, "20260101-a", config(gamma=2), 1.0, 2.0, key="0123456789abcdef")
    newest = cell(tmp_path, "20260102-b", config(gamma=2, run_name="again"), 1.0, 3.0, key="of another commit")
    cell(tmp_path, "20260103-c", config(gamma=2), 1.0, 4.0, kept=3, finished=False)
    other = cell(tmp_path, "20260101-d", config(gamma=3), 1.0, 2.0)
    cell(tmp_path, "20260104-e", config(gamma=4, name="else"), 1.0, 2.0)
    assert sorted(cells_of_sweep(tmp_path, "swept")) == [other, newest]
    with pytest.raises(UserError, match="unknown sweep 'swpt': did you mean 'swept'"):
        cells_of_sweep(tmp_path, "swpt")


def test_the_job_reports_a_sweep_or_runs_and_not_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell(tmp_path, "a", config(gamma=2), 1.0, 2.0)
    cell(tmp_path, "b", config(gamma=3), 1.0, 2.0)
    paths = report(str(tmp_path), sweep="swept")
    assert [path.name for path in paths] == [f"swept_sweep.{kind}" for kind in ("md", "csv", "png", "pdf")]
    assert all(f"wrote {path}\n" in capsys.readouterr().out for path in paths[:1])
    with pytest.raises(UserError, match="run=a and sweep=swept both choose runs: name one"):
        report(str(tmp_path), runs="a", sweep="swept")


def test_a_sweep_has_a_page_and_a_table_to_paste_where_asked_for(tmp_path: Path) -> None:
    cell(tmp_path, "a", config(gamma=2), 1.0, 2.0)
    cell(tmp_path, "b", config(gamma=3), 1.0, 2.5)
    paths = report(str(tmp_path), sweep="swept", format=["html", "latex"])
    assert [path.name for path in paths[:4]] == [f"swept_sweep.{kind}" for kind in ("md", "csv", "html", "tex")]
    page, latex = paths[2].read_text(), paths[3].read_text()
    assert "2 cells; swept: <code>gamma</code>." in page and "2.50 [2.50, 2.50]" in page and "<b>lossy</b>" in page
    assert page.count("<table>") == page.count("data:image/svg+xml;base64,") == 1 and "<script>" in page
    assert r"\label{tab:swept-sweep}" in latex and "2.50 [2.50, 2.50]" in latex and "2 cells; swept:" in latex
    again = report(str(tmp_path), sweep="swept")
    assert [path.suffix for path in again] == [".md", ".csv", ".png", ".pdf"]
    assert not paths[2].exists() and not paths[3].exists(), "an earlier page would show earlier numbers"
