"""Latency and speedup of pairs that do not fit here: a roofline under traces that were measured on real runs.

A trace says which forwards a method needed, of how many rows (``harness.traces``); the roofline says what each of them
would take of another pair on another machine (``harness.roofline``). Routes, block lengths and acceptance stay those of
the run: another pair has others.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, log2
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from harness.compare import BASELINE, output_tokens
from harness.errors import UserError
from harness.pairing import merged
from harness.records import RunRecord, SampleRecord
from harness.report.lines import DASH
from harness.report.tables import markdown_table
from harness.roofline import Load, Machine, Timed, errors, forward_s, parts_s
from harness.traces import DRAFT, FULL, SLIM, Layout, Untraced, forwards, layout

HELD = 0.9
"""Share of a device's memory that weights and cache may take."""


@dataclass(frozen=True, slots=True)
class Traced:
    """The forwards of one arm over all prompts of a run.

    ``shapes``: how often a tier had a forward of these rows, over so many positions more than decoding began with.
    ``plain`` the same of decoding as many tokens one by one. ``draft_skip`` and ``slim_skip``: share of the full
    verifier's layers that the drafter and the slim verifier skip; None of a drafter with a model of its own.
    """

    run_id: str
    arm: str
    lossless: bool
    drafter: str
    draft_skip: float | None
    slim_skip: float
    tokens: int
    shapes: Mapping[tuple[str, int, int], int]
    plain: Mapping[tuple[str, int, int], int]


def traced(
    run: RunRecord, samples: Sequence[SampleRecord], settings: Mapping[str, Any], skip_ratio: float
) -> tuple[list[Traced], dict[str, str]]:
    """Every arm but the baseline whose forwards follow from its trace, and why those of the others do not.

    ``skip_ratio`` is taken for a slim verifier whose own cannot be read from the settings or its mask file.
    """
    nodes = settings.get("methods") or {}
    outputs = merged(samples)
    found, reasons = [], {}
    for arm in run.arms:
        if arm.arm == BASELINE:
            continue
        node = nodes.get(arm.arm) or {}
        mine = [one for one in outputs if one.arm == arm.arm]
        try:
            kind = layout(node)
            skip = draft_skip(kind, node.get("drafter") or {})
            slim_skip = slim_share(node.get("slim") or {}, settings.get("model") or {})
            shapes: Counter[tuple[str, int, int]] = Counter()
            plain: Counter[tuple[str, int, int]] = Counter()
            for one in mine:
                for block in forwards(kind, one.prompt_tokens, one.generation.blocks):
                    for made in block:
                        tier = made.tier.split()[0]
                        shapes[tier, made.rows, made.context - (one.prompt_tokens - 1)] += 1
                for place in range(output_tokens(one)):
                    plain[FULL, 1, place] += 1
        except Untraced as error:
            reasons[arm.arm] = str(error)
            continue
        tokens = sum(map(output_tokens, mine))
        if tokens:
            slim_skip = skip_ratio if slim_skip is None else slim_skip
            found.append(
                Traced(run.run_id, arm.arm, arm.lossless, kind.drafter, skip, slim_skip, tokens, shapes, plain)
            )
    return found, reasons


def draft_skip(kind: Layout, drafter: Mapping[str, Any]) -> float | None:
    """Share of the full verifier's layers that a drafter made of them skips; None of another one.

    Raises:
        Untraced: a head on the verifier, whose size at another verifier the trace does not tell.
    """
    if kind.drafter in ("head", "heads"):
        raise Untraced("the size of its head at another verifier is not in the trace")
    if kind.drafter != "shared":
        return None
    if drafter.get("layers") is None and drafter.get("exit_ratio") is not None:
        return 1 - float(drafter["exit_ratio"])
    share = skipped(drafter.get("slim") or drafter, {})
    if share is None:
        raise Untraced("the share of layers that its drafter skips is not in the settings")
    return share


def slim_share(slim: Mapping[str, Any], model: Mapping[str, Any]) -> float | None:
    """Share of the full verifier's layers that a slim one skips; None where nobody says.

    Raises:
        Untraced: there are several, or it is another model.
    """
    if "masks" in slim:
        raise Untraced("its slim verifiers skip different shares of the layers")
    if "path" in slim:
        raise Untraced("its slim verifier is a model of its own, whose size beside another pair nobody says")
    return skipped(slim, model)


