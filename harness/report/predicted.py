"""Beside each measured speedup what costs and trace predict, and the ceiling that no acceptance could lift it above.

The times of a forward by rows and context, of each tier, and those of everything outside forwards, are fitted to the
seconds that a run measured (``harness.cost.fitted``); which rows a forward had is replayed from the trace
(``harness.traces``). No prompt is predicted from its own seconds: prompts are halved, and each half has the costs of
the other. The baseline's seconds are predicted in the same way. Beside it stands the closed form, which takes two
constants for the costs and one acceptance for all drafts.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import pandas as pd

from harness.compare import BASELINE, divide, output_tokens
from harness.cost import (
    Costs,
    block_full_passes,
    fitted,
    forward_terms,
    speculative_speedup,
    three_tier_speedup,
    tokens_per_block,
    weighted,
)
from harness.pairing import merged
from harness.records import ArmRecord, BlockTrace, MetricRow, RunRecord, SampleRecord
from harness.traces import DRAFT, FULL, SLIM, Forward, Untraced, faultless, forwards, layout

REMARK = (
    "Predicted: the decode speedup from the trace and the run's own times by rows, context and tier, fitted on the "
    "other half of the prompts; in brackets prediction / measurement - 1. Ceiling: the same costs and block lengths "
    "with every draft accepted and no full pass but those that two tiers and plain steps cannot do without."
)
COSTS = (
    "c, c': drafting one token, and a slim forward, in full passes over one token. Closed form: tokens a block by one "
    "acceptance rate over gamma c + 1, or over gamma c + c' + P(a block escalates)."
)

ALONE = "each half of the prompts needs one of every tier, timed while nothing else was measured"

Parts = Mapping[Hashable, Mapping[Hashable, float]]
"""Terms of a prompt by what measured seconds they sum to."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One arm on one task. Speedups of decoding; ``low`` and ``high`` bound the measured one. ``why``: no prediction.

    ``draft_cost`` and ``slim_cost`` are c, per drafted token, and c', per slim forward, as measured; ``closed`` is the
    closed form's speedup.
    """

    run_id: str
    task: str
    arm: str
    lossless: bool
    draft_cost: float | None
    slim_cost: float | None
    measured: float | None
    low: float | None
    high: float | None
    predicted: float | None
    ceiling: float | None
    closed: float | None
    why: str = ""

    @property
    def error(self) -> float | None:
        return _error(self.predicted, self.measured)

    @property
    def closed_error(self) -> float | None:
        return _error(self.closed, self.measured)


def _error(found: float | None, measured: float | None) -> float | None:
    return None if found is None or not measured else found / measured - 1


def median_error(found: Iterable[float | None]) -> float | None:
    """Of absolute values; None of none."""
    known = [abs(one) for one in found if one is not None]
    return median(known) if known else None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What one decoded prompt is to the fit: its terms, the seconds they sum to, and those without any mistake."""

    task: str
    arm: str
    half: int
    tokens: int
    parts: Parts
    seconds: Mapping[Hashable, float]
    best_tokens: int
    best_parts: Parts


def predictions(
    run: RunRecord, samples: Sequence[SampleRecord], rows: Sequence[MetricRow], settings: Mapping[str, Any]
) -> list[Prediction]:
    """Of every arm but the baseline, task by task. Empty where the baseline is not among the arms.

    An error in predicting is a reason like any other: what was measured is worth the same without.
    """
    arms = {one.arm: one for one in run.arms}
    spans = {(row.task, row.arm): row for row in rows if row.metric == "speedup_decode"}
    asked = [(task, arm) for task, arm in spans if arm != BASELINE and (task, BASELINE) in spans]
    try:
        return _predictions(run, samples, rows, settings, {cell: spans[cell] for cell in asked})
    except Exception as error:
        why = f"predicting failed ({type(error).__name__}: {error})"
        return [_unpredicted(run, arms[arm], spans[task, arm], why) for task, arm in asked]


