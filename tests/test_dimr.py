"""The mask search: its cost against a sum written out, its history against none, and the masks it proposes."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from harness import dimr
from harness.dimr import CalibrationText, calibration_text, evaluate, random_search, step_cost
from harness.errors import UserError
from harness.model.slim import LayerMask, kept_count
from harness.model.transformer import Transformer
from tests.toys import shapes_unchecked, tiers_of, tiny

DEPTH = 6
COSTS = ((0.0, 1.0), (0.3, 0.8))
NO_EOS: frozenset[int] = frozenset()
PROMPTS = ((5, 9, 2, 5, 9, 11, 3), (1, 2), (40,))


def log_softmax(logits: Sequence[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in logits))
    return [value - total for value in logits]


def plain_cost(verifier: Sequence[float], proposer: Sequence[float], alpha: float, beta: float) -> float:
    """Eq. 9 and 11 a token at a time, q the verifier and p the proposer."""
    cost = 0.0
    for log_q, log_p in zip(log_softmax(verifier), log_softmax(proposer), strict=True):
        cost += math.exp(log_p) * max(0.0, math.log(1 - alpha) + log_p - log_q)
        cost += math.exp(log_q) * max(0.0, math.log(beta) + log_p - log_q)
    return cost


def logits_of(*probabilities: float) -> list[float]:
    return [math.log(value) for value in probabilities]


HAND = (
    (logits_of(0.7, 0.2, 0.1), logits_of(0.1, 0.2, 0.7)),
    (logits_of(0.98, 0.01, 0.01), logits_of(0.4, 0.3, 0.3)),
    (logits_of(0.25, 0.25, 0.5), logits_of(0.25, 0.3, 0.45)),
    ([3.0, -2.0, 11.0], [3.5, 8.0, -4.0]),
)


@pytest.mark.parametrize(("alpha", "beta"), COSTS)
def test_step_cost_is_the_sum_of_eq_9(alpha: float, beta: float) -> None:
    verifier, proposer = (torch.tensor(side, dtype=torch.float64) for side in zip(*HAND, strict=True))
    wanted = [plain_cost(*pair, alpha, beta) for pair in HAND]
    assert step_cost(verifier, proposer, alpha, beta).tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    assert all(value > 0.1 for value in wanted[:2])


def test_step_cost_of_a_case_done_by_hand() -> None:
    """q = (1/2, 1/2), p = (3/4, 1/4): only the first token is above q; 3/4 ln(3/2) + 1/2 ln(3/2)."""
    q, p = (torch.tensor([logits_of(*side)], dtype=torch.float64) for side in ((0.5, 0.5), (0.75, 0.25)))
    assert float(step_cost(q, p, 0.0, 1.0)) == pytest.approx(1.25 * math.log(1.5), rel=1e-12)
    # With alpha 0.3 the margin of the first term is 0.7 * 1.5 = 1.05, with beta 0.8 that of the second 1.2.
    assert float(step_cost(q, p, 0.3, 0.8)) == pytest.approx(0.75 * math.log(1.05) + 0.5 * math.log(1.2), rel=1e-12)


def test_step_cost_of_equal_distributions_is_zero_and_logits_may_be_shifted() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for alpha, beta in COSTS:
        assert step_cost(logits, logits, alpha, beta).tolist() == [0.0] * 5
        assert step_cost(logits, logits + 100, alpha, beta).tolist() == pytest.approx([0.0] * 5, abs=1e-12)
    assert step_cost(logits.bfloat16(), logits.bfloat16(), 0.0, 1.0).dtype == torch.float32


def texts_of(model: Transformer, new_tokens: int = 9) -> list[CalibrationText]:
    return [calibration_text(model, prompt, new_tokens, NO_EOS) for prompt in PROMPTS]


def test_calibration_text_is_what_the_full_verifier_writes() -> None:
    model = tiny(3, layers=DEPTH)
    for text, prompt in zip(texts_of(model), PROMPTS, strict=True):
        assert text.tokens[: text.prompt_length] == prompt
        assert len(text.tokens) == len(prompt) + 9
        fresh = tiers_of(model).full.forward(text.tokens[:-1], rows=9)
        torch.testing.assert_close(text.full_logits, fresh, rtol=0, atol=1e-12)
        assert tuple(fresh.argmax(-1).tolist()) == text.tokens[len(prompt) :]
    first = texts_of(model)[0]
    stopped = calibration_text(model, PROMPTS[0], 9, frozenset((first.tokens[len(PROMPTS[0]) + 2],)))
    assert stopped.tokens == first.tokens[: len(stopped.tokens)]
    assert len(stopped.tokens) <= len(PROMPTS[0]) + 3 and stopped.full_logits.shape[0] == len(stopped.tokens) - 7


def slowly(
    model: Transformer, mask: LayerMask, texts: Sequence[CalibrationText], block: int, alpha: float, beta: float
) -> tuple[float, float, int]:
    """Cost, agreement and positions with tiers of its own for every block, and a sum written out."""
    cost, agree, positions = 0.0, 0, 0
    for text in texts:
        wanted = tiers_of(model).full.forward(text.tokens[:-1], rows=len(text.tokens) - text.prompt_length).tolist()
        first, last = text.prompt_length - 1, len(text.tokens) - 1
        for start in range(first, last, block):
            end = min(start + block, last)
            tiers = tiers_of(model)
            tiers.full.prefill(text.tokens[:start])
            got = tiers.provisional("slim", mask.layers).forward(text.tokens[:end], rows=end - start).tolist()
            for verifier, proposer in zip(wanted[start - first : end - first], got, strict=True):
                cost += plain_cost(verifier, proposer, alpha, beta)
                agree += verifier.index(max(verifier)) == proposer.index(max(proposer))
                positions += 1
    return cost / positions, agree / positions, positions


MASKS = [LayerMask.of(layers, DEPTH) for layers in ((0, 2, 5), (0, 1, 3, 5), (0, 5), tuple(range(DEPTH)), (0, 3, 4, 5))]


@pytest.mark.parametrize("block", [1, 4, 50])
@pytest.mark.parametrize(("alpha", "beta"), COSTS)
def test_evaluate_equals_a_slow_computation_from_scratch(block: int, alpha: float, beta: float) -> None:
    model = tiny(4, layers=DEPTH)
    texts = texts_of(model)
    for mask in MASKS:
        found = evaluate(mask, texts, block, alpha, beta)
        with shapes_unchecked():
            cost, agreement, positions = slowly(model, mask, texts, block, alpha, beta)
        assert found.cost == pytest.approx(cost, rel=1e-9, abs=1e-12)
        assert (found.mask, found.agreement, found.positions) == (mask, agreement, positions)
        assert positions == 9 * len(PROMPTS)
        assert found.seconds > 0
    assert evaluate(MASKS[3], texts, block, 0.0, 1.0).cost == pytest.approx(0, abs=1e-12), "nothing skipped"
    assert evaluate(MASKS[2], texts, block, 0.0, 1.0).cost > 0.01


def test_neither_order_nor_repetition_changes_a_cost() -> None:
    model = tiny(5, layers=DEPTH)
    texts = texts_of(model)
    keys = [text.tiers.cache.keys.clone() for text in texts]

    def costs(masks: Sequence[LayerMask], block: int) -> dict[LayerMask, tuple[float, float]]:
        found = [evaluate(mask, texts, block, 0.0, 1.0) for mask in masks]
        return {one.mask: (one.cost, one.agreement) for one in found}

    wanted = costs(MASKS, 5)
    assert len(set(wanted.values())) == len(MASKS)
    costs([MASKS[4], MASKS[0], MASKS[0], MASKS[2]], 3)
    assert costs(MASKS[::-1] * 2, 5) == wanted
    assert {mask: texts_first(model, mask) for mask in MASKS} == wanted
    for text, kept in zip(texts, keys, strict=True):
        assert text.tiers.others == [], "no tier of a mask outlives its evaluation"
        text.restore()
        assert torch.equal(text.tiers.cache.keys, kept), "the full verifier's entries are back"


def texts_first(model: Transformer, mask: LayerMask) -> tuple[float, float]:
    """``mask`` as the first one that is ever scored on new texts."""
    found = evaluate(mask, texts_of(model), 5, 0.0, 1.0)
    return found.cost, found.agreement


def searched(evaluations: int, seed: int = 0, skip_ratio: float = 0.3, **settings: Any) -> list[dimr.Evaluation]:
    texts = [calibration_text(tiny(6, layers=8), PROMPTS[0], 4, NO_EOS)]
    return list(random_search(texts, 8, skip_ratio, evaluations, seed, 5, **settings))


@pytest.mark.parametrize("exchange", [0.0, 0.5, 0.9])
def test_search_is_seeded_and_repeats_no_mask(exchange: float) -> None:
    found = searched(12, exchange=exchange)
    masks = [one.mask for one in found]
    assert len(masks) == len(set(masks)) == 12
    assert [(one.mask, one.cost) for one in searched(12, exchange=exchange)] == [(one.mask, one.cost) for one in found]
    assert [one.mask for one in searched(12, seed=1, exchange=exchange)] != masks
    assert [one.mask for one in searched(5, exchange=exchange)] == masks[:5], "more evaluations only go on"


@pytest.mark.parametrize("skip_ratio", [0.0, 0.125, 0.3, 0.4375, 0.5, 0.75])
def test_every_mask_keeps_the_ends_and_the_right_number(skip_ratio: float) -> None:
    kept = 8 - round(8 * skip_ratio)
    found = searched(6, skip_ratio=skip_ratio)
    assert len(found) == min(6, math.comb(6, kept - 2))
    for one in found:
        assert len(one.mask.kept) == 8 and len(one.mask.layers) == kept == kept_count(8, skip_ratio)
        assert one.mask.kept[0] and one.mask.kept[-1]


class Impatient(random.Random):
    """A source of randomness that takes endless proposals for what they are."""

    draws = 0

    def random(self) -> float:
        self.draws += 1
        assert self.draws < 5000, "the search goes on forever"
        return super().random()


@pytest.mark.parametrize("exchange", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_search_ends_when_no_mask_is_left(seed: int, exchange: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dimr.random, "Random", Impatient)
    found = searched(1000, seed=seed, exchange=exchange)
    assert len({one.mask for one in found}) == len(found) == math.comb(6, 4)


def test_proposals_exchange_one_layer_of_the_best_mask() -> None:
    lowest, best = math.inf, None
    for one in searched(6, exchange=1.0):
        assert best is None or len(set(one.mask.layers) - set(best.layers)) == 1
        if one.cost < lowest:
            lowest, best = one.cost, one.mask


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.0}, "alpha=1.0, beta=1.0: want 0 <= alpha < 1 and beta >= 1 - alpha"),
        ({"alpha": -0.1}, "alpha=-0.1"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"alpha": 0.3, "beta": 0.6}, "alpha=0.3, beta=0.6"),
        ({"beta": math.nan}, "alpha=0.0, beta=nan"),
        ({"beta": math.inf}, "alpha=0.0, beta=inf"),
        ({"evaluations": 0}, "evaluations=0: want at least 1 mask."),
        ({"exchange": 1.1}, "exchange=1.1: want a probability."),
        ({"exchange": math.nan}, "exchange=nan"),
        ({"skip_ratio": 1.0}, "skip_ratio=1.0 leaves no layer of 8"),
        ({"skip_ratio": -0.2}, "skip_ratio=-0.2 leaves no layer of 8"),
        ({"skip_ratio": 0.9}, "skip_ratio=0.9 leaves 1 of 8 layers; first and last always stay."),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        searched(**{"evaluations": 2} | settings)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
