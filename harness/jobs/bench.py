"""Decode every prompt of every task with every arm, interleaved; time, score, store, tabulate. Read top to bottom."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from harness import sweeps
from harness.cells import Cell, cell_of
from harness.claims import claimed
from harness.compare import BASELINE
from harness.config import RunSettings
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder
from harness.decode.readings import readings
from harness.decode.slim import slim_facts, slim_notes
from harness.environment import environment, git_state
from harness.errors import UserError
from harness.execution.programs import permit
from harness.jobs.models import loaded_once
from harness.jobs.report import Target, report_files, write_reports
from harness.log import Logger, NullLogger
from harness.measuring import measure, occupied
from harness.model.load import Model
from harness.model.tiers import GRAPH_STEP, Tiers
from harness.pairing import visits_a_prompt
from harness.prompts import Prompt, Task, make_prompts
from harness.records import (
    SCHEMA,
    ArmRecord,
    DataSource,
    Divergence,
    FidelityRecord,
    RunRecord,
    SampleRecord,
)
from harness.report.lines import build
from harness.report.load import load
from harness.rescore import fidelity_records
from harness.resume import begun_again, by_key, finished_or_begun, gone_on_with, key_of
from harness.sampling import Sampling
from harness.scoring import with_companions
from harness.store import RunData, RunFolder, check_writable, new_run_id, parsed, read_config

ENOUGH_BLOCKS = 50
"""Blocks with drafts from which on a drafter of which nothing is kept is warned of."""


@occupied
def bench(
    settings: RunSettings,
    model: Callable[..., Model],
    methods: Mapping[str, partial[Any]],
    tasks: Mapping[str, Task],
    log: Logger,
    config: str,
    fidelity: bool = True,
    rerun: bool = True,
) -> Path:
    """Run the comparison and return the run folder.

    One that is finished is not measured again, and one that was killed is gone on with. With ``rerun`` it is measured
    anew; only a run that ``rerun`` began and that was killed is gone on with. In a sweep tables and figures are left to
    its end.

    The arm ``autoregressive`` is added where it is not listed: every speedup is against it, in the same run.
    ``fidelity``: score every output again with the full verifier, when all are decoded.

    Raises:
        Busy: another process is measuring this very cell.
        UserError: whatever can be known to be missing or wrong before the first prompt is decoded.
    """
    screen = Console(stderr=True)
    if not tasks:
        raise UserError("no task is chosen: write task=wmt14_de_en, or another of `python -m harness --help`.")
    permit({name: task.metrics for name, task in tasks.items()}, settings.allow_code_execution)
    results = Path(settings.results_dir)
    for kind in ("runs", "tables", "figures"):
        check_writable(results / kind)
    loaded = {name: task.load(settings.limit, settings.seed) for name, task in tasks.items()}
    verifier = loaded_once(model, lambda line: screen.print(line, style="dim", highlight=False))
    prompts = [
        prompt for name, (found, _) in loaded.items() for prompt in make_prompts(verifier, name, tasks[name], found)
    ]
    capacity_of(settings, verifier, methods, prompts)  # refuses what does not fit before anything is written
    data = {name: source for name, (_, source) in loaded.items()}
    chosen = parsed(config)
    cell = cell_of(chosen, facts(verifier), data, prompts_sha(tasks, prompts), verifier.folder)
    with claimed(results, cell.key) as claim:
        finished, begun = (None, begun_again(results, cell.key)) if rerun else finished_or_begun(results, cell.key)
        if finished is not None:
            note("skipped", cell, finished.name)
            tell(screen, f"cell {cell.key} is finished: {finished} (rerun=true measures it again)")
            if sweeps.current() is None:
                write_reports([load(finished)], Target.below(results, settings.name))
            return finished
        decoders = build_arms(settings, verifier, methods, prompts)
        run = describe(settings, verifier, decoders, tasks, data, prompts, cell)
        run = replace(run, pairing=settings.pairing)
        warn_of_load(run, screen)
        for line in slim_notes({name: decoder.method for name, decoder in decoders.items()}):
            screen.print(line, style="dim", highlight=False, markup=False)
        screen.print(f"{len(prompts)} prompts, {len(decoders)} arms: {', '.join(decoders)}", style="dim", markup=False)
        if begun is None:
            folder, before = RunFolder.create(results, run, config), RunData(run, (), 0, ())
        else:
            folder, before = gone_on_with(begun, run, visits_a_prompt(settings.pairing, list(decoders)))
            chosen = read_config(folder.path)
            tell(screen, f"going on with {begun}, where {len(before.samples)} samples are")
        note("running", cell, folder.path.name)
        samples, differing, scored = list(before.samples), list(before.divergences), list(before.fidelity)
        judged = {key_of(one) for one in differing}
        try:
            log.start(folder.run, chosen)
            for sample in before.samples:
                log.sample(sample)
            done = by_key(before.samples)
            for record in measure(settings, verifier, decoders, prompts, folder.run.run_id, screen, done):
                if isinstance(record, Divergence) and key_of(record) in judged:
                    continue
                claim.check()
                folder.append(record)
                if isinstance(record, Divergence):
                    differing.append(record)
                else:
                    log.sample(record)
                    samples.append(record)
            for one in scored_again(settings, decoders, prompts, samples, screen, scored) if fidelity else ():
                claim.check()
                folder.append(one)
                scored.append(one)
            report = build(folder.run, samples, chosen, divergences=differing, fidelity=scored)
            claim.check()
            log.summary(report.rows)
            folder.finish({"cell": cell.key, "samples": len(samples), "rows": report.rows, "scorers": report.scorers})
        except BaseException as error:
            if claim.holds():  # else the folder is another process', which goes on there
                folder.fail(" ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":"))
            log.close(failed=True)
            raise
    warn_of_drafters(folder.run, samples, screen)
    reports = [replace(report, run=folder.run)]
    try:
        if sweeps.current() is None:
            log.files(folder.path, write_reports(reports, Target.below(results, settings.name)))
        elif not isinstance(log, NullLogger):  # the sweep's end writes the tables of all; a dashboard wants the cell's
            files = report_files(reports, Target.below(folder.path, settings.name))
            log.files(folder.path, files)
    finally:
        log.close()
    tell(screen, f"run folder {folder.path}")
    return folder.path


def tell(screen: Console, line: str) -> None:
    screen.print(line, highlight=False, markup=False, soft_wrap=True)


def note(state: str, cell: Cell, run_id: str) -> None:
    """In a sweep, write down which run its cell has become."""
    if (place := sweeps.current()) is not None:
        place.note(state, cell=cell.key, run_id=run_id)


def warn_of_load(run: RunRecord, screen: Console) -> None:
    """Say so when other programs are using the cores that the clock is about to run on."""
    load, cores = float(run.env.get("load_average", 0)), int(run.env["cores"])
    if load > cores / 2:
        screen.print(f"load average {load} on {cores} cores: timings will be noisy; the table shows it", style="yellow")


def warn_of_drafters(run: RunRecord, samples: Sequence[SampleRecord], screen: Console) -> None:
    """Say so when not one draft of an arm was ever kept, though there were many: chance does not look like that."""
    for arm in run.arms:
        blocks = [
            block for sample in samples if sample.arm == arm.arm for block in sample.generation.blocks if block.drafted
        ]
        if len(blocks) >= ENOUGH_BLOCKS and all(block.emitted == 1 for block in blocks):
            screen.print(
                f"{arm.arm}: mean_accept_length is 1.0 over {len(blocks)} drafted blocks: the drafter {arm.drafter} "
                "is broken or made for another model",
                style="yellow",
                markup=False,
            )


def positions_needed(model: Model, prompts: Sequence[Prompt], room: int, knob: str, answer: int = 0) -> int:
    """Positions of the longest prompt and ``room`` more, with ``answer`` for each answer that a prompt waits for.

    Raises:
        UserError: more than the model has; ``knob`` is the setting to lower.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.ids) + prompt.waits * answer)
    needed, most = len(longest.ids) + longest.waits * answer + room, model.transformer.spec.max_positions
    if needed > most:
        raise UserError(
            f"{longest.name}, example {longest.example.id}: prompt and output need {needed} positions, the "
            f"model has {most}; lower tasks.{longest.name}.max_input_tokens or {knob}."
        )
    return needed


