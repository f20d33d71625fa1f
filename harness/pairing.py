"""Which arm decodes a prompt how often and in which order, and what times of its baseline a method is compared with.

* ``once``: each arm once, in an order that turns from prompt to prompt and is reversed after each full turn.
* ``abba1``: for each method baseline, method, method, baseline. Both have the same mean place in time, so a machine
  that becomes steadily slower or faster favours neither.
* ``abba3``: the same three times over.
* ``shared``: methods as in ``once``, against one baseline that was measured before, by this run or another one.

A visit is one decoding of a prompt by an arm. All visits of an arm write the same output, so quality, routes and tokens
are those of its first one; times are combined here and nowhere else. Imports no torch.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from harness.compare import BASELINE, output_tokens
from harness.errors import UserError
from harness.records import RunRecord, SampleRecord

ROUNDS = {"once": 0, "abba1": 1, "abba3": 3, "shared": 0}  # the names of harness.config.PAIRINGS
"""Times that baseline, method, method, baseline is gone through for each method and prompt."""

MEANING = {
    "once": "each arm decoded each prompt once, in turning order",
    "abba1": "baseline, method, method, baseline on each prompt; sums of both visits",
    "abba3": "baseline, method, method, baseline on each prompt, three times; sums of both visits, median of the three",
    "shared": "one baseline for all runs of this model, task and settings; speedups are unpaired, their intervals "
    "those of independent groups",
}

Key = tuple[str, str, str, int]
"""Task, example, arm and ``repeat``."""


@dataclass(frozen=True, slots=True)
class Visit:
    """``repeat`` and ``paired_with`` as in ``SampleRecord``."""

    arm: str
    repeat: int = 0
    paired_with: str | None = None


def visits(pairing: str, arms: Sequence[str], index: int) -> list[Visit]:
    """Who decodes prompt number ``index``, in order; ``arms`` has the baseline."""
    turn, place = divmod(index, len(arms))
    order = [*arms[place:], *arms[:place]]
    if turn % 2:
        order.reverse()
    methods = [arm for arm in order if arm != BASELINE]
    rounds = ROUNDS[pairing]
    if pairing == "shared":
        return [Visit(BASELINE), *map(Visit, methods)]
    if not rounds or not methods:
        return [Visit(arm) for arm in order]
    found: list[Visit] = []
    for count, method in enumerate(methods):
        for number in range(rounds):
            mine, base = 2 * number, 2 * (count * rounds + number)
            found += [Visit(BASELINE, base, method), Visit(method, mine)]
            found += [Visit(method, mine + 1), Visit(BASELINE, base + 1, method)]
    return found


def visits_a_prompt(pairing: str, arms: Sequence[str]) -> int:
    """Decodings of each prompt."""
    return len(visits(pairing, arms, 0))


def key_of(sample: SampleRecord) -> Key:
    return sample.task, sample.example_id, sample.arm, sample.repeat


def combined(samples: Sequence[SampleRecord]) -> SampleRecord:
    """Visits of one arm to one prompt as one record: its first one, with the times of all.

    Two visits after each other are a round. Its rate is the sum of both outputs over the sum of both times; seconds are
    those that the first output takes at this rate, and the median over rounds where there are several.
    """
    first, *others = ordered = sorted(samples, key=lambda one: one.repeat)
    if not others:
        return first
    rounds = [ordered[begin : begin + 2] for begin in range(0, len(ordered), 2)]
    spent = [one.generation.tier_s for one in ordered]
    tier_s = None
    if all(one is not None for one in spent):
        tiers = zip(
            *(scaled(part, [one.generation.tier_s or () for one in part], first) for part in rounds), strict=True
        )
        tier_s = tuple(median(tier) for tier in tiers)
    (decode_s,) = zip(*(scaled(part, [(one.decode_s,) for one in part], first) for part in rounds), strict=True)
    return replace(
        together(ordered),
        prefill_s=median(fmean(one.prefill_s for one in part) for part in rounds),
        decode_s=median(decode_s),
        generation=replace(first.generation, tier_s=tier_s),
    )


def scaled(part: Sequence[SampleRecord], seconds: Sequence[Sequence[float]], first: SampleRecord) -> tuple[float, ...]:
    """Sums of ``seconds`` over the visits of a round, for as many tokens as ``first`` has."""
    tokens = sum(output_tokens(one) for one in part)
    share = output_tokens(first) / tokens if tokens else 1 / len(part)
    return tuple(share * sum(column) for column in zip(*seconds, strict=True))


def together(samples: Sequence[SampleRecord]) -> SampleRecord:
    """The first of several visits, with what is true of all: the largest memory, and who else was measuring."""
    peaks = [one.peak_bytes for one in samples if one.peak_bytes is not None]
    seen = dict.fromkeys(one.contended for one in samples if one.contended)
    return replace(samples[0], peak_bytes=max(peaks, default=None), contended="; ".join(seen) or None)


def merged(samples: Iterable[SampleRecord]) -> list[SampleRecord]:
    """One record for each task, example and arm, in the order of first visits.

    A baseline that was measured for each method apart has the mean of these times.

    Raises:
        UserError: a visit occurs twice.
    """
    found: dict[tuple[str, str, str], dict[str | None, list[SampleRecord]]] = {}
    known: set[Key] = set()
    for one in samples:
        if key_of(one) in known:
            raise UserError(
                f"run {one.run_id}: example {one.example_id!r} measured twice for {one.arm!r} on "
                f"{one.task!r}: delete one line of samples.jsonl."
            )
        known.add(key_of(one))
        groups = found.setdefault((one.task, one.example_id, one.arm), defaultdict(list))
        groups[one.paired_with].append(one)
    return [mean_of([combined(group) for group in groups.values()]) for groups in found.values()]


def mean_of(samples: Sequence[SampleRecord]) -> SampleRecord:
    """Records of one output as one with their mean times."""
    first = min(samples, key=lambda one: one.repeat)
    if len(samples) == 1:
        return first
    spent = [one.generation.tier_s for one in samples if one.generation.tier_s is not None]
    tier_s = tuple(map(fmean, zip(*spent, strict=True))) if len(spent) == len(samples) else None
    return replace(
        together([first, *samples]),
        prefill_s=fmean(one.prefill_s for one in samples),
        decode_s=fmean(one.decode_s for one in samples),
        generation=replace(first.generation, tier_s=tier_s),
    )


def baseline_of(arm: str, samples: Iterable[SampleRecord]) -> list[SampleRecord]:
    """The baseline's records that ``arm`` is compared with, one for each task and example.

    Those of the visits that stand around its own where there are such, else those of the one baseline of all arms.
    """
    return merged(one for one in samples if one.arm == BASELINE and (arm == BASELINE or one.paired_with in (arm, None)))


def complete(pairing: str, arms: Sequence[str], samples: Sequence[SampleRecord]) -> list[SampleRecord]:
    """Samples of the prompts that every arm has decoded as often as it should."""
    wanted = {(one.arm, one.repeat) for one in visits(pairing, arms, 0)}
    done: dict[tuple[str, str], set[tuple[str, int]]] = defaultdict(set)
    for sample in samples:
        done[sample.task, sample.example_id].add((sample.arm, sample.repeat))
    return [sample for sample in samples if done[sample.task, sample.example_id] >= wanted]


def remarks(run: RunRecord, samples: Sequence[SampleRecord]) -> list[str]:
    """What a table must say of how its times came about: the pairing, and which times are none."""
    found = [f"pairing {run.pairing}: {MEANING.get(run.pairing, 'unknown to this version')}"]
    if origins := sorted({one.measured_in for one in samples if one.measured_in}):
        found.append(f"baseline measured in run {', '.join(origins)}")
    for (task, arm), mine in by_task_and_arm(samples).items():
        if reasons := dict.fromkeys(one.contended for one in mine if one.contended):
            count = sum(one.contended is not None for one in mine)
            found.append(
                f"{task}, {arm}: {count} of {len(mine)} timings contended ({'; '.join(reasons)}), so speeds that need "
                "them are dashes; rerun=true measures again"
            )
        outputs = defaultdict(set)
        for one in mine:
            outputs[one.example_id].add(one.generation.token_ids)
        if differing := sum(len(found) > 1 for found in outputs.values()):
            found.append(
                f"{task}, {arm}: {differing} of {len(outputs)} outputs differed between visits; the first counts"
            )
    return found


def by_task_and_arm(samples: Iterable[SampleRecord]) -> dict[tuple[str, str], list[SampleRecord]]:
    found: dict[tuple[str, str], list[SampleRecord]] = defaultdict(list)
    for sample in samples:
        found[sample.task, sample.arm].append(sample)
    return found
