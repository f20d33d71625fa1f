"""Time every tier's forward, the memory's bandwidth, and decoding beside ``transformers``. Read top to bottom."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.compare import BASELINE
from harness.config import RunSettings
from harness.decode.base import Decoder
from harness.decode.slim import Slim, masked, only
from harness.decode.speculative import Speculative
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.small_lm import SmallLM, load_small
from harness.errors import UserError
from harness.jobs.bench import build_arms, describe, warn_of_load
from harness.jobs.report import WIDTH
from harness.measuring import occupied, seed_of, warm
from harness.model.load import Model
from harness.model.slim import evenly_spaced
from harness.model.tiers import GRAPH_STEP, Tier, Tiers
from harness.model.truncated import first_layers_folder, is_llama
from harness.prompts import AFTER, Prompt, Task, make_prompt
from harness.records import Example
from harness.speed.bandwidth import MIB, available_bytes, last_cache_bytes, matrix_bytes, time_products
from harness.speed.decoding import Arm, Item, OurArm, StockArm, decode_in_turn
from harness.speed.figure import write_figure
from harness.speed.forwards import first_layers, fitting, forwards_timed, time_forwards
from harness.speed.numbers import rows
from harness.speed.records import Comparison, SpeedRecord, SpeedRow
from harness.speed.stock import ASSISTANT, PLAIN, PROMPT_LOOKUP, Stock
from harness.speed.tables import console, write_tables
from harness.store import check_writable, write_measured
from harness.timing import Clock, synced_clock

LOOKUP, SMALL = "speculative + prompt_lookup", "speculative + small_lm"


@occupied
def speed(
    settings: RunSettings,
    model: Callable[..., Model],
    methods: Mapping[str, partial[Any]],
    slim: Callable[[Tiers, Model], Slim | Sequence[Slim]],
    tasks: Mapping[str, Task],
    config: str,
    prompts: int,
    repeats: int,
    blocks: Sequence[int],
    contexts: Sequence[int],
    draft_layers: int,
    self_skip: float | None,
    max_ngram: int,
    lookup_task: str,
    matrix_mib: int | None,
    transformers: bool,
) -> Path:
    """Measure; write ``speed/<run_id>.json``, tables and figure under ``results_dir``; return the path of the first.

    What each argument means stands in ``conf/job/speed.yaml``. ``methods`` are the arms whose time outside forwards
    and whose memory are reported, greedy and at ``settings.temperature``. ``slim`` makes the slim tier that is timed; a
    model without a mask has none.

    Raises:
        UserError: bad settings or anything missing, before the first measurement.
    """
    counts = {"prompts": prompts, "repeats": repeats, "draft_layers": draft_layers, "max_ngram": max_ngram}
    check(settings, counts | {"matrix_mib": 1 if matrix_mib is None else matrix_mib}, blocks, contexts)
    if not tasks:
        raise UserError("no task is chosen: write task=wmt14_de_en, or another of `python -m harness --help`.")
    screen = Console(stderr=True)
    say = partial(screen.print, style="dim", highlight=False, markup=False, soft_wrap=True)
    results = Path(settings.results_dir)
    for kind in ("speed", "tables", "figures"):
        check_writable(results / kind)

    loaded = {name: task.load(prompts, settings.seed) for name, task in tasks.items()}
    verifier = model(notify=say)
    examples = {name: found for name, (found, _) in loaded.items()}
    mix, lookup = prompts_of(verifier, tasks, examples, prompts, lookup_task)
    every = list({(prompt.name, prompt.example.id): prompt for prompt in (*mix, *lookup)}.values())
    used = {prompt.name: tasks[prompt.name] for prompt in every}

    draft, no_draft = draft_folder(verifier, draft_layers, say)
    pairs = comparisons(verifier, transformers, no_draft)
    arms = {**methods, **own_arms(settings.gamma, max_ngram, draft)}
    greedy = build_arms(replace(settings, temperature=0.0), verifier, arms, every)
    try:
        sampled = build_arms(settings, verifier, methods, every)
    except UserError as error:
        raise UserError(
            f"job=speed also samples, for which one of the methods is not made; leave it out: {error}"
        ) from error
    lengths, too_long = fitting(contexts, blocks, verifier.transformer.spec.max_positions)
    room = max((0, *lengths)) + max(blocks)
    tiers, timed, about = tiers_to_time(settings, verifier, slim, draft, draft_layers, self_skip, room)
    check_slim(about["slim"] if "slim" in timed else None, greedy)

    notes = [f"context {length}: left out, the model has no room for it and the largest block" for length in too_long]
    notes += [f"tier draft: left out, {no_draft}"] if "draft" not in timed else []
    notes += [f"prompt look-up on the mix: {lookup_task} is not among the tasks"] if lookup_task not in tasks else []
    asked = counts | {"blocks": blocks, "contexts": contexts, "self_skip": self_skip, "lookup_task": lookup_task}
    record = SpeedRecord(
        run=describe(settings, verifier, greedy, used, {name: loaded[name][1] for name in used}, every),
        settings=yaml.safe_load(config) | asked | {"limit": prompts},
        tiers=about,
        cache_bytes=last_cache_bytes(verifier.transformer.device),
        comparisons=pairs,
        notes=tuple(notes),
    )
    warn_of_load(record.run, screen)
    for line in notes:
        say(line)

    place = verifier.transformer.device
    plan = Plan(
        settings=settings,
        model=verifier,
        clock=synced_clock(place),
        matrix=matrix_mib * MIB if matrix_mib else matrix_bytes(record.cache_bytes, available_bytes(place)),
        repeats=repeats,
        tiers=tiers,
        timed=timed,
        shapes=(lengths, blocks),
        greedy=greedy,
        sampled=sampled,
        mix=items(mix, settings.seed),
        lookup=items(lookup, settings.seed),
        stock={pair.theirs for pair in pairs if pair.reason is None},
        draft=draft,
        max_ngram=max_ngram,
    )
    path = results / "speed" / f"{record.run.run_id}.json"
    try:
        for measured in measure(plan, record, screen):
            record = measured
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


def check(settings: RunSettings, counts: Mapping[str, int], blocks: Sequence[int], contexts: Sequence[int]) -> None:
    """Raises UserError for the first of the job's own settings that makes no sense."""
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"job.{name}={value}: want at least 1.")
    for name, sizes in (("blocks", blocks), ("contexts", contexts)):
        if not isinstance(sizes, Sequence) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise UserError(f"job.{name}={sizes}: want a list of whole numbers of at least 1, as in job.{name}=[1,6].")
    if settings.temperature == 0:
        raise UserError("temperature=0: want more than 0; it is for the arms that sample, each also runs greedily.")


