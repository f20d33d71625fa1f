"""Two runs, or two sweeps, on the same prompts: what differs in quality, in speed, and in how they were made.

Runs of two sweeps belong together when they agree in every setting that varies within either sweep, or else were
started with the same overrides. Samples are joined by task, example and arm where both runs have the same prompt;
predictions and ceilings alone are of all prompts of each run.
Differences are B's minus A's, ratios B's over A's; intervals are 95 % bootstraps over prompts, drawn jointly for both
runs. Times taken on different machines or days, or against a shared baseline, are drawn for each run by itself and
called unpaired. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.cells import EXCLUDED
from harness.compare import (
    BASELINE,
    Clock,
    Pairs,
    Samples,
    bootstrap,
    decode_seconds,
    divide,
    exact_sequence_share,
    output_tokens,
    paired,
    ratio_of_ratios,
    ratio_of_sums,
    total_seconds,
)
from harness.metrics import cells_of, complete_prompts
from harness.pairing import baseline_of
from harness.quality import Estimate, difference, quality
from harness.records import RunRecord, SampleRecord, commit_text
from harness.report.lines import build
from harness.report.predicted import CEILING, PREDICTED, Prediction
from harness.report.swept import flat, identity, is_copy, swept_keys
from harness.scoring import METRICS

UNTOLD = frozenset(key for key in EXCLUDED if key != "name")
"""Root keys of a config that say nothing of what was measured."""
MACHINE = ("cpu", "platform", "device", "cores", "threads")
"""Facts of a run's environment of which one that differs makes another machine."""
DECODE = "speedup_decode"
PAIRED, UNPAIRED = "paired", "unpaired across runs"


@dataclass(frozen=True)
class Side:
    """One run: its record, its samples, its config, and of a cell what of its overrides not all cells have."""

    run: RunRecord
    samples: Sequence[SampleRecord]
    config: Mapping[str, Any]
    overrides: str = ""

    @property
    def settings(self) -> dict[str, str]:
        """Dotted keys of the config with their values as text."""
        told = {key: value for key, value in self.config.items() if key not in UNTOLD}
        return {key: as_text(value) for key, value in flat(told).items()}


@dataclass(frozen=True)
class Compared:
    """One number of both runs. ``apart`` is B's minus A's, or B's over A's where ``is_ratio``; ``n`` common prompts."""

    cell: str
    task: str
    arm: str
    name: str
    unit: str
    n: int
    a: Estimate
    b: Estimate
    apart: Estimate
    is_ratio: bool
    pairing: str


def as_text(value: Any) -> str:
    """A setting as a config has it.

    >>> as_text(("a.json", "b.json"))
    '[a.json, b.json]'
    """
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


def matched(a: Sequence[Side], b: Sequence[Side]) -> tuple[list[tuple[str, Side, Side]], list[tuple[str, str]]]:
    """The runs that belong together, each with the settings that tell it from the others, and those left alone.

    First those that agree in every setting that varies within either side, then of the others those with the same
    overrides: what these mean may differ, as the masks of two models do. Of several runs of a side with the same
    settings the last one counts. Those left alone: ``A`` or ``B`` and the settings.
    """
    if len(a) == len(b) == 1:
        return [("", a[0], b[0])], []
    keys = sorted({key for sides in (a, b) for key in swept_keys([side.config for side in sides])})
    mine, theirs = ({label(side, keys): side for side in sides} for sides in (a, b))
    pairs = [(place, side, theirs[place]) for place, side in mine.items() if place in theirs]
    left, right = (
        {place: side for place, side in ours.items() if place not in others}
        for ours, others in ((mine, theirs), (theirs, mine))
    )
    by_overrides = {side.overrides: place for place, side in right.items() if side.overrides}
    for place, side in list(left.items()):
        if (same := by_overrides.pop(side.overrides, None)) is not None:
            pairs.append((side.overrides, left.pop(place), right.pop(same)))
    return pairs, [("A", place) for place in left] + [("B", place) for place in right]


def label(side: Side, keys: Sequence[str]) -> str:
    """What a run has at these settings."""
    found = identity(side.config)
    values = {key: as_text(found[key]) if key in found else "absent" for key in keys}
    return ", ".join(f"{key.removesuffix('._target_')}={value}" for key, value in values.items())


