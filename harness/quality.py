"""Quality of an arm and its difference from the baseline's, each with a standard error and an interval.

A mean over prompts has the standard error s / sqrt(n) and a 95 % percentile bootstrap interval. A corpus metric (BLEU,
chrF) is resampled by its terms (``harness.scoring.base``), prompts drawn with replacement: interval and standard error
are those of the resampled values. A difference is paired: both arms are drawn on the same prompts (Koehn 2004,
https://aclanthology.org/W04-3250). Draws are seeded by the run's seed; fewer than two prompts have neither.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.compare import Pairs, Samples, bootstrap, ratio_of_sums
from harness.records import RunRecord, SampleRecord
from harness.scoring import METRICS, Metric

CORPUS_RESAMPLES = 1000
"""Draws of a corpus metric, sacrebleu's own number."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value in points of its metric; None where there is none."""

    value: float | None
    stderr: float | None = None
    low: float | None = None
    high: float | None = None


def terms_of(metric: Metric, sample: SampleRecord) -> Sequence[float] | None:
    """What one prompt adds to the metric's sums. A program is not run again: its stored score counts."""
    if metric.executes:
        stored = sample.scores.get(metric.name)
        return None if stored is None else (stored, 1.0)
    return metric.terms(sample.prediction, sample.references)


def quality(metric: Metric, samples: Samples, seed: int) -> Estimate:
    """Corpus value of a metric over the prompts that have one."""
    rows = [row for sample in samples if (row := terms_of(metric, sample)) is not None]
    if not rows:
        return Estimate(None)
    terms = np.array(rows, dtype=float)  # [n, terms]
    value = metric.total(terms.sum(axis=0).tolist())
    if len(rows) < 2:
        return Estimate(value)
    if metric.is_mean:
        return Estimate(value, standard_error(terms[:, 0]), *_bounds(terms[:, 0], seed))
    return _resampled(value, [metric.total(sums) for sums in resampled_sums(terms, seed)])


def difference(metric: Metric, pairs: Pairs, seed: int) -> Estimate:
    """Quality of the method minus that of the baseline, over the prompts on which both have a value."""
    rows = [(terms_of(metric, mine), terms_of(metric, base)) for mine, base in pairs]
    known = [(mine, base) for mine, base in rows if mine is not None and base is not None]
    if not known:
        return Estimate(None)
    terms = np.array(known, dtype=float)  # [n, 2, terms]
    mine, base = (metric.total(sums) for sums in terms.sum(axis=0).tolist())
    value = None if mine is None or base is None else mine - base
    if len(known) < 2 or value is None:
        return Estimate(value)
    if metric.is_mean:
        differences = terms[:, 0, 0] - terms[:, 1, 0]
        return Estimate(value, standard_error(differences), *_bounds(differences, seed))
    draws = (resampled_sums(terms[:, arm], seed) for arm in (0, 1))  # the same seed: the same prompts
    totals = [(metric.total(ours), metric.total(theirs)) for ours, theirs in zip(*draws, strict=True)]
    return _resampled(value, [None if a is None or b is None else a - b for a, b in totals])


def standard_error(values: np.ndarray) -> float:
    """Of the mean of ``values`` [n], n >= 2: sample standard deviation over the root of n."""
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def resampled_sums(terms: np.ndarray, seed: int) -> list[list[float]]:
    """Sums of ``terms`` [n, terms] over ``CORPUS_RESAMPLES`` draws of n rows with replacement."""
    n = len(terms)
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=CORPUS_RESAMPLES)  # [draws, n]
    return [list(sums) for sums in (draws @ terms).tolist()]


def _bounds(values: np.ndarray, seed: int) -> tuple[float | None, float | None]:
    return bootstrap(ratio_of_sums, np.array([values, np.ones(len(values))]), seed) or (None, None)


def _resampled(value: float | None, values: Sequence[float | None]) -> Estimate:
    known = [found for found in values if found is not None]
    if len(known) < len(values):
        return Estimate(value)
    low, high = np.percentile(known, (2.5, 97.5)).tolist()
    return Estimate(value, float(np.std(known, ddof=1)), low, high)


def scorers(run: RunRecord, samples: Samples) -> dict[str, str]:
    """Who computed each quality metric with which settings, by ``task, metric``; tasks without samples are left out."""
    found: dict[str, str] = {}
    for task, names in run.task_metrics.items():
        references = [sample.references for sample in samples if sample.task == task]
        if references:
            found |= {f"{task}, {name}": METRICS[name].scorer(references) for name in names}
    return found
