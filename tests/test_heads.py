"""Heads on the verifier: what they compute, where their features come from, and that no history shows in them."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, Method, StopRule
from harness.decode.gate import AlwaysEscalate, Strictness
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.heads import HeadTier
from harness.drafters.medusa import MedusaTier
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.sampling import RandomChooser, Sampling
from tests.enumeration import exact_law, total_variation
from tests.heads import CONFIGS, build, head_drafter, naive_logits, naive_states, tensors_of
from tests.test_exactness import FAMILIES, METHODS, sweep
from tests.toys import CPU, GREEDY, shapes_unchecked, tiers_of, tiny_model

KINDS = tuple(CONFIGS)
SKIPPING = Strictness(0.3, 0.001)
"""Nearly never escalates, however bad the drafts: the full tier falls behind."""

RECURRENT = ("eagle", "copying", "fused", "mtp")
TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)
EVEN = torch.arange(0, 97, 2)


def model_of(seed: int, vocab_size: int = 97) -> Model:
    return tiny_model(seed, kept=(0, 1, 3), layer_scale=0.4, vocab_size=vocab_size)


def features_of(model: Model, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """The full verifier's, from one forward."""
    full, cache = model.transformer, model.transformer.new_cache(len(tokens))
    states = full.observe(torch.tensor(tokens), cache, range(full.spec.layers), 0, taps)[1]
    assert states is not None
    return states


FEW = torch.tensor([4, 90, 11, 33, 2])


@pytest.mark.parametrize(
    ("kept", "text", "said"),
    {
        "whole": (None, 0, None),
        "reduced": (FEW, 0, FEW),
        "text": (FEW, 128, torch.cat((FEW, torch.tensor([3, 1, 5, 9, 6])))),
        "newest of the text": (FEW, 3, torch.cat((FEW, torch.tensor([5, 9, 6])))),
    }.values(),
)
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_head_drafts_as_written_out(kind: str, kept: Tensor | None, text: int, said: Tensor | None) -> None:
    """Against the formulas, without a cache: the verifier's features first, then the head's own."""
    for seed in range(4):
        model = model_of(seed)
        tiers = tiers_of(model)
        drafter = head_drafter(kind, seed, kept=kept, noise=0.4, text=text)(tiers, GREEDY, model)
        tiers.prefill(TOKENS)
        drafts = drafter.draft(TOKENS, 5, RandomChooser(0, CPU)).tokens.tolist()
        tensors = tensors_of(kind, model.transformer, seed, noise=0.4)
        full = model.transformer.weights
        features = features_of(model, TOKENS[:-1], build(kind, tensors, model.transformer).taps)
        for place, draft in enumerate(drafts):
            known = torch.tensor([*TOKENS[1:], *drafts[:place]])
            states = naive_states(kind, tensors, full.embed[known], features, len(TOKENS) - 1)
            logits = naive_logits(kind, tensors, states[-1], full.head)
            best = int(logits.argmax()) if said is None else int(said[logits[said].argmax()])
            assert draft == best
        assert drafter.tier is not None and drafter.tier.forwards == 5


def test_medusa_drafts_each_place_from_its_own_head() -> None:
    model = model_of(0)
    tiers = tiers_of(model)
    drafter = head_drafter("medusa", 1, noise=2.0)(tiers, GREEDY, model)
    tiers.prefill(TOKENS)
    drafts = drafter.draft(TOKENS, 99, RandomChooser(0, CPU)).tokens
    tensors = tensors_of("medusa", model.transformer, 1, noise=2.0)
    feature = features_of(model, TOKENS[:-1], (-1,))[-1]
    want = []
    for head in range(8):
        x = feature
        for layer in range(2):
            x = x + torch.nn.functional.silu(
                tensors[f"{head}.{layer}.linear.weight"] @ x + tensors[f"{head}.{layer}.linear.bias"]
            )
        want.append(int((model.transformer.weights.head @ x).argmax()))
    assert drafts.tolist() == want and len(set(want)) > 4
    assert drafter.tier is not None and drafter.tier.forwards == 1


def stepped(method: Method, prompt: Sequence[int], blocks: int) -> list[int]:
    """Decode step by step as ``Decoder`` does, and compare the head's cache with a fresh one behind each.

    Returns how many of its rows were made of slim features each time.
    """
    tokens, slim_rows = list(prompt), []
    method.tiers.prefill(tokens)
    for turn in range(blocks):
        tokens += method.step(tuple(tokens), 99, RandomChooser(turn, CPU)).tokens
        method.tiers.rollback(len(tokens) - 1)
        check_fresh(method, tokens)
        slim_rows.append(method.drafter.tier.cache.length - method.drafter.tier.solid)  # type: ignore[attr-defined]
    return slim_rows


