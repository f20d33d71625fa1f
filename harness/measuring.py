"""The measuring loop: each prompt through every arm, interleaved and timed, its output scored when no clock runs."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial, wraps
from types import MappingProxyType
from typing import ParamSpec, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress

from harness import baselines, sweeps
from harness.cells import code_sha
from harness.compare import BASELINE
from harness.config import RunSettings
from harness.decode.base import Decoder, StopRule
from harness.divergence import divergences
from harness.environment import environment
from harness.execution.programs import score
from harness.live import Tally, columns
from harness.model.load import Model
from harness.model.tiers import TierGroup
from harness.model.transformer import Transformer
from harness.occupancy import occupying, usable_cores
from harness.pairing import Key, Visit, key_of, visits, visits_a_prompt
from harness.prompts import Prompt, gone_on
from harness.records import Divergence, Generation, SampleRecord
from harness.sampling import RandomChooser
from harness.scoring import METRICS, with_companions
from harness.timing import Clock, peak_bytes, reset_peak, synced_clock, warm_up, without_asides

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def measure(
    settings: RunSettings,
    model: Model,
    decoders: Mapping[str, Decoder],
    prompts: list[Prompt],
    run_id: str,
    screen: Console,
    done: Mapping[Key, SampleRecord] = MappingProxyType({}),
) -> Iterator[SampleRecord | Divergence]:
    """Warm up, then decode prompt by prompt with all arms, in the order that ``settings.pairing`` says.

    When all have decoded a prompt, what of the lossless arms differs from greedy is judged. A further turn of a
    conversation is put into ``prompts`` as it is decoded, with the baseline's answer to the turn before. What is
    ``done``, by task, example, arm and repeat, is neither decoded again nor yielded; its divergences may be.
    """
    devices = model.transformer.devices
    clock = synced_clock(model.transformer.device)  # the last one: it has the logits, so the others are done by then
    largest = 1 + max(getattr(decoder.method, "gamma", 0) for decoder in decoders.values())
    names = list(decoders)
    known = dict(done)
    alone = BASELINE if settings.pairing == "shared" else None  # decoded before all others: it splits no prompt
    begun_before = {(task, example) for task, example, arm, _ in done if arm != alone}
    tally, total = Tally(sweeps.progress()), len(prompts) * visits_a_prompt(settings.pairing, names)
    with occupying() as place, Progress(*columns(), console=screen) as progress:
        place.use(names_of(devices))
        bar = progress.add_task("warming up", total=total, completed=len(done), rates=tally.text)
        for decoder in decoders.values():
            warm(decoder, largest, settings.max_new_tokens)
        answers: dict[tuple[str, str], tuple[Prompt, str]] = {}

        def taken(visit: Visit, prompt: Prompt, last: bool) -> SampleRecord:
            """One decoding of a prompt, timed and scored; only from its last one does an arm learn."""
            progress.update(bar, description=f"{prompt.name}, {visit.arm}")
            stop = StopRule(settings.max_new_tokens, model.tokenizer.eos_ids, prompt.stop, model.tokenizer.decode)
            reset_peak(*devices)
            begun = place.begin()
            seed = seed_of(settings.seed, prompt)
            generation, prefill_s, decode_s = timed(decoders[visit.arm], prompt.ids, stop, seed, clock, last)
            contended = place.end(begun)
            text = visible_text(model, prompt.stop, generation)
            prediction, scores = scored(prompt, text)
            return SampleRecord(
                run_id=run_id,
                arm=visit.arm,
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
                repeat=visit.repeat,
                paired_with=visit.paired_with,
                contended=contended,
                resumed=(prompt.name, prompt.example.id) in begun_before,
            )

        def in_turn(index: int, order: Sequence[Visit]) -> Iterator[SampleRecord]:
            """Those visits to a prompt that are missing."""
            prompts[index] = prompt = gone_on(model, prompts[index], answers, settings.max_new_tokens)
            task, example = prompt.name, prompt.example.id
            missing = [visit for visit in order if (task, example, visit.arm, visit.repeat) not in known]
            for name in dict.fromkeys(visit.arm for visit in missing):
                # The first prefill of a length is slower; nobody is timed on it.
                if name == missing[0].arm or len(decoders[name].method.tiers.prefilled) > 1:
                    decoders[name].prefill(prompt.ids)
            last = {visit.arm: visit for visit in missing}
            for name in dict.fromkeys(visit.arm for visit in order if visit.arm not in last):
                learn_again(settings, model, decoders[name], prompt, known[task, example, name, 0])
            for visit in missing:
                record = known[task, example, visit.arm, visit.repeat] = taken(visit, prompt, visit is last[visit.arm])
                yield record
                progress.update(bar, completed=len(known), rates=tally.add(record))
            answers[task, example] = (prompt, known[task, example, BASELINE, 0].text)

        if settings.pairing == "shared":
            for task in dict.fromkeys(prompt.name for prompt in prompts):
                of_task = [index for index, prompt in enumerate(prompts) if prompt.name == task]
                identity = baseline_identity(settings, model, decoders[BASELINE], [prompts[index] for index in of_task])
                path = baselines.path_of(settings.results_dir, task, identity)
                with baselines.claimed(path, partial(dimly, screen)):
                    for record in baselines.stored(path, run_id) or ():
                        if key_of(record) not in known:
                            known[key_of(record)] = record
                            yield record
                    for index in of_task:
                        yield from in_turn(index, [Visit(BASELINE)])
                    made = [known[task, prompts[index].example.id, BASELINE, 0] for index in of_task]
                    baselines.store(path, made)
        for index in range(len(prompts)):
            yield from in_turn(index, visits(settings.pairing, names, index))
            if settings.temperature == 0:
                prompt = prompts[index]
                decoded = {name: known[prompt.name, prompt.example.id, name, 0] for name in names}
                exact = [decoded[name] for name in names if name != BASELINE and decoders[name].method.lossless]
                noise = 0.0 if settings.numerics == "fixed_shape" else None
                yield from divergences(decoders[BASELINE].method.tiers, prompt.ids, decoded[BASELINE], exact, noise)


def learn_again(settings: RunSettings, model: Model, decoder: Decoder, prompt: Prompt, sample: SampleRecord) -> None:
    """Bring a method, and its drafter, to what they knew after a prompt that another process has decoded."""
    if getattr(decoder.method, "learns_in_steps", False):
        stop = StopRule(settings.max_new_tokens, model.tokenizer.eos_ids, prompt.stop, model.tokenizer.decode)
        decoder.prefill(prompt.ids)
        decoder.decode(stop, RandomChooser(seed_of(settings.seed, prompt), decoder.method.tiers.model.device))
    else:
        decoder.method.finish((*prompt.ids, *sample.generation.token_ids))


def occupied(job: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A job with ``settings`` and ``model`` that has its cores from the loading of the model to its end.

    With ``cores=auto`` it also has a GPU to itself, where the model's device is left open and there is one.
    """
    signature = inspect.signature(job)

    @wraps(job)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        bound = signature.bind(*args, **kwargs)
        settings: RunSettings = bound.arguments["settings"]
        model = bound.arguments["model"]
        asked = getattr(model, "keywords", {})
        threads = asked.get("threads")
        open_device = asked.get("device") == "auto" and asked.get("devices") is None
        gpus = gpus_of_machine() if settings.cores == "auto" and open_device else {}
        notify = partial(dimly, Console(stderr=True))
        with occupying(settings.cores, threads, settings.exclusive, notify, list(gpus)) as place:
            if gpus:
                bound.arguments["model"] = partial(model, device=gpus[place.devices[0]])
            call = partial(job, *bound.args, **bound.kwargs)
            if settings.cores is None or threads is not None:
                return call()
            before = torch.get_num_threads()
            torch.set_num_threads(len(place.cores))  # more threads than cores would wait for each other
            try:
                return call()
            finally:
                torch.set_num_threads(before)

    return run


