"""Lossless methods equal plain greedy decoding token for token. CPU, float64, tiny random models."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import cycle

import pytest
import torch

from harness.decode import base as base_module
from harness.decode import speculative as speculative_module
from harness.decode import via_sd as via_sd_module
from harness.decode.accept import Draft, GreedyChooser, RandomChooser, Sampling, first_stop
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, Method, StopRule
from harness.decode.gate import AlwaysEscalate
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Drafter
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.self_skip import SelfSkip
from harness.model.cache import KVCache
from harness.model.load import Model
from harness.model.slim import LayerMask
from harness.model.tiers import Tiers
from harness.records import BlockTrace, Generation, StopReason
from tests.toys import (
    CPU,
    GREEDY,
    BytesOf,
    DrafterFactory,
    Mixed,
    Scripted,
    perturbed,
    scripted,
    shapes_unchecked,
    small_lm,
    tiers_of,
    tiny,
)

SEEDS = range(200)
VOCAB = 97
LAYERS = 3
CAPACITY = 96


@dataclass(frozen=True)
class Case:
    """One prompt to decode: ``want`` is the baseline's answer, ``script`` the prompt and its unstopped continuation."""

    seed: int
    gamma: int
    model: Model
    prompt: tuple[int, ...]
    script: tuple[int, ...]
    stop: StopRule
    want: Generation


def model_of(seed: int) -> Model:
    transformer = tiny(seed, LAYERS, layer_scale=0.4, vocab_size=VOCAB)
    return Model("tiny", transformer, BytesOf(VOCAB), LayerMask.of([0, 2], LAYERS), "test")


def decoded(method: Method, prompt: Sequence[int], stop: StopRule) -> Generation:
    decoder = Decoder(method)
    decoder.prefill(prompt)
    return decoder.decode(stop, GreedyChooser())


def baseline(model: Model, prompt: Sequence[int], stop: StopRule) -> Generation:
    return decoded(Autoregressive(tiers_of(model, CAPACITY), GREEDY), prompt, stop)


@cache
def case_of(seed: int) -> Case:
    """All lengths up to 64, mostly short ones; every gamma with every kind of stop; half of the cases end in an EOS."""
    rng = random.Random(seed)
    model = model_of(seed)
    prompt = tuple(rng.choices(range(5), k=rng.randint(1, 16)))  # few symbols, so that n-grams come again
    longest = 1 + round(63 * rng.random() ** 2)
    raw = baseline(model, prompt, StopRule(longest)).token_ids
    place = rng.randrange(longest)
    eos_ids = {
        2: {raw[place]},
        3: {raw[place], raw[rng.randrange(longest)]},
        4: {raw[0]},
        5: {raw[place], VOCAB + 1},
    }.get(seed % 8, set())
    stop_strings = (model.tokenizer.decode(raw[place : place + 2]),) if seed % 8 >= 6 else ()
    stop = StopRule(longest, frozenset(eos_ids), stop_strings, model.tokenizer.decode)
    want = baseline(model, prompt, stop)
    ends = [index for index, token in enumerate(raw) if token in eos_ids]
    if not stop_strings:
        assert want.token_ids == (raw[: ends[0] + 1] if ends else raw)
    return Case(seed, 1 + seed // 8 % 8, model, prompt, prompt + raw, stop, want)


def self_skip(case: Case) -> DrafterFactory:
    return lambda tiers, sampling, model: SelfSkip(tiers, sampling, model, mask=[0])


FAMILIES: dict[str, Callable[[Case], DrafterFactory]] = {
    "prompt_lookup": lambda case: PromptLookup,
    "self_skip": self_skip,
    "small_lm": lambda case: small_lm(perturbed(case.model.transformer, case.seed, noise=0.15, padding=7)),
    "scripted": lambda case: scripted(case.script, 0.3, VOCAB, case.seed),
}


def lossless_method(name: str, tiers: Tiers, model: Model, gamma: int, drafter: DrafterFactory) -> Method:
    if name == "speculative":
        return Speculative(tiers, GREEDY, model, gamma, drafter)
    return ViaSD(tiers, GREEDY, model, gamma, drafter, AlwaysEscalate())


METHODS = ("speculative", "via_sd")


@dataclass
class Observed:
    """What a sweep over cases saw."""

    unequal: list[int]
    kept: int
    examined: int
    stops: Counter[tuple[int, int]]


def sweep(method: str, family: str, seeds: Sequence[int] = SEEDS, every: int = 3) -> Observed:
    """Decode each case; every ``every``-th block is scripted, so that all stop positions come up.

    Kept and examined drafts are the family's own; ``stops`` counts (gamma, kept) over whole blocks of both.
    """
    observed = Observed([], 0, 0, Counter())
    cuts = {gamma: cycle(range(gamma + 1)) for gamma in range(1, 9)}
    for seed in seeds:
        case = case_of(seed)
        made: list[Mixed] = []

        def drafter(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
            inner = FAMILIES[family](case)(tiers, sampling, model)  # noqa: B023
            made.append(Mixed(inner, case.script, every, cuts[case.gamma], VOCAB))  # noqa: B023
            return made[-1]  # noqa: B023

        with nullcontext() if seed < 40 else shapes_unchecked():
            tiers = tiers_of(case.model, CAPACITY)
            got = decoded(lossless_method(method, tiers, case.model, case.gamma, drafter), case.prompt, case.stop)
        if (got.token_ids, got.stop_reason) != (case.want.token_ids, case.want.stop_reason):
            observed.unequal.append(seed)
        for block, own in zip(got.blocks, made[0].own, strict=True):
            if own:
                observed.kept += block.kept
                observed.examined += len(block.routes)
        # The last block may have been cut by the stop rule, so it says nothing about verification.
        whole = [block for block in got.blocks[:-1] if block.drafted == case.gamma]
        observed.stops.update((case.gamma, block.kept) for block in whole)
    return observed


def test_the_cases_cover_lengths_ends_and_block_sizes() -> None:
    cases = [case_of(seed) for seed in SEEDS]
    ends = Counter(case.want.stop_reason for case in cases)
    assert 80 <= ends[StopReason.EOS] <= 120
    assert ends[StopReason.STOP_STRING] >= 40 and ends[StopReason.LENGTH] >= 40
    lengths = {case.stop.max_new_tokens for case in cases}
    assert min(lengths) == 1 and max(lengths) >= 62 and len(lengths) > 30
    assert max(len(case.want.token_ids) for case in cases) >= 60
    assert {case.gamma for case in cases if case.want.stop_reason is StopReason.EOS} == set(range(1, 9))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_lossless_methods_equal_autoregressive(method: str, family: str) -> None:
    observed = sweep(method, family)
    assert observed.unequal == []
    share = observed.kept / observed.examined
    print(method, family, share, min(observed.stops.values()))
    assert 0.1 < share < 0.9, f"{family} keeps {share:.2f} of its drafts: the comparison says too little"
    missing = {(g, kept) for g in range(1, 9) for kept in range(g + 1)} - observed.stops.keys()
    assert not missing, f"stop positions (gamma, kept) that never occurred: {sorted(missing)}"
