"""Decode every prompt of every task with every arm, interleaved; time, score, store, tabulate. Read top to bottom."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from harness.compare import BASELINE
from harness.config import RunSettings
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.slim import slim_facts
from harness.divergence import divergences
from harness.environment import environment, git_state
from harness.errors import UserError
from harness.execution.programs import permit, score
from harness.jobs.report import write_reports
from harness.log import Logger
from harness.model.load import Model
from harness.model.tiers import GRAPH_STEP, TierGroup, Tiers
from harness.prompts import Prompt, Task, gone_on, make_prompts
from harness.records import (
    SCHEMA,
    ArmRecord,
    DataSource,
    Divergence,
    FidelityRecord,
    Generation,
    RunRecord,
    SampleRecord,
)
from harness.report.tables import build
from harness.rescore import fidelity_records
from harness.sampling import RandomChooser, Sampling
from harness.scoring import METRICS, with_companions
from harness.store import RunFolder, check_writable, new_run_id, read_config
from harness.timing import Clock, peak_bytes, reset_peak, synced_clock, warm_up, without_asides

ENOUGH_BLOCKS = 50
"""Blocks with drafts from which on a drafter of which nothing is kept is warned of."""


def bench(
    settings: RunSettings,
    model: Callable[..., Model],
    methods: Mapping[str, partial[Any]],
    tasks: Mapping[str, Task],
    log: Logger,
    config: str,
    fidelity: bool = True,
) -> Path:
    """Run the comparison and return the run folder.

    The arm ``autoregressive`` is added where it is not listed: every speedup is against it, in the same run.
    ``fidelity``: score every output again with the full verifier, when all are decoded.

    Raises:
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
    verifier = model(notify=lambda line: screen.print(line, style="dim", highlight=False))
    prompts = [
        prompt for name, (found, _) in loaded.items() for prompt in make_prompts(verifier, name, tasks[name], found)
    ]
    decoders = build_arms(settings, verifier, methods, prompts)
    run = describe(settings, verifier, decoders, tasks, {name: source for name, (_, source) in loaded.items()}, prompts)

    warn_of_load(run, screen)
    screen.print(f"{len(prompts)} prompts, {len(decoders)} arms: {', '.join(decoders)}", style="dim", markup=False)
    folder = RunFolder.create(settings.results_dir, run, config)
    chosen = read_config(folder.path)
    samples: list[SampleRecord] = []
    differing: list[Divergence] = []
    try:
        log.start(run, chosen)
        for record in measure(settings, verifier, decoders, prompts, run.run_id, screen):
            folder.append(record)
            if isinstance(record, Divergence):
                differing.append(record)
            else:
                log.sample(record)
                samples.append(record)
        scored = list(scored_again(settings, decoders, prompts, samples, screen)) if fidelity else []
        for one in scored:
            folder.append(one)
        report = build(run, samples, chosen, divergences=differing, fidelity=scored)
        log.summary(report.rows)
        folder.finish({"samples": len(samples), "rows": report.rows, "scorers": report.scorers})
    except BaseException:
        folder.fail()
        log.close(failed=True)
        raise
    warn_of_drafters(run, samples, screen)
    try:
        reports = [replace(report, run=folder.run)]
        log.files(folder.path, write_reports(reports, results / "tables", results / "figures", settings.name))
    finally:
        log.close()
    screen.print(f"run folder {folder.path}", highlight=False, markup=False, soft_wrap=True)
    return folder.path


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


def build_arms(
    settings: RunSettings, model: Model, methods: Mapping[str, partial[Any]], prompts: Sequence[Prompt]
) -> dict[str, Decoder]:
    """A decoder for each arm, the baseline first; all take turns with one cache.

    Raises:
        UserError: a prompt that does not fit the model with its output, or what a method refuses.
    """
    sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
    largest = 1 + max([settings.gamma, *(method.keywords.get("gamma", 0) for method in methods.values())])
    room = settings.max_new_tokens + largest
    capacity = positions_needed(model, prompts, room, "max_new_tokens or gamma", settings.max_new_tokens)
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
) -> RunRecord:
    """The run's identity: everything a table must say beside its numbers."""
    commit, dirty = git_state()
    devices = model.transformer.devices
    facts = {
        "device": ", ".join(torch.cuda.get_device_name(d) if d.type == "cuda" else d.type for d in devices),
        "dtype": str(model.transformer.dtype).removeprefix("torch."),
        "threads": str(torch.get_num_threads()),
        "layers": str(model.transformer.spec.layers),
        **slim_facts(model, {name: decoder.method for name, decoder in decoders.items()}),
        "numerics": settings.numerics,
        "graphs": str(any(tier.graphs for decoder in decoders.values() for tier in decoder.method.tiers.every)).lower(),
    }
    return RunRecord(
        run_id=new_run_id(settings.run_name or settings.name),
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
        prompts_sha={
            name: hashlib.sha256("".join(p.sha for p in prompts if p.name == name).encode()).hexdigest()
            for name in tasks
        },
        task_metrics={name: with_companions(task.metrics) for name, task in tasks.items()},
        git_commit=commit,
        git_dirty=dirty,
        env=environment() | facts,
        status="running",
    )


