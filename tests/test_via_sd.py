"""VIA-SD's rules and its chain of slim verifiers in whole generations: traces, passes, host reads, refusals."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import pytest
import torch

from harness.decode import via_sd as via_sd_module
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.gate import AlwaysEscalate, Foreseeing, Gate, Strictness
from harness.decode.gate.constant import NeverEscalate
from harness.decode.gate.oracle import Oracle
from harness.decode.rules import CHOICES
from harness.decode.slim import masked, several
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Drafter
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.records import Generation, Route
from harness.sampling import RandomChooser, Sampling
from tests.toys import CPU, GREEDY, shapes_unchecked, tiers_of, tiny_model

PROMPT = (1, 2, 3)
E = Route.ESCALATE
MASKS = ([0, 3], [0, 1, 3])
SAMPLED = Sampling(1.0)


def skipping(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
    return SelfSkip(tiers, sampling, model, mask=[0, 1])


def model_of(seed: int) -> Model:
    return tiny_model(seed, kept=MASKS[-1], layer_scale=0.8, head_scale=1.0)


def method_of(
    model: Model,
    gate: Gate | Foreseeing,
    sampling: Sampling = GREEDY,
    capacity: int = 256,
    masks: Sequence[Sequence[int]] | None = None,
    ending: str = "slim",
    escalate: str = "token",
    escalated: str = "lossless",
    bonus: str = "none",
    gamma: int = 2,
) -> ViaSD:
    return ViaSD(
        tiers_of(model, capacity),
        sampling,
        model,
        gamma,
        skipping,
        gate,
        ending=ending,
        escalate=escalate,
        escalated=escalated,
        bonus=bonus,
        slim=masked if masks is None else partial(several, masks=masks),
    )


def decoded(method, tokens: int = 30) -> Generation:
    decoder = Decoder(method)
    decoder.prefill(PROMPT)
    with shapes_unchecked():  # tests/test_via_sd_laws.py and others check them
        return decoder.decode(StopRule(tokens), RandomChooser(0, CPU))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("masks", [None, MASKS], ids=["three tiers", "four tiers"])
@pytest.mark.parametrize(("ending", "bonus"), list(product(CHOICES["ending"], CHOICES["bonus"])))
def test_traces_and_host_reads_of_every_rule(
    ending: str, bonus: str, masks, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read for each verifier that ran; the full one runs for an escalation and for a last word that is its own."""
    reads = 0
    to_host = via_sd_module.to_host

    def counted(*tensors: torch.Tensor) -> list[int]:
        nonlocal reads
        reads += 1
        return to_host(*tensors)

    monkeypatch.setattr(via_sd_module, "to_host", counted)
    method = method_of(model_of(1), Strictness(), sampling, masks=masks, ending=ending, bonus=bonus)
    got = decoded(method)
    assert len(got.token_ids) == 30
    drafting = [block for block in got.blocks if block.drafted]
    for block in drafting:
        whole = block.kept == block.drafted
        assert 1 <= block.slim_forwards <= len(method.slims)
        own = (block.routes[-1] is Route.REGENERATE and ending == "full") or (whole and bonus == "full")
        assert block.full_forwards == (Route.ESCALATE in block.routes or own)
        assert block.bonus == (whole and bonus != "none") or block is drafting[-1]
        assert block.routes[:-1].count(Route.REGENERATE) == 0
    assert sum(block.bonus for block in drafting) > 0 or bonus == "none"
    assert reads == sum(block.slim_forwards + block.full_forwards for block in drafting)
    draft, slim = method.tier_roles()
    assert draft is not None and draft.forwards == sum(block.draft_forwards for block in got.blocks)
    assert slim.forwards == sum(block.slim_forwards for block in got.blocks) == sum(t.forwards for t in method.slims)
    assert method.tiers.full.forwards == sum(block.full_forwards for block in got.blocks)
    assert got.tier_s is not None and got.tier_s[1] == pytest.approx(sum(tier.seconds for tier in method.slims))


@pytest.mark.parametrize("masks", [None, MASKS], ids=["three tiers", "four tiers"])
@pytest.mark.parametrize("bonus", CHOICES["bonus"])
def test_a_cache_of_prompt_and_output_is_large_enough_and_nothing_is_carried_over(masks, bonus: str) -> None:
    model = model_of(3)
    for length in (1, 2, 5, 11):
        method = method_of(model, Strictness(), SAMPLED, len(PROMPT) + length, masks, ending="full", bonus=bonus)
        first = decoded(method, length)
        assert len(first.token_ids) == length
        again = decoded(method, length)
        assert (again.token_ids, again.blocks) == (first.token_ids, first.blocks)


GATES: dict[str, Callable[[], Gate | Foreseeing]] = {"always": AlwaysEscalate, "oracle": Oracle}


