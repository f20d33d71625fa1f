"""A method against the baseline on the same prompts: speedups, agreement, and the bootstrap of their intervals.

Speeds are output tokens over measured seconds; tokens are generated ids, the end-of-sequence token included, counted
by one rule in both arms, and no text is tokenised again. A quotient 0/0 is None. Intervals are 95 % percentile
bootstraps over prompts, seeded by the run's seed; fewer than two prompts have none.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import scipy.stats

from harness.errors import UserError
from harness.records import Divergence, SampleRecord

BASELINE = "autoregressive"
RESAMPLES = 9999

Samples = Sequence[SampleRecord]
Pairs = Sequence[tuple[SampleRecord, SampleRecord]]
"""(method, baseline) on the same prompt."""
Interval = tuple[float, float] | None
Clock = Callable[[SampleRecord], float]


def divide(numerator: float, denominator: float) -> float | None:
    """Quotient, None when the denominator is 0."""
    return numerator / denominator if denominator else None


def output_tokens(sample: SampleRecord) -> int:
    """Generated tokens, after the stop rule."""
    return len(sample.generation.token_ids)


def decode_seconds(sample: SampleRecord) -> float:
    """Seconds after prefill."""
    return sample.decode_s


def total_seconds(sample: SampleRecord) -> float:
    """Prefill and decode."""
    return sample.prefill_s + sample.decode_s


def bootstrap(statistic: Callable[..., Any], columns: np.ndarray, seed: int, paired: bool = True) -> Interval:
    """95 % percentile interval of ``statistic(*columns, axis)``, resampling prompts.

    ``columns``: array [arguments, n], one entry a prompt; all are resampled by the same draw, unless ``paired`` is
    false: then each by its own. None for n < 2, and when some resample has no value (a zero denominator).
    """
    n = columns.shape[1]
    if n < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.stats.DegenerateDataWarning)  # answered below, by None
        found = scipy.stats.bootstrap(
            tuple(columns),
            statistic,
            paired=paired,
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=max(1, 1_000_000 // n),
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    low, high = (float(bound) for bound in found.confidence_interval)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def ratio_of_sums(numerators: Any, denominators: Any, axis: int = -1) -> Any:
    return numerators.sum(axis) / denominators.sum(axis)


def ratio_of_ratios(top: Any, top_s: Any, bottom: Any, bottom_s: Any, axis: int = -1) -> Any:
    return ratio_of_sums(top, top_s, axis) / ratio_of_sums(bottom, bottom_s, axis)


def unpaired_speedup_interval(pairs: Pairs, seed: int, clock: Clock = decode_seconds) -> Interval:
    """95 % bootstrap interval of ``speedup`` where the arms were not measured together: each is drawn by itself.

    Wider than the paired one where long prompts are long for both arms. None for fewer than two prompts.
    """
    n = len(pairs)
    if n < 2:
        return None
    columns = _columns(pairs, clock)

    def statistic(mine: Any, base: Any, axis: int = -1) -> Any:
        top, top_s = columns[:2, mine.astype(int)]
        bottom, bottom_s = columns[2:, base.astype(int)]
        return ratio_of_ratios(top, top_s, bottom, bottom_s, axis)

    return bootstrap(statistic, np.array([np.arange(n), np.arange(n)], dtype=float), seed, paired=False)


def by_example(samples: Samples) -> dict[str, SampleRecord]:
    """Samples of one arm and task by example id.

    Raises:
        UserError: an id occurs twice.
    """
    found: dict[str, SampleRecord] = {}
    for sample in samples:
        if sample.example_id in found:
            raise UserError(
                f"run {sample.run_id}: example {sample.example_id!r} measured twice for {sample.arm!r} on "
                f"{sample.task!r}: delete one line of samples.jsonl."
            )
        found[sample.example_id] = sample
    return found


def paired(samples: Samples, baseline: Samples) -> list[tuple[SampleRecord, SampleRecord]]:
    """Join on example id, in order of id.

    Raises:
        UserError: the two have different ids, or one id stands for two prompts.
    """
    mine, theirs = by_example(samples), by_example(baseline)
    for kind, missing in (("baseline", mine.keys() - theirs.keys()), ("method", theirs.keys() - mine.keys())):
        if missing:
            names = ", ".join(sorted(missing)[:5]) + (", ..." if len(missing) > 5 else "")
            raise UserError(
                f"speedup wants the same prompts in both arms; the {kind} lacks {len(missing)}: {names}. "
                "Run both arms again, in one run."
            )
    for example_id in mine:
        if mine[example_id].prompt_sha != theirs[example_id].prompt_sha:
            raise UserError(f"example {example_id!r} has another prompt in the baseline: run both arms in one run.")
    return [(mine[example_id], theirs[example_id]) for example_id in sorted(mine)]


def _columns(pairs: Pairs, clock: Clock) -> np.ndarray:
    """Array [4, n]: tokens and seconds of the method, tokens and seconds of the baseline."""
    rows = [(output_tokens(mine), clock(mine), output_tokens(base), clock(base)) for mine, base in pairs]
    return np.array(rows, dtype=float).reshape(-1, 4).T


def speedup(pairs: Pairs, clock: Clock = decode_seconds) -> float | None:
    """(sum of tokens / sum of seconds) of the method / the same of the baseline. The headline."""
    tokens, seconds, base_tokens, base_seconds = _columns(pairs, clock).sum(axis=1).tolist()
    return divide(tokens * base_seconds, seconds * base_tokens)


def speedup_interval(pairs: Pairs, seed: int, clock: Clock = decode_seconds) -> Interval:
    """95 % bootstrap interval of ``speedup``: a prompt's two arms are drawn together."""
    return bootstrap(ratio_of_ratios, _columns(pairs, clock), seed)


