"""Random models of any shape: how large they are, what is drawn, where it lies, and what is refused before drawing."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.errors import UserError
from harness.help import CONF
from harness.model import random_weights
from harness.model.load import Model
from harness.model.random_weights import available_bytes, parameters, random_model, random_transformer
from harness.model.spec import ModelSpec
from harness.model.toy import toy_spec
from harness.sampling import RandomChooser
from harness.store import read
from tests.runs import main, refused
from tests.toys import CPU, GREEDY, tiers_of

META = torch.device("meta")
PUBLISHED = {  # parameters that the model pages of the hub give, to the last digit
    "random_llama_1b": 1_235_814_400,
    "random_gemma2_9b": 9_241_705_984,
    "random_llama2_13b": 13_015_864_320,
}
SHAPES = {path.stem: yaml.safe_load(path.read_text())["config"] for path in CONF.glob("model/random_*.yaml")}
SMALL = {
    **{"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "vocab_size": 700, "max_position_embeddings": 256},
}
TOKENS = torch.randint(0, 700, (60,), generator=torch.Generator().manual_seed(1))


def small(name: str, **arguments: Any) -> Model:
    """The model of ``name``, every size scaled down."""
    return random_model(name, SHAPES[name] | SMALL, **{"device": "cpu"} | arguments)


def logits_of(model: Model, rows: int = 60) -> torch.Tensor:
    transformer = model.transformer
    return transformer.forward(TOKENS, transformer.new_cache(60), range(transformer.spec.layers), rows)


def test_every_shipped_shape_is_looked_at() -> None:
    assert sorted(SHAPES) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_number_of_parameters(name: str) -> None:
    spec = ModelSpec.from_hf(SHAPES[name], name)
    assert parameters(spec, [CPU]) == {CPU: PUBLISHED[name]}
    assert sum(parameters(spec, [CPU, META]).values()) == PUBLISHED[name] + (
        spec.vocab_size * spec.hidden_size if spec.tied_head else 0  # a tied head on another device is a copy
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_is_what_transformers_makes_of_the_same_keys(name: str) -> None:
    config = AutoConfig.for_model(**SHAPES[name])
    assert ModelSpec.from_hf(config.to_dict(), name) == ModelSpec.from_hf(SHAPES[name], name)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_numbers_are_drawn_as_were_counted(name: str) -> None:
    weights = small(name, dtype="float32").transformer.weights  # no packed copy of a tied head
    parts = [getattr(layer, field) for layer in weights.layers for field in ("qkv", "out", "gate_up", "down")]
    drawn = {id(matrix): matrix.numel() for matrix in (weights.embed, weights.head, *parts)}
    norms = 64 * (4 * (4 if name == "random_gemma2_9b" else 2) + 1)
    assert sum(drawn.values()) == parameters(ModelSpec.from_hf(SHAPES[name] | SMALL, name), [CPU])[CPU] - norms
    assert (weights.head is weights.embed) == (name != "random_llama2_13b")


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_seed_decides_every_weight_and_nothing_else_does(dtype: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = logits_of(small("random_gemma2_9b", seed=3, dtype=dtype))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(logits_of(small("random_gemma2_9b", seed=3, dtype=dtype)), first)
    assert not torch.equal(logits_of(small("random_gemma2_9b", seed=4, dtype=dtype)), first)


def test_no_two_tensors_are_the_same_draws() -> None:
    weights = random_transformer(toy_spec(layers=2), 0, torch.float64, places=[CPU, CPU]).weights
    parts = [weights.embed, weights.head, *(part for one in weights.layers for part in (one.qkv, one.gate_up))]
    drawn = [tuple((part / part.std()).flatten()[:50].tolist()) for part in parts]
    assert len({numbers[0] for numbers in drawn}) == len(drawn)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_of_one_and_of_eight_rows_are_finite_and_as_wide_as_the_vocabulary(name: str, dtype: str) -> None:
    transformer = small(name, dtype=dtype).transformer
    cache = transformer.new_cache(60)
    transformer.prefill(TOKENS[:40], cache, range(4))
    for rows in (1, 8):
        logits = transformer.forward(TOKENS[40 : 40 + rows], cache, range(4), rows)
        assert logits.dtype == transformer.dtype and logits.shape == (rows, 700)
        assert logits.isfinite().all()


@pytest.mark.parametrize("depth", [2, 24])
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_spread_alike_at_any_depth_and_no_token_repeats_itself(name: str, depth: int) -> None:
    """A tied head would otherwise find in the residual stream the very embedding that went in."""
    model = random_model(name, SHAPES[name] | SMALL | {"num_hidden_layers": depth}, dtype="float32", device="cpu")
    logits = logits_of(model)
    assert 2 < logits.std() < 4
    best = logits.argmax(dim=-1)
    assert (best == TOKENS).float().mean() < 0.1 and len(best.unique()) > 30


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_and_head_are_drawn_on_their_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device has shapes and no values, and no generator of its own."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda place: generator(CPU))
    spec = ModelSpec.from_hf(SHAPES[name] | SMALL, name)
    model = random_transformer(spec, 0, torch.float32, places=[CPU, META])
    assert model.layer_devices == (CPU, CPU, META, META)
    assert (model.input_device, model.device, model.weights.norm.device) == (CPU, META, META)
    logits = model.forward(TOKENS, model.new_cache(60), range(4), rows=3)
    assert logits.device == META and logits.shape == (3, 700)


def test_tokens_that_the_tokenizer_does_not_know_are_decoded_and_shown_as_nothing() -> None:
    model = small("random_llama_1b", dtype="float32")
    decoder = Decoder(Autoregressive(tiers_of(model, 100), GREEDY))
    decoder.prefill(model.tokenizer.encode("hello"))
    stop = StopRule(40, model.tokenizer.eos_ids, ("\n\n",), model.tokenizer.decode)
    made = decoder.decode(stop, RandomChooser(0, CPU)).token_ids
    assert max(made) > model.tokenizer.vocab_size
    assert model.tokenizer.decode([*b"a", 300, 699, *b"b"]) == "ab"
    assert len(model.tokenizer.decode(made)) < len(made)


# What is refused.


def test_a_model_that_cannot_fit_is_refused_before_a_number_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*arguments: Any, **rest: Any) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr(random_weights, "random_transformer", draw)
    monkeypatch.setattr(random_weights, "available_bytes", lambda place: 16 * 10**9)
    arguments: dict[str, Any] = {"name": "big", "config": SHAPES["random_llama2_13b"], "device": "cpu"}
    with pytest.raises(UserError) as caught:
        random_model(**arguments)
    assert str(caught.value) == (
        "the weights of big need 26.0 GB on cpu, which has 16.0 GB: take model.dtype=bfloat16 if it is wider, several "
        "model.devices, or fewer model.config.num_hidden_layers."
    )
    monkeypatch.setattr(random_weights, "available_bytes", lambda place: 2 * PUBLISHED["random_llama2_13b"])
    with pytest.raises(AssertionError, match="drawn"):
        random_model(**arguments)
    with pytest.raises(UserError, match=r"need 52\.1 GB on cpu, which has 26\.0 GB"):
        random_model(**arguments, dtype="float32")


def test_each_device_is_asked_for_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec.from_hf(SHAPES["random_llama2_13b"], "big")
    free = {CPU: 13 * 10**9, META: 18 * 10**9}
    monkeypatch.setattr(random_weights, "available_bytes", lambda place: free[place])
    with pytest.raises(UserError, match=r"need 13\.0 GB on cpu, which has 13\.0 GB"):
        random_weights.check_memory("big", spec, [CPU, META], torch.bfloat16)
    random_weights.check_memory("big", spec, [CPU, META, META], torch.bfloat16)


def test_memory_is_what_the_device_has_free_or_this_process_keeps_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"mem_get_info": (7_000, 10_000), "memory_reserved": 500, "memory_allocated": 200}
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda place, value=value: value)
    assert available_bytes(torch.device("cuda", 0)) == 7_300
    assert 10**9 < available_bytes(CPU) < 10**14


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": -1}, "model.seed=-1: want 0 or more"),
        ({"dtype": "int8"}, "dtype 'int8' is not known; one of bfloat16"),
        ({"device": "tpu"}, "device 'tpu' is not known"),
        ({"devices": ["cpu"]}, r"model.device=cpu and model.devices=\['cpu'\]: set one of them alone"),
        ({"device": "auto", "devices": ["cpu"] * 5}, "model.devices names 5 devices: want 1 to 4"),
        ({"device": "auto", "devices": []}, "model.devices names 0 devices: want 1 to 4"),
        ({"threads": 0}, "model.threads=0: want at least 1"),
        ({"skip_ratio": 1.0}, "skip_ratio=1.0 leaves no layer of 4"),
        ({"slim_mask": [0, 4]}, r"kept layers \[0, 4\] must be distinct integers from 0 to 3"),
        ({"config": {"vocab_size": 256}}, "model.config.vocab_size=256: want 257 at least"),
        ({"config": {"num_hidden_layers": 0}}, "num_hidden_layers=0 makes no sense: want a whole number of at least 1"),
        ({"config": {"hidden_size": "64"}}, "hidden_size='64' makes no sense"),
        ({"config": {"head_dim": True}}, "head_dim=True makes no sense"),
        ({"config": {"num_key_value_heads": 3}}, r"heads \(4\) must be a multiple of kv_heads \(3\)"),
        ({"config": {"model_type": "gpt2"}}, "model.config: architecture 'gpt2' is not supported"),
    ],
)
def test_what_cannot_be_made_is_one_line(changed: dict[str, Any], message: str) -> None:
    config = SHAPES["random_llama_1b"] | SMALL | changed.get("config", {})
    with pytest.raises(UserError, match=message) as caught:
        random_model(**{"name": "small", "device": "cpu"} | changed | {"config": config})
    assert "\n" not in str(caught.value)


# The command line.

SCALED = [f"model.config.{key}={value}" for key, value in (SMALL | {"max_position_embeddings": 4096}).items()]


def test_a_bench_of_a_random_model_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(
        monkeypatch,
        *("model=random_llama_1b", *SCALED, "model.device=cpu", f"results_dir={tmp_path}"),
        *("task=web_questions", "drafter=self_skip", "limit=1", "max_new_tokens=8"),
    )
    (folder,) = (tmp_path / "runs").iterdir()
    run, samples, *_ = read(folder)
    assert (run.status, run.model, run.env["dtype"]) == ("finished", "random_llama_1b", "bfloat16")
    assert run.env["slim_layers"] == "0 1 3" and run.env["slim_mask"] == "evenly spaced, skip 0.3"
    assert [len(sample.generation.token_ids) for sample in samples] == [8, 8, 8]


def test_a_model_that_cannot_fit_ends_the_command_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(random_weights, "available_bytes", lambda place: 10**9)
    chosen = ("model=random_gemma2_9b", "model.device=cpu", f"results_dir={tmp_path}", "limit=1", "task=web_questions")
    said = refused(monkeypatch, capsys, *chosen)
    assert said.startswith("the weights of random_gemma2_9b need 18.5 GB on cpu, which has 1.0 GB: take ")
    assert not list(tmp_path.iterdir())
