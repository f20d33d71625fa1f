"""Numbers from ``SampleRecord``s: every rate and speedup of the tables, its formula in its docstring.

Conventions:

* A rate is a ratio of sums: numerator and denominator are summed over all blocks of all prompts and divided once.
  ``Ratio.prompt_mean`` is the mean of per-prompt rates; where reported, it has a name of its own.
* 0/0 is None, never 0 or 1.
* Tokens are generated ids, the end-of-sequence token included, counted by one rule in every arm; no text is
  tokenised again. What the stop rule cuts off is not an output token.
* Intervals are 95 % percentile bootstraps over prompts, seeded by the run's seed; fewer than two prompts have none.

Not covered: modelled times. Seconds here were measured.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness.compare import (
    BASELINE,
    DIVERGENCE_METRICS,
    PAIR_METRICS,
    Interval,
    Pairs,
    Samples,
    bootstrap,
    by_example,
    decode_seconds,
    divide,
    judgements,
    output_tokens,
    paired,
    ratio_of_sums,
    total_seconds,
)
from harness.errors import UserError
from harness.fidelity import FIDELITY_METRICS, records_of
from harness.pairing import baseline_of, complete, merged
from harness.quality import Estimate, difference, quality
from harness.records import (
    BlockTrace,
    Divergence,
    FidelityRecord,
    MetricRow,
    Route,
    RunRecord,
    SampleRecord,
    StopReason,
)
from harness.scoring import METRICS


@dataclass(frozen=True)
class Ratio:
    """A ratio of sums over prompts. ``terms`` gives one prompt's numerator and denominator."""

    name: str
    unit: str
    higher_is_better: bool | None
    definition: str
    terms: Callable[[SampleRecord], tuple[float, float]]
    has_interval: bool = False

    @property
    def clocked(self) -> bool:
        """Whether it is made of measured times."""
        return self.unit in ("s", "ms", "tokens/s") or self.name.endswith("_time_share")

    def __call__(self, samples: Samples) -> float | None:
        """Sum of numerators / sum of denominators."""
        terms = [self.terms(sample) for sample in samples]
        return divide(sum(top for top, _ in terms), sum(bottom for _, bottom in terms))

    def prompt_mean(self, samples: Samples) -> float | None:
        """Mean of per-prompt rates, over the prompts that have one: weighs a short output as much as a long one."""
        rates = [rate for sample in samples if (rate := divide(*self.terms(sample))) is not None]
        return divide(sum(rates), len(rates))

    def interval(self, samples: Samples, seed: int) -> Interval:
        """95 % bootstrap interval of the ratio of sums, where ``has_interval``; each costs thousands of draws."""
        if not self.has_interval:
            return None
        terms = np.array([self.terms(sample) for sample in samples], dtype=float).reshape(-1, 2)
        return bootstrap(ratio_of_sums, terms.T, seed)


RATIOS: dict[str, Ratio] = {}
"""All ratios by name, in the order of the tables."""


def _ratio(
    unit: str, higher_is_better: bool | None, has_interval: bool = False
) -> Callable[[Callable[[SampleRecord], tuple[float, float]]], Ratio]:
    """Turn a function of one prompt into a ``Ratio``; its docstring is the definition that tables print."""

    def register(terms: Callable[[SampleRecord], tuple[float, float]]) -> Ratio:
        definition = " ".join((inspect.getdoc(terms) or "").split())
        made = Ratio(terms.__name__, unit, higher_is_better, definition, terms, has_interval)
        RATIOS[made.name] = made
        return made

    return register


def _sum(sample: SampleRecord, count: Callable[[BlockTrace], float]) -> float:
    return sum(count(block) for block in sample.generation.blocks)


# Rates over blocks.


@_ratio("share", False, has_interval=True)
def reject_rate(sample: SampleRecord) -> tuple[float, float]:
    """(examined - kept) / examined draft tokens. An escalated token that the full verifier keeps is not rejected."""
    examined = _sum(sample, lambda block: len(block.routes))
    return examined - _sum(sample, lambda block: block.kept), examined