def _unpredicted(run: RunRecord, arm: ArmRecord, span: MetricRow, why: str) -> Prediction:
    measured = (span.value, span.low, span.high)
    return Prediction(run.run_id, span.task, arm.arm, arm.lossless, None, None, *measured, None, None, None, why)


def _predictions(
    run: RunRecord,
    samples: Sequence[SampleRecord],
    rows: Sequence[MetricRow],
    settings: Mapping[str, Any],
    spans: Mapping[tuple[str, str], MetricRow],
) -> list[Prediction]:
    """Of the arms and tasks of ``spans``, the speedups that were measured."""
    known: dict[tuple[str, str], dict[str, float | None]] = defaultdict(dict)
    for row in rows:
        known[row.task, row.arm][row.metric] = row.value
    prompts, reasons = _replayed(run, merged(samples), settings)
    speeds = _speeds(prompts)
    found = []
    for (task, arm), span in spans.items():
        record = next(one for one in run.arms if one.arm == arm)
        numbers = known[task, arm]
        base, mine = speeds.get((task, BASELINE)), speeds.get((task, arm))
        predicted = ceiling = None
        if base and mine:
            predicted, ceiling = divide(mine[0], base[0]), divide(mine[1], base[0])
        costs = _costs(numbers, known[task, BASELINE])
        why = "" if predicted is not None else reasons.get(arm) or ALONE
        found.append(
            Prediction(
                *(run.run_id, task, arm, record.lossless, *costs, span.value, span.low, span.high),
                *(predicted, ceiling, _closed_form(record, numbers, costs), why),
            )
        )
    return found


def _replayed(
    run: RunRecord, samples: Sequence[SampleRecord], settings: Mapping[str, Any]
) -> tuple[list[_Prompt], dict[str, str]]:
    """Every prompt whose forwards can be replayed and whose seconds are its own; and why those of an arm cannot be."""
    nodes = settings.get("methods") or {}
    names = {one.arm: one.drafter for one in run.arms}
    plain = {"_target_": "harness.decode.autoregressive.Autoregressive"}
    places: dict[str, dict[str, int]] = defaultdict(dict)
    for task, example in sorted({(one.task, one.example_id) for one in samples}):
        places[task][example] = len(places[task])
    timed = all(one.generation.tier_s is not None for one in samples)
    prompts, reasons = [], {}
    for one in samples:
        if one.arm in reasons or one.contended:
            continue
        try:
            kind = layout(nodes.get(one.arm) or (plain if one.arm == BASELINE else {}))
            blocks = one.generation.blocks
            made = forwards(kind, one.prompt_tokens, blocks)
            tokens, best = faultless(kind, one.prompt_tokens, blocks)
        except Untraced as error:
            reasons[one.arm] = str(error)
            continue
        owners = {FULL: FULL, DRAFT: f"{DRAFT} {names[one.arm]}", SLIM: f"{SLIM} {kind.slims}"}
        outside = _outside(one.arm, one.prompt_tokens, blocks)
        parts, best_parts = (_parts(owners, found, outside, timed) for found in (made, best))
        half = places[one.task][one.example_id] % 2
        seconds = _seconds(owners, one, timed)
        prompts.append(_Prompt(one.task, one.arm, half, output_tokens(one), parts, seconds, tokens, best_parts))
    return [prompt for prompt in prompts if prompt.arm not in reasons], reasons


def _outside(arm: str, prompt_tokens: int, blocks: Sequence[BlockTrace]) -> dict[Hashable, float]:
    """What the seconds outside forwards are a weighted sum of: blocks, those that draft, and the text before each."""
    drafting = sum(block.drafted > 0 for block in blocks)
    text = sum(prompt_tokens + block.start for block in blocks)
    return {(arm, "blocks"): len(blocks), (arm, "drafting"): drafting, (arm, "text"): text}


def _parts(
    owners: Mapping[str, str], found: Sequence[Sequence[Forward]], outside: Mapping[Hashable, float], timed: bool
) -> Parts:
    """Terms by whose seconds they are; all together where a device does not tell those of its tiers."""
    shapes: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for block in found:
        for one in block:
            shapes[one.tier.split()[0], one.tier].append((one.rows, one.context))
    parts: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
    for (role, tier), pairs in shapes.items():
        owner = owners[role]
        parts[owner if timed else "all"] |= forward_terms((owner, tier), pairs)
    parts["outside" if timed else "all"] |= outside
    return parts