def skipped(node: Mapping[str, Any], model: Mapping[str, Any]) -> float | None:
    """``skip_ratio`` of a slim verifier's settings, or of the mask file that they or the model's name; else None."""
    if node.get("skip_ratio") is not None and node.get("mask") is None:
        return float(node["skip_ratio"])
    mask = node.get("mask") or model.get("slim_mask")
    path = Path(mask) if isinstance(mask, str) else None
    if path is None or not path.is_file():
        return None
    share = json.loads(path.read_text(encoding="utf-8")).get("skip_ratio")
    return None if share is None else float(share)


@dataclass(frozen=True, slots=True)
class ScaledPair:
    """Two models on a machine: ``full_at`` gives the load of the full verifier at a skip ratio."""

    name: str
    drafter: Load
    full_at: Mapping[float, Load]

    @property
    def full(self) -> Load:
        return self.full_at[0.0]


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One prediction. ``plain_ms`` and ``ms``: milliseconds a token alone and with the method.

    ``draft_cost`` and ``slim_cost``: c and c' of forwards over one token, by the same roofline. ``compute_bound``:
    share of the method's seconds in forwards that products, not bytes, decide.
    """

    machine: str
    devices: int
    pair: str
    context: int
    batch: int
    run_id: str
    arm: str
    lossless: bool
    plain_ms: float
    ms: float
    speedup: float
    draft_cost: float
    slim_cost: float
    compute_bound: float


def devices_for(pair: ScaledPair, memory_bytes: float | None, context: int, batch: int) -> int:
    """Devices, a power of two, that hold both models and their caches; 1 where nobody says how large one is."""
    if memory_bytes is None:
        return 1
    if not memory_bytes > 0:
        raise UserError(f"machine memory_bytes={memory_bytes}: want more than 0, or null.")
    held = sum(load.weight_bytes + batch * context * load.cache_bytes for load in (pair.drafter, pair.full))
    return int(2 ** max(0, ceil(log2(held / (HELD * memory_bytes)))))


def scaled(
    name: str, machine: Machine, devices: int, pair: ScaledPair, context: int, batch: int, arm: Traced
) -> ScaleRow:
    """What the forwards of ``arm`` would take of ``pair``, begun behind ``context`` cached tokens."""
    together = machine.times(devices)
    draft = pair.drafter if arm.draft_skip is None else pair.full_at[arm.draft_skip]
    loads = {DRAFT: draft, SLIM: pair.full_at[arm.slim_skip], FULL: pair.full}

    def spent(shapes: Mapping[tuple[str, int, int], int]) -> tuple[float, float]:
        """Seconds, and those of them in forwards that products decide."""
        total = bound = 0.0
        for (tier, rows, offset), count in shapes.items():
            load, length = loads[tier], context + offset
            seconds = count * forward_s(together, load, rows, length, batch)
            total += seconds
            moved, multiplied = parts_s(together, load, rows, length, batch)
            bound += seconds if multiplied > moved else 0.0
        return total, bound

    plain, (mine, bound) = spent(arm.plain)[0], spent(arm.shapes)
    one, small, slim = (forward_s(together, load, 1, context, batch) for load in (loads[FULL], draft, loads[SLIM]))
    return ScaleRow(
        *(name, devices, pair.name, context, batch, arm.run_id, arm.arm, arm.lossless),
        *(1e3 * plain / arm.tokens, 1e3 * mine / arm.tokens, plain / mine, small / one, slim / one, bound / mine),
    )


# For tables.

ASSUMED = (
    "a forward takes the longer of moving its bytes and making its products, and a constant a layer; attention's own "
    "products, activations and what devices tell each other are left out: times are floors, more so at long contexts",
    "routes, block lengths and acceptance are those of the traced run; another pair has others, so the speedup is what "
    "this trace would be worth there, not what that pair would reach",
    "nothing outside forwards costs anything: gates, sampling, look-up, tokenisation",
    "a slim verifier skips the share of layers that it skipped in the run",
    f"as many devices, a power of two, as hold both models and their caches in {HELD:.0%} of their memory; the drafter "
    "is spread over all of them too",
)


def scale_frame(rows: Sequence[ScaleRow]) -> pd.DataFrame:
    """A line for machine, pair and arm, a column for each context: milliseconds a token and speedup, as text."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    several = len({row.run_id for row in rows}) > 1
    for row in rows:
        key = (row.machine, row.pair, row.run_id, row.arm)
        said = {"machine": row.machine, "pair": row.pair, **({"run": row.run_id} if several else {}), "arm": row.arm}
        line = found.setdefault(key, {**said, "lossless": "yes" if row.lossless else "**lossy**"})
        many = "" if row.devices == 1 else f" ({row.devices} devices)"
        line[f"{row.context} cached"] = f"{row.plain_ms:.1f} to {row.ms:.1f} ms: {row.speedup:.2f}{many}"
    return pd.DataFrame(list(found.values())).fillna(DASH)


