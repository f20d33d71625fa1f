"""Published speedups beside what their pairs allow: arithmetic from the models' shapes, under stated assumptions.

Read ``results/paper/numbers.csv`` (the paper's values, with where each was read) and ``configs.csv`` (shapes of the
models, with where each was read); write ``paper_plausibility``. A flag says that a value cannot be reached under the
assumptions, not that it was not measured: they are printed with it, so that a reader can take one back.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.cost import (
    Costs,
    Shape,
    ceiling,
    kept_share,
    speculative_ceiling,
    speculative_speedup,
    three_tier_speedup,
    tokens_per_block,
    weight_share,
)
from harness.errors import UserError
from harness.report.lines import DASH

PAIRS = {
    "gemma2_2b_9b": ("gemma2_2b", "gemma2_9b"),
    "gemma2_2b_27b": ("gemma2_2b", "gemma2_27b"),
    "llama2_7b_13b": ("llama2_7b", "llama2_13b"),
    "llama2_7b_70b": ("llama2_7b", "llama2_70b"),
    "qwen_7b_14b": ("qwen_7b", "qwen_14b"),
    "qwen_7b_72b": ("qwen_7b", "qwen_72b"),
    "gemma3_4b_27b": ("gemma3_4b", "gemma3_27b"),
    "t5_small_large": ("t5_small", "t5_large"),
    "t5_small_xl": ("t5_small", "t5_xl"),
}
"""Drafter and full verifier."""

TWO_TIERS = ("speculative", "tiers_2", "faster_cascades")
ANY_LENGTH = ("bild",)
SELF = ("swift", "clasp")
THREE_TIERS = ("via_sd", "tiers_3", "dimr_mask", "random_mask", "slim_intermediate")
INDEPENDENT = {"independent_12b_intermediate": "gemma3_12b"}
OPEN = {
    "cascade_sd": "its drafts come from n-grams too, which cost nothing: no ceiling from shapes",
    "tiers_4": "the skip ratios of the further slim verifiers are not stated",
    "tiers_5": "the skip ratios of the further slim verifiers are not stated",
    "independent_intermediate": "a Gemma2 of 13B does not exist",
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the arithmetic takes for granted; each is a key of ``job=plausibility``.

    Args:
        gamma: drafted tokens a block, where a row does not say.
        skip_ratio: share of layers that the slim verifier skips, where a row does not say.
        draft_bytes: bytes of a drafter's weight over those of a full verifier's weight: 1 in equal precision.
    """

    gamma: int = 5
    skip_ratio: float = 0.45
    draft_bytes: float = 1.0

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise UserError(f"job.gamma={self.gamma}: want at least 1 drafted token a block.")
        if not 0 <= self.skip_ratio < 1:
            raise UserError(f"job.skip_ratio={self.skip_ratio}: want a share of the layers, 0 to below 1.")
        if not self.draft_bytes > 0:
            raise UserError(f"job.draft_bytes={self.draft_bytes}: want more than 0; 0.5 is half the precision.")

    def in_words(self) -> list[str]:
        """One line each, for under the table."""
        return [
            "batch 1: a forward costs the bytes of the weights that it reads, over one token or one block; attention, "
            "cache, gates, sampling and launches cost nothing",
            "read: all layers kept and the head; the embedding is looked up; norms and biases are left out; of an "
            "encoder-decoder the decoder alone",
            f"a drafter's weight has {self.draft_bytes:g} times the bytes of a full verifier's weight",
            f"gamma {self.gamma} and {self.skip_ratio:.0%} of the layers skipped, where the paper's row says no other",
            "ceiling: every draft accepted and no full pass; with a bonus token the paper's Alg. 1 has one more token "
            "a block than it says",
            "faster_cascades is taken at the same gamma as speculative decoding; BiLD, SWIFT and CLaSp choose their "
            "draft lengths, so theirs is the limit of long blocks; SWIFT and CLaSp draft with as many layers skipped",
            "at its rejection: the share of drafts kept is 1 - the published rejection, still without any full pass in "
            "three tiers and with a bonus token",
        ]


def plausibility(
    numbers: pd.DataFrame, shapes: Mapping[str, Shape], read_in: Mapping[str, str], assumed: Assumptions
) -> pd.DataFrame:
    """Every published speedup with the ceiling of its pair and method, a row each, in the paper's order.

    Columns: source, pair, method, task, temperature, published, origin, gamma, c, c_slim, ceiling (without bonus token
    where the method has three tiers), ceiling_bonus, at_rejection (the speedup that the published rejection allows),
    verdict, why.
    """
    keys = ["source", "pair", "method", "task", "temperature"]
    rejected = numbers[numbers["metric"] == "reject_rate"].set_index(keys)["value"]
    rejected = rejected[~rejected.index.duplicated()]
    rows = []
    for row in numbers[numbers["metric"] == "speedup"].to_dict("records"):
        rejection = rejected.get(tuple(row[key] for key in keys))
        found = judged(row["method"], row["pair"], row["value"], rejection, shapes, assumed)
        memory = [model for model in PAIRS[row["pair"]] if read_in[model].startswith("from memory")]
        note = f"shape from memory: {', '.join(memory)}" if memory else ""
        why = "; ".join(part for part in (str(found.pop("why")), note) if part)
        identity = {key: row[key] for key in keys} | {"published": row["value"], "origin": row["origin"]}
        rows.append(identity | found | {"why": why})
    return pd.DataFrame(rows)


