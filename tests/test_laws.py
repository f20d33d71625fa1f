"""Exact output laws by enumeration over a 5-token vocabulary. Each law has a wrong neighbour that must fail."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, Method, StopRule
from harness.decode.gate import AlwaysEscalate, Gate, Literal, Strictness
from harness.decode.length import Adaptive, Confidence, Length
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters import graft as graft_module
from harness.drafters.base import Draft, Drafter
from harness.drafters.graft import Graft, grafted
from harness.drafters.retrieval import Retrieval
from harness.drafters.self_skip import SelfSkip
from harness.model.load import Model
from harness.records import Route
from harness.sampling import Chooser, Sampling
from tests.enumeration import BranchChooser, exact_law, total_variation
from tests.toys import shapes_unchecked, tiers_of, tiny_model, whole

PROMPT = (1, 2, 0)
VOCAB = 5
DRAFT_LAYERS = [0, 1]


def model_of(seed: int, vocab_size: int = VOCAB) -> Model:
    spread = (3.0, 0.3, 1.0)[seed % 3]  # from peaked to nearly flat distributions
    return tiny_model(seed, kept=(0, 1, 3), layer_scale=1.0, vocab_size=vocab_size, head_scale=spread)


def skipping(tiers, sampling, model):
    return SelfSkip(tiers, sampling, model, mask=DRAFT_LAYERS)


def law_of(make: Callable[[], Method], new_tokens: int) -> dict:
    decoder = Decoder(make())
    checked = False

    def run(chooser) -> tuple[int, ...]:
        nonlocal checked
        with shapes_unchecked() if checked else nullcontext():  # the first run has checked them
            checked = True
            decoder.prefill(PROMPT)
            return decoder.decode(StopRule(new_tokens), chooser).token_ids

    return exact_law(run)


def next_probs(model: Model, sampling: Sampling, layers: list[int] | None) -> Tensor:
    """The warped distribution after PROMPT of the full verifier, or of kept layers over its committed cache."""
    tiers = tiers_of(model)
    tiers.prefill(PROMPT)
    tier = tiers.full if layers is None else tiers.provisional("tier", layers)
    return sampling.warp(tier.forward(PROMPT, rows=1))[0]


SAMPLINGS = {
    "T=2": Sampling(2.0),
    "T=0.7": Sampling(0.7),
    "top-p": Sampling(1.0, top_p=0.6),
    "top-k": Sampling(1.3, top_k=2),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("method", ["speculative", "always_escalate"])
def test_lossless_methods_have_the_full_verifiers_joint_law(name: str, method: str) -> None:
    """Jointly over a block of two drafts and its bonus token; three tokens of vocabulary keep the tree small."""
    sampling = SAMPLINGS[name]
    model = model_of(seed=3, vocab_size=3)

    def make() -> Method:
        if method == "speculative":
            return Speculative(tiers_of(model), sampling, model, 2, skipping)
        return ViaSD(tiers_of(model), sampling, model, 2, skipping, AlwaysEscalate())

    want = law_of(lambda: Autoregressive(tiers_of(model), sampling), 3)
    assert sum(want.values()) == pytest.approx(1.0)
    assert total_variation(law_of(make, 3), want) < 1e-12


def no_residual(verifier: Tensor, draft: Tensor | None, tokens: Tensor, stop: Tensor) -> Tensor:
    return verifier[stop]


def test_rejecting_without_the_residual_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sampling = model_of(seed=3, vocab_size=3), Sampling(1.0)
    monkeypatch.setattr(BranchChooser, "residual", staticmethod(no_residual))
    want = law_of(lambda: Autoregressive(tiers_of(model), sampling), 3)
    got = law_of(lambda: Speculative(tiers_of(model), sampling, model, 2, skipping), 3)
    assert total_variation(got, want) > 0.01


def test_drafting_greedily_against_softmax_probabilities_breaks_the_law() -> None:
    model, sampling = model_of(seed=3), Sampling(2.5)

    class GreedyTokensSampledProbs(SelfSkip):
        def draft(self, tokens, count, chooser):
            draft = super().draft(tokens, count, chooser)
            if draft.probs is None:
                return draft
            return Draft(draft.probs.argmax(-1), draft.probs)

    def wrong(tiers, sampling, model):
        return GreedyTokensSampledProbs(tiers, sampling, model, mask=DRAFT_LAYERS)

    want = law_of(lambda: Autoregressive(tiers_of(model), sampling), 2)
    got = law_of(lambda: Speculative(tiers_of(model), sampling, model, 1, wrong), 2)
    assert total_variation(got, want) > 0.01


@pytest.fixture
def known(tmp_path: Path) -> list[str]:
    """Calibration text over a vocabulary of three bytes."""
    (tmp_path / "known.txt").write_bytes(bytes([0, 1, 2, 2, 0, 2, 1, 1, 0, 1, 2]))
    return [str(tmp_path / "known.txt")]


class Noting(Graft):
    """Notes how many tokens of each block are the inner drafter's own, and how many are retrieved."""

    shapes: set[tuple[int, int]]

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        draft = super().draft(tokens, count, chooser)
        certain = 0 if draft.probs is None else int((draft.probs.amax(-1) == 1).sum())
        self.shapes.add((len(draft) - certain, certain))
        return draft


