"""Score slim verifiers at the same positions as the full one and a drafter; tabulate, draw. Read top to bottom."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track

from harness.config import RunSettings
from harness.decode import slim
from harness.dimr import CalibrationText, calibration_text, check_margins
from harness.errors import UserError, unknown
from harness.execution.programs import permit
from harness.jobs.bench import build_arms, describe
from harness.jobs.report import WIDTH
from harness.measuring import measure, occupied
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.prompts import AFTER, Prompt, Task, make_prompt
from harness.records import SampleRecord
from harness.sampling import Sampling
from harness.slim_fidelity.figure import write_figure
from harness.slim_fidelity.gains import TWO_TIERS
from harness.slim_fidelity.measure import (
    MakeDrafter,
    MakeSlim,
    Margins,
    by_place,
    draft_logits,
    drafting_tier,
    quantities,
    slim_logits,
)
from harness.slim_fidelity.numbers import rows
from harness.slim_fidelity.records import SlimFacts, SlimFidelityRecord, SlimFidelityRow, SlimFidelitySum
from harness.slim_fidelity.tables import console, write_tables
from harness.store import check_writable, write_measured

TIMED = ("all", "masks", "none")
MASK = "mask "
"""How the kinds of masks begin."""

THREE_TIERS = "via_sd"

SOURCES: dict[str, Callable[..., slim.Slim]] = {
    "random": slim.at_random,
    "even": slim.even,
    "prefix": slim.prefix,
    "sublayers": slim.sublayers,
}


@occupied
def fidelity(
    settings: RunSettings,
    model: Callable[..., Model],
    drafter: MakeDrafter,
    gate: object,
    tasks: Mapping[str, Task],
    methods: Mapping[str, partial[Any]],
    config: str,
    sources: Sequence[str],
    skip_ratios: Sequence[float],
    caches: Sequence[str],
    masks: Sequence[str] | None,
    checkpoints: Sequence[str],
    alpha: float,
    beta: float,
    delta_alphas: Sequence[float],
    speed: str,
    speed_prompts: int,
) -> Path:
    """Measure; write ``fidelity/<run_id>.json``, tables and figure under ``results_dir``; return the first's path.

    What each argument means stands in ``conf/job/fidelity.yaml``. Blocks have ``settings.gamma`` positions.

    Raises:
        UserError: bad settings or anything missing, before the first measurement.
    """
    check_margins(alpha, beta)
    margins = margins_of(gate, alpha, beta, delta_alphas)
    if not tasks:
        raise UserError("no task is chosen: write task=quick_four, or another of `python -m harness --help`.")
    screen = Console(stderr=True)
    results = Path(settings.results_dir)
    for kind in ("fidelity", "tables", "figures"):
        check_writable(results / kind)
    check_speed(speed, speed_prompts, methods)
    if speed != "none":
        permit({name: task.metrics for name, task in tasks.items()}, settings.allow_code_execution)
    loaded = {name: task.load(settings.limit, settings.seed) for name, task in tasks.items()}
    verifier = model(notify=partial(screen.print, style="dim", highlight=False, markup=False, soft_wrap=True))
    makers = slims(verifier, sources, skip_ratios, caches, masks, checkpoints, settings.seed)
    named = check_makers(verifier, drafter, makers)
    prompts = [
        make_prompt(verifier, name, tasks[name], example) for name, (found, _) in loaded.items() for example in found
    ]
    to_time = first_of_each(prompts, speed_prompts)
    arms = build_arms(settings, verifier, timed_methods(methods, named, speed), prompts)
    run = describe(settings, verifier, arms, tasks, {name: source for name, (_, source) in loaded.items()}, prompts)
    record = SlimFidelityRecord(
        run=replace(
            run, env={**run.env, "slim_mask": f"of {len(makers)} slim verifiers, see above", "slim_cache": "both"}
        ),
        settings=yaml.safe_load(config),
        drafter="",
        gate=str(getattr(gate, "name", gate)),
        slims={},
    )
    path = results / "fidelity" / f"{record.run.run_id}.json"
    try:
        for prompt in track(prompts, "scoring slim verifiers", console=screen):
            text = calibration_text(
                verifier.transformer, prompt.ids, settings.max_new_tokens, verifier.tokenizer.eos_ids
            )
            record = with_text(record, prompt, text, verifier, drafter, makers, margins, settings.gamma)
            write_measured(record, path)
        for sample in measure(settings, verifier, arms, to_time, record.run.run_id, screen) if len(arms) > 1 else ():
            if isinstance(sample, SampleRecord):
                record = replace(record, timed=(*record.timed, sample))
        write_measured(record, path)
    except BaseException:
        write_measured(with_status(record, "failed"), path)
        raise
    record = with_status(record, "finished")
    numbers = rows(record)
    write_measured(record, path, numbers)
    report(record, numbers, results, settings.name)
    screen.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    return path


def margins_of(gate: object, alpha: float, beta: float, delta_alphas: Sequence[float]) -> Margins:
    """Raises UserError for a gate that is not made of two thresholds on q'(v)/M', or alphas that are not two."""
    name = str(getattr(gate, "name", gate))
    accept_at, keep_at = getattr(gate, "accept_at", None), getattr(gate, "keep_at", None)
    if accept_at is None or keep_at is None:
        raise UserError(
            f"job=fidelity needs a gate with thresholds, and {name} has none: choose gate=strictness or gate=literal."
        )
    if len(delta_alphas) != 2 or not all(0 < value < 1 for value in delta_alphas):
        raise UserError(f"job.delta_alphas={list(delta_alphas)}: want [alpha1, alpha2], both between 0 and 1.")
    return Margins(alpha, beta, accept_at, keep_at, *delta_alphas)


def slims(
    model: Model,
    sources: Sequence[str],
    skip_ratios: Sequence[float],
    caches: Sequence[str],
    masks: Sequence[str] | None,
    checkpoints: Sequence[str],
    seed: int,
) -> list[tuple[str, MakeSlim]]:
    """Kind and maker of every slim verifier that is asked for, what is asked for twice once.

    Raises:
        UserError: an unknown source, or nothing to score.
    """
    for name in sources:
        if name not in SOURCES:
            raise unknown("job.sources", name, SOURCES)
    found: list[tuple[str, MakeSlim]] = []
    for cache in dict.fromkeys(caches):
        if masks is None and model.slim_mask is not None:
            found.append((kind_of(model.mask_name or "mask"), partial(slim.masked, cache=cache)))
        for mask in dict.fromkeys(masks or ()):
            found.append((kind_of(mask), partial(slim.masked, mask=mask, cache=cache)))
        for name in dict.fromkeys(sources):
            seeded = {"seed": seed} if name in ("random", "sublayers") else {}
            for ratio in dict.fromkeys(skip_ratios):
                found.append((name, partial(SOURCES[name], skip_ratio=ratio, cache=cache, **seeded)))
    for folder in dict.fromkeys(checkpoints):
        found.append((Path(folder).name, partial(slim.checkpoint, path=folder)))
    if not found:
        raise UserError("no slim verifier is asked for: give job.sources and job.skip_ratios, or job.masks.")
    return found


def check_makers(
    model: Model, drafter: MakeDrafter, makers: Sequence[tuple[str, MakeSlim]]
) -> dict[str, tuple[str, MakeSlim]]:
    """Make everything once, so that what is refused is refused before anything is decoded. Kinds and makers by name.

    Raises:
        UserError: as the makers do, and for a drafter without a tier.
    """
    tiers = Tiers(model.transformer, model.transformer.new_cache(1))
    drafting_tier(drafter(tiers, Sampling(), model))
    named = {}
    for kind, make in makers:
        made = make(tiers, model)
        named[name_of(kind, made.source, made.cache)] = (kind, make)
    return named


def name_of(kind: str, source: str, cache: str) -> str:
    """What a slim verifier is called in records."""
    return f"{kind}: {source}, {cache}"


def check_speed(speed: str, prompts: int, methods: Mapping[str, partial[Any]]) -> None:
    """Raises UserError for what cannot be timed."""
    if speed not in TIMED:
        raise unknown("job.speed", speed, TIMED)
    if prompts < 1:
        raise UserError(f"job.speed_prompts={prompts}: want at least 1; job.speed=none measures no gain.")
    lacking = [name for name in (TWO_TIERS, THREE_TIERS) if name not in methods]
    if speed != "none" and lacking:
        raise UserError(
            f"job=fidelity measures the gain of {THREE_TIERS} over {TWO_TIERS}, and method= lacks "
            f"{' and '.join(lacking)}: leave them in, or write job.speed=none."
        )


def timed_methods(
    methods: Mapping[str, partial[Any]], named: Mapping[str, tuple[str, MakeSlim]], speed: str
) -> dict[str, partial[Any]]:
    """Two tiers, and three with each slim verifier that is timed."""
    wanted = {"all": "", "masks": MASK, "none": None}[speed]
    chosen = {name: make for name, (kind, make) in named.items() if wanted is not None and kind.startswith(wanted)}
    if not chosen:
        return {}
    three = methods[THREE_TIERS]
    return {TWO_TIERS: methods[TWO_TIERS], **{name: partial(three, slim=make) for name, make in chosen.items()}}


def first_of_each(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first ``count`` prompts of every task; further turns of conversations are left out."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        mine = found.setdefault(prompt.name, [])
        if len(mine) < count and AFTER not in prompt.example.meta:
            mine.append(prompt)
    return [prompt for mine in found.values() for prompt in mine]


def kind_of(mask: str) -> str:
    """``results/masks/embedded_skip45_own.json`` -> ``mask embedded_own``: files of all ratios make one line."""
    return MASK + re.sub(r"_skip\d+", "", Path(mask).name.removesuffix(".json"))


def with_text(
    record: SlimFidelityRecord,
    prompt: Prompt,
    text: CalibrationText,
    model: Model,
    drafter: MakeDrafter,
    makers: Sequence[tuple[str, MakeSlim]],
    margins: Margins,
    block: int,
) -> SlimFidelityRecord:
    """``record`` with what every slim verifier says of one text."""
    name, draft = draft_logits(text, model, drafter, block)

    def scored() -> Iterator[tuple[str, SlimFacts, Sequence[SlimFidelitySum]]]:
        for kind, make in makers:
            facts, logits = slim_logits(text, model, make, kind, block)
            key = name_of(kind, facts.source, facts.cache)
            terms = quantities(text.full_logits, logits, draft, margins)
            yield key, facts, by_place(key, prompt.name, prompt.example.id, terms, block)

    known, sums = dict(record.slims), list(record.sums)
    for key, facts, found in scored():
        known[key] = facts
        sums += found
    return replace(record, drafter=name, slims=known, sums=tuple(sums))


def with_status(record: SlimFidelityRecord, status: str) -> SlimFidelityRecord:
    return replace(record, run=replace(record.run, status=status))


def report(record: SlimFidelityRecord, numbers: Sequence[SlimFidelityRow], results: Path, name: str) -> None:
    """Print the tables; write them and the figure."""
    screen = Console()
    if not screen.is_terminal:
        screen.width = WIDTH
    for table in console(record, numbers):
        screen.print(table)
    for path in (
        *write_tables(record, numbers, results / "tables", name),
        *write_figure(record, numbers, results / "figures", name),
    ):
        screen.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
