"""Every number that ``job=speed`` reports, from counts and seconds. Intervals are 95 %.

Of repeats: the median, between the order statistics that cover it whatever the distribution; fewer than 6 have none.
Of prompts: sums over sums, with a bootstrap over prompts that draws a prompt's two sides together. 0/0 is None.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import binom

from harness.compare import bootstrap, divide, ratio_of_ratios, ratio_of_sums
from harness.speed.records import COPY, Comparison, DecodeTime, ForwardTime, ProductTime, SpeedRecord, SpeedRow

RATIOS = {"c": ("draft", "full"), "c'": ("slim", "full")}
"""Costs of a forward beside the full verifier's, at equal block size and context."""
REFERENCE = "speculative"
"""The arm that the memory of the others is compared with."""

Span = tuple[float | None, float | None, float | None]
"""Value, low, high."""


def median_span(values: Sequence[float]) -> Span:
    """The median and the narrowest symmetric pair of order statistics that covers it with 95 % or more."""
    if not values:
        return None, None, None
    n, ordered = len(values), sorted(values)
    outside = [2 * float(binom.cdf(k, n, 0.5)) for k in range(n // 2)]  # beyond the k-th from either end
    covering = [k for k, share in enumerate(outside) if share <= 0.05]
    if not covering:
        return median(ordered), None, None
    return median(ordered), ordered[covering[-1]], ordered[-1 - covering[-1]]


def bandwidth(product: ProductTime) -> Span:
    """Bytes moved / median seconds."""
    return inverse(product.moved_bytes, median_span(product.seconds))


def inverse(amount: float, seconds: Span) -> Span:
    """``amount`` / ``seconds`` with its interval, whose ends change places."""
    rate, low, high = ((None if not value else amount / value) for value in seconds)
    return rate, high, low


def limit(products: Sequence[ProductTime]) -> float | None:
    """The bandwidth that shares are taken of: of the copy where one was made, else of the fastest product."""
    chosen = [product for product in products if product.product == COPY] or products
    rates = [rate for product in chosen if (rate := bandwidth(product)[0]) is not None]
    return max(rates, default=None)


def rows(record: SpeedRecord) -> list[SpeedRow]:
    """All numbers of a measurement, in the order of the tables."""
    most = limit(record.products)
    return [
        *product_rows(record.products),
        *forward_rows(record.forwards, most),
        *ratio_rows(record.forwards),
        *(row for pair in record.comparisons for row in comparison_rows(pair, record.decodes, record.run.seed)),
        *arm_rows(record, most),
    ]


def product_rows(products: Sequence[ProductTime]) -> Iterator[SpeedRow]:
    for product in products:
        value, low, high = scaled(bandwidth(product), 1e-9)
        yield SpeedRow("bandwidth", product.product, "bandwidth", "GB/s", value, low, high, len(product.seconds))


def forward_rows(forwards: Sequence[ForwardTime], most: float | None) -> Iterator[SpeedRow]:
    """Milliseconds, and the share of the limit: bytes that must be read / seconds / bandwidth."""
    for one in forwards:
        span, shape = median_span(one.seconds), {"n": len(one.seconds), "block": one.block, "context": one.context}
        yield row("forward", one.tier, "forward_ms", "ms", scaled(span, 1e3), **shape)
        share = inverse(one.read_bytes / most, span) if most else (None, None, None)
        yield row("forward", one.tier, "bandwidth_share", "share", share, **shape)


def ratio_rows(forwards: Sequence[ForwardTime]) -> Iterator[SpeedRow]:
    """Median over repeats of (seconds of one tier / seconds of the other in the same repeat)."""
    found = {(one.tier, one.block, one.context): one for one in forwards}
    for name, (top, bottom) in RATIOS.items():
        for (tier, block, context), one in found.items():
            base = found.get((bottom, block, context))
            if tier == top and base is not None:
                quotients = [divide(a, b) for a, b in zip(one.seconds, base.seconds, strict=True)]
                defined = [quotient for quotient in quotients if quotient is not None]
                span = median_span(defined) if len(defined) == len(quotients) else (None, None, None)
                yield row("ratio", name, "time_ratio", "x", span, n=len(quotients), block=block, context=context)


def comparison_rows(pair: Comparison, decodes: Sequence[DecodeTime], seed: int) -> Iterator[SpeedRow]:
    """Ours beside theirs on the same prompts."""
    pairs = paired(pair, decodes)
    ours, theirs = [one for one, _ in pairs], [other for _, other in pairs]
    same = terms(agreement(one.token_ids, other.token_ids) for one, other in pairs)
    for metric, unit, statistic, columns in (
        ("speedup_decode", "x", ratio_of_ratios, (*decoding(ours), *decoding(theirs))),
        ("speedup_end_to_end", "x", ratio_of_ratios, (*everything(ours), *everything(theirs))),
        ("token_agreement", "share", ratio_of_sums, same),
        ("ours_tokens_per_s", "1/s", ratio_of_sums, decoding(ours)),
        ("theirs_tokens_per_s", "1/s", ratio_of_sums, decoding(theirs)),
        ("ours_first_s", "s", ratio_of_sums, terms((one.first_s, 1) for one in ours)),
        ("theirs_first_s", "s", ratio_of_sums, terms((one.first_s, 1) for one in theirs)),
    ):
        yield row("comparison", pair.name, metric, unit, resampled(statistic, columns, seed), n=len(pairs))


def arm_rows(record: SpeedRecord, most: float | None) -> Iterator[SpeedRow]:
    """How fast our arms are, what they cost outside forwards, and what they hold."""
    seed, held = record.run.seed, {use.arm: use.held_bytes for use in record.memory}
    for arm in dict.fromkeys(one.arm for one in record.decodes if one.decode_s is not None):
        for sampled in (False, True):
            runs = [one for one in record.decodes if one.arm == arm and one.sampled == sampled]
            for metric, unit, columns in (
                ("tokens_per_s", "1/s", decoding(runs)),
                ("outside_share", "share", outside(runs)),
                ("bandwidth_share", "share", reading(runs, most)),
            ):
                name = f"{metric}_sampled" if sampled else metric
                yield row("arm", arm, name, unit, resampled(ratio_of_sums, columns, seed), n=len(runs))
        yield row("arm", arm, "held_bytes", "bytes", (held.get(arm), None, None), n=int(arm in held))
        over = divide(held[arm], held[REFERENCE]) if arm in held and REFERENCE in held else None
        yield row("arm", arm, "held_over_speculative", "x", (over, None, None), n=int(over is not None))


def decoding(runs: Sequence[DecodeTime]) -> np.ndarray:
    """Tokens after those that came first, and seconds after these: the rule of both sides."""
    return terms((len(one.token_ids) - one.first_tokens, one.rest_s) for one in runs)


def everything(runs: Sequence[DecodeTime]) -> np.ndarray:
    """All tokens, and all seconds, prefill included."""
    return terms((len(one.token_ids), one.first_s + one.rest_s) for one in runs)


def outside(runs: Sequence[DecodeTime]) -> np.ndarray:
    """Decode seconds outside forwards, and decode seconds; nothing where forwards were not timed."""
    timed = [(one.decode_s, one.tier_s) for one in runs]
    return terms((all_s - sum(tier_s), all_s) for all_s, tier_s in timed if all_s is not None and tier_s is not None)


def reading(runs: Sequence[DecodeTime], most: float | None) -> np.ndarray:
    """Seconds that the forwards after the first tokens would take at the limit, and those they took."""
    return terms((one.read_bytes / most, one.rest_s) for one in runs if most and one.read_bytes is not None)


def terms(found: Iterable[tuple[float, float]]) -> np.ndarray:
    """Array [2, n]: numerators and denominators, one entry a prompt."""
    return np.array(list(found), dtype=float).reshape(-1, 2).T


def paired(pair: Comparison, decodes: Sequence[DecodeTime]) -> list[tuple[DecodeTime, DecodeTime]]:
    """(ours, theirs) of every prompt that both sides decoded greedily."""
    sides: list[dict[tuple[str, str], DecodeTime]] = [
        {(one.task, one.example_id): one for one in decodes if one.arm == arm and not one.sampled}
        for arm in (pair.ours, pair.theirs)
    ]
    return [(one, sides[1][key]) for key, one in sides[0].items() if key in sides[1]]


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, int]:
    """Positions with equal tokens, and positions of the longer output."""
    pairs = list(zip_longest(ours, theirs))
    return sum(a == b for a, b in pairs), len(pairs)


def resampled(statistic: Callable[..., Any], columns: Iterable[np.ndarray], seed: int) -> Span:
    """``statistic`` of the columns (one entry a prompt) with its bootstrap interval; None where it is undefined."""
    stacked = np.stack(list(columns))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*stacked))
    if not math.isfinite(value):
        return None, None, None
    return value, *(bootstrap(statistic, stacked, seed) or (None, None))


def scaled(span: Span, factor: float) -> Span:
    value, low, high = (None if part is None else part * factor for part in span)
    return value, low, high


def row(table: str, name: str, metric: str, unit: str, span: Span, **shape: int) -> SpeedRow:
    return SpeedRow(table, name, metric, unit, *span, **shape)
