"""Graft: which tokens are whose, with which distributions, and that the small drafter's cache stays true."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from harness.decode.speculative import Speculative
from harness.drafters import graft as graft_module
from harness.drafters.base import Draft
from harness.drafters.graft import Graft
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.retrieval import Retrieval
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.model.cache import KVCache
from harness.model.tiers import Tier
from harness.sampling import Chooser, RandomChooser, Sampling
from tests.toys import CPU, GREEDY, perturbed, small_lm, tiers_of, tiny_model, whole

MODEL = tiny_model(1, kept=(0, 1, 3))
VOCAB = 97


class Table:
    """Drafts given tokens, each with its probability; the rest of the mass lies on token 0."""

    name = "table"
    tier: Tier | None = None
    has_probs = True

    def __init__(self, tokens: Sequence[int], sure: Sequence[float]) -> None:
        self.tokens = torch.tensor(tokens)
        self.probs = torch.zeros(len(tokens), VOCAB, dtype=torch.float64)
        self.probs[range(len(tokens)), self.tokens] = torch.tensor(sure, dtype=torch.float64)
        self.probs[:, 0] = 1 - self.probs.sum(dim=-1)

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        return Draft(self.tokens[:count], self.probs[:count])


def grafting(inner, threshold: float = 0.6, **config):
    return partial(Graft, inner=inner, retrieval=partial(Retrieval, **config), threshold=threshold)


TEXT = (1, 2, 3, 4, 5, 1, 2, 3)


@pytest.mark.parametrize(
    ("tokens", "sure", "count", "want", "certain"),
    [
        ((9, 9, 9), (0.9, 0.9, 0.9), 3, (9, 9, 9), 0),
        ((9, 9, 9), (0.5, 0.9, 0.9), 3, (4, 5, 1), 3),  # unsure at once: the text goes on
        ((4, 9, 9), (0.9, 0.5, 0.9), 3, (4, 5, 1), 2),  # behind its own token
        ((9, 9, 9), (0.9, 0.5, 0.9), 3, (9, 9, 9), 0),  # nothing is known behind 9
        ((9, 4, 7), (0.9, 0.5, 0.5), 3, (9, 4, 5), 1),  # nothing behind 9, but behind 4
        ((4, 5), (0.9, 0.5), 2, (4, 5), 1),
        ((4, 5), (0.9, 0.5), 1, (4,), 0),
    ],
)
def test_by_hand(
    tokens: tuple[int, ...], sure: tuple[float, ...], count: int, want: tuple[int, ...], certain: int
) -> None:
    """With the distributions of kept tokens to the bit, and one-hot rows for those retrieved."""
    table = Table(tokens, sure)
    drafter = grafting(lambda t, s, m: table)(tiers_of(MODEL), Sampling(1.0), MODEL)
    draft = drafter.draft(TEXT, count, RandomChooser(0, CPU))
    assert tuple(draft.tokens.tolist()) == want and draft.probs is not None
    own = count - certain
    assert torch.equal(draft.probs[:own], table.probs[:own])
    assert torch.equal(draft.probs[own:], torch.eye(VOCAB, dtype=torch.float64)[list(want[own:])])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8)], ids=["greedy", "sampled"])
def test_token_by_token_and_whole_blocks_are_grafted_alike(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first costs no forward behind the last token that is kept."""
    found: dict[str, list[tuple[int, ...]]] = {}
    forwards: dict[str, int] = {}
    for way in ("one by one", "whole"):
        if way == "whole":
            monkeypatch.setattr(graft_module, "pieces", whole)
        tiers = tiers_of(MODEL)
        drafter = grafting(partial(SelfSkip, mask=[0, 2]), 0.5)(tiers, sampling, MODEL)
        found[way] = []
        for seed in range(30):
            text = tuple(torch.randint(0, 4, (9,), generator=torch.Generator().manual_seed(seed)).tolist())
            tiers.prefill(text)
            draft = drafter.draft(text, 5, RandomChooser(seed, CPU))
            assert (draft.probs is None) == sampling.greedy
            found[way].append(tuple(draft.tokens.tolist()))
            drafter.finish(text)
        assert drafter.tier is not None
        forwards[way] = drafter.tier.forwards
    if sampling.greedy:  # else the two use different random numbers
        assert found["whole"] == found["one by one"]
    assert forwards["whole"] == 150 and forwards["one by one"] < 150


@pytest.mark.parametrize("way", ["one by one", "whole"])
def test_the_small_drafters_cache_is_fresh_after_every_block(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it drafted and was not used must not stay where retrieved tokens have come to stand."""
    if way == "whole":
        monkeypatch.setattr(graft_module, "pieces", whole)
    behind = 0
    for seed in range(4):
        model = tiny_model(seed, kept=(0, 1, 3))
        small = perturbed(model.transformer, seed, noise=0.15)
        tiers = tiers_of(model)
        make = grafting(small_lm(small), threshold=0.9, max_ngram=2)
        method = Speculative(tiers, GREEDY, model, 4, make)
        tokens = [1, 2, 3, 1, 2]
        tiers.prefill(tokens)
        while len(tokens) < 50:
            before = len(tokens)
            tokens += method.step(tuple(tokens), 99, RandomChooser(0, CPU)).tokens
            tiers.rollback(len(tokens) - 1)
            tier = method.drafter.tier
            assert tier is not None
            behind += len(tokens) - before > 2 and tier.length == before
            again = KVCache(small.spec, 256, torch.float64, CPU)
            small.prefill(torch.tensor(tokens[: tier.length]), again, range(small.spec.layers))
            for one, other in zip(tier.cache.layers, again.layers, strict=True):
                for ours, fresh in zip(one, other, strict=True):
                    assert torch.allclose(ours[:, : tier.length], fresh[:, : tier.length], atol=1e-10)
    assert behind > 0, "no block in which retrieved tokens were kept"


def test_the_name_says_both_parts_and_what_is_remembered() -> None:
    drafter = grafting(partial(SelfSkip, mask=[0, 2]), own_output="run")(tiers_of(MODEL), GREEDY, MODEL)
    assert drafter.name == "graft(self_skip(0.5), 0.6, retrieval(run))"


def test_finished_texts_reach_retrieval() -> None:
    drafter = grafting(partial(SelfSkip, mask=[0, 2]), own_output="run")(tiers_of(MODEL), GREEDY, MODEL)
    drafter.finish((1, 2, 3))
    assert drafter.retrieval.continuation((1,), 2) == [2, 3]


def test_an_inner_drafter_without_probabilities_is_refused_by_name() -> None:
    want = "^graft needs the drafter's probabilities, and prompt_lookup has none"
    with pytest.raises(UserError, match=want):
        grafting(PromptLookup)(tiers_of(MODEL), GREEDY, MODEL)


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.1])
def test_a_threshold_that_is_no_probability_is_refused(threshold: float) -> None:
    with pytest.raises(UserError, match=rf"^graft: threshold={threshold}: want a probability"):
        grafting(partial(SelfSkip, mask=[0]), threshold)(tiers_of(MODEL), GREEDY, MODEL)