def cost_frame(rows: Sequence[ScaleRow]) -> pd.DataFrame:
    """c, c' and the share bound by products, at the shortest and the longest context, as text."""
    ends = sorted({row.context for row in rows})
    ends = ends[:1] + ends[1:][-1:]
    return pd.DataFrame(
        [
            {
                **{"machine": row.machine, "pair": row.pair, "arm": row.arm, "cached": str(row.context)},
                "c": f"{row.draft_cost:.3f}",
                "c'": f"{row.slim_cost:.3f}",
                "time bound by products": f"{row.compute_bound:.0%}",
            }
            for row in rows
            if row.context in ends
        ]
    )


def validation_frame(checks: Sequence[tuple[str, Machine, Sequence[Timed]]], fitted_on: str) -> pd.DataFrame:
    """Errors of the roofline against measured forwards, a line for each set of constants and tier, as text."""
    lines = []
    for name, machine, timed in checks:
        for tier in dict.fromkeys(one.tier for one in timed):
            mine = [one for one in timed if one.tier == tier]
            found = errors(machine, mine)
            lines.append(
                {
                    "constants": name,
                    "tier": tier + (" (fitted on it)" if name == CALIBRATED and tier == fitted_on else ""),
                    "forwards": str(len(mine)),
                    "median absolute error": f"{median(map(abs, found)):.1%}",
                    "mean error": f"{sum(found) / len(found):+.1%}",
                    "largest": f"{max(found, key=abs):+.1%}",
                }
            )
    return pd.DataFrame(lines)


CALIBRATED = "calibrated"


def validation_rows(checks: Sequence[tuple[str, Machine, Sequence[Timed]]]) -> pd.DataFrame:
    """Every measured forward beside what each set of constants says, in full."""
    return pd.DataFrame(
        [
            {
                **{"constants": name, "tier": one.tier, "rows": one.rows, "context": one.context},
                **{"measured_ms": 1e3 * one.seconds, "predicted_ms": 1e3 * (1 + error) * one.seconds, "error": error},
            }
            for name, machine, timed in checks
            for one, error in zip(timed, errors(machine, timed), strict=True)
        ]
    )


def tidy(rows: Sequence[ScaleRow]) -> pd.DataFrame:
    return pd.DataFrame([asdict(row) for row in rows])


def page(
    rows: Sequence[ScaleRow],
    machines: Mapping[str, Machine],
    reasons: Mapping[str, str],
    read_in: Mapping[str, str],
    facts: Sequence[str],
    validation: str,
) -> str:
    """The whole page: predictions, costs, validation, constants, assumptions."""
    constants = pd.DataFrame(
        [
            {
                "machine": name,
                "GB/s": f"{one.bandwidth / 1e9:.4g}",
                "TFLOP/s": f"{one.compute / 1e12:.4g}",
                "microseconds a layer": f"{1e6 * one.layer_overhead_s:.3g}",
                "from": one.source or DASH,
            }
            for name, one in machines.items()
        ]
    )
    parts = [
        "# Pairs that do not fit here",
        "Predicted, never measured: milliseconds a token of the full verifier alone, then with the method, and how "
        "many times as fast that is. Lossy methods write other outputs.",
        markdown_table(scale_frame(rows)),
        "## Costs",
        markdown_table(cost_frame(rows)),
        "c and c': a draft and a slim forward over one token in full ones, by the same roofline.",
        "## Against measured forwards",
        validation,
        "## Constants",
        markdown_table(constants),
        "## Assumptions",
        "\n".join(f"{place}. {line}." for place, line in enumerate(ASSUMED, 1)),
        "## Traces and shapes",
        "\n".join(
            [
                *(f"- {fact}" for fact in facts),
                *(f"- arm `{arm}` is left out: {why}" for arm, why in reasons.items()),
                *(f"- `{model}`: {where}" for model, where in read_in.items()),
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"