def prompts_of(
    model: Model,
    tasks: Mapping[str, Task],
    examples: Mapping[str, Sequence[Example]],
    count: int,
    lookup_task: str,
) -> tuple[list[Prompt], list[Prompt]]:
    """``count`` prompts of all tasks in turn, and those of prompt look-up: of its task, else the same.

    A further turn of a conversation is left out: it would go on from an answer, and nothing is decoded yet.
    """
    made = {
        name: [make_prompt(model, name, tasks[name], one) for one in found if AFTER not in one.meta]
        for name, found in examples.items()
    }
    mix = [prompt for prompt in chain(*zip_longest(*made.values())) if prompt is not None]
    return mix[:count], made.get(lookup_task, mix[:count])


def own_arms(gamma: int, max_ngram: int, draft: Path | None) -> dict[str, partial[Any]]:
    """The arms that are compared with assisted decoding of ``transformers``, whatever ``methods`` are."""
    found = {LOOKUP: partial(Speculative, gamma=gamma, drafter=partial(PromptLookup, max_ngram=max_ngram))}
    if draft is not None:
        found[SMALL] = partial(Speculative, gamma=gamma, drafter=partial(SmallLM, path=str(draft)))
    return found


def draft_folder(model: Model, layers: int, say: Callable[[str], None]) -> tuple[Path | None, str]:
    """The folder of the verifier's first layers, or None and why there is none."""
    if layers >= model.transformer.spec.layers:
        return None, f"the model has no more than job.draft_layers={layers} layers"
    if model.folder is None:
        return None, f"{model.name} has no checkpoint folder"
    if not is_llama(model.folder):
        return None, "only a Llama is cut to its first layers"
    return first_layers_folder(model.folder, layers, say), ""


