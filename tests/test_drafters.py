"""Drafter families: what they propose, and what they refuse."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from harness.drafters import small_lm as small_lm_module
from harness.drafters.base import Drafter, draft_with
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.self_skip import SelfSkip
from harness.drafters.small_lm import SmallLM
from harness.errors import UserError
from harness.model.load import load_model, load_transformer
from harness.model.tiers import Tiers
from harness.sampling import RandomChooser, Sampling
from tests.toys import CPU, GREEDY, small_lm, tiers_of, tiny_model, write_checkpoint, write_mask

GREEDILY = RandomChooser(0, CPU)


def lookup(tokens: Sequence[int], count: int, max_ngram: int = 3, min_ngram: int = 1) -> tuple[int, ...]:
    model = tiny_model(0, kept=(0, 1))
    draft = PromptLookup(tiers_of(model, 8), GREEDY, model, max_ngram, min_ngram).draft(tokens, count, GREEDILY)
    assert draft.probs is None
    return tuple(draft.tokens.tolist())


@pytest.mark.parametrize(
    ("tokens", "count", "ngrams", "want"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, (3, 1), (4, 1)),
        ([1, 2, 3, 4, 1, 2, 3], 9, (3, 1), (4, 1, 2, 3)),  # no more than there is
        ([1, 2, 3, 4, 9, 3, 5, 2, 3], 2, (3, 1), (4, 9)),  # the longer match, though a shorter one is later
        ([1, 2, 3, 4, 9, 3, 5, 2, 3], 2, (1, 1), (5, 2)),  # cut to one token, the latest
        ([2, 3, 7, 2, 3, 8, 2, 3], 1, (3, 1), (8,)),  # as long, but later
        ([9, 1, 2, 3, 7, 1, 2, 3, 8, 9, 1, 2, 3], 1, (3, 1), (8,)),  # no more than max_ngram is looked at
        ([9, 1, 2, 3, 7, 1, 2, 3, 8, 9, 1, 2, 3], 1, (4, 1), (7,)),
        ([5, 6, 1, 6], 3, (3, 1), (1, 6)),
        ([5, 6, 1, 6], 3, (3, 2), ()),  # a match of one token is too short
        ([1, 2, 3], 4, (3, 1), ()),
        ([1], 4, (3, 1), ()),
        ([1, 1], 4, (3, 1), (1,)),
        ([1, 1, 1, 1, 1], 4, (3, 1), (1,)),  # overlapping itself: the latest place leaves one token
        ([1, 2, 1, 2, 1], 4, (3, 1), (2, 1)),
        ([4, 4, 5, 4, 4], 3, (3, 1), (5, 4, 4)),  # two tokens match at the start of the text
        ([1, 2, 3, 4, 1, 2, 3], 0, (3, 1), ()),
    ],
)
def test_prompt_lookup_by_hand(tokens: list[int], count: int, ngrams: tuple[int, int], want: tuple[int, ...]) -> None:
    assert lookup(tokens, count, *ngrams) == want


def naive_lookup(tokens: list[int], count: int, max_ngram: int, min_ngram: int) -> tuple[int, ...]:
    """Every n-gram at every place, longest first, then latest first."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[len(tokens) - size :]:
                return tuple(tokens[begin + size : begin + size + count])
    return ()


def test_prompt_lookup_equals_a_naive_search() -> None:
    rng = random.Random(0)
    lengths: set[int] = set()
    for _ in range(3000):
        tokens = rng.choices(range(rng.randint(1, 6)), k=rng.randint(1, 25))
        high = rng.randint(1, 5)
        settings = (rng.randint(0, 6), high, rng.randint(1, high))
        got = lookup_cached(tokens, *settings)
        assert got == naive_lookup(tokens, *settings), (tokens, settings)
        lengths.add(len(got))
    assert lengths == set(range(7))


def lookup_cached(tokens: list[int], count: int, max_ngram: int, min_ngram: int) -> tuple[int, ...]:
    return tuple(PromptLookup(TIERS, GREEDY, MODEL, max_ngram, min_ngram).continuation(tokens, count))


