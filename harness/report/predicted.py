"""Beside each measured speedup what costs and trace predict, and the ceiling that no acceptance could lift it above.

The times of a forward by rows and context, of each tier, and those of everything outside forwards, are fitted to the
seconds that a run measured (``harness.cost.fitted``); which rows a forward had is replayed from the trace
(``harness.traces``). No prompt is predicted from its own seconds: prompts are halved, and each half has the costs of
the other. The baseline's seconds are predicted in the same way. Beside it stands the closed form, which takes two
constants for the costs and one acceptance for all drafts.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    "Predicted: from the trace and the run's own times by rows, context and tier, fitted on the other half of the "
    "prompts. Ceiling: the same costs and block lengths with every draft accepted and no full pass but those that two "
    "tiers and plain steps cannot do without. c, c': drafting one token, and a slim forward, in full passes over one "
    "token. Closed form: tokens a block by one acceptance rate over gamma c + 1, or over gamma c + c' + P(a block "
    "escalates). Errors: prediction / measurement - 1."
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
    """Of every arm but the baseline, task by task. Empty where the baseline is not among the arms."""
    known: dict[tuple[str, str], dict[str, float | None]] = defaultdict(dict)
    spans = {}
    for row in rows:
        known[row.task, row.arm][row.metric] = row.value
        if row.metric == "speedup_decode":
            spans[row.task, row.arm] = row
    prompts, reasons = _replayed(run, merged(samples), settings)
    speeds = _speeds(prompts)
    found = []
    for (task, arm), numbers in known.items():
        record = next(one for one in run.arms if one.arm == arm)
        if arm == BASELINE or (task, BASELINE) not in known:
            continue
        base, mine = speeds.get((task, BASELINE)), speeds.get((task, arm))
        predicted = ceiling = None
        if base and mine:
            predicted, ceiling = divide(mine[0], base[0]), divide(mine[1], base[0])
        costs = _costs(numbers, known[task, BASELINE])
        span = spans[task, arm]
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


def predicted_frame(found: Sequence[Prediction], several: bool, dash: str) -> pd.DataFrame:
    """One line per task and arm, as text; the run only where there is more than one."""

    def shown(value: float | None, form: str = ".2f") -> str:
        return dash if value is None else f"{value:{form}}"

    lines = []
    for one in found:
        span = "" if one.low is None or one.high is None else f" [{one.low:.2f}, {one.high:.2f}]"
        lines.append(
            {
                **({"run": one.run_id} if several else {}),
                **{"task": one.task, "arm": one.arm, "lossless": "yes" if one.lossless else "**lossy**"},
                **{"c": shown(one.draft_cost), "c'": shown(one.slim_cost)},
                "speedup, decode": shown(one.measured) + span,
                "predicted": shown(one.predicted),
                "error": shown(one.error, "+.1%"),
                "ceiling": shown(one.ceiling),
                "of the ceiling": shown(
                    None if one.measured is None else divide(one.measured, one.ceiling or 0), ".0%"
                ),
                "closed form": shown(one.closed),
                "its error": shown(one.closed_error, "+.1%"),
                "no prediction": one.why or dash,
            }
        )
    return pd.DataFrame(lines)


def predicted_remark(found: Sequence[Prediction]) -> str:
    """How to read the table, and the median errors of both predictions."""
    mine, closed = median_error(one.error for one in found), median_error(one.closed_error for one in found)
    if mine is None:
        return REMARK
    said = f"Median absolute error: {mine:.1%}" + ("" if closed is None else f", of the closed form {closed:.1%}")
    return f"{REMARK} {said}."


def predicted_csv(found: Sequence[Prediction]) -> str:
    """The same in full precision."""
    rows = [asdict(one) | {"error": one.error, "closed_error": one.closed_error} for one in found]
    return str(pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