def check_fresh(method: Method, tokens: Sequence[int]) -> None:
    """The head's rows are those of features made in one go: the full tier's as far as it has been, then the slim's."""
    drafter = method.drafter  # type: ignore[attr-defined]
    tier: HeadTier = drafter.tier
    full = method.tiers.full.length
    assert tier.solid <= tier.length < len(tokens) and tier.solid <= full
    again = Tiers(tier.source.full.model, tier.source.full.model.new_cache(256))
    slim = again.provisional("slim", (0, 1, 3))
    fresh = HeadTier(again, tier.head, "slim")
    again.full.prefill(tokens[: tier.solid])
    if tier.cache.length > tier.solid:
        slim.prefill(tokens[: tier.cache.length])
    fresh.prefill(tokens[: tier.length])
    assert fresh.cache.length == tier.cache.length
    for one, other in zip(tier.cache.layers, fresh.cache.layers, strict=True):
        for ours, want in zip(one, other, strict=True):
            assert torch.allclose(ours[:, : tier.cache.length], want[:, : tier.cache.length], atol=1e-10)


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("source", ["slim", "catch_up"])
def test_a_heads_cache_is_fresh_after_every_history(source: str, kind: str) -> None:
    slim_rows: list[int] = []
    for seed in range(4):
        model = model_of(seed)
        for make in (
            lambda tiers, drafter: Speculative(tiers, GREEDY, model, 4, drafter),  # noqa: B023
            lambda tiers, drafter: ViaSD(tiers, Sampling(0.8), model, 4, drafter, SKIPPING),  # noqa: B023
            lambda tiers, drafter: ViaSD(tiers, GREEDY, model, 3, drafter, AlwaysEscalate()),  # noqa: B023
        ):
            tiers = tiers_of(model)
            method = make(tiers, head_drafter(kind, seed, source))
            with shapes_unchecked():
                slim_rows += stepped(method, TOKENS, 8)
    assert (max(slim_rows) > 1) == (source == "slim"), "the slim tier's features are used where they were asked for"
    assert min(slim_rows) == 0


