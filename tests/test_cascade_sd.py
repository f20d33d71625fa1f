"""Cascade Speculative Drafting: the full verifier's law by enumeration, blocks by hand, and what is refused."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.cascade_sd import CascadeSD
from harness.decode.length import Fixed
from harness.decode.nested import InTurn, Reviewed
from harness.decode.slim import masked
from harness.drafters.base import Draft
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.retrieval import Retrieval
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.model.load import Model
from harness.records import BlockTrace
from harness.sampling import Certain, Chooser, RandomChooser, Sampling
from tests.arms import PROMPT, model_of, output, tiers_with
from tests.enumeration import output_law, total_variation
from tests.toys import CPU, GREEDY, drafted, scripted, tiers_of, tiny_model

LAW_PROMPT = (1, 2, 0, 1, 2)


def skipping(tiers, sampling, model):
    return SelfSkip(tiers, sampling, model, mask=[0, 1])


def peaked(vocab_size: int) -> Model:
    return tiny_model(3, kept=(0, 1, 3), layer_scale=1.0, vocab_size=vocab_size, head_scale=1.0)


def made(model: Model, sampling: Sampling, lengths: Sequence[Sequence[int]], **settings) -> CascadeSD:
    settings = {"gamma": 10, "drafter": skipping, "statistical": PromptLookup, **settings}
    return CascadeSD(tiers_of(model), sampling, model, lengths=lengths, **settings)


LAWS = {
    "T=1": (Sampling(1.0), 3, 3, [[1, 1], [2]], None),
    "5 tokens, top-k": (Sampling(1.3, top_k=2), 5, 3, [[2, 1], [2]], None),
    "5 tokens, top-p, slim": (Sampling(1.0, top_p=0.6), 5, 3, [[1, 1, 1], [1, 1], [2]], masked),
}


@pytest.mark.parametrize("case", LAWS)
def test_the_joint_law_is_the_full_verifiers(case: str) -> None:
    sampling, vocab_size, new_tokens, lengths, slim = LAWS[case]
    model = peaked(vocab_size)
    want = output_law(lambda: Autoregressive(tiers_of(model), sampling), LAW_PROMPT, new_tokens)
    got = output_law(lambda: made(model, sampling, lengths, slim=slim), LAW_PROMPT, new_tokens)
    assert total_variation(got, want) < 1e-12


def test_lenience_when_sampling_would_break_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why it is refused: the tokens inside are no longer drawn from the reviewer's distribution."""
    monkeypatch.setattr("harness.decode.cascade_sd.check_lenience", lambda lenience, sampling: None)
    sampling, model = Sampling(1.0), peaked(3)
    want = output_law(lambda: Autoregressive(tiers_of(model), sampling), LAW_PROMPT, 3)
    got = output_law(lambda: made(model, sampling, [[2, 0], [2]], lenience=100.0), LAW_PROMPT, 3)
    assert total_variation(got, want) > 0.01


