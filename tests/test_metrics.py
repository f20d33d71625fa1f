"""Rates, speedups and agreement on cases small enough to check by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness import metrics
from harness.compare import (
    BASELINE,
    Pairs,
    exact_sequence_share,
    first_divergence,
    first_mismatch,
    geometric_mean_speedup,
    mean_of_speedups,
    paired,
    speedup,
    speedup_interval,
    speedup_of_mean_rates,
    token_agreement,
    total_seconds,
)
from harness.errors import UserError
from harness.records import BlockTrace, Divergence, RunRecord, SampleRecord
from tests.rows import BONUS, CHEAP, CUT, MIXED, REJECTED, E, divergence, plain, run_record, sample, two_arms

# Examined 4 + 1 + 2 = 7, kept 3 + 0 + 2 = 5, drafted 4 + 3 + 2 = 9, emitted 4 + 1 + 2 + 1 = 8, blocks 4.
MIXED_CASE = ((MIXED, REJECTED, CHEAP, plain(7)),)


@pytest.mark.parametrize(
    ("name", "prompts", "want"),
    [
        ("reject_rate", MIXED_CASE, 2 / 7),
        ("draft_waste", MIXED_CASE, 4 / 9),
        ("full_rate", MIXED_CASE, 3 / 8),
        ("block_full_rate", MIXED_CASE, 3 / 4),
        ("slim_rate", MIXED_CASE, 3 / 8),
        ("draft_rate", MIXED_CASE, 9 / 8),
        ("mean_accept_length", MIXED_CASE, 8 / 4),
        ("accepted_drafts_per_block", MIXED_CASE, 5 / 3),
        ("mean_drafted", MIXED_CASE, 9 / 3),
        ("plain_steps", MIXED_CASE, 1 / 4),
        ("accept_share", MIXED_CASE, 4 / 7),
        ("regenerate_share", MIXED_CASE, 1 / 7),
        ("escalate_share", MIXED_CASE, 2 / 7),
        ("mean_output_tokens", MIXED_CASE, 8.0),
        ("decode_tokens_per_s", MIXED_CASE, 8.0),
        ("end_to_end_tokens_per_s", MIXED_CASE, 8 / 1.5),
        # The bonus counts in the accepted length, never among kept drafts.
        ("mean_accept_length", ((BONUS,),), 3.0),
        ("accepted_drafts_per_block", ((BONUS,),), 2.0),
        ("reject_rate", ((BONUS,),), 0.0),
        # Drafts that the stop rule cuts are wasted, not rejected; the last block emits what it emitted.
        ("mean_accept_length", ((BONUS, CUT),), 3.0),
        ("reject_rate", ((BONUS, CUT),), 0.0),
        ("draft_waste", ((BONUS, CUT),), 2 / 7),
        # Ratio of sums over prompts, not a mean of rates.
        ("reject_rate", ((MIXED,), (replace(REJECTED, start=0),)), 2 / 5),
        # The baseline drafts nothing: undefined, not 0 and not 1.
        ("reject_rate", ((plain(0), plain(1)),), None),
        ("draft_waste", ((plain(0),),), None),
        ("accepted_drafts_per_block", ((plain(0),),), None),
        ("accept_share", ((plain(0),),), None),
        ("full_rate", ((plain(0), plain(1)),), 1.0),
        ("plain_steps", ((plain(0), plain(1)),), 1.0),
        ("reject_rate", (), None),
    ],
)
def test_ratio_by_hand(name: str, prompts: tuple[tuple[BlockTrace, ...], ...], want: float | None) -> None:
    assert metrics.RATIOS[name]([sample(blocks) for blocks in prompts]) == pytest.approx(want)


def test_pooled_rate_and_mean_of_prompt_rates_differ() -> None:
    # 8 of 10 kept on one prompt, 9 of 90 on the other: 0.17 pooled, 0.45 as the mean of rates.
    def block(start: int, drafted: int, kept: int) -> BlockTrace:
        return BlockTrace(start, drafted, drafted, (E,) * drafted, kept, kept + 1, 0, drafted, 0, 1)

    prompts = [sample((block(0, 10, 8),)), sample((block(0, 90, 9),), example="2")]
    assert metrics.reject_rate(prompts) == pytest.approx(1 - 0.17)
    assert metrics.reject_rate.prompt_mean(prompts) == pytest.approx(1 - 0.45)


def test_every_ratio_defines_itself() -> None:
    assert len(metrics.RATIOS) >= 20
    assert all("/" in ratio.definition and ratio.definition.endswith(".") for ratio in metrics.RATIOS.values())


def test_a_longer_prompt_does_not_raise_the_rate() -> None:
    short = sample(tokens=5)
    assert metrics.decode_tokens_per_s([short]) == metrics.decode_tokens_per_s([replace(short, prompt_tokens=10_000)])


# Method (200 tokens, 2 s) and (20, 1 s); baseline (200, 8 s) and (20, 1 s).
def four_ways() -> Pairs:
    return [
        (sample(tokens=200, decode_s=2.0), sample(tokens=200, decode_s=8.0)),
        (sample(tokens=20, decode_s=1.0, example="2"), sample(tokens=20, decode_s=1.0, example="2")),
    ]


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (speedup, 3.0),
        (speedup_of_mean_rates, (100 + 20) / (25 + 20)),
        (mean_of_speedups, 2.5),
        (geometric_mean_speedup, 2.0),
    ],
)
def test_four_ways_to_aggregate_a_speedup(function: metrics.Ratio, want: float) -> None:
    assert function(four_ways()) == pytest.approx(want)  # type: ignore[arg-type]
    assert function([]) is None


def test_unequal_lengths_compare_rates_not_times() -> None:
    pairs = [(sample(tokens=10, decode_s=1.0), sample(tokens=20, decode_s=4.0))]
    assert speedup(pairs) == pytest.approx(2.0)


def test_end_to_end_speedup_counts_prefill() -> None:
    pairs = [
        (sample(tokens=10, decode_s=1.0, prefill_s=10.0), sample(tokens=10, decode_s=3.0, prefill_s=10.0)),
    ]
    assert speedup(pairs) == pytest.approx(3.0)
    assert speedup(pairs, total_seconds) == pytest.approx(13 / 11)


def test_unmeasurable_time_gives_no_speedup() -> None:
    pairs = [(sample(tokens=10, decode_s=0.0), sample(tokens=10, decode_s=3.0))]
    assert [function(pairs) for function in (speedup, mean_of_speedups, geometric_mean_speedup)] == [None] * 3


def test_interval_holds_the_value_repeats_and_ignores_order() -> None:
    pairs = [
        (sample(tokens=10, decode_s=1 + i / 10, example=str(i)), sample(tokens=10, decode_s=3 - i / 5, example=str(i)))
        for i in range(8)
    ]
    low, high = speedup_interval(pairs, seed=0) or (math.nan, math.nan)
    value = speedup(pairs)
    assert value is not None and low < value < high
    assert speedup_interval(pairs, seed=0) == (low, high)
    back = list(reversed(pairs))
    assert paired([m for m, _ in pairs], [b for _, b in back]) == paired([m for m, _ in back], [b for _, b in pairs])


def test_prompts_are_resampled_in_pairs() -> None:
    # The ratio is 2 on each prompt while speeds differ tenfold: with arms drawn apart the interval would be wide.
    pairs = [
        (sample(tokens=10, decode_s=s, example=str(s)), sample(tokens=10, decode_s=2 * s, example=str(s)))
        for s in (0.1, 1.0, 10.0)
    ]
    assert speedup_interval(pairs, seed=0) == pytest.approx((2.0, 2.0))


def test_one_prompt_has_no_interval() -> None:
    assert speedup_interval(four_ways()[:1], seed=0) is None
    assert metrics.reject_rate.interval([sample((MIXED,))], seed=0) is None


def test_no_interval_where_a_resample_is_undefined() -> None:
    prompts = [sample((MIXED,)), sample((plain(0),), example="2")]
    assert metrics.reject_rate(prompts) is not None
    assert metrics.reject_rate.interval(prompts, seed=0) is None


def test_pairs_join_on_the_example_id_not_on_order() -> None:
    mine = [sample(tokens=1, example="b"), sample(tokens=2, example="a")]
    base = [sample(tokens=3, example="a"), sample(tokens=4, example="b")]
    assert [(m.example_id, b.example_id) for m, b in paired(mine, base)] == [("a", "a"), ("b", "b")]


@pytest.mark.parametrize(
    ("mine", "base", "text"),
    [
        (("a", "b"), ("a",), "baseline lacks 1: b"),
        (("a",), ("a", "b", "c"), "method lacks 2: b, c"),
        (("a", "a"), ("a",), "'a' measured twice"),
        ((), ("a",), "method lacks 1: a"),
    ],
)
def test_different_prompts_are_refused_by_name(mine: tuple[str, ...], base: tuple[str, ...], text: str) -> None:
    with pytest.raises(UserError, match=text):
        paired([sample(tokens=1, example=i) for i in mine], [sample(tokens=1, example=i) for i in base])


def test_same_id_with_another_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="another prompt"):
        paired([sample(tokens=1)], [replace(sample(tokens=1), prompt_sha="other")])


@pytest.mark.parametrize(
    ("mine", "base", "agreement", "mismatch"),
    [
        ((1, 2, 3), (1, 2, 3), 1.0, None),
        ((1, 2, 3, 4), (1, 2), 2 / 4, 2),
        ((1, 9, 3), (1, 2, 3), 2 / 3, 1),
        ((9, 1, 2), (1, 2, 3), 0.0, 0),
    ],
)
def test_agreement_by_hand(
    mine: tuple[int, ...], base: tuple[int, ...], agreement: float, mismatch: int | None
) -> None:
    pairs = [(sample(ids=mine), sample(ids=base))]
    assert token_agreement(pairs) == pytest.approx(agreement)
    assert first_mismatch(mine, base) == mismatch
    assert first_divergence(pairs) == mismatch
    assert exact_sequence_share(pairs) == float(mismatch is None)


def test_rows_are_tidy_and_complete() -> None:
    found = metrics.rows(run_record(), two_arms())
    keys = [(row.task, row.arm, row.metric) for row in found]
    assert len(keys) == len(set(keys))
    assert {row.n for row in found} == {2} and {row.source for row in found} == {"ours"}
    value = {(row.arm, row.metric): row for row in found}
    assert value["via_sd", "speedup_decode"].value == pytest.approx(2.0)
    assert value["via_sd", "speedup_end_to_end"].value == pytest.approx(2.5 / 1.5)
    assert value[BASELINE, "speedup_decode"].value == 1.0
    assert value["via_sd", "exact_match"].value == 0.0
    assert value[BASELINE, "exact_match"].value == 100.0
    assert value["via_sd", "token_agreement"].value == 1.0
    assert value[BASELINE, "reject_rate"].value is None
    assert value["via_sd", "peak_bytes"].value is None
    assert value["via_sd", "speedup_decode"].low is not None


def test_rows_do_not_depend_on_the_order_of_samples() -> None:
    samples = two_arms()
    assert metrics.rows(run_record(), samples) == metrics.rows(run_record(), samples[::-1])


def test_agreement_is_undefined_when_sampling() -> None:
    found = metrics.rows(run_record(temperature=0.7), two_arms())
    assert {row.value for row in found if row.metric == "token_agreement"} == {None}
    assert all(row.value for row in found if row.metric == "speedup_decode")


JUDGED = ("near_ties", "faults", "largest_gap")


def judged(
    run: RunRecord, samples: Sequence[SampleRecord], divergences: Sequence[Divergence], arm: str = "via_sd"
) -> tuple[float | None, ...]:
    found = {(row.arm, row.metric): row for row in metrics.rows(run, samples, divergences)}
    assert {found[arm, name].unit for name in JUDGED} == {"prompts", "logits"}
    return tuple(found[arm, name].value for name in JUDGED)


def three_prompts() -> tuple[RunRecord, list[SampleRecord]]:
    """A lossless arm that differs from greedy on two prompts of three."""
    run = run_record()
    run = replace(run, arms=tuple(replace(arm, lossless=True) for arm in run.arms))
    outputs = {"1": (1, 2, 8), "2": (1, 2, 7), "3": (1, 2)}
    base = [sample(ids=(1, 2, 7), example=example, arm=BASELINE) for example in outputs]
    return run, [*base, *(sample(ids=ids, example=example) for example, ids in outputs.items())]


def test_near_ties_and_faults_are_counted_by_prompt() -> None:
    run, samples = three_prompts()
    tie, fault = divergence(gap=0.25), divergence(False, gap=0.125, example_id="3")
    assert judged(run, samples, [tie, fault]) == (1, 1, 0.25)
    assert judged(run, samples, [fault, replace(fault, example_id="1")]) == (0, 2, 0.125)
    ended = replace(fault, arm_token=None, gap=None, distance=None, largest_logit=None, bound=None)
    assert judged(run, samples, [replace(ended, example_id="1"), ended]) == (0, 2, None)
    assert judged(run, samples, [tie, fault], arm=BASELINE) == (0, 0, None)


def test_differences_that_nobody_judged_are_not_counted_as_none() -> None:
    run, samples = three_prompts()
    tie = divergence()
    elsewhere = [replace(tie, example_id="3", task="qa"), replace(tie, example_id="3", arm=BASELINE)]
    for known in ([], [tie], [tie, *elsewhere]):
        assert judged(run, samples, known) == (None, None, None)
    equal = [one for one in samples if one.example_id == "2"]
    assert judged(run, equal, []) == (0, 0, None), "where nothing differs there was nothing to judge"


def test_lossy_arms_and_sampled_outputs_have_neither_ties_nor_faults() -> None:
    run, samples = three_prompts()
    known = [divergence(), divergence(False, example_id="3")]
    assert judged(replace(run, temperature=0.7), samples, known) == (None, None, None)
    assert judged(replace(run, arms=run_record().arms), samples, known) == (None, None, None)


def test_without_a_baseline_there_is_no_speedup() -> None:
    only = [made for made in two_arms() if made.arm == "via_sd"]
    found = metrics.rows(run_record(arms=("via_sd",)), only)
    assert [row.value for row in found if row.metric == "speedup_decode"] == [None]


def test_samples_of_an_unlisted_arm_are_refused() -> None:
    with pytest.raises(UserError, match="does not list"):
        metrics.rows(run_record(), [*two_arms(), sample(tokens=1, arm="other")])


def test_an_unfinished_prompt_is_refused_and_can_be_left_out() -> None:
    samples = [*two_arms(), sample(tokens=8, example="3", arm=BASELINE)]
    with pytest.raises(UserError, match="method lacks 1: 3"):
        metrics.rows(run_record(), samples)
    assert metrics.complete_prompts(run_record(), samples) == two_arms()
