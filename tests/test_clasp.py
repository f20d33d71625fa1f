"""CLaSp: the table against one row at a time, choices by hand, the law, and layers that change after every block."""

import pytest
import torch
from torch import Tensor

from harness.decode import clasp as clasp_module
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.clasp import CLaSp, kept_by, side_by_side, skip_table
from harness.errors import UserError
from harness.model.load import Model
from harness.model.random_weights import random_transformer
from harness.model.sight import LayerKind
from harness.model.tiers import Tiers
from harness.model.transformer import Transformer
from harness.sampling import RandomChooser, Sampling
from tests.arms import model_of
from tests.enumeration import BranchChooser, output_law, total_variation
from tests.test_fixed_shape import SPECS
from tests.toys import CPU, GREEDY, tiers_of, tiny_model

PROMPT = (1, 2, 0)


def naive_table(
    model: Transformer, tiers: Tiers, token: int, place: int, states: Tensor, skipped: int, late: int = 0
) -> dict[tuple[int, int], bool]:
    """The recurrence cell by cell, each layer run on one row over a copy of the entries; ``late`` compares wrongly."""
    reached = {(0, 0): model.embedded(torch.tensor([token]))}
    skips: dict[tuple[int, int], bool] = {}
    for index in range(len(states)):
        wanted = states[max(0, index - late)]
        for count in range(min(index + 1, skipped) + 1):
            ways = {}
            if (index, count) in reached:
                keys, values = tiers.cache.layers[index]
                sight = model.kinds[model.kind_of[index]].sight(place, 1)
                ways[False] = model.layer(index, reached[index, count], (keys.clone(), values.clone()), sight)
            if (index, count - 1) in reached:
                ways[True] = reached[index, count - 1]
            near = {way: torch.cosine_similarity(state[0], wanted, dim=0) for way, state in ways.items()}
            best = max(near, key=lambda way: (near[way], not way))
            reached[index + 1, count], skips[index, count] = ways[best], best
    return skips


def verified(model: Transformer, tokens: tuple[int, ...]) -> tuple[Tiers, Tensor]:
    """The full verifier has processed ``tokens``; its states behind each layer at the last one."""
    tiers = Tiers(model, model.new_cache(64))
    tiers.full.watch(range(model.spec.layers))
    tiers.prefill((*tokens, 0))
    return tiers, tiers.full.features[len(tokens) - 1].view(model.spec.layers, -1)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_the_table_equals_one_row_at_a_time(name: str, skipped: int) -> None:
    ways: set[bool] = set()
    for seed in range(6):
        model = random_transformer(SPECS[name], seed, torch.float64, 0.8)
        tokens = tuple(range(3, 15))  # longer than the window
        tiers, states = verified(model, tokens)
        before = [part.clone() for entries in tiers.cache.layers for part in entries]
        got = skip_table(model, tiers.cache.layers, tokens[-1], len(tokens) - 1, states, skipped)
        want = naive_table(model, tiers, tokens[-1], len(tokens) - 1, states, skipped)
        assert {cell: bool(got[cell]) for cell in want} == want
        ways.update(way for (index, count), way in want.items() if 0 < count <= index)
        after = [part for entries in tiers.cache.layers for part in entries]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), "nothing is written"
    assert not skipped or ways == {False, True}


def test_comparing_with_the_layer_before_gives_another_table() -> None:
    differ = 0
    for seed in range(6):
        model = random_transformer(SPECS["llama"], seed, torch.float64, 0.8)
        tiers, states = verified(model, (3, 4, 5, 6))
        got = skip_table(model, tiers.cache.layers, 6, 3, states, 2)
        wrong = naive_table(model, tiers, 6, 3, states, 2, late=1)
        differ += any(bool(got[cell]) != way for cell, way in wrong.items())
    assert differ > 0


def test_skipping_nothing_reaches_the_full_verifiers_state() -> None:
    """Column 0 runs every layer over the same entries: its last state is the full verifier's own."""
    model = random_transformer(SPECS["llama"], 1, torch.float64, 0.8)
    tiers, states = verified(model, (3, 4, 5, 6))
    ran: list[Tensor] = []
    layer = model.layer

    def watching(index: int, hidden: Tensor, *rest: object) -> Tensor:
        ran.append(layer(index, hidden, *rest))  # type: ignore[arg-type]
        return ran[-1]

    model.layer = watching  # type: ignore[method-assign, assignment]
    skip_table(model, tiers.cache.layers, 6, 3, states, 1)
    assert all(torch.allclose(made[0], state, atol=1e-12) for made, state in zip(ran, states, strict=True))


@pytest.mark.parametrize(
    ("table", "kept"),
    [
        ([[0, 1], [0, 0], [0, 0]], [1, 2]),  # skip layer 0
        ([[0, 1], [0, 1], [0, 0]], [0, 2]),  # skipping 1 is better than having skipped 0
        ([[0, 1], [0, 1], [0, 1]], [0, 1]),
        ([[0], [0], [0]], [0, 1, 2]),
        ([[0, 1, 0], [0, 0, 1], [0, 1, 0]], [2]),  # two skips by layer 2: it runs, then 1 and 0 are left out
        ([[0, 1, 0], [0, 0, 1], [0, 1, 1]], [1]),  # layer 2 and, of what is left, layer 0
    ],
)
def test_the_way_through_the_table_by_hand(table: list[list[int]], kept: list[int]) -> None:
    assert kept_by(torch.tensor(table).bool()) == kept


