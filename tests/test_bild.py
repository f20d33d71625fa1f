"""Big Little Decoder against a naive twin that recomputes everything for each token, and blocks by hand."""

import math
from collections.abc import Sequence

import pytest
import torch

from harness.decode.base import Decoder, StopRule
from harness.decode.bild import BiLD
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.model.load import Model
from harness.model.transformer import Transformer
from harness.records import BlockTrace
from harness.sampling import RandomChooser, Sampling
from tests.toys import CPU, GREEDY, drafted, perturbed, shapes_unchecked, small_lm, tiers_of, tiny_model, whole

PROMPT = (1, 2, 3)


def model_of(seed: int) -> Model:
    return tiny_model(seed, kept=(0, 1, 3), head_scale=6.0)


def made(model: Model, small: Transformer, fallback: float, rollback: float, gamma: int = 4) -> BiLD:
    return BiLD(tiers_of(model), GREEDY, model, gamma, small_lm(small), fallback, rollback)


def decoded(method: BiLD, length: int) -> tuple[tuple[int, ...], tuple[BlockTrace, ...]]:
    decoder = Decoder(method)
    decoder.prefill(PROMPT)
    got = decoder.decode(StopRule(length), RandomChooser(0, CPU))
    return got.token_ids, got.blocks


def log_probs(model: Transformer, text: Sequence[int]) -> torch.Tensor:
    """After the last token of ``text``, with nothing cached."""
    tiers = tiers_of(model)
    return torch.log_softmax(tiers.full.forward(text, rows=1)[0], dim=-1)


def naive(
    full: Transformer, small: Transformer, length: int, fallback: float, rollback: float, gamma: int, late: int = 0
) -> tuple[int, ...]:
    """The rule as its docstring has it; ``late`` judges each token that many positions further on, which is wrong."""
    text = list(PROMPT)
    while len(text) < len(PROMPT) + length:
        begin = len(text)
        room = min(gamma, len(PROMPT) + length - begin - 1)
        while len(text) < begin + room:
            said = log_probs(small, text)
            if said.exp().max() < fallback:
                break
            text.append(int(said.argmax()))
        for place in range(begin, len(text)):
            judged = log_probs(full, text[: min(place + late, len(text))])
            if -judged[text[place]] > rollback and int(judged.argmax()) != text[place]:
                del text[place:]
                break
        text.append(int(log_probs(full, text).argmax()))
    return tuple(text[len(PROMPT) :])


CASES = [(0.0, 3.0), (0.5, 2.0), (0.5, 1000.0), (0.3, 0.0), (1.0, 5.0)]


@pytest.mark.parametrize(("fallback", "rollback"), CASES)
def test_the_rule_equals_its_naive_twin(fallback: float, rollback: float) -> None:
    with shapes_unchecked():
        for seed in range(4):
            model = model_of(seed)
            small = perturbed(model.transformer, seed, noise=0.6)
            got, _ = decoded(made(model, small, fallback, rollback), 14)
            assert got == naive(model.transformer, small, 14, fallback, rollback, 4)


def test_the_cases_fall_back_and_roll_back_and_a_wrong_twin_differs() -> None:
    fell, rolled, differ = 0, 0, 0
    with shapes_unchecked():
        for seed in range(4):
            model = model_of(seed)
            small = perturbed(model.transformer, seed, noise=0.6)
            got, blocks = decoded(made(model, small, 0.5, 2.0), 14)
            fell += sum(block.drafted < block.asked for block in blocks)
            rolled += sum(block.kept < block.drafted for block in blocks)
            differ += got != naive(model.transformer, small, 14, 0.5, 2.0, 4, late=1)
    assert fell > 3 and rolled > 3 and differ >= 2


def test_a_sure_small_model_and_a_calm_large_one_write_the_small_models_text() -> None:
    """Blocks of gamma small tokens and one of the large model's, which is not greedy decoding of the large one."""
    model = model_of(1)
    small = perturbed(model.transformer, 1, noise=1.0)
    got, blocks = decoded(made(model, small, 0.0, 1e6, gamma=3), 8)
    counts = [(b.asked, b.drafted, b.kept, b.emitted, b.bonus, b.full_forwards) for b in blocks]
    assert counts == [(3, 3, 3, 4, 1, 1)] * 2
    assert got == naive(model.transformer, small, 8, 0.0, 1e6, 3)