def differing(a: Side, b: Side) -> dict[str, tuple[str, str]]:
    """Settings and facts that differ, with A's value and B's; a dash stands for one that is absent."""
    found: dict[str, tuple[str, str]] = {}
    for mine, theirs in ((a.settings, b.settings), (facts(a.run), facts(b.run))):
        for key in sorted(mine.keys() | theirs.keys(), key=lambda key: (is_copy(key), key)):
            values = (mine.get(key, "-"), theirs.get(key, "-"))
            if values[0] != values[1] and not (is_copy(key) and values in copied_by(key, found)):
                found[key] = values
    return found


def copied_by(key: str, found: Mapping[str, tuple[str, str]]) -> list[tuple[str, str]]:
    """Values of the settings that an arm or a task holds at ``key`` as a copy: ``gate.alpha1`` of each arm's gate."""
    return [values for own, values in found.items() if key.endswith(f".{own}")]


def facts(run: RunRecord) -> dict[str, str]:
    """What a run was made with, its config aside: commit, day, machine, versions, and its prompts."""
    found = {"commit": commit_text(run.git_commit, run.git_dirty), "day": day(run), "status": run.status}
    found |= {f"machine: {key}": value for key, value in run.env.items() if key != "load_average"}
    found |= {f"prompts of {task}": sha[:12] for task, sha in run.prompts_sha.items()}
    return found | {f"data of {task}": source.kind for task, source in run.data.items()}


def day(run: RunRecord) -> str:
    return run.created[:10]


def pairing_of(a: RunRecord, b: RunRecord) -> str:
    """Whether times of the two can be paired: same machine, same day, and no baseline from elsewhere."""
    same = day(a) == day(b) and all(a.env.get(key) == b.env.get(key) for key in MACHINE)
    return PAIRED if same and "shared" not in (a.pairing, b.pairing) else UNPAIRED


def compared(label: str, a: Side, b: Side) -> tuple[list[Compared], list[str]]:
    """All numbers of arms and tasks that both runs have, and what had to be left out, in words."""
    cells = [
        {
            (task, arm): {one.example_id: one for one in found}
            for task, arm, found in cells_of(side.run, complete_prompts(side.run, side.samples))
        }
        for side in (a, b)
    ]
    notes = [
        f"{where}{task}, {arm}: only in {name}"
        for name, mine, theirs in (("A", *cells), ("B", *reversed(cells)))
        for task, arm in mine
        if (task, arm) not in theirs
        for where in [f"{label}: " if label else ""]
    ]
    found: list[Compared] = []
    predicted = [predicted_of(side) for side in (a, b)]
    bases = [{arm.arm: baseline_of(arm.arm, side.samples) for arm in side.run.arms} for side in (a, b)]
    for (task, arm), mine in cells[0].items():
        theirs = cells[1].get((task, arm))
        if theirs is None:
            continue
        common = [key for key in sorted(mine) if key in theirs and theirs[key].prompt_sha == mine[key].prompt_sha]
        if left := len(mine.keys() | theirs.keys()) - len(common):
            notes.append(f"{task}, {arm}: {left} prompts are not the same in both, or in one alone")
        if not common:
            continue
        ours, others = [mine[key] for key in common], [theirs[key] for key in common]
        against = [[one for one in known[arm] if one.task == task and one.example_id in common] for known in bases]
        identity = (label, task, arm)
        found += qualities(identity, a, ours, others)
        timed = speeds(identity, a, b, paired(ours, against[0]), paired(others, against[1]))
        said = [known.get((task, arm)) for known in predicted]
        found += [row for one in timed for row in (one, *(foretold(one, *said) if one.name == DECODE else ()))]
    return found, list(dict.fromkeys(notes))


def qualities(identity: tuple[str, str, str], side: Side, a: Samples, b: Samples) -> list[Compared]:
    """Each metric of both, and B's minus A's on the same prompts; then the share of equal outputs."""
    n, seed = len(a), side.run.seed
    pairs = list(zip(b, a, strict=True))
    found = []
    for name in side.run.task_metrics[identity[1]]:
        metric = METRICS[name]
        values = (quality(metric, a, seed), quality(metric, b, seed), difference(metric, pairs, seed))
        found.append(Compared(*identity, name, metric.unit, n, *values, False, PAIRED))
    same = Estimate(exact_sequence_share(pairs))
    return [
        *found,
        Compared(*identity, "equal_outputs", "share", n, Estimate(None), Estimate(None), same, False, PAIRED),
    ]


