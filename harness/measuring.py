"""The measuring loop: each prompt through every arm, interleaved and timed, its output scored when no clock runs."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from harness.compare import BASELINE
from harness.config import RunSettings
from harness.decode.base import Decoder, StopRule
from harness.divergence import divergences
from harness.execution.programs import score
from harness.model.load import Model
from harness.model.tiers import TierGroup
from harness.prompts import Prompt, gone_on
from harness.records import Divergence, Generation, SampleRecord
from harness.sampling import RandomChooser
from harness.scoring import METRICS, with_companions
from harness.timing import Clock, peak_bytes, reset_peak, synced_clock, warm_up, without_asides


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
