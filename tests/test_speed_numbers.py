"""Numbers of a speed measurement from hand-written counts and seconds."""

import math
from dataclasses import replace

import pytest

from harness.records import SCHEMA, RunRecord
from harness.speed.numbers import limit, median_span, rows
from harness.speed.records import (
    COPY,
    Comparison,
    DecodeTime,
    ForwardTime,
    MemoryUse,
    ProductTime,
    SpeedRecord,
    SpeedRow,
)
from harness.store import from_json, to_json

RUN = RunRecord("id", SCHEMA, "now", "toy", 1.0, 7, (), {}, {}, {}, None, None, {}, "finished")
PAIR = Comparison("plain", "ours", "theirs")
EMPTY = SpeedRecord(run=RUN, settings={}, tiers={"full": "all"}, cache_bytes=None, comparisons=(PAIR,), notes=())


def decode(arm: str, tokens: int, first_s: float, rest_s: float, example: str = "1", **others: object) -> DecodeTime:
    found = DecodeTime(arm, False, "qa", example, 10, tuple(range(tokens)), 1, first_s, rest_s)
    return replace(found, **others)  # type: ignore[arg-type]


def one(found: list[SpeedRow], metric: str, **identity: object) -> SpeedRow:
    (row,) = [
        row for row in found if row.metric == metric and all(getattr(row, key) == is_ for key, is_ in identity.items())
    ]
    return row


@pytest.mark.parametrize(
    ("n", "beyond"),
    # Order statistics of the 95 % interval of a median, as tables of the sign test have them.
    [(1, None), (5, None), (6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (20, 5), (25, 7)],
)
def test_the_median_lies_between_order_statistics(n: int, beyond: int | None) -> None:
    values = [float(value) for value in reversed(range(n))]
    value, low, high = median_span(values)
    assert value == (n - 1) / 2
    assert (low, high) == ((None, None) if beyond is None else (beyond, n - 1 - beyond))


def test_nothing_has_no_median() -> None:
    assert median_span([]) == (None, None, None)


def test_bandwidth_is_bytes_over_median_seconds_and_the_faster_product_is_the_limit() -> None:
    products = (ProductTime("a", 100, (2.0, 1.0, 50.0)), ProductTime("b", 100, (4.0,) * 3))
    assert limit(products) == 50.0
    assert limit(()) is None
    assert limit((*products, ProductTime(COPY, 200, (20.0,) * 6))) == 10.0, "where a copy was made, it is the limit"
    found = rows(replace(EMPTY, products=(ProductTime("a", 10**9, (1.0, 2.0, 4.0, 4.0, 5.0, 5.0)),)))
    row = one(found, "bandwidth")
    assert (row.value, row.low, row.high, row.unit, row.n) == (1 / 4, 1 / 5, 1.0, "GB/s", 6)


def test_a_forwards_share_is_its_bytes_over_its_seconds_over_the_limit() -> None:
    seconds = (0.5, 0.25, 0.25, 0.25, 0.25, 0.2)
    record = replace(
        EMPTY,
        products=(ProductTime("a", 1000, (1.0,)),),
        forwards=(ForwardTime("full", 2, 64, 100, seconds),),
    )
    share, time = (one(rows(record), metric, block=2, context=64) for metric in ("bandwidth_share", "forward_ms"))
    assert (share.value, share.low, share.high) == pytest.approx((0.4, 0.2, 0.5))
    assert (time.value, time.low, time.high) == (250.0, 200.0, 500.0)
    assert one(rows(replace(record, products=())), "bandwidth_share").value is None


def test_ratios_are_taken_within_repeats() -> None:
    """The machine slows down threefold on the way: the ratio does not."""
    drift = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0)
    record = replace(
        EMPTY,
        forwards=(
            ForwardTime("full", 1, 64, 1, tuple(4 * x for x in drift)),
            ForwardTime("slim", 1, 64, 1, tuple(3 * x for x in drift)),
            ForwardTime("draft", 1, 64, 1, tuple(x for x in drift)),
            ForwardTime("draft", 1, 256, 1, drift),
            ForwardTime("self_skip", 1, 64, 1, drift),
        ),
    )
    ratios = {row.name: row for row in rows(record) if row.metric == "time_ratio"}
    assert sorted(ratios) == ["c", "c'"]
    assert (ratios["c"].value, ratios["c"].low, ratios["c"].high, ratios["c"].n) == (0.25, 0.25, 0.25, 6)
    assert ratios["c'"].value == 0.75
    assert {row.context for row in ratios.values()} == {64}, "no ratio without the full verifier's time"


def test_a_clock_that_did_not_move_gives_no_ratio_and_no_rate() -> None:
    still = (ForwardTime("full", 1, 64, 1, (0.0,) * 6), ForwardTime("draft", 1, 64, 1, (0.0,) * 6))
    found = rows(replace(EMPTY, forwards=still, products=(ProductTime("a", 1, (0.0,)),)))
    assert one(found, "time_ratio").value is None
    assert one(found, "bandwidth").value is None


