"""Score slim verifiers at the same positions as the full one and a drafter; tabulate, draw. Read top to bottom."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import track

from harness.config import RunSettings
from harness.decode import slim
from harness.dimr import CalibrationText, calibration_text, check_margins
from harness.errors import UserError, unknown
from harness.jobs.bench import build_arms, describe
from harness.jobs.report import WIDTH
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.prompts import Prompt, Task, make_prompt
from harness.sampling import Sampling
from harness.slim_fidelity.figure import write_figure
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
from harness.slim_fidelity.records import FidelityRecord, FidelityRow, FidelitySum, SlimFacts
from harness.slim_fidelity.tables import console, write_tables
from harness.store import check_writable, write_measured

SOURCES: dict[str, Callable[..., slim.Slim]] = {
    "random": slim.at_random,
    "even": slim.even,
    "prefix": slim.prefix,
    "sublayers": slim.sublayers,
}


def fidelity(
    settings: RunSettings,
    model: Callable[..., Model],
    drafter: MakeDrafter,
    gate: object,
    tasks: Mapping[str, Task],
    config: str,
    sources: Sequence[str],
    skip_ratios: Sequence[float],
    caches: Sequence[str],
    masks: Sequence[str] | None,
    checkpoints: Sequence[str],
    alpha: float,
    beta: float,
    delta_alphas: Sequence[float],
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
    loaded = {name: task.load(settings.limit, settings.seed) for name, task in tasks.items()}
    verifier = model(notify=partial(screen.print, style="dim", highlight=False, markup=False, soft_wrap=True))
    makers = slims(verifier, sources, skip_ratios, caches, masks, checkpoints, settings.seed)
    check_makers(verifier, drafter, makers)
    prompts = [
        make_prompt(verifier, name, tasks[name], example) for name, (found, _) in loaded.items() for example in found
    ]
    arms = build_arms(settings, verifier, {}, prompts)
    run = describe(settings, verifier, arms, tasks, {name: source for name, (_, source) in loaded.items()}, prompts)
    record = FidelityRecord(
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


def check_makers(model: Model, drafter: MakeDrafter, makers: Sequence[tuple[str, MakeSlim]]) -> None:
    """Make everything once, so that what is refused is refused before anything is decoded.

    Raises:
        UserError: as the makers do, and for a drafter without a tier.
    """
    tiers = Tiers(model.transformer, model.transformer.new_cache(1))
    drafting_tier(drafter(tiers, Sampling(), model))
    for _, make in makers:
        make(tiers, model)


def kind_of(mask: str) -> str:
    """``results/masks/embedded_skip45_own.json`` -> ``mask embedded_own``: files of all ratios make one line."""
    return "mask " + re.sub(r"_skip\d+", "", Path(mask).name.removesuffix(".json"))


def with_text(
    record: FidelityRecord,
    prompt: Prompt,
    text: CalibrationText,
    model: Model,
    drafter: MakeDrafter,
    makers: Sequence[tuple[str, MakeSlim]],
    margins: Margins,
    block: int,
) -> FidelityRecord:
    """``record`` with what every slim verifier says of one text."""
    name, draft = draft_logits(text, model, drafter, block)

    def scored() -> Iterator[tuple[str, SlimFacts, Sequence[FidelitySum]]]:
        for kind, make in makers:
            facts, logits = slim_logits(text, model, make, kind, block)
            key = f"{kind}: {facts.source}, {facts.cache}"
            terms = quantities(text.full_logits, logits, draft, margins)
            yield key, facts, by_place(key, prompt.name, prompt.example.id, terms, block)

    known, sums = dict(record.slims), list(record.sums)
    for key, facts, found in scored():
        known[key] = facts
        sums += found
    return replace(record, drafter=name, slims=known, sums=tuple(sums))


def with_status(record: FidelityRecord, status: str) -> FidelityRecord:
    return replace(record, run=replace(record.run, status=status))


def report(record: FidelityRecord, numbers: Sequence[FidelityRow], results: Path, name: str) -> None:
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