def comparisons(model: Model, wanted: bool, no_draft: str) -> tuple[Comparison, ...]:
    """What is compared with what, and why where it cannot be."""
    reason = None
    if not wanted:
        reason = "job.transformers=false"
    elif model.folder is None:
        reason = f"{model.name} has no checkpoint folder that transformers could read"
    elif len(model.transformer.devices) > 1:
        reason = "the model lies on several devices"
    return (
        Comparison("autoregressive", BASELINE, PLAIN, reason),
        Comparison("prompt look-up", LOOKUP, PROMPT_LOOKUP, reason),
        Comparison("small_lm", SMALL, ASSISTANT, reason or no_draft or None),
    )


def check_slim(timed: str | None, arms: Mapping[str, Decoder]) -> None:
    """Refuse a slim verifier that is not the one timed, ``timed`` as ``described`` has it.

    Raises:
        UserError: an arm has another than ``slim`` names.
    """
    for name, decoder in arms.items():
        for one in getattr(decoder.method, "slim_verifiers", ()):
            if described(one) != timed:
                raise UserError(
                    f"job=speed times the slim verifier that slim= names; {name} has another ({described(one)}): "
                    f"choose that one with slim=, or leave {name} out of method=."
                )


def described(slim: Slim) -> str:
    """What a slim tier runs, as the table has it."""
    return f"{slim.source}, over {'the same cache' if slim.cache == 'shared' else 'a cache of its own'}: {slim.layers}"


def tiers_to_time(
    settings: RunSettings,
    model: Model,
    slim: Callable[[Tiers, Model], Slim | Sequence[Slim]],
    draft: Path | None,
    draft_layers: int,
    self_skip: float | None,
    room: int,
) -> tuple[Tiers, dict[str, Tier], dict[str, str]]:
    """Tiers over one cache, those that are timed by name, and what each runs."""
    full = model.transformer
    depth = full.spec.layers
    block = 1 + settings.gamma if settings.numerics == "fixed_shape" else None
    tiers = Tiers(full, full.new_cache(room + (block or GRAPH_STEP)), block, settings.graphs)
    timed, about = {"full": tiers.full}, {"full": f"{depth} layers"}
    if not no_mask(model, slim):
        made = only(slim(tiers, model), "job=speed")
        timed["slim"], about["slim"] = made.tier, described(made)
    if draft_layers < depth:
        small = first_layers(full, draft_layers)
        if draft is not None:
            small, _ = load_small(draft, str(full.dtype).removeprefix("torch."), str(full.device))
        timed["draft"] = tiers.independent("draft", small)
        about["draft"] = f"the first {draft_layers} layers with a cache of their own"
        about["draft"] += ", weights not copied" if draft is None else ", as a checkpoint of its own"
    if self_skip is not None:
        kept = evenly_spaced(depth, self_skip).layers
        timed["self_skip"] = tiers.provisional("self_skip", kept)
        about["self_skip"] = f"{len(kept)} of the full verifier's layers, evenly spaced, over the same cache"
    return tiers, timed, about


def no_mask(model: Model, slim: Callable[[Tiers, Model], Slim | Sequence[Slim]]) -> bool:
    """Whether ``slim`` asks for the model's own mask, and it has none: then there is no slim tier to time."""
    arguments = getattr(slim, "keywords", {})
    named = any(arguments.get(key) is not None for key in ("mask", "skip_ratio"))
    return model.slim_mask is None and getattr(slim, "func", slim) is masked and not named


def items(prompts: Sequence[Prompt], seed: int) -> list[Item]:
    return [Item(one.name, one.example.id, one.ids, seed_of(seed, one)) for one in prompts]


