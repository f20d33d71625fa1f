"""Predicted speedups and ceilings: hand cases, limits, and the numbers that the formulas give for published pairs."""

import math
import random

import pytest

from harness.cost import (
    Costs,
    Shape,
    block_full_passes,
    break_even,
    break_even_at,
    ceiling,
    fitted,
    forward_terms,
    kept_share,
    ramps,
    speculative_ceiling,
    speculative_speedup,
    three_tier_speedup,
    tokens_per_block,
    weighted,
)
from harness.errors import UserError

GEMMA_2B = Shape("gemma2_2b", "decoder", 26, 2304, 9216, 8, 4, 256, 256000, True, 3)
GEMMA_9B = Shape("gemma2_9b", "decoder", 42, 3584, 14336, 16, 8, 256, 256000, True, 3)
LLAMA_7B = Shape("llama2_7b", "decoder", 32, 4096, 11008, 32, 32, 128, 32000, False, 3)


def simulated_tokens(rate: float, gamma: int, bonus: int, blocks: int = 40_000) -> float:
    draw = random.Random(1)
    total = 0
    for _ in range(blocks):
        kept = 0
        while kept < gamma and draw.random() < rate:
            kept += 1
        total += kept + (bonus if kept == gamma else 1)
    return total / blocks


@pytest.mark.parametrize("bonus", [0, 1])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.9])
def test_tokens_per_block_are_what_independent_acceptance_gives(rate: float, bonus: int) -> None:
    assert tokens_per_block(rate, 5, bonus) == pytest.approx(simulated_tokens(rate, 5, bonus), rel=0.02)


def test_tokens_per_block_at_certain_acceptance() -> None:
    assert tokens_per_block(1.0, 5, 1) == 6
    assert tokens_per_block(1.0, 5, 0) == 5


def test_two_tiers_by_hand() -> None:
    """(1 - .75^8) / (.25 * 1.14): acceptance and gamma of T5-small for XXL, En-De, in arXiv 2211.17192."""
    assert speculative_speedup(0.75, 7, 0.02) == pytest.approx(3.16, abs=0.01)


@pytest.mark.parametrize(("rate", "cost"), [(0.3, 0.31), (0.6, 0.7)])
def test_no_draft_pays_when_it_costs_more_than_it_is_accepted(rate: float, cost: float) -> None:
    assert all(speculative_speedup(rate, gamma, cost) < 1 for gamma in range(1, 30))


def test_a_cheaper_draft_pays_at_some_length() -> None:
    assert any(speculative_speedup(0.3, gamma, 0.29) > 1 for gamma in range(1, 30))


def test_full_passes_of_a_block_are_the_chance_that_it_escalates() -> None:
    draw = random.Random(2)
    accept, escalate, gamma, blocks = 0.6, 0.15, 5, 40_000
    asked = 0
    for _ in range(blocks):
        for _ in range(gamma):
            one = draw.random()
            if one < accept:
                continue
            asked += one < accept + escalate
            break
    assert block_full_passes(accept, escalate, gamma) == pytest.approx(asked / blocks, rel=0.03)


def test_full_passes_at_certain_acceptance_are_none() -> None:
    assert block_full_passes(1.0, 0.0, 5) == 0


def test_break_even_is_where_both_speedups_meet() -> None:
    costs = Costs(draft=0.1, slim=0.7)
    passes = break_even(costs.slim)
    tokens = tokens_per_block(0.5, 5, 1)
    assert three_tier_speedup(tokens, passes, 5, costs) == pytest.approx(speculative_speedup(0.5, 5, costs.draft))


@pytest.mark.parametrize(
    ("draft", "slim", "without", "with_bonus"),
    [(0.28, 0.593, 2.51, 3.01), (0.096, 0.56, 4.81, 5.77), (0.51, 0.56, 1.61, 1.93)],
)
def test_ceilings(draft: float, slim: float, without: float, with_bonus: float) -> None:
    assert ceiling(5, Costs(draft, slim), bonus=0) == pytest.approx(without, abs=0.01)
    assert ceiling(5, Costs(draft, slim), bonus=1) == pytest.approx(with_bonus, abs=0.01)


