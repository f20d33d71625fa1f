"""The two objectives of an arm, each over all tasks of a run, with a 95 % interval.

Speedup: the geometric mean over tasks of ``speedup_decode``. Loss, by choice of the mean over tasks of

* ``greedy_share``: 1 - the share of output tokens that are the full verifier's likeliest, the output's own text given.
  It asks no task and does not grow after a first difference, so few prompts say something;
* ``agreement``: 1 - ``token_agreement`` with the baseline's output, greedy runs only;
* ``quality``: (baseline's - arm's primary metric) / 100. Metrics are on a 0-100 scale, so this is a share of the scale,
  not of the baseline's value, which may be 0. Below 0 where the arm is better.

An interval is made of the tasks' own (bootstraps over prompts): half-widths of independent means add as squares; those
of a speedup on the log scale.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.errors import UserError
from harness.metrics import DIFFERENCE
from harness.records import MetricRow, RunRecord

LOSSES = ("greedy_share", "agreement", "quality")


@dataclass(frozen=True)
class Value:
    """A number with its interval, without where some task has none."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Score:
    """Both objectives of an arm; every loss that is defined, by name."""

    speedup: Value
    losses: Mapping[str, Value]


def score_of(run: RunRecord, rows: Sequence[MetricRow], arm: str) -> Score:
    """
    Raises:
        UserError: an arm without a speed on some task: nothing was timed, or not alone.
    """
    tasks = list(dict.fromkeys(row.task for row in rows))
    known = {(row.task, row.metric): row for row in rows if row.arm == arm}
    speeds = [known[task, "speedup_decode"] for task in tasks]
    speedup = geometric_mean(speeds)
    if speedup is None:
        raise UserError(f"run {run.run_id}: {arm} has no speedup on some task: run the search again, and alone.")
    shares = [known[task, "greedy_share"] for task in tasks]
    agreements = [known[task, "token_agreement"] for task in tasks]
    points = [known[task, run.task_metrics[task][0] + DIFFERENCE] for task in tasks]
    losses = {
        "greedy_share": missing_of_one(mean(shares)),
        "agreement": missing_of_one(mean(agreements)),
        "quality": scaled(mean(points), -1 / 100),
    }
    return Score(speedup, {name: value for name, value in losses.items() if value is not None})


def geometric_mean(rows: Sequence[MetricRow]) -> Value | None:
    """Over tasks; None where one has no value or is 0."""
    values = [row.value for row in rows if row.value]
    if len(values) < len(rows) or not rows:
        return None
    logs = [math.log(value) for value in values]
    middle = sum(logs) / len(logs)
    halves = [
        (math.log(row.high) - math.log(row.low)) / 2 for row in rows if row.low is not None and row.high and row.low > 0
    ]
    if len(halves) < len(rows):
        return Value(math.exp(middle))
    half = math.hypot(*halves) / len(halves)
    return Value(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def mean(rows: Sequence[MetricRow]) -> Value | None:
    """Over tasks; None where one has no value."""
    values = [row.value for row in rows if row.value is not None]
    if len(values) < len(rows) or not rows:
        return None
    middle = sum(values) / len(values)
    halves = [(row.high - row.low) / 2 for row in rows if row.low is not None and row.high is not None]
    if len(halves) < len(rows):
        return Value(middle)
    half = math.hypot(*halves) / len(halves)
    return Value(middle, middle - half, middle + half)


def scaled(value: Value | None, factor: float) -> Value | None:
    if value is None:
        return None
    ends = sorted(factor * end + 0.0 for end in (value.low, value.high) if end is not None)  # + 0.0: no -0.0
    return Value(factor * value.value + 0.0, *ends)


def missing_of_one(share: Value | None) -> Value | None:
    """1 - share, its interval cut to [0, 1]."""
    if share is None or share.low is None or share.high is None:
        return None if share is None else Value(1 - share.value)
    return Value(1 - share.value, max(0.0, 1 - share.high), min(1.0, 1 - share.low))