def _seconds(owners: Mapping[str, str], sample: SampleRecord, timed: bool) -> dict[Hashable, float]:
    spent = sample.generation.tier_s
    if not timed or spent is None:
        return {"all": sample.decode_s}
    draft, slim, full = spent
    outside = sample.decode_s - sum(spent)
    return {owners[DRAFT]: draft, owners[SLIM]: slim, owners[FULL]: full, "outside": outside}


def _speeds(prompts: Sequence[_Prompt]) -> dict[tuple[str, str], tuple[float, float]]:
    """By task and arm tokens a second, predicted, and if every draft were accepted; costs are of the other half."""
    weights = [_weights([prompt for prompt in prompts if prompt.half != half]) for half in (0, 1)]
    cells: dict[tuple[str, str], list[_Prompt]] = defaultdict(list)
    for prompt in prompts:
        cells[prompt.task, prompt.arm].append(prompt)
    found = {}
    for cell, members in cells.items():
        own = [_predicted_s(one.parts, weights[one.half]) for one in members]
        best = [_predicted_s(one.best_parts, weights[one.half]) for one in members]
        tokens = sum(one.tokens for one in members)
        shares = [one.tokens / one.best_tokens for one in members]
        if None in own or None in best:
            continue
        spent = sum(second for second in own if second is not None)
        least = sum(share * second for share, second in zip(shares, best, strict=True) if second is not None)
        if spent > 0 and least > 0:
            found[cell] = tokens / spent, tokens / least
    return found


def _weights(prompts: Sequence[_Prompt]) -> dict[Hashable, float]:
    groups: dict[Hashable, list[_Prompt]] = defaultdict(list)
    for prompt in prompts:
        for owner in prompt.parts:
            groups[owner].append(prompt)
    found: dict[Hashable, float] = {}
    for owner, members in groups.items():
        found |= fitted([one.parts[owner] for one in members], [one.seconds[owner] for one in members])
    return found


def _predicted_s(parts: Parts, weights: Mapping[Hashable, float]) -> float | None:
    total = 0.0
    for terms in parts.values():
        seconds = weighted(terms, weights)
        if seconds is None:
            return None
        total += seconds
    return total


def _costs(numbers: Mapping[str, float | None], base: Mapping[str, float | None]) -> tuple[float | None, float | None]:
    """c and c': seconds of drafting a drafted token, and of a slim forward, over those of the baseline's forward."""
    full = base.get("full_pass_ms")
    draft_ms, slim_ms = (
        numbers.get(f"{tier}_pass_ms") if numbers.get(f"{tier}_rate") else None for tier in (DRAFT, SLIM)
    )
    drafted, plain = numbers.get("mean_drafted"), numbers.get("plain_steps")
    draft = None
    if draft_ms is not None and drafted and plain is not None and full:
        tokens = drafted * (1 - plain) / (numbers.get("mean_accept_length") or 1.0)
        draft = draft_ms * (numbers.get("draft_rate") or 0.0) / tokens / full
    return draft, None if slim_ms is None or not full else slim_ms / full


def _closed_form(
    arm: ArmRecord, numbers: Mapping[str, float | None], costs: tuple[float | None, float | None]
) -> float | None:
    """Of two and three tiers, from their mean rates and the rounded mean of their drafts a block; None of others."""
    rejected, drafted = numbers.get("reject_rate"), numbers.get("mean_drafted")
    if rejected is None or drafted is None:
        return None
    if costs[0] is None and numbers.get("draft_rate"):
        return None  # its forwards were not timed
    draft = costs[0] or 0.0  # a drafter without a model costs nothing
    gamma = max(1, round(drafted))
    if arm.method == "via_sd":
        accepted, escalated, slim = numbers.get("accept_share"), numbers.get("escalate_share"), costs[1]
        if accepted is None or escalated is None or slim is None:
            return None
        gate = arm.gate or ""
        tokens = tokens_per_block(1 - rejected, gamma, bonus=int("bonus=" in gate))
        if "ending=full" in gate:  # a draft that is regenerated needs a pass too
            escalated += numbers.get("regenerate_share") or 0.0
        passes = block_full_passes(accepted, escalated, gamma) + ("bonus=full" in gate) * accepted**gamma
        return three_tier_speedup(tokens, passes, gamma, Costs(draft, slim))
    two_tiers = numbers.get("slim_rate") == 0 and numbers.get("escalate_share") == 1 and arm.method != "cascade_sd"
    return speculative_speedup(1 - rejected, gamma, draft) if two_tiers else None


