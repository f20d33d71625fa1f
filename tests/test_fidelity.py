"""Rates of fidelity records, by hand, and where tables show them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fidelity import FIDELITY_METRICS, LENIENCES, records_of
from harness.metrics import rows
from harness.records import FidelityRecord
from harness.report.frames import FIDELITY_COLUMNS, fidelity_frame
from harness.report.lines import DASH, build
from harness.report.tables import markdown
from harness.store import RunFolder, read
from tests.rows import run_record, sample, two_arms

FIRST = FidelityRecord("run", "translation", "1", "via_sd", 8, 6, 4.0, (math.log(1.1), math.log(1.3), math.log(6.0)))
SECOND = replace(FIRST, example_id="2", greedy=8, nll=2.0, overshoot=(math.log(2.0),))
METRICS = {known.name: known for known in FIDELITY_METRICS}


def value(name: str, *records: FidelityRecord) -> float | None:
    return METRICS[name].value(records)


def test_rates_are_ratios_of_sums_over_prompts() -> None:
    assert value("greedy_share", FIRST, SECOND) == 14 / 16
    assert value("nll_per_token", FIRST, replace(SECOND, tokens=12)) == 6.0 / 20


@pytest.mark.parametrize(("lenience", "above"), [*zip(LENIENCES, (1, 1, 2, 3), strict=True)])
def test_overshoot_is_the_share_of_accepted_drafts_above_a_lenience(lenience: float, above: int) -> None:
    assert value(f"overshoot_{lenience}", FIRST, SECOND) == above / 4
    at_the_bound = replace(FIRST, overshoot=(math.log(1 / lenience),))
    assert value(f"overshoot_{lenience}", at_the_bound) == 0.0, "above, not from"


def test_the_tail_is_a_percentile_of_all_accepted_drafts_together() -> None:
    many = replace(FIRST, tokens=101, overshoot=tuple(float(step) for step in range(101)))
    assert value("overshoot_p95", many) == 95.0 and value("overshoot_p99", many) == 99.0
    assert value("overshoot_p99", FIRST, SECOND) != pytest.approx(math.log(6.0), abs=1e-3)


@pytest.mark.parametrize("name", [name for name in METRICS if name.startswith("overshoot")])
def test_no_probability_and_no_accepted_draft_are_no_number(name: str) -> None:
    assert value(name, FIRST, replace(SECOND, overshoot=None)) is None
    assert value(name, replace(FIRST, overshoot=())) is None


def test_a_number_that_is_not_finite_for_one_prompt_is_none_for_all() -> None:
    assert value("nll_per_token", FIRST, replace(SECOND, nll=None)) is None
    assert METRICS["nll_per_token"].interval([FIRST, replace(SECOND, nll=None)], 0) is None
    assert METRICS["nll_per_token"].interval([FIRST, SECOND], 0) is not None


@pytest.mark.parametrize("change", [{"greedy": 9}, {"greedy": -1}, {"overshoot": (0.0,) * 9}])
def test_a_record_that_contradicts_itself_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"want 0 <= greedy|more accepted"):
        replace(FIRST, **change)  # type: ignore[arg-type]


def test_a_prompt_without_a_record_leaves_no_number() -> None:
    samples = [sample(tokens=8, example=example) for example in ("1", "2")]
    assert records_of(samples, [SECOND, FIRST]) == [FIRST, SECOND]
    assert records_of(samples, [FIRST]) is None and records_of([], []) is None
    found = {(row.arm, row.metric): row.value for row in rows(run_record(), two_arms(), (), [FIRST, SECOND])}
    assert found["via_sd", "greedy_share"] == 14 / 16 and found["autoregressive", "greedy_share"] is None
    assert all(found["via_sd", name] is not None for name in METRICS)


def test_tables_show_fidelity_with_its_definitions_and_a_dash_where_there_is_none() -> None:
    report = build(run_record(), two_arms(), fidelity=[FIRST, SECOND])
    frame = fidelity_frame([report]).set_index("arm")
    assert list(frame.columns) == ["task", *FIDELITY_COLUMNS]
    assert frame.loc["via_sd", "greedy_share"] == "0.875" and frame.loc["autoregressive", "greedy_share"] == DASH
    page = markdown([report], "title")
    assert "## Fidelity" in page and all(f"`{name}`: " in page for name in FIDELITY_COLUMNS)


def test_records_lie_beside_the_samples_and_old_runs_have_none(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, run_record(), {})
    for record in (FIRST, replace(SECOND, nll=None, overshoot=None)):
        folder.append(record)
    assert read(folder.path).fidelity == (FIRST, replace(SECOND, nll=None, overshoot=None))
    (folder.path / "fidelity.jsonl").unlink()
    assert read(folder.path).fidelity == ()
