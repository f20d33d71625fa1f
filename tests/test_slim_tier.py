"""Slim verifiers: both cache modes against fresh computations, sublayers against zeroed weights, every source."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.decode import slim
from harness.decode.base import Decoder, StopRule
from harness.decode.gate import AlwaysEscalate, Strictness
from harness.decode.slim import Slim, masked_tier
from harness.decode.via_sd import ViaSD
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.memory import held_bytes
from harness.model.load import Model, load_model
from harness.model.random_weights import random_transformer
from harness.model.slim import LayerMask, Mask, SublayerMask
from harness.model.spec import ModelSpec
from harness.model.tiers import Tier
from harness.model.tokenizer import ByteTokenizer
from harness.model.transformer import Transformer
from harness.sampling import RandomChooser, Sampling
from harness.store import find_runs, read
from tests.runs import main, refused, unreported
from tests.toys import CPU, Scripted, scripted, tiers_of, tiny, tiny_model, write_checkpoint

MASKS: dict[str, Mask] = {
    "layers": LayerMask.of((0, 1, 3), 4),
    "without the first layer": LayerMask.of((1, 3), 4),
    "sublayers": SublayerMask.of(attention=(0, 2, 3), mlp=(0, 1, 3), depth=4),
    "a layer skipped whole": SublayerMask.of(attention=(0, 3), mlp=(0, 2, 3), depth=4),
    "first layer without attention": SublayerMask.of(attention=(1, 3), mlp=(0, 1, 2, 3), depth=4),
}


def zeroed(model: Transformer, mask: Mask) -> Transformer:
    """A whole model that computes what ``mask`` keeps of ``model``: what is skipped adds zeros."""
    halves = (mask.kept, mask.kept) if isinstance(mask, LayerMask) else (mask.attention, mask.mlp)
    layers = []
    for layer, attention, mlp in zip(model.weights.layers, *halves, strict=True):
        parts = {"out": attention, "out_bias": attention, "down": mlp, "down_bias": mlp}
        skipped = [name for name, runs in parts.items() if not runs and getattr(layer, name) is not None]
        layers.append(replace(layer, **{name: torch.zeros_like(getattr(layer, name)) for name in skipped}))
    return Transformer(model.spec, replace(model.weights, layers=tuple(layers)))


def fresh(model: Transformer, mask: Mask, sequence: list[int], rows: int) -> torch.Tensor:
    """Logits of the skipped model over the whole sequence."""
    return tiers_of(zeroed(model, mask), 64).full.forward(sequence, len(sequence))[-rows:]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("seed", range(2))
def test_own_logits_are_those_of_the_skipped_model_whatever_happened_before(mask: Mask, seed: int) -> None:
    rng, model = random.Random(seed), tiny(seed)
    tiers = tiers_of(model, capacity=64)
    tier, draft = masked_tier(tiers, mask, "own"), tiers.provisional("draft", (0, 3))
    tokens = [rng.randrange(97) for _ in range(8)]
    tiers.prefill(tokens)
    assert tier.length == 7 and tier.forwards == 0, "the prompt is processed while prefilling"
    for _ in range(15):
        block = tokens + [rng.randrange(97) for _ in range(rng.randrange(1, 5))]
        if len(block) > 60:
            break
        if rng.random() < 0.3:
            draft.forward(block, 1)
        if rng.random() < 0.7:  # otherwise the tier falls behind, as after a plain step
            rows = rng.randint(1, len(block) - tier.length)
            assert torch.allclose(tier.forward(block, rows), fresh(model, mask, block, rows), atol=1e-10)
        if rng.random() < 0.5:
            tiers.full.forward(block, 1)
        tokens = [*block[: rng.randint(len(tokens), len(block))], rng.randrange(97)]
        tiers.rollback(len(tokens) - 1)


def test_shared_logits_are_not_those_of_the_skipped_model() -> None:
    """The two modes differ, and the check above would see a tier of the wrong one."""
    model = tiny(0)
    for mask in MASKS.values():
        tiers = tiers_of(model)
        tier = masked_tier(tiers, mask, "shared")
        tiers.prefill([1, 2, 3, 4])
        shared = tier.forward([1, 2, 3, 4, 5], 2)
        assert not torch.allclose(shared, fresh(model, mask, [1, 2, 3, 4, 5], 2), atol=1e-3)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_shared_logits_are_those_of_the_skipped_layers_over_committed_entries(mask: Mask) -> None:
    """A model with zeroed weights over a copy of the full verifier's entries."""
    model, text = tiny(3), [1, 2, 3, 4, 5, 6]
    tiers, other = tiers_of(model), tiers_of(zeroed(model, mask))
    tiers.prefill(text[:4])
    other.prefill(text[:4])
    other.cache.write(0, tiers.cache.read(0, 3))
    tier = masked_tier(tiers, mask, "shared")
    assert torch.allclose(tier.forward(text, 3), other.full.forward(text, 3), atol=1e-10)
    assert tier.length == 6 and tiers.cache.length == 3


