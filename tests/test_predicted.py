"""Predicted speedups and ceilings: a run whose costs are known, one that lies, and the stored reference runs."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from harness import compare
from harness.compare import BASELINE
from harness.jobs.report import Target, report_files
from harness.metrics import rows
from harness.records import ArmRecord, BlockTrace, RunRecord, SampleRecord
from harness.report.lines import build
from harness.report.load import load
from harness.report.predicted import (
    CEILING,
    PREDICTED,
    Prediction,
    beside,
    costs_frame,
    costs_remark,
    median_error,
    predicted_csv,
    predicted_rows,
    predictions,
    unpredicted,
)
from harness.report.predicted_figure import predicted_figure
from harness.report.tables import console
from harness.traces import DRAFT, FULL, SLIM, Layout, forwards
from tests.rows import A, E, R, plain, run_record, sample

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "reference"
TARGET = "harness.decode.{}"
DRAFTER = {"_target_": "harness.drafters.small_lm.SmallLM"}
SETTINGS: dict[str, Any] = {
    "methods": {
        BASELINE: {"_target_": TARGET.format("autoregressive.Autoregressive")},
        "via_sd": {"_target_": TARGET.format("via_sd.ViaSD"), "drafter": DRAFTER, "slim": {"cache": "shared"}},
        "speculative": {"_target_": TARGET.format("speculative.Speculative"), "drafter": DRAFTER},
    }
}
LAYOUTS = {
    BASELINE: Layout("plain"),
    "via_sd": Layout("three_tiers", "own"),
    "speculative": Layout("two_tiers", "own"),
}
BASE_MS, ROW_MS = {DRAFT: 2.0, SLIM: 7.0, FULL: 10.0}, {DRAFT: 0.2, SLIM: 0.5, FULL: 1.0}
OUTSIDE_MS = 0.3


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RESAMPLES", 50)


def accepted(start: int, gamma: int = 4) -> BlockTrace:
    return BlockTrace(start, gamma, gamma, (A,) * gamma, gamma, gamma, 0, gamma, 1, 0)


def escalated(start: int) -> BlockTrace:
    return BlockTrace(start, 4, 4, (A, E), 1, 2, 0, 4, 1, 1)


def regenerated(start: int) -> BlockTrace:
    return BlockTrace(start, 4, 3, (A, R), 1, 2, 0, 3, 1, 0)


def refused(start: int, kept: int) -> BlockTrace:
    return BlockTrace(start, 4, 4, (E,) * (kept + 1), kept, kept + 1, 0, 4, 0, 1)


def timed(one: SampleRecord, slow: float = 1.0) -> SampleRecord:
    """With the seconds that its forwards take by the costs above, ``slow`` times over."""
    spent = dict.fromkeys((DRAFT, SLIM, FULL), 0.0)
    for block in forwards(LAYOUTS[one.arm], one.prompt_tokens, one.generation.blocks):
        for made in block:
            spent[made.tier] += slow * (BASE_MS[made.tier] + ROW_MS[made.tier] * (made.rows - 1)) / 1e3
    outside = slow * OUTSIDE_MS * len(one.generation.blocks) / 1e3
    tier_s = tuple(spent.values())
    return replace(one, decode_s=sum(tier_s) + outside, generation=replace(one.generation, tier_s=tier_s))


def made_run(slow: dict[str, float] | None = None) -> tuple[RunRecord, list[SampleRecord]]:
    """Six prompts of three arms, whose traces differ; ``slow`` by example."""
    found = []
    for index in range(6):
        example = str(index)
        start, three = 0, []
        for place in range(4 + index):
            kind = (accepted, escalated, regenerated)[(place * (index + 1)) % 3]
            three.append(kind(start))
            start += three[-1].emitted
        two, at = [], 0
        for place in range(3 + index):
            two.append(refused(at, (place + index) % 4))
            at += two[-1].emitted
        for arm, blocks in (
            (BASELINE, [plain(place) for place in range(8 + index)]),
            ("via_sd", three),
            ("speculative", two),
        ):
            one = sample(tuple(blocks), example=example, arm=arm)
            found.append(timed(one, (slow or {}).get(example, 1.0)))
    arms = tuple(ArmRecord(arm, arm, None if arm == BASELINE else "small_lm", None, arm != "via_sd") for arm in LAYOUTS)
    return replace(run_record(), arms=arms), found


def found_in(run: RunRecord, samples: list[SampleRecord], settings: dict[str, Any] = SETTINGS) -> dict[str, Prediction]:
    return {one.arm: one for one in predictions(run, samples, rows(run, samples), settings)}


def test_a_run_that_obeys_its_costs_is_predicted_exactly() -> None:
    found = found_in(*made_run())
    assert sorted(found) == ["speculative", "via_sd"]
    for one in found.values():
        assert one.predicted == pytest.approx(one.measured, rel=1e-3)
        assert one.ceiling is not None and one.predicted is not None and one.ceiling > one.predicted
        assert one.why == ""


def test_no_prompt_is_predicted_from_its_own_seconds() -> None:
    """Of the prompts that stand in even places all but the baseline becomes slower: the odd ones are predicted slower.

    Were a prompt fitted on itself, both halves would be right and the error 0.
    """
    run, samples = made_run()
    spoiled = [one if one.arm == BASELINE or int(one.example_id) % 2 else timed(one, 3.0) for one in samples]
    for one in found_in(run, spoiled).values():
        assert one.error is not None and abs(one.error) > 0.02


def test_the_closed_form_misses_what_a_backlog_costs() -> None:
    """Here a pass takes a tenth more for each row, which two constants do not know."""
    found = found_in(*made_run())
    errors = {arm: one.closed_error for arm, one in found.items()}
    assert all(error is not None and abs(error) > 0.02 for error in errors.values())


def test_the_closed_form_knows_whose_pass_ends_a_block() -> None:
    run, samples = made_run()
    closed = []
    for gate in ("strictness", "strictness, ending=full"):
        arms = tuple(replace(arm, gate=gate) if arm.arm == "via_sd" else arm for arm in run.arms)
        closed.append(found_in(replace(run, arms=arms), samples)["via_sd"].closed)
    assert closed[0] is not None and closed[1] is not None and closed[1] < closed[0]


def test_a_ceiling_by_hand() -> None:
    """Blocks of four, all accepted already: the ceiling is what was predicted."""
    run, samples = made_run()
    blocks = tuple(accepted(4 * place) for place in range(5))
    whole = [timed(sample(blocks, example=one.example_id)) if one.arm == "via_sd" else one for one in samples]
    one = found_in(run, whole)["via_sd"]
    block_ms = 4 * BASE_MS[DRAFT] + BASE_MS[SLIM] + 3 * ROW_MS[SLIM] + OUTSIDE_MS
    assert one.ceiling == pytest.approx(4 * (BASE_MS[FULL] + OUTSIDE_MS) / block_ms, rel=1e-3)
    assert one.predicted == pytest.approx(one.ceiling, rel=1e-3)


def test_a_device_that_does_not_tell_its_tiers_apart_is_fitted_as_a_whole() -> None:
    run, samples = made_run()
    untold = [replace(one, generation=replace(one.generation, tier_s=None)) for one in samples]
    for one in found_in(run, untold).values():
        assert one.error is not None and abs(one.error) < 0.05
        assert one.closed is None, "a drafter whose forwards were not timed is not free"


def test_an_arm_that_cannot_be_replayed_has_a_reason_and_no_number() -> None:
    settings = {"methods": {**SETTINGS["methods"], "via_sd": {"_target_": "harness.decode.swift.Swift"}}}
    one = found_in(*made_run(), settings)["via_sd"]
    assert (one.predicted, one.ceiling, one.error) == (None, None, None)
    assert one.measured is not None and "layers" in one.why
    assert beside(one, "-") == {"predicted (error)": "-", "ceiling": "-"}
    assert unpredicted([one, one]) == [f"Not predicted: via_sd: {one.why}"]
    (line,) = costs_frame([one], False, "-").to_dict("records")
    assert line["of the ceiling"] == "-" and "measured" not in line


def test_one_prompt_cannot_predict_another() -> None:
    run, samples = made_run()
    alone = [one for one in samples if one.example_id == "0"]
    assert all(one.predicted is None and "half" in one.why for one in found_in(run, alone).values())


def test_contended_times_predict_nothing() -> None:
    run, samples = made_run()
    busy = [replace(one, contended="another run") for one in samples]
    assert all(one.predicted is None and one.measured is None for one in found_in(run, busy).values())


def test_a_run_without_a_baseline_is_left_alone() -> None:
    run, samples = made_run()
    alone = replace(run, arms=tuple(arm for arm in run.arms if arm.arm != BASELINE))
    assert found_in(alone, [one for one in samples if one.arm != BASELINE]) == {}


def test_the_median_error_is_of_absolute_values() -> None:
    assert median_error([-0.3, 0.1, None, 0.2]) == 0.2
    assert median_error([None]) is None


@pytest.mark.parametrize("name", ["quickstart", "drafters"])
def test_stored_reference_runs_are_predicted_within_a_tenth(name: str) -> None:
    (folder,) = (REFERENCE / name / "runs").iterdir()
    found = load(folder).predicted
    assert found and all(one.predicted is not None for one in found)
    middle = median_error(one.error for one in found)
    assert middle is not None and middle <= 0.10
    assert all(one.ceiling is not None and one.predicted is not None and one.ceiling >= one.predicted for one in found)


def test_report_writes_table_and_figure_of_predictions(tmp_path: Path) -> None:
    (folder,) = (REFERENCE / "quickstart" / "runs").iterdir()
    loaded = load(folder)
    paths = report_files([loaded], Target.below(tmp_path, "mine"))
    named = {path.name for path in paths}
    assert {"mine_predicted.csv", "mine_predicted.png", "mine_predicted.pdf"} <= named
    assert len(pd.read_csv(tmp_path / "tables" / "mine_predicted.csv")) == len(loaded.predicted) == 8
    text = (tmp_path / "tables" / "mine.md").read_text()
    assert "## Costs and closed form" in text and "Median absolute error" in text
    known = loaded.prediction["gsm8k", "via_sd"]
    assert known.predicted is not None and known.error is not None and known.ceiling is not None
    beside_it = f" | {known.predicted:.2f} ({round(100 * known.error):+d} %)"
    (row,) = [line for line in text.partition("## Quality")[0].splitlines() if re.match(r"\| gsm8k +\| via_sd ", line)]
    assert beside_it in row and f"| {known.ceiling:.2f} " in row
    frame = pd.read_csv(tmp_path / "tables" / "mine.csv").set_index(["task", "arm", "metric"])["value"]
    assert frame["gsm8k", "via_sd", PREDICTED] == known.predicted
    assert frame["gsm8k", "via_sd", CEILING] == known.ceiling


def test_the_figure_has_every_prediction_once_in_each_panel() -> None:
    found = list(found_in(*made_run()).values())
    figure = predicted_figure(found)
    assert figure is not None and predicted_figure([replace(one, predicted=None) for one in found]) is None
    for axes in figure.axes:
        points = [line for line in axes.lines if line.get_linestyle() == "None"]
        assert sum(np.size(line.get_xdata()) for line in points) == 2
        assert sorted(line.get_markerfacecolor() == "white" for line in points) == [False, True]


def test_the_csv_keeps_full_precision() -> None:
    found = list(found_in(*made_run()).values())
    lines = predicted_csv(found).splitlines()
    assert len(lines) == 3 and "closed_error" in lines[0]
    assert "Median absolute error" in costs_remark(found)


def test_a_mistake_in_predicting_costs_no_measured_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*given: Any) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr("harness.report.predicted._replayed", broken)
    run, samples = made_run()
    loaded = build(run, samples, SETTINGS)
    assert [(one.predicted, one.ceiling) for one in loaded.predicted] == [(None, None)] * 2
    assert all(one.measured is not None for one in loaded.predicted)
    paths = report_files([loaded], Target.below(tmp_path, "mine"))
    text = paths[0].read_text()
    said = "Not predicted: via_sd, speculative: predicting failed (ZeroDivisionError: float division by zero)"
    assert said in text and "speedup, decode" in text
    screen = Console(file=io.StringIO(), width=200)
    screen.print(console([loaded])[0])
    assert said in screen.file.getvalue()  # type: ignore[attr-defined]


def test_rows_of_predictions_have_no_interval() -> None:
    run, samples = made_run()
    measured = rows(run, samples)
    found = predicted_rows(measured, predictions(run, samples, measured, SETTINGS))
    assert [(row.arm, row.metric) for row in found] == [
        (arm, metric) for arm in ("via_sd", "speculative") for metric in (PREDICTED, CEILING)
    ]
    assert all(row.value is not None and row.low is row.high is None and row.unit == "x" for row in found)