@pytest.mark.parametrize(("window", "begin"), [(None, 0), (3, 3), (50, 0)])
def test_versions_of_a_token_see_the_past_and_themselves(window: int | None, begin: int) -> None:
    kind = LayerKind(window, None, torch.float64, CPU)
    first, sight = side_by_side(kind, 5, 2)
    past = 5 - begin
    assert first == begin and sight.mask is not None
    inf = float("inf")
    assert sight.mask.tolist() == [[0.0] * past + [0.0, -inf], [0.0] * past + [-inf, 0.0]]


def made(model: Model, sampling: Sampling = GREEDY, gamma: int = 3, **settings) -> CLaSp:
    return CLaSp(tiers_of(model), sampling, model, gamma, **settings)


LAWS = {"T=1": (Sampling(1.0), 3, 3), "5 tokens, top-k": (Sampling(1.3, top_k=2), 5, 4)}


@pytest.mark.parametrize("case", LAWS)
def test_the_joint_law_is_the_full_verifiers(case: str) -> None:
    sampling, vocab_size, new_tokens = LAWS[case]
    model = tiny_model(3, kept=(0,), layer_scale=1.0, vocab_size=vocab_size, head_scale=1.0)
    want = output_law(lambda: Autoregressive(tiers_of(model), sampling), PROMPT, new_tokens)
    assert total_variation(output_law(lambda: made(model, sampling, 2), PROMPT, new_tokens), want) < 1e-12


def test_replacing_from_the_verifier_itself_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, vocab_size, new_tokens = LAWS["T=1"]
    model = tiny_model(3, kept=(0,), layer_scale=1.0, vocab_size=vocab_size, head_scale=1.0)
    want = output_law(lambda: Autoregressive(tiers_of(model), sampling), PROMPT, new_tokens)
    monkeypatch.setattr(BranchChooser, "residual", staticmethod(lambda verifier, draft, tokens, stop: verifier[stop]))
    assert total_variation(output_law(lambda: made(model, sampling, 2), PROMPT, new_tokens), want) > 0.005


def test_layers_changed_within_a_block_are_refused() -> None:
    """The wrong variant: between two drafts, where the layers before have left holes in the tail."""
    model = model_of(1, torch.float64)
    method = made(model)
    method.tiers.prefill(PROMPT)
    method.skipping.draft(PROMPT, 2, RandomChooser(0, CPU))
    with pytest.raises(ValueError, match="draft: other layers made the entries"):
        method.skipping.tier.change_layers((0, 1))


def choices_of(method: CLaSp, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The layers that each block of a text was drafted with."""
    seen: list[tuple[int, ...]] = []
    draft = method.length.draft

    def noting(tokens, count, chooser):
        seen.append(method.skipping.tier.layers)
        return draft(tokens, count, chooser)

    monkeypatch.setattr(method.length, "draft", noting)
    decoder = Decoder(method)
    decoder.prefill(PROMPT)
    decoder.decode(StopRule(30), RandomChooser(0, CPU))
    return seen


def test_layers_are_chosen_after_every_verification_or_every_few(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    tables = iter([torch.tensor([[0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]).bool()] * 50)

    def counted(model, entries, token, place, states, skipped) -> Tensor:
        asked.append(place)
        return next(tables)

    monkeypatch.setattr(clasp_module, "skip_table", counted)
    for every in (1, 3):
        asked.clear()
        model = model_of(2, torch.float64)
        seen = choices_of(made(model, every=every), monkeypatch)
        assert set(seen) == {(2, 3)}
        assert len(asked) == -(-len(seen) // every)
        assert asked[0] == len(PROMPT) - 2, "the last token of the prompt is pending"


def test_different_texts_are_drafted_with_different_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {layers for seed in range(4) for layers in choices_of(made(model_of(seed, torch.float64)), monkeypatch)}
    assert len(chosen) > 1 and all(len(layers) == 2 for layers in chosen)


def test_a_prompt_of_one_token_begins_with_evenly_spaced_layers() -> None:
    method = made(model_of(0, torch.float64))
    decoder = Decoder(method)
    decoder.prefill((4,))
    before = method.skipping.tier.layers
    method.step((4,), 5, RandomChooser(0, CPU))
    assert method.skipping.tier.layers == before


def test_the_draft_tier_runs_without_graphs() -> None:
    model = model_of(0, torch.float64)
    method = CLaSp(Tiers(model.transformer, model.transformer.new_cache(64), None, True), GREEDY, model, 3)
    assert method.skipping.tier.graphs is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every=0: want at least 1 block"),
        ({"skip_ratio": 1.0}, "leaves no layer of 4"),
        ({"gamma": 0}, "gamma=0: want at least 1"),
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(model_of(0, torch.float64), **settings)


def test_names_for_the_records() -> None:
    method = made(model_of(0, torch.float64), every=2)
    assert (method.name, method.lossless, method.gate_name) == ("clasp", True, None)
    assert method.drafter_name == "self_skip(0.5), chosen every 2"
    assert method.tier_roles() == (method.skipping.tier, None)