def speedup_of_mean_rates(pairs: Pairs, clock: Clock = decode_seconds) -> float | None:
    """Mean of per-prompt tokens/s of the method / the same of the baseline (Spec-Bench, EAGLE)."""
    rates = _rates(pairs, clock)
    return divide(sum(mine for mine, _ in rates), sum(base for _, base in rates)) if rates else None


def mean_of_speedups(pairs: Pairs, clock: Clock = decode_seconds) -> float | None:
    """Mean over prompts of (tokens/s of the method / tokens/s of the baseline)."""
    rates = _rates(pairs, clock)
    return sum(mine / base for mine, base in rates) / len(rates) if rates else None


def geometric_mean_speedup(pairs: Pairs, clock: Clock = decode_seconds) -> float | None:
    """Geometric mean over prompts of (tokens/s of the method / tokens/s of the baseline)."""
    rates = _rates(pairs, clock)
    return math.exp(sum(math.log(mine / base) for mine, base in rates) / len(rates)) if rates else None


def _rates(pairs: Pairs, clock: Clock) -> list[tuple[float, float]]:
    """Tokens/s of both arms per prompt; empty when one of them is 0 or undefined, as then no mean is."""
    rates = [
        (divide(output_tokens(mine), clock(mine)) or 0.0, divide(output_tokens(base), clock(base)) or 0.0)
        for mine, base in pairs
    ]
    return rates if all(mine > 0 and base > 0 for mine, base in rates) else []


def first_mismatch(mine: Sequence[int], base: Sequence[int]) -> int | None:
    """Index of the first position where the two differ, the shorter one's end included; None when they are equal."""
    return next((i for i, (a, b) in enumerate(zip_longest(mine, base)) if a != b), None)


def token_agreement(pairs: Pairs) -> float | None:
    """Positions with equal tokens / positions of the longer output, summed over prompts."""
    same, length = agreement_terms(pairs).sum(axis=1).tolist()
    return divide(same, length)


def token_agreement_interval(pairs: Pairs, seed: int) -> Interval:
    """95 % bootstrap interval of ``token_agreement``."""
    return bootstrap(ratio_of_sums, agreement_terms(pairs), seed)


def agreement_terms(pairs: Pairs) -> np.ndarray:
    """Array [2, n]: equal positions and length of the longer output, per prompt."""
    rows = []
    for mine, base in pairs:
        ours, theirs = mine.generation.token_ids, base.generation.token_ids
        rows.append((sum(a == b for a, b in zip(ours, theirs, strict=False)), max(len(ours), len(theirs))))
    return np.array(rows, dtype=float).reshape(-1, 2).T


def exact_sequence_share(pairs: Pairs) -> float | None:
    """Outputs equal to the baseline's token for token / prompts."""
    return divide(sum(m.generation.token_ids == b.generation.token_ids for m, b in pairs), len(pairs))


