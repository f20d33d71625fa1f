"""SWIFT: the search by hand, scores against a fresh computation, the law, and a clock that may stand still."""

from contextlib import nullcontext

import pytest
import torch

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.swift import Plan, Swift
from harness.errors import UserError
from harness.model.load import Model
from harness.model.slim import LayerMask, Mask, SublayerMask
from harness.model.sublayers import skipping
from harness.model.tiers import Tier
from harness.proposals import Evaluation, search
from harness.sampling import RandomChooser, Sampling
from harness.timing import without_asides
from tests.arms import model_of
from tests.enumeration import exact_law, total_variation
from tests.toys import CPU, GREEDY, shapes_unchecked, tiers_of, tiny, tiny_model

PROMPT = (1, 2, 0)
SHORT = Plan(skip_ratio=0.25, context=3, bayes_every=None, steps=12, enough=1.0)


def made(model: Model, plan: Plan = SHORT, sampling: Sampling = GREEDY, clock: str = "inside") -> Swift:
    return Swift(tiers_of(model), sampling, model, 3, plan, clock=clock)


def written(method: Swift, length: int) -> tuple[int, ...]:
    decoder = Decoder(method)
    decoder.prefill(PROMPT)
    return decoder.decode(StopRule(length), RandomChooser(0, CPU)).token_ids


CASES = {"T=1": (Sampling(1.0), 3, 4), "5 tokens, top-k": (Sampling(1.3, top_k=2), 5, 5)}


@pytest.mark.parametrize("case", CASES)
def test_the_joint_law_is_the_full_verifiers_while_the_layers_change(case: str) -> None:
    sampling, vocab_size, new_tokens = CASES[case]
    model = tiny_model(3, kept=(0,), layer_scale=1.0, vocab_size=vocab_size, head_scale=1.0)
    plan = Plan(skip_ratio=0.25, context=1, bayes_every=None, steps=9, enough=1.0)
    used: set[tuple] = set()
    checked = False

    def law_of(make):
        def run(chooser) -> tuple[int, ...]:
            nonlocal checked
            with shapes_unchecked() if checked else nullcontext():
                checked = True
                method = make()  # a new one for every branch: the search remembers what came before
                decoder = Decoder(method)
                decoder.prefill(PROMPT)
                ids = decoder.decode(StopRule(new_tokens), chooser).token_ids
                used.update(
                    (tier.layers, getattr(tier.model, "mask", None))
                    for tier in method.tiers.others
                    if tier.name == "draft"
                )
                return ids

        return exact_law(run)

    want = law_of(lambda: Autoregressive(tiers_of(model), sampling))
    got = law_of(lambda: Swift(tiers_of(model), sampling, model, 1, plan))
    assert total_variation(got, want) < 1e-12
    assert len(used) > 1