# For tables.

PREDICTED, CEILING = "speedup_decode_predicted", "speedup_decode_ceiling"
DEFINITIONS = {
    PREDICTED: "What the trace and the times of the other half of the prompts say of speedup_decode.",
    CEILING: "The same with every draft accepted, and no full pass but those that cannot be done without.",
}


def predicted_rows(rows: Sequence[MetricRow], found: Sequence[Prediction]) -> list[MetricRow]:
    """Prediction and ceiling as rows like those of the measured speedups among ``rows``; without intervals."""
    known = {(row.task, row.arm): row for row in rows if row.metric == "speedup_decode"}
    return [
        replace(known[one.task, one.arm], metric=metric, value=value, low=None, high=None)
        for one in found
        for metric, value in ((PREDICTED, one.predicted), (CEILING, one.ceiling))
    ]


def beside(one: Prediction | None, dash: str) -> dict[str, str]:
    """The columns that stand beside a measured speedup: ``1.31 (-2 %)`` and the ceiling; dashes where there is none."""
    predicted, measured, most = (None,) * 3 if one is None else (one.predicted, one.measured, one.ceiling)
    return {"predicted (error)": with_error(predicted, measured, dash), "ceiling": _shown(most, dash)}


def with_error(predicted: float | None, measured: float | None, dash: str) -> str:
    """``1.31 (-2 %)``; the dash for what was not predicted."""
    error = _error(predicted, measured)
    return _shown(predicted, dash) + ("" if error is None else f" ({round(100 * error):+d} %)")


def costs_frame(found: Sequence[Prediction], several: bool, dash: str) -> pd.DataFrame:
    """One line per task and arm, as text: what does not stand beside the speedup; the run only with several."""
    return pd.DataFrame(
        [
            {
                **({"run": one.run_id} if several else {}),
                **{"task": one.task, "arm": one.arm},
                **{"c": _shown(one.draft_cost, dash), "c'": _shown(one.slim_cost, dash)},
                "of the ceiling": dash if not one.measured or not one.ceiling else f"{one.measured / one.ceiling:.0%}",
                "closed form": _shown(one.closed, dash),
                "its error": dash if one.closed_error is None else f"{one.closed_error:+.1%}",
            }
            for one in found
        ]
    )


def _shown(value: float | None, dash: str) -> str:
    return dash if value is None else f"{value:.2f}"


def costs_remark(found: Sequence[Prediction]) -> str:
    """How to read the table, and the median errors of both predictions."""
    mine, closed = median_error(one.error for one in found), median_error(one.closed_error for one in found)
    if mine is None:
        return COSTS
    said = f"Median absolute error of the predictions: {mine:.1%}"
    return f"{COSTS} {said}" + ("." if closed is None else f", of the closed form {closed:.1%}.")


def unpredicted(found: Sequence[Prediction]) -> list[str]:
    """Why arms have no prediction, each reason once, in a line that names them."""
    arms: dict[str, list[str]] = defaultdict(list)
    for one in found:
        if one.why and one.arm not in arms[one.why]:
            arms[one.why].append(one.arm)
    return [f"Not predicted: {', '.join(named)}: {why}" for why, named in arms.items()]


def predicted_csv(found: Sequence[Prediction]) -> str:
    """The same in full precision."""
    rows = [asdict(one) | {"error": one.error, "closed_error": one.closed_error} for one in found]
    return str(pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
