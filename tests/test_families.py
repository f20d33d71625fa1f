"""Every supported family against Hugging Face: each way to fill a cache, sliding windows, older configurations."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, Method, StopRule
from harness.decode.gate import AlwaysEscalate
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.model.load import Model, load_transformer
from harness.model.rotary import frequencies
from harness.model.slim import LayerMask
from harness.model.spec import DEFAULTS, NEEDED, SUPPORTED, ModelSpec, Rope, RopeScaling
from harness.model.tokenizer import ByteTokenizer
from harness.model.toy import random_transformer, toy_spec
from harness.model.transformer import offset_rms_norm, rms_norm
from harness.records import Generation
from harness.sampling import RandomChooser
from tests.families import CASES, LLAMA3, SLIDING, VOCAB, lift_float32_casts, older_style, write_reference
from tests.toys import CPU, GREEDY, tiers_of

LENGTH = 60
Steps = list[tuple[int | None, list[int]]]


def histories(tokens: list[int]) -> Iterator[tuple[str, Steps]]:
    """Ways to process the same tokens: a name, and the tokens of each forward with where to roll back before it."""
    yield "prefill", [(None, tokens)]
    yield "single steps", [(None, tokens[:20]), *((None, [token]) for token in tokens[20:])]
    for size in range(2, 9):
        yield f"blocks of {size}", [(None, tokens[i : i + size]) for i in range(0, len(tokens), size)]
    wrong = [(token + 1) % VOCAB for token in tokens]
    yield (
        "after rollback",
        [(None, tokens[:30]), (None, wrong[30:37]), (30, tokens[30:33]), (None, wrong[33:50]), (25, tokens[25:])],
    )


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_hugging_face_in_float64(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = write_reference(name, tmp_path)
    ours = load_transformer(tmp_path, "float64", "cpu")
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    stock = theirs(torch.tensor([tokens])).logits[0]
    lift_float32_casts(monkeypatch, theirs)
    exact = theirs(torch.tensor([tokens])).logits[0]
    assert (stock - exact).abs().max() > 1e-9, "the bound below is tighter than the casts that were lifted"
    worst, worst_stock = 0.0, 0.0
    for history, steps in histories(tokens):
        cache = ours.new_cache(64)
        for back_to, fresh in steps:
            if back_to is not None:
                cache.rollback(back_to)
            begun = cache.length
            logits = ours.forward(torch.tensor(fresh), cache, range(ours.spec.layers), rows=len(fresh))
            if fresh == tokens[begun : begun + len(fresh)]:
                error = float((logits - exact[begun : begun + len(fresh)]).abs().max())
                stock_error = float((logits - stock[begun : begun + len(fresh)]).abs().max())
                assert error < 1e-9 and stock_error < 1e-4, history
                worst, worst_stock = max(worst, error), max(worst_stock, stock_error)
        assert cache.length == len(tokens), history
    print(f"{name}: largest error {worst:.1e}, against the stock model {worst_stock:.1e}")


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3_biases", "gemma2", "gemma3", "mistral_sliding", "smollm3"])
def test_a_cache_longer_than_one_prefill_chunk_equals_hugging_face(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = write_reference(name, tmp_path)
    lift_float32_casts(monkeypatch, theirs)
    ours = load_transformer(tmp_path, "float64", "cpu")
    tokens = torch.randint(0, VOCAB, (600,), generator=torch.Generator().manual_seed(2))
    cache = ours.new_cache(600)
    every = range(ours.spec.layers)
    ours.prefill(tokens[:-3], cache, every)
    logits = ours.forward(tokens[-3:], cache, every, rows=3)
    assert (logits - theirs(tokens[None]).logits[0, -3:]).abs().max() < 1e-9


@pytest.mark.parametrize("name", SLIDING)
def test_the_window_matters_in_these_tests(name: str, tmp_path: Path) -> None:
    """The same weights with a window one longer give other logits, beyond the window alone."""
    write_reference(name, tmp_path)
    ours = load_transformer(tmp_path, "float64", "cpu")
    assert ours.spec.window == 8
    longer = type(ours)(replace(ours.spec, window=9), ours.weights)
    tokens, every = torch.arange(40), range(ours.spec.layers)
    one, other = (model.forward(tokens, model.new_cache(40), every, rows=40) for model in (ours, longer))
    assert torch.allclose(one[:8], other[:8], atol=1e-12)
    assert (one[8] - other[8]).abs().max() > 1e-6


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_older_configurations_mean_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_reference(name, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    new = ModelSpec.from_hf(config, "c")
    old = older_style(config)
    path.write_text(json.dumps(old))
    assert "rope_parameters" not in old and ModelSpec.from_hf(old, "c") == new
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    ours = load_transformer(tmp_path, "float64", "cpu")
    tokens = torch.arange(30)
    lift_float32_casts(monkeypatch, theirs)
    logits = ours.forward(tokens, ours.new_cache(30), range(ours.spec.layers), rows=30)
    assert (logits - theirs(tokens[None]).logits[0]).abs().max() < 1e-9


@pytest.mark.parametrize("kind", SUPPORTED)
def test_what_a_configuration_leaves_out_is_what_transformers_takes(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    written = {key: getattr(config, key) for key in (*NEEDED, "num_key_value_heads")}
    least = ModelSpec.from_hf({"model_type": kind, **written}, "c")
    assert least == ModelSpec.from_hf(config.to_dict(), "c")
    for key, value in DEFAULTS[kind].items():
        if key not in ("rope_theta", "rope_local_base_freq", "sliding_window_pattern", "head_dim", "sliding_window"):
            assert getattr(config, key) == (value or getattr(config, key)), key


def test_stretched_frequencies_equal_those_of_transformers() -> None:
    positions, theta, size = 8192, 500_000.0, 128
    rope = LLAMA3 | {"original_max_position_embeddings": positions, "rope_theta": theta}
    theirs = AutoConfig.for_model("llama", rope_parameters=rope, head_dim=size, max_position_embeddings=131072)
    want = modeling_llama.LlamaRotaryEmbedding(theirs).inv_freq
    ours = Rope(theta, RopeScaling("llama3", 8.0, 1.0, 4.0, positions))
    found = frequencies(ours, size, torch.float64, CPU)
    assert torch.allclose(found, want.double(), rtol=1e-6, atol=0)
    plain = frequencies(Rope(theta), size, torch.float64, CPU)
    kept, divided = (found == plain).sum(), torch.isclose(found, plain / 8, rtol=1e-12).sum()
    assert kept > 5 and divided > 5 and kept + divided < size // 2, "all three ranges are there"


def test_norms_and_embedding_round_as_published_in_bfloat16(tmp_path: Path) -> None:
    """Bit for bit: where the casts stand is part of the function that a model was trained as."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 48, generator=generator).bfloat16()
    weight = torch.randn(48, generator=generator).bfloat16()
    for module, ours, gain in (
        (modeling_llama.LlamaRMSNorm(48, 1e-6), rms_norm, weight),
        (modeling_gemma2.Gemma2RMSNorm(48, 1e-6), offset_rms_norm, 1 + weight.float()),
    ):
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        assert torch.equal(ours(hidden, gain, 1e-6, torch.float32), module(hidden))
    write_reference("gemma2", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).get_input_embeddings()
    model = load_transformer(tmp_path, "bfloat16", "cpu")
    assert model.embed_scale is not None and model.embed_scale != 48**0.5
    assert torch.equal(theirs(torch.arange(101)), model.weights.embed * model.embed_scale)
    assert model.weights.layers[0].mlp_norm.dtype == torch.float32