def judged(
    method: str,
    pair: str,
    published: float,
    rejection: float | None,
    shapes: Mapping[str, Shape],
    assumed: Assumptions,
) -> dict[str, object]:
    """The ceiling of one published speedup, and on which side of it that lies."""
    drafter, full = (shapes[name] for name in PAIRS[pair])
    base, said = _parsed(method)
    gamma = int(said.get("gamma", assumed.gamma))
    skip = said["skip"] / 100 if "skip" in said else assumed.skip_ratio
    draft = weight_share(drafter, full, assumed.draft_bytes)
    slim = kept_share(full, skip)
    kept = None if rejection is None else 1 - rejection
    low = high = at = None
    why = OPEN.get(base, "")
    shown: float | None = None
    if base in TWO_TIERS:
        low = high = speculative_ceiling(gamma, draft)
        at = None if kept is None else speculative_speedup(kept, gamma, draft)
    elif base in ANY_LENGTH:
        low = high = speculative_ceiling(None, draft)
    elif base in SELF:
        draft = slim
        low = high = speculative_ceiling(None, slim)
    elif base in THREE_TIERS or base in INDEPENDENT:
        if base in INDEPENDENT:
            slim = shapes[INDEPENDENT[base]].read_weights() / full.read_weights()
        shown, costs = slim, Costs(draft, slim)
        low, high = ceiling(gamma, costs, bonus=0), ceiling(gamma, costs, bonus=1)
        at = None if kept is None else three_tier_speedup(tokens_per_block(kept, gamma, bonus=1), 0.0, gamma, costs)
    elif not why:
        why = "no model of its cost"
    return {
        "gamma": gamma,
        "c": draft,
        "c_slim": shown,
        "ceiling": low,
        "ceiling_bonus": high,
        "at_rejection": at,
        "verdict": _verdict(published, low, high, at),
        "why": why,
    }


def _parsed(method: str) -> tuple[str, dict[str, float]]:
    """``via_sd_alpha1=0.4_skip=35`` -> ``via_sd`` and its values."""
    said = {key: float(value) for key, value in re.findall(r"_([a-z0-9]+)=([\d.]+)", method)}
    return re.sub(r"_[a-z0-9]+=[\d.]+", "", method), said


def _verdict(published: float, low: float | None, high: float | None, at: float | None) -> str:
    if low is None or high is None:
        return "no ceiling"
    if published > high:
        return "above the ceiling"
    if at is not None and published > at:
        return "above what its rejection allows"
    return "above the ceiling without a bonus token" if published > low else "within"


VERDICTS = (
    "above the ceiling",
    "above what its rejection allows",
    "above the ceiling without a bonus token",
    "within",
    "no ceiling",
)


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """By table, pair and kind of method: values published, their range, c, c', ceilings, and how many lie where."""
    kinds = found.assign(method=[_parsed(method)[0] for method in found["method"]])
    rows = []
    for (source, pair, method), part in kinds.groupby(["source", "pair", "method"], sort=False):
        counts = part["verdict"].value_counts()
        rows.append(
            {
                "source": source,
                "pair": pair,
                "method": method,
                "values": len(part),
                "published": _span(part["published"]),
                "c": _span(part["c"]),
                "c'": _span(part["c_slim"]),
                "ceiling": _span(part["ceiling"]),
                "with bonus": _span(part["ceiling_bonus"]),
                **{verdict: int(counts.get(verdict, 0)) for verdict in VERDICTS},
            }
        )
    return pd.DataFrame(rows)


def _span(values: pd.Series) -> str:
    known = values.dropna()
    if known.empty:
        return DASH
    low, high = f"{known.min():.2f}", f"{known.max():.2f}"
    return low if low == high else f"{low} to {high}"


def markdown(found: pd.DataFrame, assumed: Assumptions, read_in: Mapping[str, str]) -> str:
    """The page: what is claimed, counts by verdict, the summary, the assumptions, where shapes were read."""
    counts = found["verdict"].value_counts()
    reasons = found[found["verdict"] == "no ceiling"][["method", "why"]].drop_duplicates("method")
    named = [part for pair in found["pair"].unique() for part in PAIRS[pair]]
    models = list(dict.fromkeys([*named, *INDEPENDENT.values()]))
    lines = [
        "# Published speedups beside their ceilings",
        "",
        f"{len(found)} speedups of arXiv 2606.12243, as printed or read off a plot. Arithmetic under the assumptions "
        "below; a value above its ceiling needs another assumption, which the paper does not state.",
        "",
        *(f"- {verdict}: {int(counts.get(verdict, 0))}" for verdict in VERDICTS),
        "",
        summary(found).to_markdown(index=False, disable_numparse=True),
        "",
        "Assumptions:",
        "",
        *(f"{place}. {line}." for place, line in enumerate(assumed.in_words(), 1)),
        "",
        "No ceiling:",
        "",
        *(f"- `{row.method}`: {row.why}" for row in reasons.itertuples()),
        "",
        "Shapes:",
        "",
        *(f"- `{model}`: {read_in[model]}" for model in models),
        "",
        "Every row, with its own c, c', ceilings and verdict, is in the CSV file beside this page.",
    ]
    return "\n".join(lines) + "\n"


def write(folder: Path, found: pd.DataFrame, page: str) -> Sequence[Path]:
    """``paper_plausibility.md`` and ``.csv`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / "paper_plausibility.md", folder / "paper_plausibility.csv")
    paths[0].write_text(page, encoding="utf-8")
    found.to_csv(paths[1], index=False, float_format="%.4f", lineterminator="\n")
    return paths