def test_speedup_compares_tokens_after_the_first_over_the_seconds_after_it() -> None:
    record = replace(
        EMPTY,
        decodes=(
            decode("ours", 11, 1.0, 5.0),
            decode("theirs", 11, 2.0, 10.0),
            decode("ours", 21, 1.0, 5.0, "2"),
            decode("theirs", 6, 2.0, 10.0, "2"),
            decode("theirs", 99, 0.0, 0.1, "3"),  # no prompt of ours: left out
        ),
    )
    found = rows(record)
    assert one(found, "ours_tokens_per_s").value == 30 / 10
    assert one(found, "theirs_tokens_per_s").value == 15 / 20
    speedup = one(found, "speedup_decode")
    assert speedup.value == 4.0 and speedup.n == 2
    assert speedup.low is not None and speedup.high is not None and 2.0 <= speedup.low <= 4.0 <= speedup.high <= 8.0
    assert one(found, "speedup_end_to_end").value == pytest.approx((32 / 12) / (17 / 24))
    assert (one(found, "ours_first_s").value, one(found, "theirs_first_s").value) == (1.0, 2.0)


def test_tokens_that_come_in_the_first_block_are_counted_on_neither_side() -> None:
    record = replace(EMPTY, decodes=(decode("ours", 11, 1, 5, first_tokens=6), decode("theirs", 11, 1, 5)))
    assert one(rows(record), "speedup_decode").value == 0.5


def test_equal_tokens_count_positions_of_the_longer_output() -> None:
    ours, theirs = decode("ours", 4, 1, 1), decode("theirs", 5, 1, 1)
    record = replace(EMPTY, decodes=(replace(ours, token_ids=(0, 9, 2, 3)), theirs))
    assert one(rows(record), "token_agreement").value == 3 / 5


def test_zero_over_zero_is_none() -> None:
    """One token each: there is nothing after the first."""
    found = rows(replace(EMPTY, decodes=(decode("ours", 1, 1.0, 0.0), decode("theirs", 1, 1.0, 0.0))))
    for metric in ("speedup_decode", "ours_tokens_per_s", "theirs_tokens_per_s"):
        row = one(found, metric)
        assert (row.value, row.low, row.high) == (None, None, None)
    assert one(found, "speedup_end_to_end").value == 1.0


def test_what_was_not_compared_has_a_row_without_a_value() -> None:
    found = rows(replace(EMPTY, comparisons=(replace(PAIR, reason="no checkpoint"),)))
    measured = rows(replace(EMPTY, decodes=(decode("ours", 3, 1.0, 1.0), decode("theirs", 3, 1.0, 1.0))))
    assert [row.metric for row in found] == [row.metric for row in measured if row.table == "comparison"]
    assert {(row.value, row.low, row.high, row.n) for row in found} == {(None, None, None, 0)}


def test_arms_report_what_is_outside_forwards_greedy_and_sampled_apart() -> None:
    runs = (
        decode("ours", 5, 1.0, 8.0, decode_s=10.0, tier_s=(1.0, 2.0, 6.0), read_bytes=400),
        decode("ours", 5, 1.0, 8.0, "2", decode_s=10.0, tier_s=(1.0, 2.0, 4.0), read_bytes=400),
        decode("ours", 5, 1.0, 8.0, sampled=True, decode_s=4.0, tier_s=(0.0, 0.0, 3.0)),
        decode("theirs", 5, 1.0, 8.0),
        decode("far", 5, 1.0, 8.0, decode_s=10.0),
    )
    memory = (MemoryUse("ours", 104), MemoryUse("speculative", 100))
    found = rows(replace(EMPTY, decodes=runs, memory=memory, products=(ProductTime("a", 100, (1.0,)),)))
    outside = one(found, "outside_share", name="ours")
    assert outside.value == pytest.approx(4 / 20) and outside.n == 2
    assert outside.low is not None and outside.low == pytest.approx(0.1)
    assert one(found, "outside_share_sampled", name="ours").value == 0.25
    assert one(found, "outside_share", name="far").value is None, "forwards were not timed"
    assert one(found, "bandwidth_share", name="ours").value == pytest.approx((800 / 100) / 16)
    assert one(found, "bandwidth_share_sampled", name="ours").value is None
    assert one(found, "held_over_speculative", name="ours").value == 1.04
    assert one(found, "held_bytes", name="far").value is None
    assert {row.name for row in found if row.table == "arm"} == {"ours", "far"}


def test_a_record_can_be_read_back() -> None:
    record = replace(
        EMPTY,
        settings={"blocks": [1, 2]},
        products=(ProductTime("a", 1, (1.0,)),),
        forwards=(ForwardTime("full", 1, 64, 1, (1.0, 2.0)),),
        decodes=(decode("ours", 3, 1, 1, tier_s=(0.0, 0.0, 1.0)), decode("theirs", 3, 1, 1)),
        memory=(MemoryUse("ours", 5),),
    )
    assert from_json(SpeedRecord, to_json(record)) == record


def test_every_value_is_finite_or_none() -> None:
    for record in (EMPTY, replace(EMPTY, decodes=(decode("ours", 1, 0.0, 0.0), decode("theirs", 1, 0.0, 0.0)))):
        for row in rows(record):
            assert all(part is None or math.isfinite(part) for part in (row.value, row.low, row.high))


def test_more_first_tokens_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="want 1 to 3 first tokens, got 4"):
        decode("ours", 3, 1, 1, first_tokens=4)