@_ratio("share", False, has_interval=True)
def draft_waste(sample: SampleRecord) -> tuple[float, float]:
    """(drafted - kept) / drafted tokens: rejected, discarded unexamined, or cut off by the stop rule."""
    drafted = _sum(sample, lambda block: block.drafted)
    return drafted - _sum(sample, lambda block: block.kept), drafted


@_ratio("per token", False, has_interval=True)
def full_rate(sample: SampleRecord) -> tuple[float, float]:
    """Forward passes of the full verifier after prefill / output tokens."""
    return _sum(sample, lambda block: block.full_forwards), output_tokens(sample)


@_ratio("share", False, has_interval=True)
def block_full_rate(sample: SampleRecord) -> tuple[float, float]:
    """Blocks with at least one pass of the full verifier / blocks."""
    return _sum(sample, lambda block: block.full_forwards > 0), len(sample.generation.blocks)


@_ratio("share", False, has_interval=True)
def drafting_block_full_rate(sample: SampleRecord) -> tuple[float, float]:
    """Blocks that drafted and needed a pass of the full verifier / blocks that drafted: P(a block escalates)."""
    drafting = [block for block in sample.generation.blocks if block.drafted]
    return sum(block.full_forwards > 0 for block in drafting), len(drafting)


@_ratio("per token", None)
def slim_rate(sample: SampleRecord) -> tuple[float, float]:
    """Forward passes of the slim verifier / output tokens."""
    return _sum(sample, lambda block: block.slim_forwards), output_tokens(sample)


@_ratio("per token", None)
def draft_rate(sample: SampleRecord) -> tuple[float, float]:
    """Forward passes of the drafter / output tokens; 0 for a drafter without a model."""
    return _sum(sample, lambda block: block.draft_forwards), output_tokens(sample)


@_ratio("tokens per block", True, has_interval=True)
def mean_accept_length(sample: SampleRecord) -> tuple[float, float]:
    """Output tokens / blocks, correction and bonus token included (vLLM's convention), plain steps included."""
    return output_tokens(sample), len(sample.generation.blocks)


@_ratio("tokens per block", True)
def accepted_drafts_per_block(sample: SampleRecord) -> tuple[float, float]:
    """Kept draft tokens / blocks that drafted: without correction, bonus or plain steps."""
    return _sum(sample, lambda block: block.kept), _sum(sample, lambda block: block.drafted > 0)


@_ratio("tokens per block", None)
def mean_drafted(sample: SampleRecord) -> tuple[float, float]:
    """Drafted tokens / blocks that drafted; below gamma where the drafter fell short or the length limit was near."""
    return _sum(sample, lambda block: block.drafted), _sum(sample, lambda block: block.drafted > 0)


@_ratio("share", None)
def plain_steps(sample: SampleRecord) -> tuple[float, float]:
    """Blocks with no draft (one autoregressive step of the full verifier) / blocks."""
    return _sum(sample, lambda block: block.drafted == 0), len(sample.generation.blocks)


def _routed(sample: SampleRecord, route: Route) -> tuple[float, float]:
    return (
        _sum(sample, lambda block: block.routes.count(route)),
        _sum(sample, lambda block: len(block.routes)),
    )


@_ratio("share", None)
def accept_share(sample: SampleRecord) -> tuple[float, float]:
    """Draft tokens the gate accepted / examined."""
    return _routed(sample, Route.ACCEPT)


@_ratio("share", None)
def regenerate_share(sample: SampleRecord) -> tuple[float, float]:
    """Draft tokens the gate replaced by the slim verifier's / examined."""
    return _routed(sample, Route.REGENERATE)


@_ratio("share", None)
def escalate_share(sample: SampleRecord) -> tuple[float, float]:
    """Draft tokens sent to the full verifier / examined; 1 for two-tier methods."""
    return _routed(sample, Route.ESCALATE)


# Lengths and times.


@_ratio("tokens", None, has_interval=True)
def mean_output_tokens(sample: SampleRecord) -> tuple[float, float]:
    """Output tokens / prompts."""
    return output_tokens(sample), 1


@_ratio("tokens", None)
def mean_prompt_tokens(sample: SampleRecord) -> tuple[float, float]:
    """Prompt tokens, after any cut / prompts."""
    return sample.prompt_tokens, 1


@_ratio("share", None)
def input_cut_share(sample: SampleRecord) -> tuple[float, float]:
    """Prompts whose input was cut to fit / prompts."""
    return sample.input_cut > 0, 1