@pytest.mark.parametrize("masks", [None, [*MASKS, [0, 1, 2, 3]]], ids=["3 tiers", "5 tiers"])
@pytest.mark.parametrize("gate", GATES)
def test_greedy_tokens_come_out_of_every_combination_that_says_lossless(gate: str, masks) -> None:
    """The bonus of the slim verifier, which is lossy, has its law in tests/test_via_sd_laws.py."""
    for seed, (ending, escalate) in enumerate(product(CHOICES["ending"], CHOICES["escalate"])):
        model = model_of(seed)
        bonus = ("none", "full")[seed % 2]
        method = method_of(model, GATES[gate](), masks=masks, ending=ending, escalate=escalate, bonus=bonus)
        assert method.lossless
        assert decoded(method).token_ids == decoded(Autoregressive(tiers_of(model), GREEDY)).token_ids


def test_the_next_verifier_runs_where_the_one_before_escalates_first() -> None:
    seen: set[tuple[int, int]] = set()
    for seed in range(4):
        method = method_of(model_of(seed), Strictness(0.8, 0.5), masks=MASKS)
        got = decoded(method)
        first, second = method.slims
        drafting = sum(block.drafted > 0 for block in got.blocks)
        assert first.forwards == drafting and 0 < second.forwards < drafting
        for block in got.blocks:
            assert block.full_forwards <= block.slim_forwards == 2 or block.full_forwards == 0
            seen.add((block.slim_forwards, block.full_forwards))
    assert seen == {(1, 0), (2, 0), (2, 1)}


def test_one_slim_verifier_given_by_hand_is_the_models_own() -> None:
    model = model_of(2)
    for sampling in (GREEDY, SAMPLED):
        own, given = (decoded(method_of(model, Strictness(), sampling, masks=masks)) for masks in (None, MASKS[1:]))
        assert (own.token_ids, own.blocks) == (given.token_ids, given.blocks)


def test_judging_the_rest_routes_everything_behind_an_escalation_to_the_full_verifier() -> None:
    seen = set()
    for escalate in CHOICES["escalate"]:
        methods = [method_of(model_of(seed), Strictness(), SAMPLED, escalate=escalate, gamma=5) for seed in range(4)]
        routes = [block.routes for method in methods for block in decoded(method).blocks]
        behind = [route for one in routes if E in one for route in one[one.index(E) :]]
        seen.add((escalate, set(behind) == {E}))
    assert seen == {("token", False), ("rest", True)}


def test_a_gate_that_never_escalates_needs_the_full_verifier_for_nothing() -> None:
    got = decoded(method_of(model_of(0), NeverEscalate()))
    assert sum(block.full_forwards for block in got.blocks) == 0
    assert {route for block in got.blocks for route in block.routes} == {Route.ACCEPT, Route.REGENERATE}


@pytest.mark.parametrize("key", CHOICES)
def test_an_unknown_setting_is_refused_by_name(key: str) -> None:
    with pytest.raises(UserError, match=rf"^{key}='other': want one of {', '.join(CHOICES[key])}\.$"):
        method_of(model_of(0), Strictness(), **{key: "other"})  # type: ignore[arg-type]


@pytest.mark.parametrize("masks", [[[0, 1, 3], [0, 3]], [[0, 3], [0, 2]]])
def test_slim_verifiers_that_do_not_skip_less_and_less_are_refused(masks: list[list[int]]) -> None:
    with pytest.raises(UserError, match=r"^slim\.masks skip 0\.\d\d, 0\.50: .*decreasing skip ratio"):
        method_of(model_of(0), Strictness(), masks=masks)


def test_no_slim_verifier_and_an_unreadable_one_are_refused() -> None:
    with pytest.raises(UserError, match=r"^slim\.masks skip nothing: want one mask at least"):
        method_of(model_of(0), Strictness(), masks=[])
    with pytest.raises(UserError, match=r"layer mask 'nowhere\.json' does not exist"):
        method_of(model_of(0), Strictness(), masks=["nowhere.json"])  # type: ignore[list-item]


@pytest.mark.parametrize(("gate", "masks"), [(Oracle(), None), (Strictness(), MASKS)])
def test_the_mixture_is_refused_where_eq_14_says_nothing(gate: Gate | Foreseeing, masks) -> None:
    with pytest.raises(
        UserError, match=r"^escalated=mixture is for one slim verifier and a gate that routes by the slim"
    ):
        method_of(model_of(0), gate, masks=masks, escalated="mixture")


def test_records_name_every_rule_that_is_not_the_default() -> None:
    model = model_of(0)
    assert method_of(model, Strictness()).gate_name == "strictness(0.5, 0.3)"
    method = method_of(model, Strictness(), masks=MASKS, ending="full", bonus="slim")
    assert method.gate_name == "strictness(0.5, 0.3), ending=full, bonus=slim, 2 slim verifiers"
