"""The oracle gate: greedy tokens by the fewest full passes, and nothing of how it knows shows."""

from collections.abc import Sequence

import pytest
import torch

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.gate import AlwaysEscalate, Foreseeing, Gate, Strictness
from harness.decode.gate.oracle import Foresight, Oracle
from harness.decode.via_sd import ViaSD
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.kernels.gate import ACCEPT, ESCALATE, REGENERATE
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.records import Generation, Route
from harness.sampling import RandomChooser, Sampling, top
from harness.timing import outside_the_clock
from tests.toys import CPU, GREEDY, tiers_of, tiny_model

PROMPT = (1, 2, 3)


def skipping(tiers, sampling, model):
    return SelfSkip(tiers, sampling, model, mask=[0])


def model_of(seed: int) -> Model:
    return tiny_model(seed, kept=(0, 1, 3), layer_scale=0.8, head_scale=1.0)


def method_of(model: Model, gate: Gate | Foreseeing) -> ViaSD:
    return ViaSD(tiers_of(model), GREEDY, model, 4, skipping, gate)


def decoded(method) -> Generation:
    decoder = Decoder(method)
    decoder.prefill(PROMPT)
    return decoder.decode(StopRule(40), RandomChooser(0, CPU))


@pytest.mark.parametrize("seed", range(6))
def test_its_tokens_are_greedy_and_its_full_passes_the_fewest(seed: int) -> None:
    model = model_of(seed)
    want = decoded(Autoregressive(tiers_of(model), GREEDY))
    got, always = (decoded(method_of(model, gate)) for gate in (Oracle(), AlwaysEscalate()))
    assert got.token_ids == want.token_ids == always.token_ids
    passes, most = (sum(block.full_forwards for block in one.blocks) for one in (got, always))
    assert 0 < passes < most
    for block in got.blocks:
        assert Route.ESCALATE not in block.routes[:-1], "an escalated token is one that neither tier had"
        assert block.full_forwards == (Route.ESCALATE in block.routes)


def test_every_route_is_what_hindsight_says() -> None:
    """Position by position against plain argmaxes of fresh tiers."""
    seen: set[Route] = set()
    for seed in range(6):
        model = model_of(seed)
        text = list(PROMPT)
        for block in decoded(method_of(model, Oracle())).blocks:
            tiers = tiers_of(model)
            tiers.prefill(text)
            drafts = SelfSkip(tiers, GREEDY, model, mask=[0]).draft(text, block.drafted, RandomChooser(0, CPU)).tokens
            full = top(tiers.full.forward(text, block.drafted, drafts[:-1])).tolist()
            for place, route in enumerate(block.routes):
                if int(drafts[place]) == full[place]:
                    assert route is Route.ACCEPT
                else:
                    assert route in (Route.REGENERATE, Route.ESCALATE)
                seen.add(route)
            text += full[: block.emitted]
    assert seen == set(Route)


def test_it_regenerates_where_the_slim_verifier_has_the_token_and_escalates_where_nobody_has() -> None:
    model = model_of(0)
    tiers = tiers_of(model)
    tiers.prefill(PROMPT)
    drafts = torch.tensor([5, 6, 7])
    coming = top(tiers.full.forward(PROMPT, 3, drafts[:-1]))
    tiers.prefill(PROMPT)
    drafts[0] = coming[0]  # the first is right; the tokens behind it are wrong
    coming = top(tiers.full.forward(PROMPT, 3, drafts[:-1]))
    tiers.prefill(PROMPT)
    slim = torch.zeros(3, 97, dtype=torch.float64)
    slim[0, (coming[0] + 1) % 97] = slim[1, coming[1]] = slim[2, (coming[2] + 1) % 97] = 1.0
    foresight = Oracle().over(tiers, GREEDY)(PROMPT)
    assert isinstance(foresight, Foresight)
    codes, stop = foresight(slim, drafts)
    assert codes.tolist() == [ACCEPT, REGENERATE, ESCALATE] and int(stop) == 1


def test_one_look_serves_every_verifier_that_asks() -> None:
    model = model_of(0)
    tiers = tiers_of(model)
    tiers.prefill(PROMPT)
    foresight = Oracle().over(tiers, GREEDY)(PROMPT)
    (seer,) = tiers.others
    for _ in range(3):
        foresight(torch.randn(2, 97, dtype=torch.float64), torch.tensor([1, 2]))
    assert seer.forwards == 1 and tiers.full.forwards == 0


def test_looking_changes_nothing_for_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an oracle that looks and is not heeded, everything is as with the gate that is heeded: traces, caches."""

    class Heedless(Oracle):
        def over(self, tiers: Tiers, sampling: Sampling):
            seeing = super().over(tiers, sampling)

            def at(text: Sequence[int]) -> Gate:
                class Other(Strictness):
                    def __call__(self, scores, tokens):
                        seeing(text)(scores, tokens)
                        resident.append(tiers.cache.resident)
                        return super().__call__(scores, tokens)

                return Other()

            return at

    resident: list[object] = []
    model = model_of(2)
    looking, plain = method_of(model, Heedless()), method_of(model, Strictness())
    got, want = decoded(looking), decoded(plain)
    assert got.blocks == want.blocks and got.token_ids == want.token_ids
    assert set(resident) == {looking.slim.cache}, "the slim tail is back in the storage before anybody needs it"
    assert looking.tiers.full.forwards == plain.tiers.full.forwards
    assert torch.equal(looking.tiers.cache.keys, plain.tiers.cache.keys)


def test_the_full_verifier_falls_behind_as_if_nobody_had_looked() -> None:
    model = model_of(0)
    tiers = tiers_of(model)
    tiers.prefill(PROMPT)
    before = tiers.full.length
    Oracle().over(tiers, GREEDY)(PROMPT)(torch.randn(2, 97, dtype=torch.float64), torch.tensor([1, 2]))
    assert tiers.full.length == before and tiers.aside_s > 0


def test_seconds_add_up_outside_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("harness.timing.synced_clock", lambda device: lambda: now[0])
    tiers = tiers_of(model_of(0))
    for spent in (2.0, 3.0):
        now[0] += 10
        with outside_the_clock(tiers):
            now[0] += spent
    assert tiers.aside_s == 5.0


def test_it_is_for_greedy_decoding_alone() -> None:
    model = model_of(0)
    with pytest.raises(UserError, match=r"^gate=oracle is for greedy decoding, temperature is 0\.7: set temperature=0"):
        ViaSD(tiers_of(model), Sampling(0.7), model, 4, skipping, Oracle())


def test_it_is_lossless_and_says_so() -> None:
    method = method_of(model_of(0), Oracle())
    assert method.lossless and method.gate_name == "oracle"