@_ratio("share", None)
def length_stop_share(sample: SampleRecord) -> tuple[float, float]:
    """Outputs ended by the length limit / prompts."""
    return sample.generation.stop_reason is StopReason.LENGTH, 1


@_ratio("s", False)
def mean_prefill_s(sample: SampleRecord) -> tuple[float, float]:
    """Seconds of prefill / prompts."""
    return sample.prefill_s, 1


@_ratio("s", False)
def mean_decode_s(sample: SampleRecord) -> tuple[float, float]:
    """Seconds of decoding after prefill / prompts."""
    return sample.decode_s, 1


TIER_FORWARDS: tuple[Callable[[BlockTrace], float], ...] = (
    lambda block: block.draft_forwards,
    lambda block: block.slim_forwards,
    lambda block: block.full_forwards,
)


def _time_share(sample: SampleRecord, tier: int) -> tuple[float, float]:
    spent, passes = sample.generation.tier_s, _sum(sample, TIER_FORWARDS[tier])
    return (0.0, 0.0) if spent is None or not passes else (spent[tier], decode_seconds(sample))


def _pass_ms(sample: SampleRecord, tier: int) -> tuple[float, float]:
    spent = sample.generation.tier_s
    return (0.0, 0.0) if spent is None else (1000 * spent[tier], _sum(sample, TIER_FORWARDS[tier]))


@_ratio("ms", None)
def draft_pass_ms(sample: SampleRecord) -> tuple[float, float]:
    """Milliseconds in forwards of the drafter / forwards."""
    return _pass_ms(sample, 0)


@_ratio("ms", None)
def slim_pass_ms(sample: SampleRecord) -> tuple[float, float]:
    """Milliseconds in forwards of the slim verifier / forwards."""
    return _pass_ms(sample, 1)


@_ratio("ms", None)
def full_pass_ms(sample: SampleRecord) -> tuple[float, float]:
    """Milliseconds in forwards of the full verifier after prefill / forwards."""
    return _pass_ms(sample, 2)


@_ratio("share", None)
def draft_time_share(sample: SampleRecord) -> tuple[float, float]:
    """Seconds in forwards of the drafter / seconds of decoding."""
    return _time_share(sample, 0)


@_ratio("share", None)
def slim_time_share(sample: SampleRecord) -> tuple[float, float]:
    """Seconds in forwards of the slim verifier / seconds of decoding."""
    return _time_share(sample, 1)


@_ratio("share", None)
def full_time_share(sample: SampleRecord) -> tuple[float, float]:
    """Seconds in forwards of the full verifier / seconds of decoding; the rest is gates, look-up and bookkeeping."""
    return _time_share(sample, 2)


@_ratio("tokens/s", True)
def decode_tokens_per_s(sample: SampleRecord) -> tuple[float, float]:
    """Output tokens / seconds of decoding after prefill."""
    return output_tokens(sample), decode_seconds(sample)


@_ratio("tokens/s", True)
def end_to_end_tokens_per_s(sample: SampleRecord) -> tuple[float, float]:
    """Output tokens / seconds of prefill and decoding."""
    return output_tokens(sample), total_seconds(sample)


# Everything.

DIFFERENCE = "_difference"
"""Ends the name of a quality metric's difference from the baseline."""

_Number = tuple[str, str, bool | None, Estimate]
"""Name, unit, higher is better, value with its interval."""


def cells_of(run: RunRecord, samples: Samples) -> Iterator[tuple[str, str, list[SampleRecord]]]:
    """(task, arm, one sample an example in order of id), in the run's order; tasks without any sample are left out.

    Where an arm decoded a prompt more than once, its times are those of all visits (``harness.pairing``).

    Raises:
        UserError: a sample's task or arm is not in the run, or an example was measured twice.
    """
    cells: dict[tuple[str, str], list[SampleRecord]] = defaultdict(list)
    for sample in merged(samples):
        cells[sample.task, sample.arm].append(sample)
    arms = [arm.arm for arm in run.arms]
    for task, arm in cells:
        if task not in run.task_metrics or arm not in arms:
            raise UserError(f"run {run.run_id}: samples of {arm!r} on {task!r}, which run.json does not list.")
    measured = {task for task, _ in cells}
    for task in run.task_metrics:
        for arm in arms:
            if task in measured:
                found = by_example(cells[task, arm])
                yield task, arm, [found[example_id] for example_id in sorted(found)]


