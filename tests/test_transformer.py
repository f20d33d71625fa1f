"""Our forward against Hugging Face's, and every way of filling a cache against a fresh one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from harness.model.cache import KVCache
from harness.model.load import load_transformer
from harness.model.random_weights import random_transformer
from harness.model.spec import ModelSpec
from harness.model.toy import toy_spec
from harness.model.transformer import AFTER_NORM, Transformer
from tests.toys import CPU, tiny

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "multi_query": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "multi_head_tied": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "wide_heads": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24, "rope_theta": 500_000.0},
}


def reference(name: str, folder) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 101}
    theta = CONFIGS[name].get("rope_theta", 10_000.0)
    rest = {key: value for key, value in CONFIGS[name].items() if key != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(**shape, **rest, rope_parameters=rope, max_position_embeddings=640)
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model.to(torch.float64)


def lift_float32_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face computes norm and rotary in float32 even in a float64 model; compute them in float64 instead."""

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))

    def rotary(self, x: torch.Tensor, position_ids: torch.Tensor):
        theta = self.config.rope_parameters["rope_theta"]
        size = self.config.head_dim
        frequency = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = position_ids[..., None].to(torch.float64) * frequency
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)


def histories(tokens: list[int]):
    """Ways to process the same tokens: (name, list of (rollback target or None, tokens to feed))."""
    n = len(tokens)
    yield "prefill", [(None, tokens)]
    yield "single steps", [(None, tokens[:20])] + [(None, [token]) for token in tokens[20:]]
    for size in range(2, 9):
        yield f"blocks of {size}", [(None, tokens[i : i + size]) for i in range(0, n, size)]
    wrong = [(token + 1) % 101 for token in tokens]
    yield (
        "after rollback",
        [(None, tokens[:30]), (None, wrong[30:37]), (30, tokens[30:33]), (None, wrong[33:40]), (25, tokens[25:])],
    )