BASE = AutoConfig.for_model("llama", hidden_size=48, num_attention_heads=4).to_dict()
GEMMA2 = AutoConfig.for_model("gemma2").to_dict()
GEMMA3 = AutoConfig.for_model("gemma3_text").to_dict()
QWEN2 = AutoConfig.for_model("qwen2").to_dict()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            ({"model_type": kind}, f"architecture '{kind}' is not supported; supported: llama, qwen2, qwen3, gemma2, ")
            for kind in ("qwen", "t5", "mixtral", "gemma", "gemma3", "phi3", "ministral")
        ),
        (BASE | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_type='yarn'"),
        (BASE | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (BASE | {"rope_scaling": {"type": "linear"}}, "config.json has no factor"),
        (BASE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (BASE | {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only 'silu' or 'gelu_pytorch_tanh' is"),
        (BASE | {"quantization_config": {"bits": 4}}, "quantization_config="),
        (BASE | {"layer_types": ["sliding_attention"]}, "layer_types entry='sliding_attention'"),
        (BASE | {"num_key_value_heads": 3}, r"heads \(4\) must be a multiple of kv_heads \(3\)"),
        ({key: value for key, value in BASE.items() if key != "vocab_size"}, "config.json has no vocab_size"),
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (GEMMA2 | {"sliding_window": None}, "no sliding window is set"),
        (GEMMA2 | {"sliding_window_pattern": 3}, "sliding_window_pattern=3"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (GEMMA3 | {"layer_types": ["chunked_attention"] * 26}, "layer_types entry='chunked_attention'"),
        (GEMMA3 | {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 26 layers"),
        (
            GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_scaling of sliding layers",
        ),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 32}, "no sliding window is set or used"),
        (QWEN2 | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "of 'full_attention' alone"),
        ({"model_type": "smollm3", **BASE, "no_rope_layers": [1]} | {"model_type": "smollm3"}, "no_rope_layers has 1"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelSpec.from_hf(config, "checkpoint")


PARTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 30), "qkv_bias": True, "out_bias": True},
    "qwen3": {"qk_norm": True, "window": 6, "sliding": frozenset((2, 3))},
    "gemma2": {
        **{"offset_norm": True, "post_norms": True, "activation": "gelu_pytorch_tanh", "embed_scale": 32**0.5},
        **{"attn_scale": 0.2, "attn_softcap": 2.0, "logit_softcap": 5.0, "window": 6, "sliding": frozenset((0, 2))},
    },
    "gemma3": {
        **{"offset_norm": True, "post_norms": True, "qk_norm": True, "embed_scale": 32**0.5},
        **{"window": 6, "sliding": frozenset((0, 1, 3)), "local_rope_theta": 100.0},
    },
    "mistral": {"window": 6, "sliding": frozenset(range(4))},
    "smollm3": {"no_rope": frozenset((1, 3)), "mlp_bias": True},
}


def decoded(method: Method, prompt: Sequence[int]) -> Generation:
    decoder = Decoder(method)
    decoder.prefill(prompt)
    return decoder.decode(StopRule(40), RandomChooser(0, CPU))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", PARTS)
def test_lossless_methods_equal_greedy_decoding(family: str, seed: int) -> None:
    transformer = random_transformer(replace(toy_spec(), **PARTS[family]), seed, torch.float64, layer_scale=0.35)
    model = Model(family, transformer, ByteTokenizer(), LayerMask.of([0, 1, 3], 4), "test")
    prompt = torch.randint(0, 97, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    want = decoded(Autoregressive(tiers_of(model, 64), GREEDY), prompt)
    drafter = partial(SelfSkip, mask=[0, 2, 3])
    found = decoded(Speculative(tiers_of(model, 64), GREEDY, model, gamma=4, drafter=drafter), prompt)
    three = decoded(ViaSD(tiers_of(model, 64), GREEDY, model, gamma=5, drafter=drafter, gate=AlwaysEscalate()), prompt)
    assert found.token_ids == want.token_ids == three.token_ids
    kept = [block.emitted for block in found.blocks]
    assert max(kept) > 1 and min(kept) < 5, "some drafts are kept and some are not"