def test_a_stale_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: rows of drafts that stay in the cache, as if they were known."""
    extend = HeadTier.extend

    def forgetful(self: HeadTier, sequence: Sequence[int], count: int, *rest: object) -> object:
        found = extend(self, sequence, count, *rest)  # type: ignore[arg-type]
        self.cache.append(count - 1)
        return found

    monkeypatch.setattr(HeadTier, "extend", forgetful)
    model = model_of(0)
    with pytest.raises(AssertionError):
        stepped(Speculative(tiers_of(model), GREEDY, model, 4, head_drafter("eagle", 0)), TOKENS, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_catching_up_is_a_full_forward_and_slim_features_are_none(kind: str) -> None:
    counts = {}
    for source in ("slim", "catch_up"):
        model = model_of(2)
        method = ViaSD(tiers_of(model), Sampling(0.8), model, 4, head_drafter(kind, 2, source), SKIPPING)
        decoder = Decoder(method)
        decoder.prefill(TOKENS)
        got = decoder.decode(StopRule(60), RandomChooser(0, CPU))
        counts[source] = [block.full_forwards for block in got.blocks]
    assert set(counts["slim"]) <= {0, 1} and 0 in counts["slim"]
    caught_up = counts["catch_up"]
    assert caught_up[0] <= 1 and max(caught_up) <= 2
    assert sum(caught_up) > sum(counts["slim"])


def test_an_unknown_source_is_refused() -> None:
    model = model_of(0)
    with pytest.raises(UserError, match=r"unknown drafter\.features 'both'"):
        head_drafter("eagle", source="both")(tiers_of(model), GREEDY, model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_lossless_methods_equal_autoregressive(method: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, kind, lambda case: head_drafter(kind, case.seed))
    observed = sweep(method, kind)
    assert observed.unequal == []
    least = 0.1 if kind in ("eagle", "copying", "mtp") else 0.0
    assert least < observed.kept / observed.examined < 0.9
    assert {(g, kept) for g in range(1, 9) for kept in range(g + 1)} <= observed.stops.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_the_joint_law_is_the_full_verifiers(method: str, kind: str) -> None:
    model, sampling = tiny_model(3, (0, 1, 3), layer_scale=1.0, vocab_size=3, head_scale=1.0), Sampling(1.3)
    prompt = (1, 2, 0)

    def law(made: Method) -> dict:
        decoder = Decoder(made)

        def run(chooser) -> tuple[int, ...]:
            decoder.prefill(prompt)
            return decoder.decode(StopRule(3), chooser).token_ids

        with shapes_unchecked():
            return exact_law(run)

    want = law(Autoregressive(tiers_of(model), sampling))
    for kept, text in ((None, 0), (torch.tensor([2, 0]), 0), (torch.tensor([2]), 1)):
        drafter = head_drafter(kind, 0, kept=kept, noise=1.0, text=text)
        if method == "speculative":
            made: Method = Speculative(tiers_of(model), sampling, model, 2, drafter)
        else:
            made = ViaSD(tiers_of(model), sampling, model, 2, drafter, AlwaysEscalate())
        assert total_variation(law(made), want) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["slim", "catch_up"])
@pytest.mark.parametrize(("kept", "text"), [(None, 0), (EVEN, 2)])
def test_nothing_is_carried_from_prompt_to_prompt(source: str, kind: str, kept: Tensor | None, text: int) -> None:
    model = model_of(1)

    def decoder() -> Decoder:
        drafter = head_drafter(kind, 1, source, kept, text=text)
        return Decoder(ViaSD(tiers_of(model), Sampling(0.7), model, 4, drafter, SKIPPING))

    def output(one: Decoder, prompt: Sequence[int]) -> object:
        one.prefill(prompt)
        got = one.decode(StopRule(30), RandomChooser(5, CPU))
        return got.token_ids, got.blocks

    used = decoder()
    with shapes_unchecked():
        for prompt in (TOKENS, (7, 7), (8,), (2, 9, 4)):
            assert output(used, prompt) == output(decoder(), prompt)


def test_a_long_prompt_is_taken_in_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(0)
    prompt = tuple(index * 7 % 97 for index in range(40))
    whole, parts = tiers_of(model), tiers_of(model)
    tier_of = {id(tiers): head_drafter("eagle")(tiers, GREEDY, model).tier for tiers in (whole, parts)}
    whole.prefill(prompt)
    for module in ("harness.model.tiers", "harness.drafters.heads"):
        monkeypatch.setattr(f"{module}.PREFILL_CHUNK", 7)
    parts.prefill(prompt)
    one, other = (tier_of[id(tiers)] for tiers in (whole, parts))
    assert isinstance(one, HeadTier) and isinstance(other, HeadTier)
    assert one.length == other.length == 39
    assert torch.allclose(one.cache.keys[:, :, :38], other.cache.keys[:, :, :38], atol=1e-10)  # type: ignore[attr-defined]
    assert torch.allclose(whole.full.features[:39], parts.full.features[:39], atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [None, 6])
@pytest.mark.parametrize(("kept", "text"), [(None, 0), (EVEN, 3)])
def test_graphs_and_fixed_shapes_give_the_same_tokens(
    kind: str, block: int | None, kept: Tensor | None, text: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outputs() -> list[tuple[int, ...]]:
        found = []
        for seed, sampling in ((0, GREEDY), (1, Sampling(0.8))):
            model = model_of(seed)
            tiers = Tiers(model.transformer, model.transformer.new_cache(128), block)
            drafter = head_drafter(kind, seed, kept=kept, text=text)
            decoder = Decoder(ViaSD(tiers, sampling, model, 5, drafter, SKIPPING))
            decoder.prefill(TOKENS * 3)
            found.append(decoder.decode(StopRule(40), RandomChooser(seed, CPU)).token_ids)
            replays.append(decoder.method.tiers.others[-1].replays)
        return found

    replays: list[dict] = []
    plain = outputs()
    assert not any(replays)
    made = Tier.__init__

    def pretending(self: Tier, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)  # type: ignore[arg-type]
        self.graphs = True

    monkeypatch.setattr(Tier, "__init__", pretending)
    replays.clear()
    assert outputs() == plain
    assert all(replays)


@pytest.mark.parametrize("kind", RECURRENT)
def test_the_mathematics_can_be_differentiated(kind: str) -> None:
    model = model_of(0)
    tensors = {name: tensor.requires_grad_() for name, tensor in tensors_of(kind, model.transformer, 0).items()}
    head = build(kind, tensors, model.transformer)
    features = features_of(model, TOKENS[:-1], head.taps).clone()
    sights = [kind.sight(0, 7) for kind in head.model.kinds]
    states = head.advance(torch.tensor(TOKENS[1:]), head.enter(features), head.model.new_entries(7), sights)
    head.model.full_logits(head.read(states)).logsumexp(-1).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in tensors.values())


def test_a_medusa_tier_has_nothing_to_cut() -> None:
    model = model_of(0)
    tiers = tiers_of(model)
    tier = head_drafter("medusa")(tiers, GREEDY, model).tier
    assert isinstance(tier, MedusaTier)
    tiers.prefill(TOKENS)
    tiers.rollback(3)
    assert tier.length == 1 and tiers.full.length == 3


def test_a_slim_verifier_that_is_another_model_has_no_features_for_a_head() -> None:
    model = tiny_model(0, kept=(0,))
    tiers = tiers_of(model, capacity=32)
    tiers.independent("slim", tiny_model(1, kept=(0,)).transformer)
    with pytest.raises(UserError, match=r"the slim verifier is another model.*drafter\.features=catch_up"):
        head_drafter("eagle")(tiers, Sampling(), model)
    head_drafter("eagle", source="catch_up")(tiers, Sampling(), model)