def speeds(identity: tuple[str, str, str], a: Side, b: Side, mine: Pairs, theirs: Pairs) -> list[Compared]:
    """Speedups over each run's own baseline and B's over A's, then tokens/s; nothing of timings that are contended."""
    seed, n, together = a.run.seed, len(mine), pairing_of(a.run, b.run)
    if any(one.contended for pair in (*mine, *theirs) for one in pair):
        mine, theirs = [], []

    def number(name: str, unit: str, rate: Any, sides: Sequence[np.ndarray]) -> Compared:
        mine_is, theirs_is, ratio = estimates(rate, sides, seed, a, b)
        return Compared(*identity, name, unit, n, mine_is, theirs_is, ratio, True, together)

    found = []
    for name, clock in ((DECODE, decode_seconds), ("speedup_end_to_end", total_seconds)):
        if identity[2] != BASELINE:
            found.append(number(name, "x", ratio_of_ratios, [columns(mine, clock), columns(theirs, clock)]))
    rates = [columns(pairs, decode_seconds)[:2] for pairs in (mine, theirs)]
    return [*found, number("decode_tokens_per_s", "tokens/s", ratio_of_sums, rates)]


def predicted_of(side: Side) -> dict[tuple[str, str], Prediction]:
    """What costs and traces of a run say of its speedups, by task and arm."""
    return build(side.run, complete_prompts(side.run, side.samples), side.config).prediction


def foretold(measured: Compared, a: Prediction | None, b: Prediction | None) -> list[Compared]:
    """What stands below a measured speedup: the predicted one and the ceiling, without intervals."""
    found = []
    for name, field in ((PREDICTED, "predicted"), (CEILING, "ceiling")):
        mine, theirs = (getattr(one, field, None) for one in (a, b))
        apart = None if mine is None or theirs is None else divide(theirs, mine)
        found.append(replace(measured, name=name, a=Estimate(mine), b=Estimate(theirs), apart=Estimate(apart)))
    return found


def columns(pairs: Pairs, clock: Clock) -> np.ndarray:
    """Array [4, n]: tokens and seconds of the method, tokens and seconds of its baseline."""
    rows = [(output_tokens(one), clock(one), output_tokens(base), clock(base)) for one, base in pairs]
    return np.array(rows, dtype=float).reshape(-1, 4).T


def estimates(rate: Any, sides: Sequence[np.ndarray], seed: int, a: Side, b: Side) -> list[Estimate]:
    """``rate(*columns)`` of A, of B, and B's over A's; ``sides``: their arrays [arguments, n].

    What was measured together is drawn together: with both runs paired all columns, else those of each run, and with a
    shared baseline the method's two and the baseline's two each by themselves.
    """
    n, wide = sides[0].shape[1], len(sides[0])
    if not n:
        return [Estimate(None)] * 3

    def ratio(*drawn: Any, axis: int = -1) -> Any:
        return rate(*drawn[wide:], axis=axis) / rate(*drawn[:wide], axis=axis)

    groups = [[place // 2 if side.run.pairing == "shared" else 0 for place in range(wide)] for side in (a, b)]
    apart = 0 if pairing_of(a.run, b.run) == PAIRED else 1 + max(groups[0])
    whole = np.concatenate(sides)
    wanted = [(rate, sides[0], groups[0]), (rate, sides[1], groups[1])]
    wanted.append((ratio, whole, [*groups[0], *(group + apart for group in groups[1])]))
    return [estimate(*one, seed) for one in wanted]


def estimate(rate: Any, table: np.ndarray, groups: Sequence[int], seed: int) -> Estimate:
    """``rate`` of the rows of ``table`` [arguments, n]; rows of one group are resampled by the same draw."""

    def drawn(*places: Any, axis: int = -1) -> Any:
        return rate(*(row[places[group].astype(int)] for row, group in zip(table, groups, strict=True)), axis=axis)

    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(rate(*table))
    places = np.array([np.arange(table.shape[1])] * (max(groups) + 1), dtype=float)
    low, high = bootstrap(drawn, places, seed, paired=False) or (None, None)
    return Estimate(value if np.isfinite(value) else None, None, low, high)
