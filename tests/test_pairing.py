"""Pairings: who decodes when, what their times make of a known machine, and what becomes of contended timings."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from harness import compare
from harness.compare import BASELINE, paired, speedup, speedup_interval, unpaired_speedup_interval
from harness.errors import UserError
from harness.metrics import complete_prompts, rows
from harness.pairing import Visit, baseline_of, combined, merged, remarks, visits
from harness.records import ArmRecord, RunRecord, SampleRecord
from harness.report.frames import results_frame
from harness.report.lines import build
from tests.rows import run_record, sample

ARMS = (BASELINE, "speculative", "via_sd")
SPEEDUP = {BASELINE: 1.0, "speculative": 2.0, "via_sd": 1.25}
TOKENS = 10


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RESAMPLES", 50)


def run_of(pairing: str) -> RunRecord:
    arms = tuple(ArmRecord(arm, arm, None, None, arm != "via_sd") for arm in ARMS)
    return replace(run_record(), arms=arms, pairing=pairing)


def measured(
    pairing: str,
    prompts: int = 6,
    slow: Callable[[float], float] = lambda now: 1.0,
    jitter: Callable[[], float] = lambda: 1.0,
) -> list[SampleRecord]:
    """A fake clock: a decoding takes 1 / speedup seconds times what ``slow`` says of the moment it begins."""
    now, found = 0.0, []
    for index in range(prompts):
        for visit in visits(pairing, ARMS, index):
            seconds = slow(now) * jitter() / SPEEDUP[visit.arm]
            now += 1.0  # the moment alone makes a machine slower here, not how long an arm takes
            one = sample(arm=visit.arm, example=str(index), tokens=TOKENS, decode_s=seconds, prefill_s=0.0)
            found.append(replace(one, repeat=visit.repeat, paired_with=visit.paired_with))
    return found


def speedups(pairing: str, samples: list[SampleRecord]) -> dict[str, float | None]:
    return {row.arm: row.value for row in rows(run_of(pairing), samples) if row.metric == "speedup_decode"}


def test_each_method_stands_between_visits_of_the_baseline() -> None:
    a, m, v = BASELINE, "speculative", "via_sd"
    assert visits("abba1", ARMS, 0) == [
        *(Visit(a, 0, m), Visit(m, 0), Visit(m, 1), Visit(a, 1, m)),
        *(Visit(a, 2, v), Visit(v, 0), Visit(v, 1), Visit(a, 3, v)),
    ]
    three = visits("abba3", ARMS, 0)
    assert [one.arm for one in three[:12]] == [a, m, m, a] * 3 and len(three) == 24
    assert len({(one.arm, one.repeat) for one in three}) == 24, "no two visits have one key"
    assert visits("once", ARMS, 1) == [Visit(m), Visit(v), Visit(a)]
    assert visits("abba1", [a], 4) == [Visit(a)]


@pytest.mark.parametrize("pairing", ["once", "abba1", "abba3", "shared"])
def test_known_speedups_come_out(pairing: str) -> None:
    assert speedups(pairing, measured(pairing)) == pytest.approx(SPEEDUP)


@pytest.mark.parametrize("pairing", ["abba1", "abba3"])
def test_a_machine_that_becomes_slower_favours_neither(pairing: str) -> None:
    """Linear drift cancels on every prompt; decoding the baseline first and the method after it does not."""

    def slower(now: float) -> float:
        return 1.0 + 0.05 * now

    samples = measured(pairing, slow=slower)
    assert speedups(pairing, samples) == pytest.approx(SPEEDUP)
    first: dict[tuple[str, str], SampleRecord] = {}
    for one in samples:
        if "speculative" in (one.arm, one.paired_with):
            first.setdefault((one.arm, one.example_id), one)
    mine, base = ([one for (name, _), one in first.items() if name == arm] for arm in ("speculative", BASELINE))
    found = speedup(paired(mine, base))
    assert found is not None and found < 1.99


def test_the_median_of_three_repeats_forgets_a_stall() -> None:
    calm = measured("abba3")
    stalled = [replace(one, decode_s=50.0) if one.arm == "speculative" and one.repeat == 2 else one for one in calm]
    assert speedups("abba3", stalled) == pytest.approx(SPEEDUP)
    assert speedups(
        "abba1", [replace(one, decode_s=50.0) if one.repeat == 1 else one for one in measured("abba1")]
    ) != (pytest.approx(SPEEDUP))


def test_each_method_is_compared_with_its_own_baseline() -> None:
    samples = [replace(one, decode_s=3.0) if one.paired_with == "via_sd" else one for one in measured("abba1")]
    found = speedups("abba1", samples)
    assert found["speculative"] == pytest.approx(2.0) and found["via_sd"] == pytest.approx(1.25 * 3)
    assert {one.decode_s for one in merged(samples) if one.arm == BASELINE} == {2.0}, "its own row has the mean"


def test_outputs_and_tiers_count_once_and_times_are_those_of_both_visits() -> None:
    first = replace(
        sample(tokens=4, decode_s=1.0, prefill_s=0.2),
        generation=replace(sample(tokens=4).generation, tier_s=(0.1, 0, 0.5)),
    )
    second = replace(
        first, repeat=1, decode_s=3.0, prefill_s=0.4, generation=replace(first.generation, tier_s=(0.3, 0, 1.5))
    )
    found = combined([second, first])
    assert (found.decode_s, found.prefill_s, found.repeat) == pytest.approx((2.0, 0.3, 0))
    assert found.generation.tier_s == pytest.approx((0.2, 0, 1.0))
    longer = replace(sample(tokens=8, decode_s=3.0), repeat=1)
    assert 4 / combined([first, longer]).decode_s == pytest.approx((4 + 8) / (1.0 + 3.0)), (
        "sum of tokens / sum of times"
    )


def test_a_visit_that_occurs_twice_is_refused() -> None:
    with pytest.raises(UserError, match="measured twice"):
        merged([sample(tokens=1), sample(tokens=1)])


def test_of_an_unfinished_run_only_prompts_with_all_visits_count() -> None:
    samples = measured("abba1", prompts=3)
    kept = complete_prompts(run_of("abba1"), samples[:-1])
    assert {one.example_id for one in kept} == {"0", "1"} and len(kept) == 16


def test_an_unpaired_interval_does_not_use_that_long_prompts_are_long_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RESAMPLES", 2000)
    rng = random.Random(0)
    base, mine = [], []
    for index in range(30):
        rate = rng.uniform(0.5, 4)  # the prompt's own seconds a token, shared by both arms
        base.append(sample(arm=BASELINE, example=f"{index:02}", tokens=TOKENS, decode_s=rate * rng.uniform(0.95, 1.05)))
        mine.append(sample(example=f"{index:02}", tokens=TOKENS, decode_s=rate / 2 * rng.uniform(0.95, 1.05)))
    pairs = paired(mine, base)
    together, apart = speedup_interval(pairs, 0), unpaired_speedup_interval(pairs, 0)
    assert together is not None and apart is not None
    assert together[0] < 2 < together[1] and apart[0] < 2 < apart[1]
    assert apart[1] - apart[0] > 5 * (together[1] - together[0])
    assert unpaired_speedup_interval(pairs[:1], 0) is None
    run = run_of("shared")
    found = [row for row in rows(run, [*base, *mine, *(replace(one, arm="speculative") for one in mine)])]
    (row,) = [one for one in found if (one.arm, one.metric) == ("via_sd", "speedup_decode")]
    assert (row.low, row.high) == apart
    frame = results_frame([build(run, [*base, *mine, *(replace(one, arm="speculative") for one in mine)])])
    assert [cell.endswith(" unpaired") for cell in frame["speedup, decode"]] == [False, True, True]


def test_a_contended_timing_makes_its_speeds_dashes() -> None:
    samples = [
        replace(one, contended="process 7 on core 0")
        if (one.arm, one.repeat, one.example_id) == ("via_sd", 1, "2")
        else one
        for one in measured("abba1")
    ]
    found = {(row.arm, row.metric): row.value for row in rows(run_of("abba1"), samples)}
    for metric in ("speedup_decode", "speedup_end_to_end", "decode_tokens_per_s", "mean_decode_s"):
        assert found["via_sd", metric] is None and found["speculative", metric] is not None
    assert found["via_sd", "exact_match"] is not None and found["via_sd", "mean_output_tokens"] == TOKENS
    (line,) = [line for line in remarks(run_of("abba1"), samples) if "contended" in line]
    assert "1 of 12 timings" in line and "process 7 on core 0" in line
    baseline = [replace(one, contended="x") if one.paired_with == "speculative" else one for one in measured("abba1")]
    found = {(row.arm, row.metric): row.value for row in rows(run_of("abba1"), baseline)}
    assert found["speculative", "speedup_decode"] is None and found["via_sd", "speedup_decode"] is not None


def test_what_a_table_says_of_its_pairing() -> None:
    assert remarks(run_of("abba3"), measured("abba3"))[0].startswith(
        "pairing abba3: baseline, method, method, baseline"
    )
    odd = [
        replace(one, generation=sample(tokens=3).generation) if one.repeat == 1 else one for one in measured("abba1")
    ]
    assert any("6 of 6 outputs differed between visits" in line for line in remarks(run_of("abba1"), odd))
    kept = baseline_of("via_sd", [replace(one, measured_in="r1") for one in measured("shared")])
    assert len(kept) == 6 and "baseline measured in run r1" in remarks(run_of("shared"), kept)
