"""What a mask costs: against a sum written out, in both cache modes, and without a trace of what was scored before."""

import math
from collections.abc import Sequence

import pytest
import torch

from harness.decode.slim import masked_tier
from harness.dimr import CalibrationText, block_logits, calibration_text, check_margins, evaluate
from harness.errors import UserError
from harness.model.slim import LayerMask, Mask, SublayerMask
from harness.model.transformer import Transformer
from tests.theory import plain_cost
from tests.toys import shapes_unchecked, tiers_of, tiny

DEPTH = 6
COSTS = ((0.0, 1.0), (0.3, 0.8))
NO_EOS: frozenset[int] = frozenset()
PROMPTS = ((5, 9, 2, 5, 9, 11, 3), (1, 2), (40,))


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

    def costs(masks: Sequence[Mask], block: int) -> dict[Mask, tuple[float, float]]:
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


def texts_first(model: Transformer, mask: Mask) -> tuple[float, float]:
    """``mask`` as the first one that is ever scored on new texts."""
    found = evaluate(mask, texts_of(model), 5, 0.0, 1.0)
    return found.cost, found.agreement


@pytest.mark.parametrize("mask", [MASKS[0], SublayerMask.of((0, 2, 5), (0, 1, 5), DEPTH)], ids=["layers", "sublayers"])
def test_own_mode_scores_the_skipped_model_over_the_whole_text(mask: Mask) -> None:
    """Whatever the block; and shared mode scores something else."""
    model = tiny(4, layers=DEPTH)
    texts = texts_of(model)
    found = {block: evaluate(mask, texts, block, 0.0, 1.0, "own") for block in (1, 4)}
    assert found[1].cost == pytest.approx(found[4].cost, rel=1e-12)
    cost = 0.0
    for text in texts:
        tier = masked_tier(tiers_of(model), mask, "own")
        rows = len(text.tokens) - text.prompt_length
        got = tier.forward(text.tokens[:-1], len(text.tokens) - 1)[-rows:]
        with shapes_unchecked():
            pairs = zip(text.full_logits.tolist(), got.tolist(), strict=True)
            cost += sum(plain_cost(verifier, proposer, 0.0, 1.0) for verifier, proposer in pairs)
        assert text.tiers.others == []
    assert found[1].cost == pytest.approx(cost / found[1].positions, rel=1e-9)
    assert abs(evaluate(mask, texts, 4, 0.0, 1.0, "shared").cost - found[4].cost) > 1e-3


def test_logits_of_blocks_come_in_the_order_of_the_text() -> None:
    model = tiny(4, layers=DEPTH)
    text = texts_of(model)[0]
    whole = text.tiers.provisional("slim", range(DEPTH))
    assert torch.allclose(block_logits(text, whole, 4), text.full_logits, atol=1e-10)


@pytest.mark.parametrize(
    ("alpha", "beta", "message"),
    [
        (1.0, 1.0, "job.alpha=1.0, job.beta=1.0: want 0 <= alpha < 1 and beta >= 1 - alpha"),
        (-0.1, 1.0, "job.alpha=-0.1"),
        (math.nan, 1.0, "job.alpha=nan"),
        (0.3, 0.6, "job.alpha=0.3, job.beta=0.6"),
        (0.0, math.nan, "job.alpha=0.0, job.beta=nan"),
        (0.0, math.inf, "job.alpha=0.0, job.beta=inf"),
    ],
)
def test_margins_outside_eq_8_are_refused(alpha: float, beta: float, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_margins(alpha, beta)
    assert str(caught.value).startswith(message)
    check_margins(0.3, 0.8)
