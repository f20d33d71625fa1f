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

from harness.compare import BASELINE
from harness.config import RunSettings
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder
from harness.decode.readings import readings
from harness.decode.slim import slim_facts, slim_notes
from harness.environment import environment, git_state
from harness.errors import UserError
from harness.execution.programs import permit
from harness.jobs.report import write_reports
from harness.log import Logger
from harness.measuring import measure, occupied
from harness.model.load import Model
from harness.model.tiers import GRAPH_STEP, Tiers
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
from harness.report.tables import build
from harness.rescore import fidelity_records
from harness.sampling import Sampling
from harness.scoring import with_companions
from harness.store import RunFolder, check_writable, new_run_id, read_config

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
    run = replace(run, pairing=settings.pairing)

    warn_of_load(run, screen)
    for line in slim_notes({name: decoder.method for name, decoder in decoders.items()}):
        screen.print(line, style="dim", highlight=False, markup=False)
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
        raise
    finally:
        log.close()
    warn_of_drafters(run, samples, screen)
    write_reports([replace(report, run=folder.run)], results / "tables", results / "figures", settings.name)
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
        **slim_facts(model, {name: decoder.method for name, decoder in decoders.items()}),
        "numerics": settings.numerics,
        "graphs": str(any(tier.graphs for decoder in decoders.values() for tier in decoder.method.tiers.every)).lower(),
    }
    if ours := readings({name: decoder.method for name, decoder in decoders.items()}):
        facts["readings"] = ours
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


def scored_again(
    settings: RunSettings,
    decoders: Mapping[str, Decoder],
    prompts: Sequence[Prompt],
    samples: Sequence[SampleRecord],
    screen: Console,
) -> Iterator[FidelityRecord]:
    """Every output, its text given: a pass of its own, when nothing is timed any more."""
    screen.print(f"scoring {sum(one.repeat == 0 for one in samples)} outputs again", style="dim")
    methods = {name: decoder.method for name, decoder in decoders.items()}
    for prompt in prompts:
        mine = [one for one in samples if (one.task, one.example_id, one.repeat) == (prompt.name, prompt.example.id, 0)]
        yield from fidelity_records(methods, prompt.ids, mine, settings.temperature)