@torch.inference_mode()
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_hugging_face_in_float64(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = reference(name, tmp_path)
    ours = load_transformer(tmp_path, "float64", "cpu")
    tokens = torch.randint(0, 101, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    stock = theirs(torch.tensor([tokens])).logits[0]
    lift_float32_casts(monkeypatch)
    exact = theirs(torch.tensor([tokens])).logits[0]
    layers = range(ours.spec.layers)
    for history, steps in histories(tokens):
        cache = KVCache(ours.spec, 64, ours.dtype, CPU)
        for back_to, fresh in steps:
            if back_to is not None:
                cache.rollback(back_to)
            begun = cache.length
            logits = ours.forward(torch.tensor(fresh), cache, layers, rows=len(fresh))
            if fresh == tokens[begun : begun + len(fresh)]:
                want = exact[begun : begun + len(fresh)]
                assert (logits - want).abs().max() < 1e-9, history
                assert (logits - stock[begun : begun + len(fresh)]).abs().max() < 1e-4, history
        assert cache.length == len(tokens), history


@torch.inference_mode()
def test_a_cache_longer_than_one_prefill_chunk_equals_hugging_face(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = reference("grouped", tmp_path)
    lift_float32_casts(monkeypatch)
    ours = load_transformer(tmp_path, "float64", "cpu")
    tokens = torch.randint(0, 101, (600,), generator=torch.Generator().manual_seed(2))
    cache = KVCache(ours.spec, 600, ours.dtype, CPU)
    ours.prefill(tokens[:-3], cache, range(3))
    logits = ours.forward(tokens[-3:], cache, range(3), rows=3)
    assert (logits - theirs(tokens[None]).logits[0, -3:]).abs().max() < 1e-9


def test_the_float32_casts_are_what_the_stock_reference_differs_by(tmp_path) -> None:
    """Shows that the tight bound above can fail: without lifting the casts it does."""
    theirs = reference("grouped", tmp_path)
    ours = load_transformer(tmp_path, "float64", "cpu")
    tokens = torch.randint(0, 101, (40,), generator=torch.Generator().manual_seed(1))
    logits = ours.forward(tokens, KVCache(ours.spec, 64, ours.dtype, CPU), range(3), rows=40)
    with torch.inference_mode():
        assert (logits - theirs(tokens[None]).logits[0]).abs().max() > 1e-9


def test_skipped_layers_equal_a_model_that_never_had_them() -> None:
    whole = tiny(seed=0, layers=5)
    tokens = torch.arange(12)
    cache = KVCache(whole.spec, 12, whole.dtype, CPU)
    skipped = whole.forward(tokens, cache, (0, 2, 4), rows=12)
    layers = tuple(whole.weights.layers[index] for index in (0, 2, 4))
    small = Transformer(replace(whole.spec, layers=3), replace(whole.weights, layers=layers))
    alone = small.forward(tokens, KVCache(small.spec, 12, small.dtype, CPU), range(3), rows=12)
    assert torch.equal(skipped, alone)


def test_too_small_a_cache_and_too_few_positions_are_refused() -> None:
    model = tiny(seed=0)
    with pytest.raises(ValueError, match="cache holds 4 positions, 5 are needed"):
        model.forward(torch.arange(5), KVCache(model.spec, 4, model.dtype, CPU), range(4), rows=1)
    with pytest.raises(ValueError, match="the model has 512 positions, 513 are needed"):
        model.forward(torch.zeros(513, dtype=torch.long), KVCache(model.spec, 600, model.dtype, CPU), range(4), rows=0)


BASE = LlamaConfig(hidden_size=48, num_attention_heads=4).to_dict()


def test_both_spellings_of_the_rotary_base_are_read() -> None:
    old = {key: value for key, value in BASE.items() if key != "rope_parameters"}
    assert ModelSpec.from_hf({**old, "rope_theta": 123.0}, "c").rope_theta == 123.0
    new = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    assert ModelSpec.from_hf(new, "c").rope_theta == 77.0


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (0, 2), ()])
@pytest.mark.parametrize("fixed", [False, True])
def test_hidden_states_are_those_of_the_layers_that_ran(layers: tuple[int, ...], fixed: bool) -> None:
    """A tap behind a layer that is left out gives what came before it; the last one is what the head reads."""
    model, tokens = tiny(0), torch.tensor([3, 1, 4, 1, 5])
    cache = model.new_cache(16)
    taps = (0, 1, 3, AFTER_NORM)
    if fixed:
        logits, states = model.fixed_forward(tokens, torch.tensor(0), cache.layers, layers, taps)
    else:
        logits, states = model.observe(tokens, cache, layers, 2, taps)
    assert states is not None and states.shape == (5, 4 * 32)
    behind = [model.embedded(tokens)]
    for index in layers:
        sight = model.kinds[0].sight(0, 5)
        behind.append(model.layer(index, behind[-1], model.new_cache(16).layers[index], sight))
    want = [behind[sum(layer <= tap for layer in layers)] for tap in taps[:3]]
    for found, state in zip(states.chunk(4, dim=-1), [*want, model.normed(behind[-1])], strict=True):
        assert torch.allclose(found, state, atol=1e-12)
    assert torch.allclose(logits[-2:], model.full_logits(states.chunk(4, dim=-1)[3][-2:]), atol=1e-12)
    assert torch.allclose(logits[-2:], model.forward(tokens, model.new_cache(16), layers, 2), atol=1e-12)


def test_no_hidden_state_is_kept_unasked() -> None:
    model = tiny(0)
    assert model.observe(torch.tensor([3, 1]), model.new_cache(8), range(4), 1, ())[1] is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_reduced_head_gives_the_logits_of_its_tokens_and_none_else(dtype: torch.dtype) -> None:
    """Also where the head has been packed, as it is in bfloat16."""
    model = random_transformer(toy_spec(vocab_size=97), 0, dtype)
    kept = torch.tensor([7, 3, 88])
    reduced = model.with_head_tokens(kept)
    tokens = torch.tensor([3, 1, 4])
    whole = model.forward(tokens, model.new_cache(8), range(4), 3)
    got = reduced.forward(tokens, reduced.new_cache(8), range(4), 3)
    assert got.shape == whole.shape == (3, 97)
    assert torch.allclose(got[:, kept], whole[:, kept], atol=0.05 if dtype == torch.bfloat16 else 1e-12)
    assert torch.isneginf(got).sum() == 3 * 94 and got[:, kept].isfinite().all()


def test_layers_can_be_differentiated() -> None:
    """What a drafter is trained through: nothing in ``run`` is in inference mode or writes over what is needed."""
    model, tokens = tiny(0), torch.tensor([3, 1, 4, 1])
    down = model.weights.layers[0].down.requires_grad_()
    qkv = model.weights.layers[1].qkv.requires_grad_()
    sights = [kind.sight(0, 4) for kind in model.kinds]

    def loss() -> torch.Tensor:
        return model.run(tokens, model.new_entries(4), range(4), sights, 4)[0].square().sum()

    loss().backward()
    for weight in (down, qkv):
        assert weight.grad is not None
        step, before = 1e-6, weight.data[1, 2].item()
        ends = []
        for sign in (1, -1):
            weight.data[1, 2] = before + sign * step
            ends.append(loss().item())
        weight.data[1, 2] = before
        assert float(weight.grad[1, 2]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4)