def measure(
    settings: RunSettings,
    model: Model,
    decoders: Mapping[str, Decoder],
    prompts: list[Prompt],
    run_id: str,
    screen: Console,
) -> Iterator[SampleRecord | Divergence]:
    """Warm up, then decode prompt by prompt with all arms, whose order turns and after each full turn is reversed.

    When all have decoded a prompt, what of the lossless arms differs from greedy is judged. A further turn of a
    conversation is put into ``prompts`` as it is decoded, with the baseline's answer to the turn before.
    """
    devices = model.transformer.devices
    clock = synced_clock(model.transformer.device)  # the last one: it has the logits, so the others are done by then
    largest = 1 + max(getattr(decoder.method, "gamma", 0) for decoder in decoders.values())
    names = list(decoders)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=screen) as progress:
        bar = progress.add_task("warming up", total=len(prompts) * len(names))
        for decoder in decoders.values():
            warm(decoder, largest, settings.max_new_tokens)
        answers: dict[tuple[str, str], tuple[Prompt, str]] = {}
        for index in range(len(prompts)):
            prompts[index] = prompt = gone_on(model, prompts[index], answers, settings.max_new_tokens)
            for name, decoder in decoders.items():  # the first prefill of a length is slower; nobody is timed on it
                if name == BASELINE or len(decoder.method.tiers.prefilled) > 1:
                    decoder.prefill(prompt.ids)
            turn, place = divmod(index, len(names))
            order = names[place:] + names[:place]
            decoded: dict[str, SampleRecord] = {}
            for name in reversed(order) if turn % 2 else order:
                progress.update(bar, description=f"{prompt.name}, {name}")
                stop = StopRule(settings.max_new_tokens, model.tokenizer.eos_ids, prompt.stop, model.tokenizer.decode)
                reset_peak(*devices)
                generation, prefill_s, decode_s = timed(
                    decoders[name], prompt.ids, stop, seed_of(settings.seed, prompt), clock
                )
                text = visible_text(model, prompt.stop, generation)
                prediction, scores = scored(prompt, text)
                decoded[name] = SampleRecord(
                    run_id=run_id,
                    arm=name,
                    task=prompt.name,
                    example_id=prompt.example.id,
                    prompt_tokens=len(prompt.ids),
                    input_cut=prompt.input_cut,
                    prompt_sha=prompt.sha,
                    text=text,
                    prediction=prediction,
                    references=prompt.example.references,
                    scores=scores,
                    prefill_s=prefill_s,
                    decode_s=decode_s,
                    peak_bytes=peak_bytes(*devices),
                    generation=generation,
                )
                yield decoded[name]
                progress.advance(bar)
            answers[prompt.name, prompt.example.id] = (prompt, decoded[BASELINE].text)
            if settings.temperature == 0:
                exact = [decoded[name] for name in names if name != BASELINE and decoders[name].method.lossless]
                noise = 0.0 if settings.numerics == "fixed_shape" else None
                yield from divergences(decoders[BASELINE].method.tiers, prompt.ids, decoded[BASELINE], exact, noise)


def scored(prompt: Prompt, text: str) -> tuple[str, dict[str, float | None]]:
    """What is scored of an output, and its scores. Programs run here, when no clock runs, and are gone on return."""
    task, example = prompt.task, prompt.example
    metrics = with_companions(task.metrics)
    executes = any(METRICS[name].executes for name in metrics)
    prediction = task.program(example, text) if executes else task.prediction(text)
    return prediction, score(metrics, prediction, example)


def scored_again(
    settings: RunSettings,
    decoders: Mapping[str, Decoder],
    prompts: Sequence[Prompt],
    samples: Sequence[SampleRecord],
    screen: Console,
) -> Iterator[FidelityRecord]:
    """Every output, its text given: a pass of its own, when nothing is timed any more."""
    screen.print(f"scoring {len(samples)} outputs again", style="dim")
    methods = {name: decoder.method for name, decoder in decoders.items()}
    for prompt in prompts:
        mine = [one for one in samples if (one.task, one.example_id) == (prompt.name, prompt.example.id)]
        yield from fidelity_records(methods, prompt.ids, mine, settings.temperature)


def warm(decoder: Decoder, largest: int, new_tokens: int) -> None:
    """Every shape this arm may run; a verifier behind a slim one may have to catch up with all new tokens."""
    method = decoder.method
    _, slim = method.tier_roles()
    lagging = slim.tiers[1:] if isinstance(slim, TierGroup) else ()
    drafter = getattr(method, "drafter", None)
    chooser = RandomChooser(0, method.tiers.model.device)
    draft = drafter and (lambda tokens, count: drafter.draft(tokens, count, chooser))
    warm_up(method.tiers, largest, new_tokens if slim else 0, draft, lagging)


def timed(
    decoder: Decoder, prompt: Sequence[int], stop: StopRule, seed: int, clock: Clock
) -> tuple[Generation, float, float]:
    """One prompt through one arm: the generation, seconds of prefill, seconds of decoding."""
    method = decoder.method
    chooser = RandomChooser(seed, method.tiers.model.device)
    read = without_asides(clock, method.tiers)
    begun = read()
    decoder.prefill(prompt)
    filled = read()
    generation = decoder.decode(stop, chooser)
    return generation, filled - begun, read() - filled


def seed_of(seed: int, prompt: Prompt) -> int:
    """A seed for this prompt's draws that depends neither on the order of prompts nor on the arm."""
    digest = hashlib.sha256(f"{seed}/{prompt.name}/{prompt.example.id}".encode()).digest()
    return int.from_bytes(digest[:7])


def visible_text(model: Model, stop: Sequence[str], generation: Generation) -> str:
    """The output as text, up to the first stop string."""
    text = model.tokenizer.decode(generation.token_ids)
    ends = [place for end in stop if (place := text.find(end)) >= 0]
    return text[: min(ends)] if ends else text