FAMILIES = {
    "biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "norms on both sides, soft-caps and windows": {
        **{"model_type": "gemma2", "head_dim": 16, "sliding_window": 3, "query_pre_attn_scalar": 20},
        **{"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    },
}
SHAPE = {
    **{"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_sublayers_of_families_with_more_parts_in_a_layer(family: str) -> None:
    model = random_transformer(ModelSpec.from_hf(SHAPE | FAMILIES[family], family), 0, torch.float64)
    depth = model.spec.layers
    mask = SublayerMask.of(range(0, depth, 2), range(1, depth), depth)
    tiers = tiers_of(model, 64)
    tiers.prefill([1, 2, 3])
    got = masked_tier(tiers, mask, "own").forward([1, 2, 3, 4, 5], 3)
    assert torch.allclose(got, fresh(model, mask, [1, 2, 3, 4, 5], 3), atol=1e-9)
    assert not torch.allclose(got, tiers.full.forward([1, 2, 3, 4, 5], 3), atol=1e-3)


def slim_of(mask: Mask, cache: str) -> Callable[..., Slim]:
    return lambda tiers, model: Slim(masked_tier(tiers, mask, cache), "test", mask.text, cache)


def entries(tier: Tier, length: int) -> list[torch.Tensor]:
    assert tier.length >= length
    return [keys[:, :, :length] for storage in tier.cache.storages for keys in storage]  # type: ignore[attr-defined]


@pytest.mark.parametrize("mask", [MASKS["layers"], MASKS["sublayers"]], ids=["layers", "sublayers"])
@pytest.mark.parametrize("seed", range(2))
def test_the_own_cache_is_fresh_after_every_block_of_via_sd(mask: Mask, seed: int) -> None:
    model = tiny_model(seed, kept=(0, 1, 3))
    tiers = tiers_of(model, capacity=64)
    drafter = partial(SelfSkip, mask=[0, 1])
    method = ViaSD(tiers, Sampling(), model, 4, drafter, Strictness(), slim=slim_of(mask, "own"))
    tokens = [5, 6, 7, 8, 9]
    tiers.prefill(tokens)
    passes = 0
    while len(tokens) < 40:
        block = method.step(tuple(tokens), 99, RandomChooser(0, CPU))
        tokens += block.tokens
        tiers.rollback(len(tokens) - 1)
        passes += tiers.full.forwards > 0
        again = tiers_of(model, capacity=64)
        renewed = masked_tier(again, mask, "own")
        again.prefill([*tokens[: method.slims[0].length], 0])
        for one, other in zip(entries(method.slims[0], 0), entries(renewed, 0), strict=True):
            assert one.shape == other.shape
        for one, other in zip(
            entries(method.slims[0], method.slims[0].length), entries(renewed, renewed.length), strict=True
        ):
            assert torch.allclose(one, other, atol=1e-10)
    assert passes, "the full verifier ran in between"


@pytest.mark.parametrize("cache", slim.CACHES)
@pytest.mark.parametrize("mask", [MASKS["layers"], MASKS["sublayers"]], ids=["layers", "sublayers"])
def test_an_escalating_three_tier_decoder_is_greedy_in_both_modes(cache: str, mask: Mask) -> None:
    for seed in range(3):
        model = tiny_model(seed, kept=(0, 1, 3))
        greedy = [5, 6, 7]
        tiers = tiers_of(model)
        for _ in range(24):
            tiers.rollback(0)
            greedy.append(int(tiers.full.forward(greedy, 1).argmax()))
        method = ViaSD(
            tiers_of(model),
            Sampling(),
            model,
            4,
            scripted(greedy, 0.3, 97, seed),
            AlwaysEscalate(),
            slim=slim_of(mask, cache),
        )
        decoder = Decoder(method)
        decoder.prefill(greedy[:3])
        made = decoder.decode(StopRule(24), RandomChooser(0, CPU))
        assert list(made.token_ids) == greedy[3:]
        assert method.slims[0].forwards == sum(block.slim_forwards for block in made.blocks) > 0


def test_an_own_cache_falls_behind_empty_drafts_and_catches_up_in_one_forward() -> None:
    model = tiny_model(1, kept=(0, 1, 3))
    drafts = iter([0, 0, 0, 3])

    class Sometimes(PromptLookup):
        def draft(self, tokens, count, chooser):
            return Scripted(range(3, 90), 0.0, 97, 0).draft(tokens, next(drafts), chooser)

    method = ViaSD(
        tiers_of(model), Sampling(), model, 4, Sometimes, AlwaysEscalate(), slim=slim_of(MASKS["layers"], "own")
    )
    tokens = [5, 6, 7]
    method.tiers.prefill(tokens)
    for blocks in range(1, 5):
        tokens += method.step(tuple(tokens), 99, RandomChooser(0, CPU)).tokens
        method.tiers.rollback(len(tokens) - 1)
        assert method.slims[0].forwards == (blocks == 4)
        assert method.slims[0].length >= (2 if blocks < 4 else 6)


def test_an_own_cache_is_held_for_attending_layers_alone() -> None:
    model = tiny_model(0, (0, 1, 3))
    tiers = tiers_of(model, 64)
    row = tiers.cache.keys.nbytes // 4 * 2
    for name, attending in {"layers": 3, "without the first layer": 2, "a layer skipped whole": 2}.items():
        held = {}
        for cache in slim.CACHES:
            made = ViaSD(
                tiers_of(model, 64), Sampling(), model, 3, PromptLookup, Strictness(), slim=slim_of(MASKS[name], cache)
            )
            held[cache] = held_bytes(made)
        assert held["own"] - held["shared"] == attending * row


def test_fixed_shapes_give_an_own_tier_the_same_logits() -> None:
    model = tiny(2)
    for mask in MASKS.values():
        tiers = tiers_of(model, 64)
        tiers.block = 4
        tier = masked_tier(tiers, mask, "own")
        tiers.prefill([1, 2, 3])
        text = [1, 2, 3, 4, 5, 6]
        assert torch.allclose(tier.forward(text, 4), fresh(model, mask, text, 4), atol=1e-10)


def test_a_drafter_may_skip_sublayers_too(tmp_path: Path) -> None:
    path = tmp_path / "mask.json"
    path.write_text('{"layers": 4, "kept_attention": [0, 2, 3], "kept_mlp": [0, 1, 3]}')
    model = tiny_model(0, (0,))
    tiers, other = tiers_of(model), tiers_of(model)
    for each in (tiers, other):
        each.prefill([1, 2, 3])
    drafter = SelfSkip(tiers, Sampling(), model, mask=str(path))
    slim_tier = masked_tier(other, MASKS["sublayers"], "shared")
    assert torch.equal(drafter.tier.forward([1, 2, 3, 4], 2), slim_tier.forward([1, 2, 3, 4], 2))
    assert drafter.name == "self_skip(0.25)"


# Sources.


@pytest.fixture(scope="module")
def six() -> Model:
    return Model("six", tiny(0, layers=6), ByteTokenizer(), None, None)


@pytest.mark.parametrize(
    ("source", "layers", "about"),
    [
        (partial(slim.masked, mask=[0, 2, 5]), "0 2 5", "[0, 2, 5]"),
        (partial(slim.even, skip_ratio=0.33), "0 1 3 5", "evenly spaced, skip 0.33"),
        (partial(slim.prefix, skip_ratio=0.5), "0 1 2", "prefix, skip 0.5"),
        (partial(slim.at_random, skip_ratio=0.0, seed=1), "0 1 2 3 4 5", "random, skip 0, seed 1"),
    ],
)
def test_each_source_names_its_layers_and_itself(six: Model, source: Any, layers: str, about: str) -> None:
    for cache in slim.CACHES:
        tiers = tiers_of(six)
        made = source(tiers, six, cache=cache)
        assert (made.layers, made.source, made.cache) == (layers, about, cache)
        assert tiers.others == [made.tier] and made.tier.name == "slim"
        assert " ".join(map(str, made.tier.layers)) == layers
        assert (made.tier in tiers.prefilled) == (cache == "own")


def test_random_sources_are_seeded(six: Model) -> None:
    for source in (slim.at_random, slim.sublayers):
        made = [source(tiers_of(six), six, skip_ratio=0.5, seed=seed).layers for seed in (0, 0, 1, 2, 3)]
        assert made[0] == made[1] and len(set(made)) > 2


def test_the_models_mask_is_taken_where_none_is_given() -> None:
    model = tiny_model(0, kept=(0, 1, 3))
    assert slim.masked(tiers_of(model), model).layers == "0 1 3"
    assert slim.masked(tiers_of(model), model).source == "test"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (partial(slim.masked, mask=[0, 9]), "layer mask: kept layers [0, 9] must be distinct integers"),
        (partial(slim.masked), "a slim verifier is needed and the model has no layer mask"),
        (partial(slim.masked, mask=[0], cache="shard"), "unknown slim cache 'shard': did you mean 'shared'"),
        (partial(slim.at_random, skip_ratio=0.9), "skip_ratio=0.9 leaves 1 of 6 layers; first and last always stay."),
        (partial(slim.even, skip_ratio=1.0), "skip_ratio=1.0 leaves no layer of 6"),
        (partial(slim.prefix, skip_ratio=-0.1), "skip_ratio=-0.1 leaves no layer of 6"),
        (partial(slim.sublayers, skip_ratio=0.8), "skip_ratio=0.8 of 12 sublayers: want 0 or more, and the four"),
        (partial(slim.checkpoint, path="no/such/folder"), "slim.path='no/such/folder' is not a folder"),
    ],
)
def test_a_source_that_cannot_be_is_refused_by_name(six: Model, source: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        source(tiers_of(six), six)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_checkpoint_is_a_slim_verifier_with_a_cache_of_its_own(tmp_path: Path) -> None:
    full = load_model(str(write_checkpoint(tmp_path / "full", 0, num_hidden_layers=3)), dtype="float64", device="cpu")
    middle = load_model(str(write_checkpoint(tmp_path / "middle", 1)), dtype="float64", device="cpu").transformer
    source = partial(slim.checkpoint, path=str(tmp_path / "middle"))
    text = [3, 4, 5, 6, 7]
    tiers = tiers_of(full, 60)
    made = source(tiers, full)
    assert (made.source, made.layers, made.cache) == ("checkpoint middle", "all 2 of middle", "own")
    tiers.prefill(text[:3])
    assert made.tier.length == 2
    assert torch.allclose(made.tier.forward(text, 3), tiers_of(middle).full.forward(text, 5)[-3:], atol=1e-10)

    write_checkpoint(tmp_path / "foreign", words=["<s>", "</s>", "?", "x"])
    with pytest.raises(UserError, match=r"^slim verifier '.*foreign' has another tokenizer than"):
        slim.checkpoint(tiers_of(full), full, str(tmp_path / "foreign"))

    outputs = []
    for method in (
        ViaSD(tiers_of(full, 60), Sampling(), full, 3, partial(SelfSkip, mask=[0]), AlwaysEscalate(), slim=source),
        ViaSD(
            tiers_of(full, 60),
            Sampling(),
            full,
            3,
            partial(SelfSkip, mask=[0, 1, 2]),
            AlwaysEscalate(),
            slim=slim_of(LayerMask.of([0], 3), "shared"),
        ),
    ):
        decoder = Decoder(method)
        decoder.prefill(text)
        outputs.append(decoder.decode(StopRule(20), RandomChooser(0, CPU)).token_ids)
    assert outputs[0] == outputs[1]


SHORT = ("task=web_questions", "method=via_sd", "limit=1", "max_new_tokens=3")


def test_the_command_line_chooses_source_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with unreported():
        main(
            monkeypatch, "+experiment=cache_modes", "task=web_questions", "limit=1", "max_new_tokens=3",
            "slim=sublayers", "slim.skip_ratio=0.25", "slim.seed=3", f"results_dir={tmp_path}",
        )  # fmt: skip
    (folder,) = find_runs(tmp_path)
    env = read(folder).run.env
    assert env["slim_mask"] == "random sublayers, skip 0.25, seed 3"
    assert env["slim_cache"] == "via_sd: shared; via_sd_own: own"
    assert env["slim_layers"].startswith("0 ") and ";" not in env["slim_layers"]


@pytest.mark.parametrize(
    ("argument", "message"),
    {
        "slim=randm": "unknown slim 'randm': did you mean 'random'",
        "slim.cache=owned": "unknown slim cache 'owned': did you mean 'own'",
        "slim=checkpoint": "slim.path has no value: add slim.path=PATH.",
        "slim.cach=own": "unknown slim key 'cach': did you mean 'cache'",
    }.items(),
)
def test_a_bad_choice_is_one_line(
    argument: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, capsys, *SHORT, argument, f"results_dir={tmp_path}").startswith(message)