MODEL = tiny_model(0, kept=(0, 1))
TIERS = tiers_of(MODEL, 8)


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(3, 0), (2, 3), (0, 0), (3, -1)])
def test_prompt_lookup_refuses_impossible_lengths(max_ngram: int, min_ngram: int) -> None:
    with pytest.raises(UserError, match=f"want 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}"):
        PromptLookup(TIERS, GREEDY, MODEL, max_ngram, min_ngram)


def layers_of(drafter: SelfSkip) -> tuple[int, ...]:
    return drafter.tier.layers


def test_self_skip_keeps_the_layers_of_a_list_a_file_or_a_ratio(tmp_path: Path) -> None:
    model = tiny_model(0, kept=(0, 1, 3))
    file = write_mask(tmp_path / "mask.json", [0, 3], depth=4)
    assert layers_of(SelfSkip(tiers_of(model), GREEDY, model, mask=[3, 1])) == (1, 3)
    assert layers_of(SelfSkip(tiers_of(model), GREEDY, model, mask=str(file))) == (0, 3)
    assert layers_of(SelfSkip(tiers_of(model), GREEDY, model, skip_ratio=0.25)) == (0, 1, 3)
    assert layers_of(SelfSkip(tiers_of(model), GREEDY, model, skip_ratio=0.5)) == (0, 3)
    assert layers_of(SelfSkip(tiers_of(model), GREEDY, model, skip_ratio=0.0)) == (0, 1, 2, 3)
    assert SelfSkip(tiers_of(model), GREEDY, model, skip_ratio=0.5).name == "self_skip(0.5)"


def test_self_skip_refuses_masks_of_other_models(tmp_path: Path) -> None:
    model = tiny_model(0, kept=(0, 1, 3))
    file = write_mask(tmp_path / "mask.json", [0, 3], depth=30)
    with pytest.raises(UserError, match="is a mask over 30 layers, the model has 4"):
        SelfSkip(tiers_of(model), GREEDY, model, mask=str(file))
    with pytest.raises(UserError, match="must be distinct integers from 0 to 3"):
        SelfSkip(tiers_of(model), GREEDY, model, mask=[4])
    with pytest.raises(UserError, match=r"skip_ratio=1\.0 leaves no layer of 4"):
        SelfSkip(tiers_of(model), GREEDY, model, skip_ratio=1.0)


def test_greedy_drafts_are_the_models_likeliest_tokens_and_certain() -> None:
    model = tiny_model(1, kept=(0, 1, 3))
    tiers = tiers_of(model)
    drafter = SelfSkip(tiers, GREEDY, model, mask=[0, 2])
    tiers.prefill((1, 2, 3))
    draft = drafter.draft((1, 2, 3), 4, GREEDILY)
    assert draft.probs is None and len(draft.tokens) == 4
    again = tiers_of(model)
    again.prefill((1, 2, 3))
    logits = again.provisional("draft", (0, 2)).forward((1, 2, 3), 4, draft.tokens[:-1])
    assert torch.equal(logits.argmax(-1), draft.tokens)


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(1.2, top_p=0.7), Sampling(1.0, top_k=3)], ids=str)
def test_sampled_drafts_bring_the_distributions_they_were_drawn_from(sampling: Sampling) -> None:
    model = tiny_model(1, kept=(0, 1, 3))
    tiers = tiers_of(model)
    tier = tiers.provisional("draft", (0, 2))
    tiers.prefill((1, 2, 3))
    drawn_from: list[torch.Tensor] = []

    class Noting(RandomChooser):
        def draw(self, probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
            drawn_from.append(probs.clone())
            return super().draw(probs, uniform)

    draft = draft_with(tier, sampling, (1, 2, 3), 4, Noting(0, CPU))
    assert draft.probs is not None and torch.equal(draft.probs, torch.stack(drawn_from))
    again = tiers_of(model)
    again.prefill((1, 2, 3))
    logits = again.provisional("draft", (0, 2)).forward((1, 2, 3), 4, draft.tokens[:-1])
    assert torch.allclose(draft.probs, sampling.warp(logits), atol=1e-10)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "sampled"])