def test_no_speedup_is_above_its_ceiling() -> None:
    draw = random.Random(3)
    for _ in range(300):
        costs = Costs(draw.uniform(0.01, 1), draw.uniform(0.01, 1))
        rate, passes, bonus = draw.random(), draw.random(), draw.randint(0, 1)
        tokens = tokens_per_block(rate, 5, bonus)
        assert three_tier_speedup(tokens, passes, 5, costs) <= ceiling(5, costs, bonus) + 1e-12
        assert speculative_speedup(rate, 5, costs.draft) <= speculative_ceiling(5, costs.draft) + 1e-12


def test_the_ceiling_without_a_given_length_is_its_limit() -> None:
    assert speculative_ceiling(None, 0.25) == 4
    assert speculative_ceiling(100_000, 0.25) == pytest.approx(4, rel=1e-3)


def test_weights_read_of_a_tied_head_are_counted_once() -> None:
    layer = 2304 * (8 + 2 * 4) * 256 + 8 * 256 * 2304 + 3 * 2304 * 9216
    assert GEMMA_2B.read_weights() == 26 * layer + 256000 * 2304


def test_weights_read_leave_out_an_untied_embedding() -> None:
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    assert LLAMA_7B.read_weights() == 32 * layer + 32000 * 4096


def test_a_slim_verifier_keeps_the_head() -> None:
    kept = GEMMA_9B.kept_layers(0.45)
    assert kept == 23
    assert kept_share(GEMMA_9B, 0.45) == pytest.approx(0.593, abs=0.001)


def test_a_decoder_layer_of_an_encoder_decoder_reads_its_cross_attention() -> None:
    """Keys and values of the encoder's output are made once, before decoding: per step query and output are read."""
    shape = Shape("t5", "encoder-decoder", 2, 8, 16, 2, 2, 4, 10, False, 3)
    assert shape.read_weights() == 2 * (4 * 8 * 8 + 2 * 8 * 8 + 3 * 8 * 16) + 10 * 8


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_a_rate_out_of_bounds_is_refused(rate: float) -> None:
    with pytest.raises(UserError, match="acceptance"):
        tokens_per_block(rate, 5, 1)


def test_a_length_of_none_is_refused() -> None:
    with pytest.raises(UserError, match="gamma=0"):
        tokens_per_block(0.5, 0, 1)


def test_ramps_are_a_straight_line_between_knots() -> None:
    assert ramps(1) == (1, 0, 0, 0, 0, 0, 0)
    assert ramps(3) == (1, 1, 0.5, 0, 0, 0, 0)
    assert ramps(32) == (1,) * 7
    assert ramps(48) == (1,) * 6 + (2,)


def test_times_of_any_rising_shape_are_found_again() -> None:
    """A step between 1 and 2 rows, flat to 4, then steep: neither a line nor convex."""
    draw = random.Random(4)
    milliseconds = {1: 10.0, 2: 14.0, 3: 14.0, 4: 14.0, 5: 18.0, 6: 22.0}
    terms, seconds = [], []
    for _ in range(40):
        forwards = [(draw.choice(list(milliseconds)), draw.randint(50, 900)) for _ in range(20)]
        terms.append(forward_terms("full", forwards))
        seconds.append(sum(milliseconds[rows] / 1e3 + 1e-6 * context for rows, context in forwards))
    weights = fitted(terms, seconds)
    for rows, spent in milliseconds.items():
        found = weighted(forward_terms("full", [(rows, 300)]), weights)
        assert found == pytest.approx(spent / 1e3 + 3e-4, rel=1e-3)


def test_no_cost_is_negative() -> None:
    weights = fitted([{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0}], [2.0, 1.0])
    assert min(weights.values()) >= 0


def test_what_was_never_measured_has_no_cost() -> None:
    weights = fitted([forward_terms("full", [(1, 10)])], [1.0])
    assert weighted(forward_terms("slim", [(1, 10)]), weights) is None
    assert forward_terms("slim", []) == {}


def test_the_edge_is_where_both_speedups_meet_at_unequal_tokens() -> None:
    costs = Costs(draft=0.1, slim=0.6)
    two, three = 2.5, 2.8
    edge = break_even_at(three / two, 5, costs)
    assert three_tier_speedup(three, edge, 5, costs) == pytest.approx(two / (5 * costs.draft + 1))
    assert break_even_at(1.0, 5, costs) == pytest.approx(break_even(costs.slim))
