"""Gates: hand cases, bounds, and what they do to a decoder at temperature 0."""

from collections.abc import Callable

import pytest
import torch

from harness.decode.base import Decoder, StopRule
from harness.decode.gate import ROUTES, AlwaysEscalate, Gate, Literal, Strictness, Tabled, routes_of
from harness.decode.gate.constant import NeverEscalate
from harness.decode.gate.doubt import Entropy, Margin
from harness.decode.via_sd import ViaSD
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.records import Route
from harness.sampling import RandomChooser, Sampling
from tests.toys import CPU, GREEDY, scripted, tiers_of, tiny_model

A, R, E = Route.ACCEPT, Route.REGENERATE, Route.ESCALATE

# (gate, slim distribution, its routes by token).
CASES: dict[str, tuple[Gate, list[float], list[Route]]] = {
    "strictness between its thresholds": (Strictness(0.5, 0.3), [0.5, 0.2, 0.14, 0.16], [A, R, E, R]),
    "strictness on both thresholds": (Strictness(0.5, 0.25), [0.5, 0.25, 0.125, 0.125], [A, A, R, R]),
    "strictness just above a threshold": (Strictness(0.50001, 0.25001), [0.5, 0.25, 0.125, 0.125], [A, R, E, E]),
    "strictness of a flat distribution": (Strictness(0.9, 0.8), [0.25] * 4, [A] * 4),
    "strictness of a certain slim verifier": (Strictness(0.1, 0.05), [1.0, 0.0, 0.0, 0.0], [A, E, E, E]),
    "literal between its thresholds": (Literal(0.3, 0.8), [0.5, 0.3, 0.12, 0.08], [A, R, R, E]),
    "literal on both thresholds": (Literal(0.5, 0.75), [0.5, 0.25, 0.125, 0.125], [A, A, R, R]),
    "literal as published": (Literal(0.5, 0.3, True), [0.4, 0.3, 0.2, 0.1], [A, A, E, E]),
    "literal as published, between 1 - alpha1 and 1 - alpha2": (
        Literal(0.5, 0.3, True),
        [0.4, 0.26, 0.24, 0.1],
        [A, E, E, E],
    ),
    "strictness with alpha2 above alpha1": (Strictness(0.3, 0.5, True), [0.5, 0.24, 0.16, 0.26], [A, E, E, A]),
    "literal with equal thresholds": (Literal(0.5, 0.5, True), [0.5, 0.25, 0.15, 0.1], [A, A, E, E]),
    "always": (AlwaysEscalate(), [0.7, 0.1, 0.1, 0.1], [E] * 4),
    "never": (NeverEscalate(0.5), [0.5, 0.25, 0.24, 0.01], [A, A, R, R]),
    "never, of a certain slim verifier": (NeverEscalate(0.1), [1.0, 0.0, 0.0, 0.0], [A, R, R, R]),
    # Entropies: log 4 for the flat one; 0.5 log 4 for two of four; 0.258 log 4, by hand, for [0.9, 0.09, 0.01, 0].
    "entropy of a flat distribution": (Entropy(0.99, 0.5), [0.25] * 4, [E] * 4),
    "entropy on the threshold": (Entropy(0.5 + 1e-6, 0.5), [0.5, 0.5, 0.0, 0.0], [A, A, R, R]),
    "entropy just above the threshold": (Entropy(0.5 - 1e-6, 0.5), [0.5, 0.5, 0.0, 0.0], [E] * 4),
    "entropy of a sure one": (Entropy(0.26, 0.05), [0.9, 0.09, 0.01, 0.0], [A, A, R, R]),
    "entropy of one not sure enough": (Entropy(0.25, 0.05), [0.9, 0.09, 0.01, 0.0], [E] * 4),
    "margin of a flat distribution": (Margin(0.01, 0.5), [0.25] * 4, [E] * 4),
    "margin on the threshold": (Margin(0.25, 0.5), [0.5, 0.25, 0.125, 0.125], [A, A, R, R]),
    "margin just below the threshold": (Margin(0.25001, 0.5), [0.5, 0.25, 0.125, 0.125], [E] * 4),
    "margin of a certain slim verifier": (Margin(0.99, 0.01), [1.0, 0.0, 0.0, 0.0], [A, R, R, R]),
}


@pytest.mark.parametrize("case", CASES)
def test_routes_of_hand_cases(case: str) -> None:
    """Each of the four tokens drafted at a position with the same slim distribution."""
    gate, probs, want = CASES[case]
    codes, stop = gate(torch.tensor([probs] * 4).log(), torch.arange(4))
    assert routes_of(codes.tolist()) == tuple(want)
    assert int(stop) == ([*(route is A for route in want), False]).index(False)


TABLED = {name: gate for name, (gate, _, _) in CASES.items()}


@pytest.mark.parametrize("name", TABLED)
def test_the_table_has_the_route_of_every_token_that_might_have_been_drafted(name: str) -> None:
    gate = TABLED[name]
    assert isinstance(gate, Tabled)
    scores = 3 * torch.randn(40, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores[0] = torch.tensor([0.0, *[float("-inf")] * 6])
    table = gate.table(scores)
    for token in range(7):
        assert torch.equal(table[:, token], gate(scores, torch.full((40,), token)).codes)
    assert set(routes_of(table.flatten().tolist())) <= gate.reachable


@pytest.mark.parametrize("gate", [Entropy(0.4, 0.5), Margin(0.3, 0.5)], ids=lambda gate: gate.name)
def test_a_gate_by_doubt_takes_every_route_and_doubt_does_not_depend_on_the_draft(gate: Tabled) -> None:
    scores = 3 * torch.randn(200, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table = gate.table(scores)
    assert set(routes_of(table.flatten().tolist())) == gate.reachable == {A, R, E}
    escalated = table == ROUTES.index(E)
    assert torch.equal(escalated.any(-1), escalated.all(-1))
    assert torch.equal(table, gate.table(scores.log_softmax(-1))), "logits and log-probabilities are routed alike"


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(Entropy, "escalate_above", 0.0), (Entropy, "escalate_above", 1.0), (Margin, "escalate_below", 1.0)]
    + [(kind, "alpha1", value) for kind in (Entropy, Margin, NeverEscalate) for value in (0.0, 1.0)],
)
def test_other_thresholds_are_held_to_their_bounds_too(kind: Callable[..., Gate], name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"^gate\.{name}={value}: want a threshold between 0 and 1, both excluded\.$"):
        kind(**{name: value})