def test_drafting_nothing_costs_nothing(sampling: Sampling) -> None:
    model = tiny_model(1, kept=(0, 1, 3))
    tiers = tiers_of(model)
    drafters: list[Drafter] = [
        SelfSkip(tiers, sampling, model, mask=[0, 2]),
        small_lm(model.transformer)(tiers, sampling, model),
        PromptLookup(tiers, sampling, model),
    ]
    tiers.prefill((1, 2, 1))
    for drafter in drafters:
        assert drafter.draft((1, 2, 1), 0, GREEDILY).tokens.tolist() == []
        assert drafter.tier is None or drafter.tier.forwards == 0


@pytest.fixture
def full(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "full", seed=0, vocab_size=40)


def drafter_from(folder: Path, full: Path, dtype: str | None = None) -> tuple[SmallLM, Tiers]:
    model = load_model(str(full), dtype="float64", device="cpu")
    tiers = tiers_of(model, 64)
    return SmallLM(tiers, GREEDY, model, str(folder), dtype), tiers


def test_small_lm_reads_a_checkpoint_of_another_shape(full: Path, tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", seed=1, vocab_size=40, num_hidden_layers=1, hidden_size=16)
    drafter, tiers = drafter_from(small, full)
    assert drafter.name == "small_lm(small)"
    assert drafter.tier.layers == (0,) and drafter.tier.model.dtype == torch.float64
    tiers.prefill((1, 2, 3))
    assert drafter.tier.length == tiers.full.length == 2
    assert len(drafter.draft((1, 2, 3), 3, GREEDILY).tokens) == 3
    assert drafter.tier.length == 5 and tiers.full.length == 2
    assert drafter_from(small, full, dtype="float32")[0].tier.model.dtype == torch.float32


def test_small_lm_with_the_full_checkpoint_drafts_its_greedy_tokens(full: Path) -> None:
    drafter, tiers = drafter_from(full, full)
    tiers.prefill((1, 2, 3))
    draft = drafter.draft((1, 2, 3), 4, GREEDILY)
    logits = tiers.full.forward((1, 2, 3), 4, draft.tokens[:-1])
    assert torch.equal(logits.argmax(-1), draft.tokens)


def test_small_lm_never_drafts_a_padding_token(full: Path, tmp_path: Path) -> None:
    """Head and embedding have more rows than the tokenizer has tokens, and those rows would win."""
    padded = write_checkpoint(tmp_path / "padded", seed=0, vocab_size=64, loud_from=29)
    drafter, tiers = drafter_from(padded, full)
    known = drafter.tier.model.weights.head.shape[0]
    assert known == load_model(str(full), device="cpu").tokenizer.vocab_size < 40
    for first in range(8):
        tiers.prefill((first, 2, 3))
        assert drafter.draft((first, 2, 3), 6, GREEDILY).tokens.max() < known
    uncut = tiers_of(load_transformer(padded, "float64", "cpu"), 64)
    assert int(uncut.full.forward((1, 2, 3), rows=1).argmax()) >= known


def test_small_lm_refuses_another_tokenizer(full: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", seed=0, vocab_size=40, words=("<s>", "</s>", "?", "b", "a"))
    with pytest.raises(UserError, match=r"^drafter '.*other' has another tokenizer than '.*full' \(\d+ and \d+ tokens"):
        drafter_from(other, full)


def test_small_lm_refuses_what_is_no_checkpoint(full: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^drafter\.path='.*nowhere' is not a folder"):
        drafter_from(tmp_path / "nowhere", full)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        drafter_from(tmp_path / "empty", full)


def test_a_small_checkpoint_is_read_once_for_all_arms(full: Path, tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", seed=1, vocab_size=40, num_hidden_layers=1)
    small_lm_module.load_small.cache_clear()
    one, other = (drafter_from(small, full)[0] for _ in range(2))
    assert one.tier.model is other.tier.model
    assert one.tier is not other.tier and one.tier.cache is not other.tier.cache