@pytest.mark.parametrize("lenience", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("statistical", [PromptLookup, Retrieval])
def test_greedy_tokens_do_not_depend_on_what_is_done_inside(statistical, lenience: float) -> None:
    for seed in range(6):
        model = model_of(seed, torch.float64)
        want = output(Autoregressive(tiers_with(model, None, False), Sampling()))
        for slim, lengths in (
            (None, [[3, 2], [4]]),
            (masked, [[3, 2, 2], [1, 4], [4]]),
            (masked, [[0, 2, 2], [0, 4], [4]]),
        ):
            tiers = tiers_with(model, None, False)
            method = CascadeSD(tiers, GREEDY, model, 10, skipping, statistical, lengths, slim, lenience)
            assert output(method) == want


def blocks_of(method: CascadeSD, length: int) -> tuple[tuple[int, ...], Sequence[BlockTrace]]:
    decoder = Decoder(method)
    decoder.prefill(PROMPT)
    got = decoder.decode(StopRule(length), RandomChooser(0, CPU))
    return got.token_ids, got.blocks


def test_a_block_by_hand_where_everybody_agrees() -> None:
    """A drafter of all layers reviews an oracle: 4 + 1 tokens a review, then 3 of the oracle's, then the full one's."""
    model = tiny_model(1, kept=range(4))
    want, _ = blocks_of(made(model, GREEDY, [[1, 1], [1]]), 30)
    oracle = scripted((*PROMPT, *want), 0.0, 97, 0)
    whole = partial(SelfSkip, mask=range(4))
    got, blocks = blocks_of(made(model, GREEDY, [[5, 3], [4]], drafter=whole, statistical=oracle), 18)
    assert got == want[:18]
    counts = [(b.asked, b.drafted, b.kept, b.emitted, b.draft_forwards, b.full_forwards) for b in blocks]
    assert counts == [(8, 8, 8, 9, 1, 1)] * 2
    got, blocks = blocks_of(made(model, GREEDY, [[6, 0], [2]], drafter=whole, statistical=oracle), 14)
    assert [(b.drafted, b.draft_forwards) for b in blocks] == [(6, 2)] * 2, "3 tokens a review"


class Spelled:
    """Extends a text by the letters that it is made of, and notes what it is asked."""

    tier: Any = None

    def __init__(self, name: str, token: int) -> None:
        self.name = name
        self.token = token
        self.asked: list[tuple[int, int]] = []

    def extend(self, tokens: Sequence[int], count: int, chooser: Chooser) -> tuple[Draft, list[int]]:
        self.asked.append((len(tokens), count))
        return drafted([self.token] * count), [self.token] * count


@pytest.mark.parametrize(
    ("count", "tokens", "asked"),
    [
        (9, [7, 7, 8, 1, 2], [[(4, 2)], [(6, 1)]]),
        (3, [7, 7, 8], [[(4, 2)], [(6, 1)]]),
        (2, [7, 7], [[(4, 2)], []]),
        (1, [7], [[(4, 1)], []]),
        (0, [], [[], []]),
    ],
)
def test_weaker_drafters_take_later_positions(
    count: int, tokens: list[int], asked: list[list[tuple[int, int]]]
) -> None:
    strong, weak = Spelled("strong", 7), Spelled("weak", 8)
    model = peaked(97)
    last = scripted((9, 9, 9, 9, 9, 9, 9, 1, 2, 3), 0.0, 97, 0)(tiers_of(model), GREEDY, model)
    chain: list[tuple[Any, int]] = [(strong, 2), (weak, 1)]
    in_turn = InTurn(chain, last, 2, CPU)
    assert in_turn.draft((1, 2, 3, 4), count, RandomChooser(0, CPU)).tokens.tolist() == tokens
    assert [strong.asked, weak.asked] == asked
    assert in_turn.name == "strong, then weak, then scripted"


@pytest.mark.parametrize(
    ("lenience", "probs", "kept"),
    [
        (1.0, [0.6, 0.3, 0.1], [True, False, False]),
        (2.0, [0.6, 0.3, 0.1], [True, False, False]),
        (4.0, [0.6, 0.3, 0.1], [True, True, False]),  # 0.3 > 1/4 >= 0.1
        (11.0, [0.6, 0.3, 0.1], [True, True, True]),
    ],
)
def test_lenient_reviews_by_hand(lenience: float, probs: list[float], kept: list[bool]) -> None:
    """Looked-up tokens 0, 1 and 2, each with the same distribution of the reviewer."""
    model = peaked(3)
    tiers = tiers_of(model)
    inner = Fixed(PromptLookup(tiers, GREEDY, model))
    reviewed = Reviewed(tiers, tiers.full, GREEDY, inner, 3, lenience=lenience)
    logits = torch.tensor([probs] * 4).log()
    proposed = drafted([0, 1, 2])
    assert reviewed.kept(Certain(logits.argmax(-1)), logits, proposed, RandomChooser(0, CPU)).tolist() == kept


def test_a_model_that_proposes_is_believed_by_its_own_probabilities() -> None:
    model = peaked(3)
    tiers = tiers_of(model)
    reviewed = Reviewed(tiers, tiers.full, GREEDY, Fixed(PromptLookup(tiers, GREEDY, model)), 3, lenience=2.0)
    logits = torch.tensor([[0.6, 0.3, 0.1]] * 3).log()
    proposed = Draft(torch.tensor([1, 1]), None, torch.tensor([[0.3, 0.5, 0.2], [0.1, 0.8, 0.1]]).log())
    kept = reviewed.kept(Certain(logits.argmax(-1)), logits, proposed, RandomChooser(0, CPU))
    assert kept.tolist() == [True, False], "0.3 > 0.5/2, not > 0.8/2"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 0}, "gamma=0: want at least 1"),
        ({"lengths": [[5, 5]]}, r"lengths=\[\[5, 5\]\]: want rows of 2, 1 numbers"),
        ({"lengths": [[5], [5]]}, r"lengths=\[\[5\], \[5\]\]: want rows of 2, 1 numbers"),
        ({"lengths": [[5, -1], [5]]}, r"lengths=\[\[5, -1\], \[5\]\]: want rows"),
        ({"lengths": [[0, 0], [5]]}, "a row of zeros leaves"),
        ({"lengths": [[5, 5], [5]], "slim": masked}, "want rows of 3, 2, 1 numbers"),
        ({"lenience": 0.5}, r"lenience=0\.5: want 1"),
        ({"drafter": PromptLookup}, "prompt_lookup is no model that could: choose drafter=self_skip"),
        ({"statistical": skipping}, r"statistical=self_skip\(0\.5\) has a model: choose prompt_lookup or retrieval"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict, message: str) -> None:
    settings = {"lengths": [[5, 5], [10]], **settings}
    with pytest.raises(UserError, match=message):
        made(peaked(5), GREEDY, **settings)


def test_lenience_is_refused_when_sampling() -> None:
    with pytest.raises(UserError, match=r"lenience=2 is for greedy drafting, temperature=0\.7: set lenience=1"):
        made(peaked(5), Sampling(0.7), [[5, 5], [10]], lenience=2.0)


def test_names_for_the_records() -> None:
    method = made(peaked(5), GREEDY, [[2, 2, 2], [1, 2], [2]], slim=masked)
    assert (method.name, method.lossless, method.gate_name, method.gamma) == ("cascade_sd", True, None, 6)
    assert method.drafter_name == "slim over self_skip(0.5) over prompt_lookup"
    assert made(peaked(5), GREEDY, [[5, 5], [10]]).drafter_name == "self_skip(0.5) over prompt_lookup"
    assert method.tier_roles() == (method.weakest.tier, method.slim)