def largest_block(settings: RunSettings, methods: Mapping[str, partial[Any]]) -> int:
    """Tokens of the longest block of any arm, one besides the drafted ones."""
    return 1 + max([settings.gamma, *(method.keywords.get("gamma", 0) for method in methods.values())])


def capacity_of(
    settings: RunSettings, model: Model, methods: Mapping[str, partial[Any]], prompts: Sequence[Prompt]
) -> int:
    """Positions that the arms' cache must have.

    Raises:
        UserError: a prompt that does not fit the model with its output.
    """
    room = settings.max_new_tokens + largest_block(settings, methods)
    return positions_needed(model, prompts, room, "max_new_tokens or gamma", settings.max_new_tokens)


def build_arms(
    settings: RunSettings, model: Model, methods: Mapping[str, partial[Any]], prompts: Sequence[Prompt]
) -> dict[str, Decoder]:
    """A decoder for each arm, the baseline first; all take turns with one cache.

    Raises:
        UserError: a prompt that does not fit the model with its output, or what a method refuses.
    """
    sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
    largest, capacity = largest_block(settings, methods), capacity_of(settings, model, methods, prompts)
    block = largest if settings.numerics == "fixed_shape" else None
    cache = model.transformer.new_cache(capacity + (block or GRAPH_STEP))  # the last block's padding has to fit too
    arms: dict[str, partial[Any]] = {BASELINE: partial(Autoregressive), **methods}
    return {
        name: Decoder(
            method(tiers=Tiers(model.transformer, cache, block, settings.graphs), sampling=sampling, model=model)
        )
        for name, method in arms.items()
    }