def test_positions_are_judged_by_their_own_distribution() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]])
    codes, stop = Strictness(0.5, 0.3)(probs.log(), torch.tensor([0, 0, 0]))
    assert routes_of(codes.tolist()) == (A, E, A) and int(stop) == 1


def test_logits_and_log_probabilities_are_routed_alike() -> None:
    """The ratio does not depend on what all scores of a position have in common."""
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.arange(200) % 7
    one, other = (Strictness(0.5, 0.3)(scores, tokens) for scores in (logits, logits.log_softmax(-1)))
    assert set(one.codes.tolist()) == {0, 1, 2}
    assert torch.equal(one.codes, other.codes)


@pytest.mark.parametrize("kind", [Strictness, Literal])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1.5])
@pytest.mark.parametrize("name", ["alpha1", "alpha2"])
def test_a_threshold_outside_0_1_is_refused_by_name(kind: Callable[..., Gate], name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"^gate\.{name}={value}: want a threshold between 0 and 1, both excluded\.$"):
        kind(**{"alpha1": 0.5, "alpha2": 0.4, name: value}, allow_unreachable=True)


@pytest.mark.parametrize(
    ("kind", "alpha1", "alpha2"),
    [(Strictness, 0.3, 0.5), (Strictness, 0.4, 0.4), (Literal, 0.5, 0.3), (Literal, 0.4, 0.4)],
)
def test_an_unreachable_route_is_refused_unless_it_is_allowed(
    kind: Callable[..., Gate], alpha1: float, alpha2: float
) -> None:
    with pytest.raises(UserError, match=r"no token can be regenerated.*change alpha1 and alpha2, or set gate\.allow"):
        kind(alpha1, alpha2)
    gate = kind(alpha1, alpha2, allow_unreachable=True)
    assert gate.reachable == {A, E}
    probs = torch.rand(500, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert set(routes_of(gate(probs.log(), torch.arange(500) % 7).codes.tolist())) <= gate.reachable


@pytest.mark.parametrize(
    ("gate", "name", "reachable"),
    [
        (Strictness(), "strictness(0.5, 0.3)", {A, R, E}),
        (Literal(0.3, 0.5), "literal(0.3, 0.5)", {A, R, E}),
        (AlwaysEscalate(), "always_escalate", {E}),
        (NeverEscalate(), "never_escalate(0.5)", {A, R}),
        (Entropy(), "entropy(0.2, 0.5)", {A, R, E}),
        (Margin(), "margin(0.2, 0.5)", {A, R, E}),
    ],
)
def test_names_and_reachable_routes(gate: Gate, name: str, reachable: set[Route]) -> None:
    assert gate.name == name
    assert gate.reachable == reachable
    model = tiny_model(0, kept=(0, 1, 3))
    method = ViaSD(tiers_of(model), GREEDY, model, 2, scripted((), 0.0, 97, 0), gate)
    assert method.gate_name == name
    assert method.lossless == (reachable == {E})


def routes_taken(gate: Gate, gate_probs: str, sampling: Sampling) -> tuple[Route, ...]:
    taken: list[Route] = []
    for seed in range(3):
        model = tiny_model(seed, kept=(0, 1, 3), layer_scale=0.8, head_scale=1.0)
        method = ViaSD(
            tiers_of(model), sampling, model, 4, lambda t, s, m: SelfSkip(t, s, m, mask=[0]), gate, gate_probs
        )
        decoder = Decoder(method)
        decoder.prefill((1, 2, 3))
        for block in decoder.decode(StopRule(40), RandomChooser(0, CPU)).blocks:
            taken += block.routes
    return tuple(taken)


@pytest.mark.parametrize("strict", [True, False])
def test_all_routes_occur_at_temperature_0_and_alpha1_moves_them(strict: bool) -> None:
    def gate(alpha1: float) -> Gate:
        return Strictness(alpha1, 0.3) if strict else Literal(1 - alpha1, 0.7)

    seen = [routes_taken(gate(alpha1), "raw", GREEDY) for alpha1 in (0.4, 0.6, 0.95)]
    for taken in seen:
        assert set(taken) == {A, R, E}
    assert len(set(seen)) == 3, "moving alpha1 changed nothing"


def test_a_gate_that_reads_greedy_distributions_sees_no_middle() -> None:
    """Why raw is the default: a one-hot slim distribution gives ratios of 0 and 1 only, whatever the thresholds."""
    seen = [routes_taken(Strictness(alpha1, 0.3), "warped", GREEDY) for alpha1 in (0.4, 0.95)]
    assert seen[0] == seen[1]
    assert set(seen[0]) == {A, E}


def test_an_unknown_reading_is_refused() -> None:
    model = tiny_model(0, kept=(0, 1, 3))
    with pytest.raises(UserError, match="gate_probs='logits': want one of raw, warped"):
        ViaSD(tiers_of(model), GREEDY, model, 2, scripted((), 0.0, 97, 0), Strictness(), "logits")