@pytest.mark.parametrize(
    ("method", "way"), [("speculative", "one by one"), ("speculative", "whole"), ("always_escalate", "one by one")]
)
def test_grafted_drafts_keep_the_joint_law(
    method: str, way: str, known: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, model = Sampling(1.0), model_of(seed=3, vocab_size=3)
    if way == "whole":
        monkeypatch.setattr(graft_module, "pieces", whole)
    Noting.shapes = set()
    drafter = partial(Noting, inner=skipping, retrieval=partial(Retrieval, text=known), threshold=0.6)

    def make() -> Method:
        if method == "speculative":
            return Speculative(tiers_of(model), sampling, model, 2, drafter)
        return ViaSD(tiers_of(model), sampling, model, 2, drafter, AlwaysEscalate())

    want = law_of(lambda: Autoregressive(tiers_of(model), sampling), 3)
    assert total_variation(law_of(make, 3), want) < 1e-12
    assert {(2, 0), (1, 1), (0, 1)} <= Noting.shapes, "blocks of one's own tokens, of both, and retrieved ones"


def test_grafting_where_the_drawn_token_was_unlikely_breaks_the_law(known: list[str]) -> None:
    """Replacing a draw for its value, while ``probs`` has what it was drawn from and a one-hot row behind."""

    class Selecting(Graft):
        def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
            draft = self.inner.draft(tokens, count, chooser)
            if not len(draft):
                return draft
            drawn_with = draft.distributions().gather(-1, draft.tokens[:, None])[:, 0].tolist()
            for place, prob in enumerate(drawn_with):
                found = self.retrieval.continuation(tokens, count - place, draft.tokens[:place].tolist())
                if prob < self.threshold and found:
                    return grafted(draft.first(place), found)
            return draft

    sampling, model = Sampling(1.0), model_of(seed=3, vocab_size=3)
    drafter = partial(Selecting, inner=skipping, retrieval=partial(Retrieval, text=known), threshold=0.6)
    want = law_of(lambda: Autoregressive(tiers_of(model), sampling), 3)
    got = law_of(lambda: Speculative(tiers_of(model), sampling, model, 2, drafter), 3)
    assert total_variation(got, want) > 0.01


LENGTHS: dict[str, Callable[[Drafter], Length]] = {
    "confidence": partial(Confidence, threshold=0.4),
    "adaptive": partial(Adaptive, first=1),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("method", ["speculative", "always_escalate"])
def test_rules_for_the_length_of_a_block_keep_the_joint_law(method: str, length: str) -> None:
    sampling, model = Sampling(1.0), model_of(seed=3, vocab_size=3)

    def make() -> Method:
        if method == "speculative":
            return Speculative(tiers_of(model), sampling, model, 2, skipping, LENGTHS[length])
        return ViaSD(tiers_of(model), sampling, model, 2, skipping, AlwaysEscalate(), length=LENGTHS[length])

    want = law_of(lambda: Autoregressive(tiers_of(model), sampling), 3)
    assert total_variation(law_of(make, 3), want) < 1e-12


def test_dropping_the_unlikely_token_that_ends_a_block_breaks_the_law() -> None:
    class Dropping(Confidence):
        def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
            draft = super().draft(tokens, count, chooser)
            if not len(draft):
                return draft
            drawn_with = draft.distributions().gather(-1, draft.tokens[:, None])[:, 0]
            unsure = bool((drawn_with < self.threshold).any())
            return draft.first(len(draft) - 1) if unsure else draft

    sampling, model = Sampling(1.0), model_of(seed=3, vocab_size=3)
    want = law_of(lambda: Autoregressive(tiers_of(model), sampling), 3)
    got = law_of(
        lambda: Speculative(tiers_of(model), sampling, model, 2, skipping, partial(Dropping, threshold=0.4)), 3
    )
    assert total_variation(got, want) > 0.01


def closed_form(model: Model, sampling: Sampling, gate: Gate, gate_probs: str) -> tuple[dict, dict[Route, float]]:
    """The one-position law in the docstring of ``ViaSD``, written out; and the drafter's mass on each route."""
    draft = next_probs(model, sampling, DRAFT_LAYERS)
    assert model.slim_mask is not None
    kept = list(model.slim_mask.layers)
    slim = next_probs(model, sampling, kept)
    full = next_probs(model, sampling, None)
    seen = slim if gate_probs == "warped" else next_probs(model, Sampling(1.0), kept)
    largest = float(seen.max())
    law, escalated_loss, regenerated = [0.0] * VOCAB, 0.0, 0.0
    mass = dict.fromkeys(Route, 0.0)
    for v in range(VOCAB):
        ratio, p, q = float(seen[v]) / largest, float(draft[v]), float(full[v])
        if isinstance(gate, Strictness):
            route = Route.ACCEPT if ratio >= 0.5 else Route.REGENERATE if ratio >= 0.2 else Route.ESCALATE
        else:
            route = Route.ESCALATE if ratio < 1 - 0.8 else Route.ACCEPT if ratio >= 1 - 0.4 else Route.REGENERATE
        mass[route] += p
        if route is Route.ACCEPT:
            law[v] += p
        elif route is Route.REGENERATE:
            regenerated += p
        else:
            law[v] += min(p, q)
            escalated_loss += max(0.0, p - q)
    left = (full - draft).clamp(min=0)
    left = left / left.sum()
    for v in range(VOCAB):
        law[v] += regenerated * float(slim[v]) + escalated_loss * float(left[v])
    return {(v,): prob for v, prob in enumerate(law)}, mass


GATES = {"strictness": Strictness(0.5, 0.2), "literal": Literal(0.4, 0.8)}


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6), Sampling(1.0, top_k=4)], ids=str)
@pytest.mark.parametrize("gate_probs", ["raw", "warped"])
@pytest.mark.parametrize("gate", GATES)
def test_via_sd_has_its_stated_one_position_law(gate: str, gate_probs: str, sampling: Sampling) -> None:
    seen: set[frozenset[Route]] = set()
    for seed in range(12):
        model = model_of(seed)
        got = law_of(lambda: ViaSD(tiers_of(model), sampling, model, 1, skipping, GATES[gate], gate_probs), 1)  # noqa: B023
        want, mass = closed_form(model, sampling, GATES[gate], gate_probs)
        assert total_variation(got, want) < 1e-12
        seen.add(frozenset(route for route, share in mass.items() if share > 0))
    with_escalation = [routes for routes in seen if Route.ESCALATE in routes]
    assert with_escalation and len(with_escalation) < len(seen), f"want laws with and without escalation, got {seen}"
    assert frozenset(Route) in seen


