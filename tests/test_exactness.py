"""Lossless methods equal plain greedy decoding token for token. CPU, float64, tiny random models."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle

import pytest
import torch

from harness.decode import rule as rule_module
from harness.decode import via_sd as via_sd_module
from harness.decode.accept import first_stop
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, Method, StopRule
from harness.decode.block_verification import BlockVerification
from harness.decode.gate import AlwaysEscalate
from harness.decode.lossy import Lossy
from harness.decode.rule import Lossless, Rule
from harness.decode.sets import MinP
from harness.decode.speculative import Speculative
from harness.decode.truncated import Truncated
from harness.decode.typical import Typical
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Drafter
from harness.drafters.early_exit import EarlyExit
from harness.drafters.graft import Graft
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.retrieval import Retrieval
from harness.drafters.self_skip import SelfSkip
from harness.model.cache import KVCache
from harness.model.load import Model
from harness.model.slim import LayerMask
from harness.model.tiers import Tiers
from harness.records import BlockTrace, Generation, StopReason
from harness.sampling import RandomChooser, Sampling
from tests.toys import (
    CPU,
    GREEDY,
    BytesOf,
    DrafterFactory,
    Mixed,
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
CHECKED = 16
"""Tensor shapes are checked in the cases of the first seeds only; the checks take more time than the models."""


@dataclass(frozen=True)
class Case:
    """One prompt to decode: ``want`` is the baseline's answer, ``script`` the prompt and its unstopped continuation."""

    seed: int
    gammas: tuple[int, int]
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
    return decoder.decode(stop, RandomChooser(0, CPU))


def baseline(model: Model, prompt: Sequence[int], stop: StopRule) -> Generation:
    return decoded(Autoregressive(tiers_of(model, CAPACITY), GREEDY), prompt, stop)


@cache
def case_of(seed: int) -> Case:
    """All lengths up to 64, mostly short ones; every gamma with every kind of stop; half of the cases end in an EOS."""
    rng = random.Random(seed)
    model = model_of(seed)
    prompt = tuple(rng.choices(range(5), k=rng.randint(1, 16)))  # few symbols, so that n-grams come again
    longest = 1 + round(63 * rng.random() ** 2)
    with shapes_unchecked():
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
    with nullcontext() if seed < CHECKED else shapes_unchecked():
        want = baseline(model, prompt, stop)
    ends = [index for index, token in enumerate(raw) if token in eos_ids]
    if not stop_strings:
        assert want.token_ids == (raw[: ends[0] + 1] if ends else raw)
    gamma = 1 + seed // 8 % 8
    return Case(seed, (gamma, 9 - gamma), model, prompt, prompt + raw, stop, want)


def self_skip(case: Case) -> DrafterFactory:
    return lambda tiers, sampling, model: SelfSkip(tiers, sampling, model, mask=[0])


FAMILIES: dict[str, Callable[[Case], DrafterFactory]] = {
    "prompt_lookup": lambda case: PromptLookup,
    "retrieval": lambda case: Retrieval,
    "graft": lambda case: partial(Graft, inner=self_skip(case), retrieval=Retrieval, threshold=0.5),
    "self_skip": self_skip,
    "early_exit": lambda case: partial(EarlyExit, layers=2),
    "small_lm": lambda case: small_lm(perturbed(case.model.transformer, case.seed, noise=0.15, padding=7)),
    "scripted": lambda case: scripted(case.script, 0.3, VOCAB, case.seed),
}


RULES: dict[str, Callable[[Sampling], Rule]] = {
    "speculative": Lossless,
    "block_verification": BlockVerification,
    "lossy": Lossy,
    "typical": Typical,
    "truncated": partial(Truncated, kept=MinP()),
}
"""The rules of the two-tier method that are lossless in greedy decoding."""


def lossless_method(
    name: str, tiers: Tiers, model: Model, gamma: int, drafter: DrafterFactory, sampling: Sampling = GREEDY
) -> Method:
    if name in RULES:
        return Speculative(tiers, sampling, model, gamma, drafter, rule=RULES[name])
    return ViaSD(tiers, sampling, model, gamma, drafter, AlwaysEscalate())


METHODS = ("speculative", "via_sd")


@dataclass
class Observed:
    """What a sweep over cases saw."""

    unequal: list[tuple[int, int]]
    kept: int
    examined: int
    stops: Counter[tuple[int, int]]