def complete_prompts(run: RunRecord, samples: Samples) -> list[SampleRecord]:
    """Samples of the prompts that every arm has decoded as often as it should: what an unfinished run can compare."""
    return complete(run.pairing, [arm.arm for arm in run.arms], samples)


def rows(
    run: RunRecord,
    samples: Samples,
    divergences: Sequence[Divergence] = (),
    fidelity: Sequence[FidelityRecord] = (),
) -> list[MetricRow]:
    """Every metric of every task and arm, in the run's order: quality, speedups, agreement, fidelity, rates, times.

    What ``divergences`` does not judge and ``fidelity`` does not score is not counted as none: it makes a number None.

    Raises:
        UserError: two arms decoded different prompts, or a sample does not belong to the run.
    """
    cells = {(task, arm): cell for task, arm, cell in cells_of(run, samples)}
    lossless = {arm.arm for arm in run.arms if arm.lossless}
    found: list[MetricRow] = []
    baselines = {arm.arm: baseline_of(arm.arm, samples) for arm in run.arms}
    for (task, arm), cell in cells.items():
        baseline = [one for one in baselines[arm] if one.task == task]
        pairs = paired(cell, baseline) if (task, BASELINE) in cells else []
        exact = arm in lossless and run.temperature == 0 and pairs
        judged = judgements(pairs, divergences) if exact else None
        scored = records_of(cell, fidelity)
        for name, unit, better, known in _numbers(run, task, cell, pairs, judged, scored):
            value, low, high = known.value, known.low, known.high
            identity = (run.run_id, arm, run.model, task, name, unit, better)
            found.append(MetricRow(*identity, value, low, high, len(cell), "ours", known.stderr, run.cell))
    return found


def _numbers(
    run: RunRecord,
    task: str,
    cell: Samples,
    pairs: Pairs,
    judged: Sequence[Divergence] | None,
    scored: Sequence[FidelityRecord] | None,
) -> Iterator[_Number]:
    for name in run.task_metrics[task]:
        metric = METRICS[name]
        yield name, metric.unit, metric.higher_is_better, quality(metric, cell, run.seed)
        minus = difference(metric, pairs, run.seed)
        yield f"{name}{DIFFERENCE}", metric.unit, metric.higher_is_better, minus
    for compared in PAIR_METRICS:
        usable = [] if compared.greedy_only and run.temperature > 0 else pairs
        if compared.clocked and any(one.contended for pair in usable for one in pair):
            usable = []
        apart = run.pairing == "shared" and compared.clocked and cell and cell[0].arm != BASELINE
        bounds = compared.unpaired if apart else compared.interval
        interval = bounds(usable, run.seed) if usable and bounds else None
        yield compared.name, compared.unit, compared.higher_is_better, _estimate(compared.value(usable), interval)
    for known in DIVERGENCE_METRICS:
        yield known.name, known.unit, False, Estimate(None if judged is None else known.value(judged))
    for one in FIDELITY_METRICS:
        value, interval = (None, None) if scored is None else (one.value(scored), one.interval(scored, run.seed))
        yield one.name, one.unit, one.higher_is_better, _estimate(value, interval)
    contended = any(sample.contended for sample in cell)
    for ratio in RATIOS.values():
        timed: Samples = [] if ratio.clocked and contended else cell
        found = _estimate(ratio(timed), ratio.interval(timed, run.seed))
        yield ratio.name, ratio.unit, ratio.higher_is_better, found
    for ratio in (reject_rate, mean_accept_length):
        mean = Estimate(ratio.prompt_mean(cell))
        yield f"{ratio.name}_prompt_mean", ratio.unit, ratio.higher_is_better, mean
    peaks = [sample.peak_bytes for sample in cell if sample.peak_bytes is not None]
    yield "peak_bytes", "bytes", False, Estimate(max(peaks, default=None))


def _estimate(value: float | None, interval: Interval) -> Estimate:
    return Estimate(value, None, *(interval or (None, None)))