def test_a_wrong_residual_and_the_papers_mixture_fail_the_one_position_law(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, gate = Sampling(1.0), GATES["strictness"]
    wrong_residual, mixture_gap = 0.0, 0.0
    monkeypatch.setattr(BranchChooser, "residual", staticmethod(no_residual))
    for seed in range(12):
        model = model_of(seed)
        got = law_of(lambda: ViaSD(tiers_of(model), sampling, model, 1, skipping, gate), 1)  # noqa: B023
        want, mass = closed_form(model, sampling, gate, "raw")
        wrong_residual = max(wrong_residual, total_variation(got, want))
        draft, slim, full = (next_probs(model, sampling, layers) for layers in (DRAFT_LAYERS, [0, 1, 3], None))
        delta1, delta2 = mass[Route.ACCEPT], mass[Route.ESCALATE]
        mixed = (1 - delta2) * ((1 - delta1) * draft + delta1 * slim) + delta2 * full  # eq. 14
        mixture_gap = max(mixture_gap, total_variation({(v,): float(mixed[v]) for v in range(VOCAB)}, want))
    assert wrong_residual > 0.01
    assert mixture_gap > 0.01


def test_greedy_decoding_of_a_lossy_gate_is_not_the_full_verifiers() -> None:
    """The lossy method really is lossy here, so the equality tests elsewhere compare unequal things."""
    differs = 0
    for seed in range(10):
        model = model_of(seed)
        want = law_of(lambda: Autoregressive(tiers_of(model), Sampling()), 6)  # noqa: B023
        got = law_of(lambda: ViaSD(tiers_of(model), Sampling(), model, 3, skipping, Strictness()), 6)  # noqa: B023
        differs += got != want
    assert differs > 0


def test_the_slim_softmax_is_read_at_temperature_one_by_default() -> None:
    model = model_of(seed=1)
    method = ViaSD(tiers_of(model), Sampling(0.1, top_k=1), model, 1, skipping, Strictness())
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0, -1.0]])
    assert torch.equal(method.read_by_gate(logits), logits)
