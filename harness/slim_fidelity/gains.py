"""The gain in speed that a third tier really brings, beside Delta (eq. 7), whose sign should say whether it pays."""

from collections.abc import Sequence
from typing import NamedTuple

from harness.compare import (
    BASELINE,
    Interval,
    Pairs,
    paired,
    speedup,
    speedup_interval,
    token_agreement,
    token_agreement_interval,
)
from harness.records import SampleRecord
from harness.slim_fidelity.records import SlimFidelityRecord, SlimFidelityRow

TWO_TIERS = "speculative"
"""The arm that every slim verifier's gain is over."""


def pairs_of(record: SlimFidelityRecord, arm: str, base: str) -> Pairs:
    """What two arms made of the same prompts, task by task."""

    def of(name: str, task: str) -> list[SampleRecord]:
        return [one for one in record.timed if (one.arm, one.task) == (name, task)]

    tasks = dict.fromkeys(one.task for one in record.timed if one.arm == arm)
    return [pair for task in tasks for pair in paired(of(arm, task), of(base, task))]


def gain_rows(record: SlimFidelityRecord, delta: SlimFidelityRow) -> list[SlimFidelityRow]:
    """Of one slim verifier, whose Delta is ``delta``: ``via_sd`` with it against ``speculative``, where it was timed.

    ``third_tier_speedup``  tokens/s of ``via_sd`` / of ``speculative``, decoding alone; with a bootstrap over prompts.
    ``third_tier_agreement``  share of tokens equal to greedy's: what the lossy rule changes. None when sampling.
    ``signs_agree``  1 where Delta > 0 and the speedup is above 1, or neither is.
    """
    slim, seed = delta.slim, record.run.seed
    pairs = pairs_of(record, slim, TWO_TIERS)
    if not pairs:
        return []
    greedy = pairs_of(record, slim, BASELINE) if record.run.temperature == 0 else []

    def row(metric: str, unit: str, value: float | None, interval: Interval) -> SlimFidelityRow:
        low, high = interval or (None, None)
        return SlimFidelityRow(
            *(slim, delta.kind, delta.skip_ratio, delta.cache, None, metric, unit, value, low, high),
            positions=sum(len(mine.generation.token_ids) for mine, _ in pairs),
            n=len(pairs),
        )

    faster = speedup(pairs)
    agree = None if faster is None or delta.value is None else float((delta.value > 0) == (faster > 1))
    return [
        row("third_tier_speedup", "x", faster, speedup_interval(pairs, seed)),
        row("third_tier_agreement", "share", token_agreement(greedy), token_agreement_interval(greedy, seed)),
        row("signs_agree", "share", agree, None),
    ]


class Signs(NamedTuple):
    """Slim verifiers whose Delta has the sign of their gain, and how many there are; then only where both are clear."""

    agree: int
    of: int
    clear_agree: int
    clear_of: int

    def __str__(self) -> str:
        return (
            f"Delta has the sign of the measured gain for {self.agree} of {self.of} slim verifiers; where both "
            f"intervals leave no doubt about the sign, for {self.clear_agree} of {self.clear_of}."
        )


def signs(rows: Sequence[SlimFidelityRow]) -> Signs:
    """Counted over the slim verifiers that were timed."""
    found = {(one.slim, one.metric): one for one in rows if one.place is None}
    timed = [one for one in found.values() if one.metric == "signs_agree" and one.value is not None]
    clear = [
        one
        for one in timed
        if is_clear(found[one.slim, "gain"], 0.0) and is_clear(found[one.slim, "third_tier_speedup"], 1.0)
    ]
    return Signs(sum(one.value == 1 for one in timed), len(timed), sum(one.value == 1 for one in clear), len(clear))


def is_clear(row: SlimFidelityRow, border: float) -> bool:
    """Whether the interval lies on one side of ``border``."""
    return row.low is not None and row.high is not None and not row.low <= border <= row.high
