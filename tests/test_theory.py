"""The theory's formulas: cases done by hand, sums written out, and the emitted law against a decoder's, enumerated."""

import math
from functools import partial

import pytest
import torch

from harness.decode.base import Decoder, StopRule
from harness.decode.gate import Literal, Strictness, Thresholds
from harness.decode.via_sd import ViaSD
from harness.drafters.self_skip import SelfSkip
from harness.sampling import Sampling
from harness.theory import (
    deltas,
    exact_law,
    gain,
    mass,
    mixture,
    regions,
    step_cost,
    three_way,
    total_variation,
)
from tests import enumeration
from tests.theory import plain_cost
from tests.toys import tiers_of, tiny_model

COSTS = ((0.0, 1.0), (0.3, 0.8))


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


P, SLIM, Q = (torch.tensor([row], dtype=torch.float64) for row in ((0.5, 0.3, 0.2), (0.6, 0.3, 0.1), (0.2, 0.5, 0.3)))
"""Ratios q'(v)/M' are 1, 1/2 and 1/6."""


def test_the_chain_pays_when_its_two_links_cost_less_than_the_jump() -> None:
    assert gain(full_draft=3.0, slim_draft=1.0, full_slim=1.5) == 0.5
    assert gain(full_draft=1.0, slim_draft=1.0, full_slim=1.5) == -1.5


def test_total_variation_by_hand() -> None:
    assert total_variation(P, Q).tolist() == pytest.approx([0.3])
    assert total_variation(P, P).tolist() == [0.0]


def test_regions_partition_the_vocabulary_as_the_gate_routes() -> None:
    found = regions(SLIM, accept_at=0.5, keep_at=0.3)
    assert [part.tolist() for part in found] == [[[True, True, False]], [[False] * 3], [[False, False, True]]]
    assert [round(float(mass(P, part)), 12) for part in found] == [0.8, 0.0, 0.2]
    literal = regions(SLIM, accept_at=0.5, keep_at=0.7)  # as printed: nothing is regenerated
    assert not literal.regenerate.any() and literal.accept.tolist() == [[True, True, False]]
    strict = regions(SLIM, accept_at=0.9, keep_at=0.3)
    assert strict.regenerate.tolist() == [[False, True, False]]


def test_every_token_takes_the_route_that_a_gate_gives_it() -> None:
    scores = torch.randn(4, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2
    for gate in (Strictness(0.5, 0.3), Literal(0.5, 0.3, allow_unreachable=True)):
        found = torch.stack(regions(torch.softmax(scores, -1), gate.accept_at, gate.keep_at))  # [3, N, V]
        assert (found.sum(0) == 1).all()
        for token in range(7):
            codes = gate(scores, torch.full((4,), token)).codes
            assert codes.tolist() == found[:, :, token].int().argmax(0).tolist()


def test_deltas_are_those_of_b11_and_may_overlap() -> None:
    """alpha1 = .5, alpha2 = .3: from 1/2 of M', and below .7 of it; the second token is in both."""
    one, two = deltas(P, SLIM, 0.5, 0.3)
    assert [float(one), float(two)] == pytest.approx([0.8, 0.5])
    assert float(one + two) > 1


def test_mixtures_by_hand() -> None:
    delta1, delta2 = torch.tensor([0.8], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    inner = [0.2 * p + 0.8 * slim for p, slim in zip(P[0].tolist(), SLIM[0].tolist(), strict=True)]
    wanted = [0.5 * value + 0.5 * q for value, q in zip(inner, Q[0].tolist(), strict=True)]
    assert mixture(P, SLIM, Q, delta1, delta2)[0].tolist() == pytest.approx(wanted)
    found = regions(SLIM, 0.9, 0.3)  # A: .5, B: .3, C: .2
    wanted = [0.5 * p + 0.3 * s + 0.2 * q for p, s, q in zip(*(x[0].tolist() for x in (P, SLIM, Q)), strict=True)]
    assert three_way(P, SLIM, Q, found)[0].tolist() == pytest.approx(wanted)


def test_the_emitted_law_by_hand() -> None:
    """A = {0}, B = {1}, C = {2}: p(0) stays; q'(v) gets .3; token 2 has p below q, so nothing is refused."""
    wanted = [0.5 + 0.3 * 0.6, 0.3 * 0.3, 0.2 + 0.3 * 0.1]
    assert exact_law(P, SLIM, Q, regions(SLIM, 0.9, 0.3))[0].tolist() == pytest.approx(wanted)
    # With all escalated it is the full verifier's.
    assert exact_law(P, SLIM, Q, regions(SLIM, 1.1, 1.1))[0].tolist() == pytest.approx(Q[0].tolist())
    assert exact_law(P, SLIM, P, regions(SLIM, 1.1, 1.1))[0].tolist() == pytest.approx(P[0].tolist())


GATES = {"strict": Strictness(0.6, 0.3), "literal": Literal(0.5, 0.3, allow_unreachable=True)}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("seed", range(3))
def test_the_emitted_law_is_what_the_decoder_emits_and_the_mixtures_are_not(seed: int, gate: Thresholds) -> None:
    spread = (3.0, 0.3, 1.0)[seed]
    model = tiny_model(seed, kept=(0, 1, 3), layer_scale=1.0, vocab_size=5, head_scale=spread)
    sampling, prompt, drafter = Sampling(1.0), (1, 2, 0), partial(SelfSkip, mask=[0, 1])

    def run(chooser) -> tuple[int, ...]:
        decoder = Decoder(ViaSD(tiers_of(model), sampling, model, 1, drafter, gate))
        decoder.prefill(prompt)
        return decoder.decode(StopRule(1), chooser).token_ids

    def said(layers: list[int] | None) -> torch.Tensor:
        tiers = tiers_of(model)
        tiers.prefill(prompt)
        tier = tiers.full if layers is None else tiers.provisional("tier", layers)
        return torch.softmax(tier.forward(prompt, 1), -1)

    draft, slim, full = said([0, 1]), said([0, 1, 3]), said(None)
    found = regions(slim, gate.accept_at, gate.keep_at)
    got = enumeration.exact_law(run)
    emitted = torch.tensor([[got.get((token,), 0.0) for token in range(5)]], dtype=torch.float64)
    assert float(total_variation(exact_law(draft, slim, full, found), emitted)) < 1e-12
    if bool(found.accept.all()):
        return
    for wrong in (mixture(draft, slim, full, *deltas(draft, slim, 0.5, 0.3)), three_way(draft, slim, full, found)):
        assert wrong.sum().item() == pytest.approx(1.0)
        assert float(total_variation(wrong, emitted)) > 1e-3