def test_an_unsure_small_model_leaves_all_to_the_large_one() -> None:
    model = model_of(2)
    got, blocks = decoded(made(model, perturbed(model.transformer, 2, noise=0.6), 1.0, 5.0), 6)
    assert [(b.asked, b.drafted, b.emitted, b.full_forwards) for b in blocks] == [
        (min(4, 5 - start), 0, 1, 1) for start in range(6)
    ]
    assert [block.draft_forwards for block in blocks] == [1, 1, 1, 1, 1, 0], "one look at each place, none at the last"
    text = list(PROMPT)
    for token in got:
        assert token == int(log_probs(model.transformer, text).argmax())
        text.append(token)


@pytest.mark.parametrize(
    ("probs", "tokens", "rollback", "kept"),
    [
        ([[0.9, 0.05, 0.05]], [1], 3.0, [True]),  # -log 0.05 = 2.996
        ([[0.9, 0.05, 0.05]], [1], 2.99, [False]),
        ([[0.5, 0.3, 0.2], [0.98, 0.01, 0.01], [0.2, 0.4, 0.4]], [2, 1, 0], 2.0, [True, False, True]),
        ([[0.4, 0.35, 0.25]], [0], 0.0, [True]),  # the argmax, however surprising
        ([[0.4, 0.35, 0.25]], [1], 0.0, [False]),
    ],
)
def test_which_tokens_stand_by_hand(
    probs: list[list[float]], tokens: list[int], rollback: float, kept: list[bool]
) -> None:
    model = model_of(0)
    method = BiLD(tiers_of(model), GREEDY, model, 4, lambda t, s, m: SelfSkip(t, s, m), 0.6, rollback)
    logits = torch.tensor(probs, dtype=torch.float64).log()
    assert method.kept(logits, logits.argmax(-1), drafted(tokens).tokens).tolist() == kept


def test_the_block_that_an_accelerator_drafts_whole_gives_the_same_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the unsure token and those behind it are scored too, and not used."""
    with shapes_unchecked():
        for seed in range(4):
            model = model_of(seed)
            small = perturbed(model.transformer, seed, noise=0.6)
            want, blocks = decoded(made(model, small, 0.5, 2.0), 20)
            with monkeypatch.context() as patch:
                patch.setattr("harness.decode.bild.pieces", whole)
                cut, _ = decoded(made(model, small, 0.5, 2.0), 20)
                patch.setattr("harness.decode.bild.BiLD.write", written_whole)
                got, others = decoded(made(model, small, 0.5, 2.0), 20)
            assert got == cut == want
            assert [(b.drafted, b.kept, b.emitted) for b in others] == [(b.drafted, b.kept, b.emitted) for b in blocks]


def written_whole(self: BiLD, tokens: Sequence[int], asked: int, chooser: RandomChooser):
    draft = self.drafter.draft(tokens, asked, chooser)
    if not len(draft):
        return draft, torch.empty(0, dtype=torch.bool)
    return draft, draft.distributions().amax(dim=-1) >= self.fallback


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 0}, "gamma=0: want at least 1"),
        ({"fallback": 1.5}, r"fallback=1\.5: want a probability"),
        ({"fallback": -0.1}, r"fallback=-0\.1: want a probability"),
        ({"rollback": -1.0}, r"rollback=-1\.0: want 0 nats"),
        ({"rollback": math.inf}, "rollback=inf: want 0 nats"),
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict, message: str) -> None:
    model = model_of(0)
    with pytest.raises(UserError, match=message):
        BiLD(tiers_of(model), GREEDY, model, **{"gamma": 4, "drafter": SelfSkip, **settings})


def test_sampling_and_drafters_without_probabilities_are_refused() -> None:
    model = model_of(0)
    with pytest.raises(UserError, match=r"temperature=0\.7: set temperature=0"):
        BiLD(tiers_of(model), Sampling(0.7), model, 4, SelfSkip)
    with pytest.raises(UserError, match=r"bild needs the drafter's probabilities, and prompt_lookup has none"):
        BiLD(tiers_of(model), GREEDY, model, 4, PromptLookup)


def test_names_for_the_records() -> None:
    model = model_of(0)
    method = BiLD(tiers_of(model), GREEDY, model, 4, SelfSkip)
    assert (method.name, method.lossless, method.gate_name) == ("bild", False, None)
    assert method.drafter_name == "self_skip(0.5), until below 0.6"
