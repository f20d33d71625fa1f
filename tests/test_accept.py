"""Distributions, acceptance and residuals by hand; and 30,000 seeded samples against the law they should have."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from jaxtyping import Float
from scipy.stats import chi2
from torch import Tensor

from harness.decode.accept import first_stop, keep_probability
from harness.decode.base import Decoder, StopRule
from harness.decode.speculative import Speculative
from harness.drafters.base import Draft, Drafter, draft_with
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.sampling import Certain, Chooser, Dense, RandomChooser, Sampling, widen
from tests.toys import CPU, drafted, shapes_unchecked, tiers_of, tiny_model

SPREAD = (0.5, 0.25, 0.15, 0.1)

# (sampling, probabilities at temperature 1, what is sampled from)
WARPED: dict[str, tuple[Sampling, Sequence[float], Sequence[float]]] = {
    "greedy": (Sampling(), SPREAD, (1, 0, 0, 0)),
    "greedy, a tie: the first": (Sampling(), (0.1, 0.4, 0.4, 0.1), (0, 1, 0, 0)),
    "greedy ignores top-p and top-k": (Sampling(0.0, top_p=0.1, top_k=3), SPREAD, (1, 0, 0, 0)),
    "temperature 1": (Sampling(1.0), SPREAD, SPREAD),
    "temperature 1/2 squares": (Sampling(0.5), (0.5, 0.3, 0.2), (25 / 38, 9 / 38, 4 / 38)),
    "temperature 2 takes roots": (Sampling(2.0), (9 / 14, 4 / 14, 1 / 14), (3 / 6, 2 / 6, 1 / 6)),
    "top-k 2": (Sampling(1.0, top_k=2), SPREAD, (2 / 3, 1 / 3, 0, 0)),
    "top-k 1": (Sampling(1.0, top_k=1), SPREAD, (1, 0, 0, 0)),
    "top-k 1 of a tie: the first, as greedy": (Sampling(1.0, top_k=1), (0.1, 0.4, 0.4, 0.1), (0, 1, 0, 0)),
    "top-k of the whole vocabulary": (Sampling(1.0, top_k=4), SPREAD, SPREAD),
    "top-k beyond the vocabulary": (Sampling(1.0, top_k=9), SPREAD, SPREAD),
    "top-p ends inside the first": (Sampling(1.0, top_p=0.4), SPREAD, (1, 0, 0, 0)),
    "top-p keeps the token that crosses": (Sampling(1.0, top_p=0.6), SPREAD, (2 / 3, 1 / 3, 0, 0)),
    "top-p keeps another one that crosses": (Sampling(1.0, top_p=0.8), SPREAD, (5 / 9, 2.5 / 9, 1.5 / 9, 0)),
    "top-p 1 is off": (Sampling(1.0, top_p=1.0), SPREAD, SPREAD),
    "top-p of unsorted probabilities": (Sampling(1.0, top_p=0.6), (0.1, 0.5, 0.15, 0.25), (0, 2 / 3, 0, 1 / 3)),
    "temperature comes before top-p": (Sampling(0.5, top_p=0.65), (0.5, 0.3, 0.2), (1, 0, 0)),
    "top-k comes before top-p": (Sampling(1.0, top_p=0.6, top_k=2), SPREAD, (1, 0, 0, 0)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", WARPED)
def test_warped_distributions_of_hand_cases(case: str, dtype: torch.dtype) -> None:
    sampling, probs, want = WARPED[case]
    rows = torch.tensor([probs, probs[::-1]], dtype=torch.float64).log().to(dtype) + 3.0
    got = sampling.warp(rows)
    assert got.dtype == dtype
    assert torch.allclose(got[0], torch.tensor(want, dtype=dtype), atol=1e-6)
    assert torch.equal(got[0] > 0, torch.tensor(want) > 0)
    if len(set(probs)) == len(probs):
        assert torch.allclose(got[1], torch.tensor(want[::-1], dtype=dtype), atol=1e-6)


def test_top_p_on_the_bound_itself_keeps_nothing_more() -> None:
    """0.5 of mass is reached by the first token exactly, so nothing is missing any more."""
    logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    assert Sampling(1.0, top_p=0.5).warp(logits).tolist() == [[1.0, 0.0, 0.0]]


def test_low_precision_logits_are_warped_in_float32() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert widen(logits).dtype == torch.float32
    for sampling in (Sampling(), Sampling(0.7, top_p=0.9, top_k=20)):
        probs = sampling.warp(logits)
        assert probs.dtype == torch.float32
        assert torch.allclose(probs.sum(-1), torch.ones(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: want 0"),
        ({"top_p": 0.0}, "top_p=0.0: want more than 0 and at most 1"),
        ({"top_p": 1.1}, "top_p=1.1: want more than 0 and at most 1"),
        ({"top_k": -1}, "top_k=-1: want 0"),
    ],
)
def test_settings_out_of_bounds_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**arguments)


FULL = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.0, 0.5, 0.5]])
DRAWN_FROM = torch.tensor([[0.3, 0.6, 0.1], [0.8, 0.1, 0.1], [0.5, 0.25, 0.25]])


@pytest.mark.parametrize(
    ("tokens", "probs", "want"),
    [
        ((0, 0, 0), DRAWN_FROM, [1.0, 0.25, 0.0]),
        ((1, 1, 1), DRAWN_FROM, [0.5, 1.0, 1.0]),
        ((2, 2, 2), DRAWN_FROM, [1.0, 1.0, 1.0]),
        ((0, 1, 2), None, [0.6, 0.2, 0.5]),
        ((2, 0, 0), None, [0.1, 0.2, 0.0]),
    ],
)
def test_keep_probability_is_the_smaller_of_1_and_q_over_p(
    tokens: tuple[int, ...], probs: Tensor | None, want: list[float]
) -> None:
    assert torch.allclose(keep_probability(Dense(FULL), drafted(tokens, probs)), torch.tensor(want))


def test_a_certain_draft_is_a_one_hot_distribution() -> None:
    tokens = (1, 2, 0)
    certain, spelled_out = drafted(tokens), drafted(tokens, one_hot(tokens))
    assert torch.equal(keep_probability(Dense(FULL), certain), keep_probability(Dense(FULL), spelled_out))


def one_hot(tokens: Sequence[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), 3).float()


@pytest.mark.parametrize("probs", [DRAWN_FROM, None])
def test_a_certain_law_is_a_table_of_one_hot_rows(probs: Tensor | None) -> None:
    """What is kept and what replaces a refused draft, or follows three kept ones, for all blocks of three."""
    top = (2, 0, 1, 2)
    certain, spelled_out = Certain(torch.tensor(top)), Dense(one_hot(top))
    chooser = RandomChooser(0, CPU)
    for tokens in product(range(3), repeat=3):
        draft = drafted(tokens, probs)
        assert torch.equal(keep_probability(certain, draft), keep_probability(spelled_out, draft))
        kept = keep_probability(certain, drafted(tokens)) >= 1
        stop = first_stop(kept)
        for law in (certain, spelled_out):
            assert int(law.replace(draft.probs, draft.tokens, stop, chooser)) == top[int(stop)]
            assert int(law.draw(stop, chooser)) == top[int(stop)]


@pytest.mark.parametrize("gamma", range(1, 9))
def test_first_stop_is_the_length_of_the_leading_run(gamma: int) -> None:
    for stop in range(gamma + 1):
        kept = torch.ones(gamma, dtype=torch.bool)
        kept[stop : stop + 1] = False
        assert first_stop(kept) == stop
        kept[stop + 1 :] = False
        assert first_stop(kept) == stop


def stream(seed: int) -> list[int]:
    chooser = RandomChooser(seed, CPU)
    probs = torch.full((11,), 1 / 11, dtype=torch.float64)
    flips = [int(flip) for flip in chooser.accept(torch.full((30,), 0.5, dtype=torch.float64))]
    draws = [int(chooser.draw(probs, uniform)) for uniform in chooser.uniforms(30)]
    replaced = [chooser.replace(probs[None], None, torch.tensor([4]), torch.tensor(0)) for _ in range(9)]
    return flips + draws + [int(token) for token in replaced]


def test_draws_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = stream(7)
    torch.manual_seed(2)
    assert stream(7) == first
    assert stream(8) != first


def test_certain_decisions_do_not_depend_on_the_seed() -> None:
    one_hot = torch.tensor([0.0, 0.0, 1.0, 0.0])
    sure = torch.tensor([1.0, 0.0, 1.5, 0.0])
    for seed in range(200):
        chooser = RandomChooser(seed, CPU)
        assert chooser.draw(one_hot, chooser.uniforms(1)[0]) == 2
        assert chooser.accept(sure).tolist() == [True, False, True, False]


def test_a_draw_takes_the_token_whose_share_of_the_mass_holds_the_number() -> None:
    """Tokens without mass are never drawn, not even by the smallest and the largest number there is."""
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    chooser = RandomChooser(0, CPU)
    largest = torch.nextafter(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
    for uniform, want in ((0.0, 1), (0.2, 1), (0.25, 3), (0.7, 3), (0.75, 4), (float(largest), 4)):
        assert int(chooser.draw(probs, torch.tensor(uniform, dtype=torch.float64))) == want


VOCAB = 5


class TableTier(Tier):
    """Logits by the last token alone: a Markov chain whose law is a table."""

    table: Float[Tensor, "V V"]

    def forward(self, sequence: Sequence[int], rows: int, drafts: Tensor | None = None) -> Float[Tensor, "R V"]:
        self.forwards += 1
        tokens = [*sequence, *(drafts.tolist() if drafts is not None else [])]
        return self.table[tokens[-rows:]]


def table_tier(tiers: Tiers, name: str, seed: int) -> TableTier:
    tier = TableTier(name, tiers.model, tiers.cache, range(1))
    tier.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return tier


class TableDrafter:
    """Draws from a table of its own. ``greedy``: its likeliest tokens, passed off as draws from its softmax."""

    name = "table"
    has_probs = True

    def __init__(self, tier: Tier, sampling: Sampling, greedy: bool) -> None:
        self.tier: Tier | None = tier
        self.drafts_with = tier
        self.sampling = sampling
        self.greedy = greedy

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        if not self.greedy:
            return draft_with(self.drafts_with, self.sampling, tokens, count, chooser)
        tokens, probs = list(tokens), []
        for _ in range(count):
            probs.append(self.sampling.warp(self.drafts_with.forward(tokens, rows=1)))
            tokens.append(int(probs[-1].argmax()))
        return drafted(tokens[len(tokens) - count :], torch.cat(probs) if probs else None)


def p_value(gamma: int, tokens: int, greedy: bool) -> float:
    """Chi-square test of ``tokens`` sampled tokens, each given the one before, against the full verifier's table."""
    sampling = Sampling(0.7)
    model = tiny_model(0, kept=(0,), vocab_size=VOCAB)
    tiers = tiers_of(model, capacity=8)
    full = tiers.full = table_tier(tiers, "full", seed=1)

    def drafter(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
        return TableDrafter(table_tier(tiers, "draft", seed=2), sampling, greedy)

    decoder = Decoder(Speculative(tiers, sampling, model, gamma, drafter))
    chooser = RandomChooser(0, CPU)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    length = 50
    for start in range(tokens // length):
        with shapes_unchecked() if start else nullcontext():
            decoder.prefill((start % VOCAB,))
            output = decoder.decode(StopRule(length), chooser).token_ids
        before = torch.tensor((start % VOCAB, *output[:-1]))
        counts.index_put_((before, torch.tensor(output)), torch.ones(length, dtype=torch.float64), accumulate=True)
    assert counts.sum() == tokens
    expected = counts.sum(-1, keepdim=True) * sampling.warp(full.table)
    assert expected.min() > 5  # what the chi-square approximation asks for
    return float(chi2.sf(float(((counts - expected) ** 2 / expected).sum()), VOCAB * (VOCAB - 1)))


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1, 3])
def test_thirty_thousand_samples_have_the_full_verifiers_law(gamma: int) -> None:
    assert p_value(gamma, 30_000, greedy=False) > 1e-3


@pytest.mark.parametrize("gamma", [1, 3])
def test_greedy_drafts_passed_off_as_draws_fail_the_same_test(gamma: int) -> None:
    assert p_value(gamma, 10_000, greedy=False) > 1e-3
    assert p_value(gamma, 10_000, greedy=True) < 1e-12


def test_the_smallest_temperatures_do_not_overflow() -> None:
    logits = torch.tensor([[3.0, 7.5, -2.0]])
    assert Sampling(1e-40).warp(logits).tolist() == [[0.0, 1.0, 0.0]]