def describe(
    settings: RunSettings,
    model: Model,
    decoders: Mapping[str, Decoder],
    tasks: Mapping[str, Task],
    data: Mapping[str, DataSource],
    prompts: Sequence[Prompt],
    cell: Cell | None = None,
) -> RunRecord:
    """The run's identity: everything a table must say beside its numbers. Without a cell it is a run of another job."""
    commit, dirty = git_state()
    about_arms = {
        **slim_facts(model, {name: decoder.method for name, decoder in decoders.items()}),
        "numerics": settings.numerics,
        "graphs": str(any(tier.graphs for decoder in decoders.values() for tier in decoder.method.tiers.every)).lower(),
    }
    if ours := readings({name: decoder.method for name, decoder in decoders.items()}):
        about_arms["readings"] = ours
    return RunRecord(
        run_id=free_run_id(settings, cell),
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model.name,
        temperature=settings.temperature,
        seed=settings.seed,
        arms=tuple(
            ArmRecord(name, m.name, m.drafter_name, m.gate_name, m.lossless)
            for name, m in ((name, decoder.method) for name, decoder in decoders.items())
        ),
        data=data,
        prompts_sha=prompts_sha(tasks, prompts),
        task_metrics={name: with_companions(task.metrics) for name, task in tasks.items()},
        git_commit=commit,
        git_dirty=dirty,
        env=facts(model) | about_arms,
        status="running",
        cell=None if cell is None else cell.key,
        parts={} if cell is None else cell.parts,
        sweep=place.sweep if (place := sweeps.current()) is not None else None,
        prompts=len(prompts),
    )


def facts(model: Model) -> dict[str, str]:
    """The machine, the installed versions, and how the model runs on it."""
    devices = model.transformer.devices
    return environment() | {
        "device": ", ".join(torch.cuda.get_device_name(d) if d.type == "cuda" else d.type for d in devices),
        "dtype": str(model.transformer.dtype).removeprefix("torch."),
        "threads": str(torch.get_num_threads()),
        "layers": str(model.transformer.spec.layers),
    }


def prompts_sha(tasks: Iterable[str], prompts: Sequence[Prompt]) -> dict[str, str]:
    """A digest of each task's prompts."""
    return {
        name: hashlib.sha256("".join(p.sha for p in prompts if p.name == name).encode()).hexdigest() for name in tasks
    }


def free_run_id(settings: RunSettings, cell: Cell | None) -> str:
    """The id of a new run: of this second, or of the next one where the same cell was measured in it already."""
    time, runs = datetime.now(UTC), Path(settings.results_dir) / "runs"
    while True:
        run_id = new_run_id(settings.run_name or settings.name, time, None if cell is None else cell.key)
        if not (runs / run_id).exists():
            return run_id
        time += timedelta(seconds=1)


def scored_again(
    settings: RunSettings,
    decoders: Mapping[str, Decoder],
    prompts: Sequence[Prompt],
    samples: Sequence[SampleRecord],
    screen: Console,
    done: Sequence[FidelityRecord] = (),
) -> Iterator[FidelityRecord]:
    """First outputs but those ``done``, their text given: a pass of its own, when nothing is timed any more."""
    known = {key_of(one) for one in done}
    first = [one for one in samples if one.repeat == 0]
    screen.print(f"scoring {len(first)} outputs again", style="dim")
    methods = {name: decoder.method for name, decoder in decoders.items()}
    for prompt in prompts:
        mine = [one for one in first if (one.task, one.example_id) == (prompt.name, prompt.example.id)]
        if not {key_of(one) for one in mine} <= known:
            found = fidelity_records(methods, prompt.ids, mine, settings.temperature)
            yield from (one for one in found if key_of(one) not in known)