def test_entries_left_behind_by_scoring_break_equality(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scored pass writes over committed entries; were they not put back, the full verifier would read them."""

    def outputs() -> list[tuple[int, ...]]:
        return [written(made(model_of(seed, torch.float64)), 40) for seed in range(8)]

    want = outputs()
    monkeypatch.setattr("harness.model.cache.KVCache.write", lambda cache, begin, entries: None)
    assert outputs() != want


MASKS: list[Mask] = [
    *(LayerMask.of(layers, 4) for layers in ((0, 3), (0, 1, 3), (0, 1, 2, 3))),
    SublayerMask.of((0, 2, 3), (0, 1, 3), 4),
]


@pytest.mark.parametrize("seed", range(4))
def test_a_score_is_the_share_of_right_tokens_and_leaves_the_cache_as_it_was(seed: int) -> None:
    model = model_of(seed, torch.float64)
    method = made(model)
    tokens = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    method.tiers.prefill(tokens)
    before = method.tiers.cache.read(0, len(tokens) - 1)
    for mask in MASKS:
        fresh = tiers_of(model)
        fresh.full.prefill(tokens[:2])
        tier = fresh.provisional("one", mask.layers, skipping(fresh.model, mask))
        said = tier.forward(tokens[:6], rows=4).argmax(-1).tolist()
        right = sum(one == other for one, other in zip(said, tokens[3:7], strict=True))
        method.known = tokens[:7], 3
        found = method.evaluated(mask)
        assert (found.agreement, found.cost, found.positions) == (right / 4, 1 - right / 4, 4)
        assert method.tiers.cache.length == len(tokens) - 1
        after = method.tiers.cache.read(0, len(tokens) - 1)
        for (keys, values), (old_keys, old_values) in zip(after, before, strict=True):
            assert torch.equal(keys, old_keys) and torch.equal(values, old_values)


def test_all_layers_score_all_of_a_greedy_text() -> None:
    model = model_of(1, torch.float64)
    method = made(model)
    text = PROMPT + written(made(model), 6)
    method.tiers.prefill(text)
    method.known = text, 3
    assert method.evaluated(LayerMask.of(range(4), 4)).agreement == 1.0


def scoring(scores: list[float], tried: list[Mask], method: Swift):
    """In place of ``Swift.evaluated``: given scores, in turn."""
    left = iter(scores)

    def evaluated(mask: Mask) -> Evaluation:
        text, prompt_length = method.known
        assert (prompt_length, len(text)) == (3, 3 + method.plan.context)
        tried.append(mask)
        score = next(left)
        return Evaluation(mask, 1 - score, score, method.plan.context, 0.0)

    return evaluated


def searched(plan: Plan, scores: list[float], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Mask], list[tuple], Swift]:
    """What was tried while a text was written, and the layers that each block was drafted with."""
    tried: list[Mask] = []
    drafting: list[tuple] = []
    method = made(tiny_model(2, kept=(0,)), plan)
    method.search = search(plan.over(4), scoring(scores, tried, method))
    draft = method.length.draft

    def noting(tokens, count, chooser):
        tier = method.skipping.tier
        drafting.append((tier.layers, getattr(tier.model, "mask", None)))
        return draft(tokens, count, chooser)

    monkeypatch.setattr(method.length, "draft", noting)
    written(method, 40)
    return tried, drafting, method


def without_repeats(choices: list[tuple]) -> list[tuple]:
    return [choice for index, choice in enumerate(choices) if index == 0 or choice != choices[index - 1]]


def test_the_best_choice_so_far_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores 0, .4, .4, .7, .2 in turn: the second and the fourth choice are taken, an equal one is not."""
    plan = Plan(skip_ratio=0.25, context=3, bayes_every=None, steps=5)
    tried, drafting, method = searched(plan, [0.0, 0.4, 0.4, 0.7, 0.2], monkeypatch)
    assert len(set(tried)) == 5 and method.ended and method.best == 0.7
    assert all(isinstance(mask, SublayerMask) for mask in tried)
    taken = [(mask.layers, mask) for mask in (tried[1], tried[3])]
    assert without_repeats(drafting) == [drafting[0], *taken]


@pytest.mark.parametrize(
    ("settings", "scores", "tried"),
    [
        ({"steps": 3}, [0.1, 0.2, 0.3], 3),
        ({"patience": 2}, [0.5, 0.4, 0.5], 3),
        ({"patience": 2}, [0.5, 0.4, 0.6, 0.1, 0.1], 5),
        ({"enough": 0.9}, [0.5, 0.9, 0.91], 3),
        ({"units": "layers", "skip_ratio": 0.25}, [0.1, 0.2], 2),  # two masks are all there are
    ],
)
def test_when_the_search_ends(settings: dict, scores: list[float], tried: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(**{"skip_ratio": 0.25, "context": 3, "bayes_every": None, **settings})
    found, drafting, method = searched(plan, scores, monkeypatch)
    assert len(found) == tried and method.ended and len(drafting) > tried + 3


def test_the_defaults_are_the_sources() -> None:
    plan = Plan().over(30)
    assert (plan.steps, plan.bayes_every, plan.patience, plan.units, plan.skip_ratio) == (
        1000,
        25,
        300,
        "sublayers",
        0.45,
    )


@pytest.mark.parametrize("clock", ["inside", "outside"])
def test_the_search_is_timed_or_not(clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks once a reading, and scoring that takes 100 ticks."""
    now = [0.0]

    def ticking() -> float:
        now[0] += 1
        return now[0]

    model = tiny_model(2, kept=(0,))
    method = made(model, SHORT, clock=clock)

    scored = 0

    def slow(mask: Mask) -> Evaluation:
        nonlocal scored
        scored += 1
        now[0] += 100
        return Evaluation(mask, 0.9, 0.1, 3, 0.0)

    method.search = search(method.plan.over(4), slow)
    monkeypatch.setattr("harness.timing.synced_clock", lambda device: ticking)
    read = without_asides(ticking, method.tiers)
    begun = read()
    written(method, 30)
    spent = read() - begun
    assert scored >= 3
    assert (spent > 100 * scored) if clock == "inside" else (spent < 100)
    assert f"with the search {clock} the clock" in method.drafter_name


def test_changing_layers_needs_an_empty_tail_and_drops_graphs() -> None:
    tiers = tiers_of(tiny(0))
    tier = tiers.provisional("draft", (0, 3))
    tiers.prefill((1, 2, 3, 4))
    tier.replays[(1,)] = object()  # type: ignore[assignment]
    tier.change_layers((0, 1, 3))
    assert tier.layers == (0, 1, 3) and not tier.replays
    tier.forward((1, 2, 3, 4), rows=1)
    with pytest.raises(ValueError, match="draft: other layers made the entries from 3 back"):
        tier.change_layers((0, 2, 3))
    with pytest.raises(ValueError, match="full: other layers made"):
        tiers.full.change_layers((0, 1))
    fresh = tiers_of(tiny(0))
    fresh.prefill((1, 2, 3, 4))
    tiers.full.forward((1, 2, 3, 4, 5), rows=1)
    tier.change_layers((0, 2, 3))
    fresh.full.forward((1, 2, 3, 4, 5), rows=1)
    want = fresh.provisional("other", (0, 2, 3)).forward((1, 2, 3, 4, 5, 6), rows=1)
    assert torch.equal(tier.forward((1, 2, 3, 4, 5, 6), rows=1), want)


def test_scoring_runs_in_no_fixed_shape_and_without_graphs() -> None:
    method = made(tiny_model(0, kept=(0,)))
    scorer: Tier = method.scorer
    assert scorer.block is None and scorer.graphs is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": 0}, r"plan\.context=0: want at least 1"),
        ({"bayes_every": 0}, "methods.swift.plan.bayes_every=0: want at least 1"),
        ({"steps": 0}, "methods.swift.plan.steps=0: want at least 1"),
        ({"patience": -1}, "methods.swift.plan.patience=-1: want at least 1"),
        ({"enough": 0.0}, r"plan\.enough=0\.0: want a share"),
        ({"enough": 1.2}, r"plan\.enough=1\.2: want a share"),
        ({"units": "heads"}, "unknown methods.swift.plan.units 'heads'"),
        ({"skip_ratio": 0.75}, "the four of the first and the last"),
        ({"skip_ratio": 0.75, "units": "layers"}, "leaves 1 of 4 layers; first and last always stay"),
    ],
)
def test_plans_that_cannot_be_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(tiny_model(0, kept=(0,)), Plan(**settings))


def test_an_unknown_clock_is_refused() -> None:
    with pytest.raises(UserError, match="unknown swift clock 'outsid': did you mean 'outside'"):
        made(tiny_model(0, kept=(0,)), clock="outsid")


def test_names_for_the_records() -> None:
    method = made(tiny_model(0, kept=(0,)))
    assert (method.name, method.lossless, method.gate_name) == ("swift", True, None)
    assert method.drafter_name == "self_skip(0.25), searched with the search inside the clock"
    assert method.tier_roles() == (method.skipping.tier, None)
