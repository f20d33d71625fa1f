"""SWIFT: the search by hand, scores against a fresh computation, the law, and a clock that may stand still."""

from contextlib import nullcontext

import pytest
import torch

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.swift import Plan, Search, Swift
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tier
from harness.sampling import RandomChooser, Sampling
from harness.timing import without_asides
from tests.arms import model_of
from tests.enumeration import exact_law, total_variation
from tests.toys import CPU, GREEDY, shapes_unchecked, tiers_of, tiny, tiny_model

PROMPT = (1, 2, 0)
SHORT = Plan(skip_ratio=0.25, context=3, bayes_every=1000, steps=12, enough=1.0)


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
    plan = Plan(skip_ratio=0.25, context=1, bayes_every=1000, steps=9, enough=1.0)
    used: set[tuple[int, ...]] = set()
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
                used.update(tier.layers for tier in method.tiers.others if tier.name == "draft")
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


@pytest.mark.parametrize("seed", range(4))
def test_a_score_is_the_share_of_right_tokens_and_leaves_the_cache_as_it_was(seed: int) -> None:
    model = model_of(seed, torch.float64)
    method = made(model)
    tokens = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    method.tiers.prefill(tokens)
    before = method.tiers.cache.read(0, len(tokens) - 1)
    for layers in ((0, 3), (0, 1, 3), (0, 1, 2, 3)):
        fresh = tiers_of(model)
        fresh.full.prefill(tokens[:2])
        said = fresh.provisional("one", layers).forward(tokens[:6], rows=4).argmax(-1).tolist()
        right = sum(one == other for one, other in zip(said, tokens[3:7], strict=True))
        assert method.agreement(layers, tokens[:7], 3) == right / 4
        assert method.tiers.cache.length == len(tokens) - 1
        for (keys, values), (old_keys, old_values) in zip(
            method.tiers.cache.read(0, len(tokens) - 1), before, strict=True
        ):
            assert torch.equal(keys, old_keys) and torch.equal(values, old_values)


def test_all_layers_score_all_of_a_greedy_text() -> None:
    model = model_of(1, torch.float64)
    method = made(model)
    text = PROMPT + written(made(model), 6)
    method.tiers.prefill(text)
    assert method.agreement(range(4), text, 3) == 1.0


def test_the_best_choice_so_far_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores 0, .4, .4, .7, .2 in turn: the second and the fourth choice are taken, an equal one is not."""
    scores = iter([0.0, 0.4, 0.4, 0.7, 0.2, *[0.1] * 99])
    tried: list[tuple[int, ...]] = []
    drafting: list[tuple[int, ...]] = []
    model = tiny_model(2, kept=(0,))
    method = made(model, Plan(skip_ratio=0.5, context=3, bayes_every=1000, steps=5))

    def scored(layers, text, prompt_length) -> float:
        assert (prompt_length, len(text)) == (3, 6)
        tried.append(tuple(layers))
        return next(scores)

    monkeypatch.setattr(method, "agreement", scored)
    step = method.length.draft

    def noting(tokens, count, chooser):
        drafting.append(method.skipping.tier.layers)
        return step(tokens, count, chooser)

    monkeypatch.setattr(method.length, "draft", noting)
    written(method, 40)
    assert len(tried) == 5 and method.search.ended, "as many as the plan has steps"
    assert without_repeats(drafting) == without_repeats([drafting[0], tried[1], tried[3]])


def without_repeats(choices: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [layers for index, layers in enumerate(choices) if index == 0 or layers != choices[index - 1]]


@pytest.mark.parametrize(
    ("plan", "scores", "ends_after"),
    [
        (Plan(steps=3), [0.1, 0.2, 0.3, 0.4], 3),
        (Plan(patience=2), [0.5, 0.4, 0.5, 0.6], 3),
        (Plan(patience=2), [0.5, 0.4, 0.6, 0.1, 0.1, 0.9], 5),
        (Plan(enough=0.9), [0.5, 0.9, 0.91, 0.1], 3),
    ],
)
def test_when_the_search_ends(plan: Plan, scores: list[float], ends_after: int) -> None:
    search = Search(plan, 12)
    scored = 0
    for score in scores:
        if search.ended:
            break
        search.learn(search.propose(), score)
        scored += 1
    assert scored == ends_after and search.ended


def test_proposals_keep_the_ends_and_the_ratio_and_depend_on_the_seed() -> None:
    runs = {}
    for seed in (1, 1, 2):
        search = Search(Plan(skip_ratio=0.45, seed=seed), 12)
        runs[seed] = [search.propose() for _ in range(20)]
        assert all(layers[0] == 0 and layers[-1] == 11 and len(set(layers)) == 7 for layers in runs[seed])
        assert len(set(runs[seed])) > 10
    again = Search(Plan(skip_ratio=0.45, seed=1), 12)
    assert runs[1] == [again.propose() for _ in range(20)] != runs[2]


def test_every_so_often_a_proposal_is_bayesian_and_learns_from_scores() -> None:
    """The score is the share of kept layers below 5: the surrogate finds out, chance does not in so few steps."""
    search = Search(Plan(skip_ratio=0.5, bayes_every=12, seed=3), 10)
    layers: tuple[int, ...] = ()
    for _ in range(12):
        layers = search.propose()
        search.learn(layers, sum(0 < layer < 5 for layer in layers) / 4)
    assert len(layers) == 5 and sum(0 < layer < 5 for layer in layers) >= 2
    assert search.study is not None and len(search.study.study.trials) == 13, "12 scores and what was asked"


@pytest.mark.parametrize("clock", ["inside", "outside"])
def test_the_search_is_timed_or_not(clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks once a reading, and scoring that takes 100 ticks."""
    now = [0.0]

    def ticking() -> float:
        now[0] += 1
        return now[0]

    model = tiny_model(2, kept=(0,))
    method = made(model, SHORT, clock=clock)

    def slow(layers, text, prompt_length) -> float:
        now[0] += 100
        return 0.1

    monkeypatch.setattr(method, "agreement", slow)
    monkeypatch.setattr("harness.timing.synced_clock", lambda device: ticking)
    read = without_asides(ticking, method.tiers)
    begun = read()
    written(method, 30)
    spent = read() - begun
    scored = 100 * method.search.scored
    assert scored >= 300
    assert (spent > scored) if clock == "inside" else (spent < 100)
    assert f"with the search {clock} the clock" in method.drafter_name


def test_changing_layers_needs_an_empty_tail_and_drops_graphs() -> None:
    tiers = tiers_of(tiny(0))
    tier = tiers.provisional("draft", (0, 3))
    tiers.prefill((1, 2, 3, 4))
    tier.replays[(1,)] = object()  # type: ignore[assignment]
    tier.change_layers((0, 3))
    assert tier.replays, "nothing has changed"
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
        ({"bayes_every": 0}, r"plan\.bayes_every=0: want at least 1"),
        ({"steps": 0}, r"plan\.steps=0: want at least 1"),
        ({"patience": -1}, r"plan\.patience=-1: want at least 1"),
        ({"enough": 0.0}, r"plan\.enough=0\.0: want a share"),
        ({"enough": 1.2}, r"plan\.enough=1\.2: want a share"),
        ({"skip_ratio": 0.75}, "leaves 1 of 4 layers; first and last stay"),
        ({"skip_ratio": 1.0}, "leaves no layer of 4"),
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