def sweep(method: str, family: str, seeds: Sequence[int] = SEEDS) -> Observed:
    """Decode each case with both gammas; every other block is scripted, so that all stop positions come up.

    Kept and examined drafts are the family's own; ``stops`` counts (gamma, kept) over whole blocks of both.
    """
    observed = Observed([], 0, 0, Counter())
    cuts = {gamma: cycle(range(gamma + 1)) for gamma in range(1, 9)}
    for case, gamma in ((case_of(seed), gamma) for seed in seeds for gamma in case_of(seed).gammas):
        made: list[Mixed] = []

        def drafter(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
            inner = FAMILIES[family](case)(tiers, sampling, model)  # noqa: B023
            made.append(Mixed(inner, case.script, cuts[gamma], VOCAB))  # noqa: B023
            return made[-1]  # noqa: B023

        with nullcontext() if case.seed < CHECKED else shapes_unchecked():
            tiers = tiers_of(case.model, CAPACITY)
            got = decoded(lossless_method(method, tiers, case.model, gamma, drafter), case.prompt, case.stop)
        if (got.token_ids, got.stop_reason) != (case.want.token_ids, case.want.stop_reason):
            observed.unequal.append((case.seed, gamma))
        for block, own in zip(got.blocks, made[0].own, strict=True):
            if own:
                observed.kept += block.kept
                observed.examined += len(block.routes)
        # The last block may have been cut by the stop rule, so it says nothing about verification.
        observed.stops.update((gamma, block.kept) for block in got.blocks[:-1] if block.drafted == gamma)
    return observed


def test_the_cases_cover_lengths_ends_and_block_sizes() -> None:
    cases = [case_of(seed) for seed in SEEDS]
    ends = Counter(case.want.stop_reason for case in cases)
    assert 80 <= ends[StopReason.EOS] <= 120
    assert ends[StopReason.STOP_STRING] >= 40 and ends[StopReason.LENGTH] >= 40
    lengths = {case.stop.max_new_tokens for case in cases}
    assert min(lengths) == 1 and max(lengths) >= 62 and len(lengths) > 30
    assert max(len(case.want.token_ids) for case in cases) >= 60
    assert {gamma for case in cases if case.want.stop_reason is StopReason.EOS for gamma in case.gammas} == set(
        range(1, 9)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_lossless_methods_equal_autoregressive(method: str, family: str) -> None:
    observed = sweep(method, family)
    assert observed.unequal == []
    share = observed.kept / observed.examined
    assert 0.1 < share < 0.9, f"{family} keeps {share:.2f} of its drafts: the comparison says too little"
    missing = {(g, kept) for g in range(1, 9) for kept in range(g + 1)} - observed.stops.keys()
    assert not missing, f"stop positions (gamma, kept) that never occurred: {sorted(missing)}"


BROKEN_SEEDS = range(24)


@pytest.mark.parametrize("family", ["self_skip", "scripted"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in METHODS])
def test_rules_that_are_lossless_when_greedy_equal_autoregressive(rule: str, family: str) -> None:
    """They share one greedy path, so that few cases of each show that it is taken; the whole sweep is above."""
    observed = sweep(rule, family, BROKEN_SEEDS)
    assert observed.unequal == []
    assert 0.1 < observed.kept / observed.examined < 0.9


def test_keeping_one_draft_too_many_breaks_equality(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in BROKEN_SEEDS:
        case_of(seed)
    assert sweep("speculative", "scripted", BROKEN_SEEDS).unequal == []
    for module in (rule_module, via_sd_module):
        monkeypatch.setattr(module, "first_stop", lambda kept: (first_stop(kept) + 1).clamp(max=len(kept)))
    for method in METHODS:
        assert len(sweep(method, "scripted", BROKEN_SEEDS).unequal) > 10


def test_one_stale_cache_entry_after_a_rollback_breaks_equality(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in BROKEN_SEEDS:
        case_of(seed)
    rollback = KVCache.rollback

    def forgetful(cache: KVCache, length: int) -> None:
        if 0 < length < cache.length:  # the last entry that stays is the one after it, of a token that was refused
            cache.keys[:, :, length - 1] = cache.keys[:, :, length]
            cache.values[:, :, length - 1] = cache.values[:, :, length]
        rollback(cache, length)

    monkeypatch.setattr(KVCache, "rollback", forgetful)
    for method in METHODS:
        assert len(sweep(method, "scripted", BROKEN_SEEDS).unequal) > 5


def test_the_baseline_equals_recomputing_everything_for_each_token() -> None:
    for seed in range(8):
        model = model_of(seed)
        tokens = [seed, 1, 2]
        got = baseline(model, tokens, StopRule(20)).token_ids
        for _ in range(20):
            cache = KVCache(model.transformer.spec, CAPACITY, torch.float64, CPU)
            logits = model.transformer.forward(torch.tensor(tokens), cache, range(LAYERS), rows=1)
            tokens.append(int(logits.argmax()))
        assert got == tuple(tokens[3:])


@cache
def varied(count: int) -> tuple[Model, tuple[int, ...], tuple[int, ...]]:
    """A model, a prompt, and its greedy continuation whose first ``count`` tokens all differ."""
    for seed in range(300, 400):
        model, prompt = model_of(seed), (1, 2, 3)
        output = baseline(model, prompt, StopRule(64)).token_ids
        if len(set(output[:count])) == count:
            return model, prompt, output
    raise AssertionError(f"no model in sight has {count} different tokens first")


@pytest.mark.parametrize("gamma", range(1, 9))
@pytest.mark.parametrize("method", METHODS)
def test_an_oracle_is_kept_whole_and_its_opposite_not_at_all(method: str, gamma: int) -> None:
    """Per step: the oracle gives gamma tokens, and a bonus in the two-tier method; the opposite gives 1."""
    model, prompt, output = varied(4)
    script, bonus = prompt + output, int(method == "speculative")
    length = 4 * (gamma + bonus)
    make = lossless_method(method, tiers_of(model, CAPACITY), model, gamma, scripted(script, 0.0, VOCAB, 0))
    oracle = decoded(make, prompt, StopRule(length))
    assert oracle.token_ids == output[:length]
    assert [trace(block) for block in oracle.blocks] == [(gamma, gamma, gamma, gamma, gamma + bonus, bonus, 1)] * 4

    make = lossless_method(method, tiers_of(model, CAPACITY), model, gamma, scripted(script, 1.0, VOCAB, 0))
    opposite = decoded(make, prompt, StopRule(12))
    assert opposite.token_ids == output[:12]
    assert [block.emitted for block in opposite.blocks] == [1] * 12
    asked = [min(gamma, 12 - start - bonus) for start in range(12)]
    assert [trace(block) for block in opposite.blocks] == [(n, n, min(n, 1), 0, 1, 0, 1) for n in asked]


def trace(block: BlockTrace) -> tuple[int, ...]:
    examined = len(block.routes)
    return block.asked, block.drafted, examined, block.kept, block.emitted, block.bonus, block.full_forwards


@pytest.mark.parametrize("gamma", range(1, 6))
@pytest.mark.parametrize("family", ["self_skip", "small_lm"])
@pytest.mark.parametrize("method", METHODS)
def test_the_full_model_as_its_own_drafter_is_kept_whole(method: str, family: str, gamma: int) -> None:
    for seed in (0, 1):
        case = case_of(seed)
        factory: DrafterFactory = small_lm(case.model.transformer)
        if family == "self_skip":
            factory = lambda tiers, sampling, model: SelfSkip(tiers, sampling, model, mask=range(LAYERS))  # noqa: E731
        made = lossless_method(method, tiers_of(case.model, CAPACITY), case.model, gamma, factory)
        got = decoded(made, case.prompt, StopRule(64))
        assert got.token_ids == baseline(case.model, case.prompt, StopRule(64)).token_ids
        assert sum(block.kept for block in got.blocks) == sum(block.drafted for block in got.blocks) > 30
        assert all(block.drafted == block.asked for block in got.blocks)


def test_a_drafting_models_cache_is_fresh_after_every_block() -> None:
    for seed in range(6):
        case = case_of(seed)
        small = perturbed(case.model.transformer, seed, noise=0.15, padding=7)
        tiers = tiers_of(case.model, CAPACITY)
        method = Speculative(tiers, GREEDY, case.model, 4, small_lm(small))
        tokens = list(case.prompt)
        tiers.prefill(tokens)
        while len(tokens) < len(case.prompt) + 40:
            tokens += method.step(tuple(tokens), 99, RandomChooser(0, CPU)).tokens
            tiers.rollback(len(tokens) - 1)
            tier = method.drafter.tier
            assert tier is not None and len(case.prompt) - 1 < tier.length < len(tokens)
            again = KVCache(small.spec, CAPACITY, torch.float64, CPU)
            small.prefill(torch.tensor(tokens[: tier.length]), again, range(LAYERS))
            for one, other in zip(tier.cache.layers, again.layers, strict=True):
                for ours, fresh in zip(one, other, strict=True):
                    assert torch.allclose(ours[:, : tier.length], fresh[:, : tier.length], atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_exactly_as_many_tokens_as_asked_come_out(method: str, family: str, length: int) -> None:
    for seed in range(8):
        case = case_of(seed)
        factory = FAMILIES[family](case)
        made = lossless_method(method, tiers_of(case.model, CAPACITY), case.model, 5, factory)
        got = decoded(made, case.prompt, StopRule(length))
        assert len(got.token_ids) == length and got.stop_reason is StopReason.LENGTH
        known = case.script[len(case.prompt) :][:length]
        assert got.token_ids[: len(known)] == known


@pytest.mark.parametrize("place", range(10))
@pytest.mark.parametrize("method", METHODS)
def test_an_eos_at_any_place_of_a_block_ends_it_there(method: str, place: int) -> None:
    """Also as the very first token, as bonus, and with several ids; what was cut off was never rejected."""
    gamma, bonus = 4, int(method == "speculative")
    model, prompt, output = varied(10)
    stop = StopRule(64, frozenset({output[place], VOCAB + 3}))
    made = lossless_method(method, tiers_of(model, CAPACITY), model, gamma, scripted(prompt + output, 0.0, VOCAB, 0))
    got = decoded(made, prompt, stop)
    assert got.token_ids == output[: place + 1] and got.stop_reason is StopReason.EOS
    assert got.token_ids == baseline(model, prompt, stop).token_ids
    emitted = place % (gamma + bonus) + 1
    kept = min(emitted, gamma)
    assert trace(got.blocks[-1]) == (gamma, gamma, kept, kept, emitted, int(emitted > gamma), 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [*METHODS, "block_verification"])
def test_sampling_the_likeliest_token_alone_is_greedy(method: str, family: str) -> None:
    sampling = Sampling(temperature=1.0, top_k=1)
    for seed in range(10):
        case = case_of(seed)
        tiers, factory = tiers_of(case.model, CAPACITY), FAMILIES[family](case)
        decoder = Decoder(lossless_method(method, tiers, case.model, 3, factory, sampling))
        decoder.prefill(case.prompt)
        assert decoder.decode(case.stop, RandomChooser(seed, CPU)).token_ids == case.want.token_ids


def outside(seed: int, method: str, sampling: Sampling, judged_by: Sampling) -> int:
    """How many tokens sampled with ``sampling`` have no mass under ``judged_by``."""
    case = case_of(seed)
    tiers, factory = tiers_of(case.model, CAPACITY), self_skip(case)
    made: Method = Speculative(tiers, sampling, case.model, 3, factory)
    if method == "via_sd":
        made = ViaSD(tiers, sampling, case.model, 3, factory, AlwaysEscalate())
    if method == "autoregressive":
        made = Autoregressive(tiers, sampling)
    decoder = Decoder(made)
    with nullcontext() if seed < 2 else shapes_unchecked():
        decoder.prefill(case.prompt)
        output = decoder.decode(StopRule(24), RandomChooser(seed, CPU)).token_ids
    fresh = tiers_of(case.model, CAPACITY)
    logits = fresh.full.forward((*case.prompt, *output[:-1]), rows=len(output))
    chosen = judged_by.warp(logits).gather(-1, torch.tensor(output)[:, None])
    return int((chosen == 0).sum())


@pytest.mark.parametrize("method", ["autoregressive", *METHODS])
def test_no_token_outside_the_top_p_set_is_ever_emitted(method: str) -> None:
    narrow, wide = Sampling(1.0, top_p=0.5), Sampling(1.0)
    assert sum(outside(seed, method, narrow, narrow) for seed in range(12)) == 0
    assert sum(outside(seed, method, wide, narrow) for seed in range(12)) > 20