@dataclass(frozen=True)
class Plan:
    """All that is made before the clock runs. ``stock``: the methods of ``transformers`` that are measured."""

    settings: RunSettings
    model: Model
    clock: Clock
    matrix: int
    repeats: int
    tiers: Tiers
    timed: Mapping[str, Tier]
    shapes: tuple[Sequence[int], Sequence[int]]
    greedy: Mapping[str, Decoder]
    sampled: Mapping[str, Decoder]
    mix: Sequence[Item]
    lookup: Sequence[Item]
    stock: Set[str]
    draft: Path | None
    max_ngram: int

    def prompts(self, arm: str) -> Sequence[Item]:
        return self.lookup if arm in (LOOKUP, PROMPT_LOOKUP) else self.mix

    def ours(self) -> list[OurArm]:
        """Each arm greedy, the configured ones also sampling, on every other prompt."""
        return [
            OurArm(
                name=name,
                sampled=decoders is self.sampled,
                decoder=decoder,
                prepare=partial(warm, decoder, 1 + getattr(decoder.method, "gamma", 0), self.settings.max_new_tokens),
                items=self.mix[::2] if decoders is self.sampled else self.prompts(name),
                max_new_tokens=self.settings.max_new_tokens,
                eos_ids=self.model.tokenizer.eos_ids,
                clock=self.clock,
            )
            for decoders in (self.greedy, self.sampled)
            for name, decoder in decoders.items()
        ]

    def theirs(self) -> list[StockArm]:
        """What there is to compare with. Loads the checkpoint once more."""
        if not self.stock or self.model.folder is None:
            return []
        full, gamma = self.model.transformer, self.settings.gamma
        assistant = self.draft if ASSISTANT in self.stock else None
        stock = Stock(
            self.model.folder, full.dtype, full.device, self.model.tokenizer.eos_ids, gamma, self.max_ngram, assistant
        )
        return [
            StockArm(name, stock, self.prompts(name), self.settings.max_new_tokens, self.clock)
            for name in stock.methods
        ]


def measure(plan: Plan, record: SpeedRecord, screen: Console) -> Iterator[SpeedRecord]:
    """The record after each part and each prompt."""
    full, (contexts, blocks) = plan.model.transformer, plan.shapes
    ours = plan.ours()
    decodes = sum(len(arm.items) for arm in ours) + sum(len(plan.prompts(name)) for name in plan.stock)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen) as progress:
        steps = forwards_timed(len(plan.timed), len(contexts), len(blocks), plan.repeats) + decodes
        bar = progress.add_task("memory bandwidth", total=steps)
        advance = partial(progress.advance, bar)
        products = time_products(full.dtype, full.device, plan.matrix, plan.repeats, plan.clock)
        yield (record := replace(record, products=tuple(products)))

        progress.update(bar, description="forwards")
        shapes = time_forwards(plan.tiers, plan.timed, contexts, blocks, plan.repeats, plan.clock, advance)
        yield (record := replace(record, forwards=tuple(shapes)))

        progress.update(bar, description="loading and warming up")
        arms: list[Arm] = [*ours, *plan.theirs()]
        for done in decode_in_turn(arms, advance):
            progress.update(bar, description="decoding")
            yield (record := replace(record, decodes=(*record.decodes, *done)))

        progress.update(bar, description="memory")
        yield replace(record, memory=tuple(arm.weigh(arm.items[0]) for arm in ours if not arm.sampled))


def with_status(record: SpeedRecord, status: str) -> SpeedRecord:
    return replace(record, run=replace(record.run, status=status))


def report(record: SpeedRecord, numbers: Sequence[SpeedRow], results: Path, name: str) -> None:
    """Print the tables; write them and the figure."""
    screen = Console()
    if not screen.is_terminal:
        screen.width = WIDTH
    for table in console(record, numbers):
        screen.print(table)
    paths = write_tables(record, numbers, results / "tables", name)
    paths += write_figure(record, numbers, results / "figures", name)
    for path in paths:
        screen.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