def dimly(screen: Console, line: str) -> None:
    screen.print(line, style="dim", highlight=False, markup=False)


def names_of(devices: Sequence[torch.device]) -> list[str]:
    """Devices beside the CPU, by what names them in every process of the machine."""
    return [f"GPU {torch.cuda.get_device_properties(one).uuid}" for one in devices if one.type == "cuda"]


def gpus_of_machine() -> dict[str, str]:
    """Every GPU that this process sees, by the name of ``names_of``, as ``model.device`` has it."""
    places = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return dict(zip(names_of(list(map(torch.device, places))), places, strict=True))


def baseline_identity(
    settings: RunSettings, model: Model, decoder: Decoder, prompts: Sequence[Prompt]
) -> dict[str, object]:
    """All that the baseline's outputs and times of one task depend on; ``prompts`` as they are before any answer."""
    tiers = decoder.method.tiers
    return {
        "machine": {key: value for key, value in environment().items() if key not in ("load_average", "cores")},
        "cores": len(usable_cores()),
        "devices": [*map(str, tiers.model.devices), *names_of(tiers.model.devices)],
        "threads": torch.get_num_threads(),
        "code": code_sha(),
        "model": [model.name, str(tiers.model.dtype), weights_sha(tiers.model)],
        "prompts": [(prompt.example.id, prompt.sha, list(prompt.stop)) for prompt in prompts],
        "metrics": [list(prompt.task.metrics) for prompt in prompts[:1]],
        "sampling": [settings.temperature, settings.top_p, settings.top_k, settings.seed, settings.max_new_tokens],
        "numerics": [settings.numerics, tiers.block, settings.graphs],
    }


def weights_sha(transformer: Transformer) -> str:
    """Digest of the sum of each tensor: a checkpoint that was replaced in place is another one."""
    weights = transformer.weights
    parts = [weights.embed, weights.norm, weights.head]
    parts += [
        tensor for layer in weights.layers for one in fields(layer) if (tensor := getattr(layer, one.name)) is not None
    ]
    sums = [(tuple(tensor.shape), float(tensor.sum(dtype=torch.float64))) for tensor in parts]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


def scored(prompt: Prompt, text: str) -> tuple[str, dict[str, float | None]]:
    """What is scored of an output, and its scores. Programs run here, when no clock runs, and are gone on return."""
    task, example = prompt.task, prompt.example
    metrics = with_companions(task.metrics)
    executes = any(METRICS[name].executes for name in metrics)
    prediction = task.program(example, text) if executes else task.prediction(text)
    return prediction, score(metrics, prediction, example)


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
    decoder: Decoder, prompt: Sequence[int], stop: StopRule, seed: int, clock: Clock, learn: bool = True
) -> tuple[Generation, float, float]:
    """One prompt through one arm: the generation, seconds of prefill, seconds of decoding."""
    method = decoder.method
    chooser = RandomChooser(seed, method.tiers.model.device)
    read = without_asides(clock, method.tiers)
    begun = read()
    decoder.prefill(prompt)
    filled = read()
    generation = decoder.decode(stop, chooser, learn)
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