def first_divergence(pairs: Pairs) -> float | None:
    """Mean count of equal tokens before the first difference, over outputs that differ; None when none does."""
    found = [first_mismatch(m.generation.token_ids, b.generation.token_ids) for m, b in pairs]
    differing = [index for index in found if index is not None]
    return divide(sum(differing), len(differing))


@dataclass(frozen=True)
class PairMetric:
    """A number from the prompts of one arm and the baseline. ``greedy_only``: None when sampling.

    ``unpaired``: its interval where the two were not measured together. ``clocked``: made of measured times.
    """

    name: str
    unit: str
    higher_is_better: bool | None
    definition: str
    value: Callable[[Pairs], float | None]
    interval: Callable[[Pairs, int], Interval] | None = None
    greedy_only: bool = False
    unpaired: Callable[[Pairs, int], Interval] | None = None
    clocked: bool = False


def _speedups() -> list[PairMetric]:
    made = []
    for span, clock in (("decode", decode_seconds), ("end_to_end", total_seconds)):
        rate = "tokens/s after prefill" if clock is decode_seconds else "tokens/s with prefill"
        for suffix, function, definition in (
            ("", speedup, f"{rate.capitalize()}, sums over the same prompts, method / baseline."),
            ("_of_mean_rates", speedup_of_mean_rates, f"Mean over prompts of {rate}, method / baseline."),
            ("_mean_of_ratios", mean_of_speedups, f"Mean over prompts of ({rate}, method / baseline)."),
            ("_geometric", geometric_mean_speedup, f"Geometric mean over prompts of ({rate}, method / baseline)."),
        ):
            interval, unpaired = (
                partial(one, clock=clock) if function is speedup else None
                for one in (speedup_interval, unpaired_speedup_interval)
            )
            value = partial(function, clock=clock)
            made.append(
                PairMetric(
                    f"speedup_{span}{suffix}", "x", True, definition, value, interval, unpaired=unpaired, clocked=True
                )
            )
    return made


PAIR_METRICS: tuple[PairMetric, ...] = (
    *_speedups(),
    PairMetric(
        "token_agreement",
        "share",
        True,
        "Positions with the baseline's token / positions of the longer output, greedy runs only.",
        token_agreement,
        token_agreement_interval,
        greedy_only=True,
    ),
    PairMetric(
        "exact_sequence_share",
        "share",
        True,
        "Outputs equal to the baseline's token for token / prompts, greedy runs only.",
        exact_sequence_share,
        greedy_only=True,
    ),
    PairMetric(
        "first_divergence",
        "tokens",
        True,
        "Mean count of equal tokens before the first difference, over outputs that differ, greedy runs only.",
        first_divergence,
        greedy_only=True,
    ),
)
"""All comparisons, in the order of the tables."""


def judgements(pairs: Pairs, divergences: Sequence[Divergence]) -> list[Divergence] | None:
    """What is known of each output that differs from the baseline's; None where one of them was not judged."""
    known = {(one.task, one.arm, one.example_id): one for one in divergences}
    differing = [mine for mine, base in pairs if mine.generation.token_ids != base.generation.token_ids]
    found = [known.get((mine.task, mine.arm, mine.example_id)) for mine in differing]
    return None if None in found else [one for one in found if one is not None]


@dataclass(frozen=True)
class DivergenceMetric:
    """A number from the judged differences of a lossless arm, greedy runs only; None where one was not judged."""

    name: str
    unit: str
    definition: str
    value: Callable[[Sequence[Divergence]], float | None]


DIVERGENCE_METRICS: tuple[DivergenceMetric, ...] = (
    DivergenceMetric(
        "near_ties",
        "prompts",
        "Prompts whose greedy output differs from the baseline's, first by a token whose logit is so close to the "
        "largest that rounding can decide (the run's divergences.jsonl has both and the bound); lossless arms only.",
        lambda found: sum(one.near_tie for one in found),
    ),
    DivergenceMetric(
        "faults",
        "prompts",
        "Prompts whose greedy output differs from the baseline's in any other way; lossless arms only.",
        lambda found: sum(not one.near_tie for one in found),
    ),
    DivergenceMetric(
        "largest_gap",
        "logits",
        "Largest difference of the two top logits at a first difference from the baseline; lossless arms only.",
        lambda found: max((one.gap for one in found if one.gap is not None), default=None),
    ),
)
"""Differences from greedy, in the order of the tables."""
