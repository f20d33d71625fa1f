"""Checkpoint folders: what is read from them, and the one line that says what is wrong with one."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness.errors import UserError
from harness.model.load import DTYPES, Model, load_model, load_tokenizer, load_transformer, resolve_device
from harness.model.spec import ModelSpec
from harness.model.transformer import Transformer
from tests.toys import WORDS, tiers_of, write_checkpoint, write_mask

TOKENS = (3, 4, 5, 6, 7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def loaded(folder: Path, **settings: Any) -> Model:
    return load_model(str(folder), **{"dtype": "float64", "device": "cpu", **settings})


def logits(model: Transformer) -> torch.Tensor:
    return tiers_of(model, 64).full.forward(TOKENS, rows=len(TOKENS))


def theirs(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_checkpoint_becomes_a_model(folder: Path) -> None:
    model = loaded(folder)
    assert model.name == str(folder)
    assert model.slim_mask is None and model.mask_name is None
    assert model.transformer.spec.layers == 2 and model.transformer.dtype == torch.float64
    assert model.tokenizer.vocab_size == len(WORDS) == model.transformer.weights.head.shape[0]
    assert model.tokenizer.eos_ids == {1}
    assert (logits(model.transformer) - theirs(folder)[:, : len(WORDS)]).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_take_the_dtype_that_is_asked_for(folder: Path, dtype: str) -> None:
    weights = load_transformer(folder, dtype, "cpu").weights
    for tensor in (weights.embed, weights.head, weights.norm, weights.layers[0].qkv, weights.layers[1].down):
        assert tensor.dtype == DTYPES[dtype]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tmp_path: Path, tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=tied)
    model = load_transformer(folder, "float64", "cpu")
    assert model.spec.tied_head == tied
    assert (model.weights.head is model.weights.embed) == tied
    assert torch.equal(model.weights.head, model.weights.embed) == tied
    assert (logits(model) - theirs(folder)).abs().max() < 1e-4


def test_a_tied_checkpoint_that_stores_its_head_too_is_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=True)
    want = logits(load_transformer(folder, "float64", "cpu"))
    change_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(load_transformer(folder, "float64", "cpu")), want)


def test_shards_equal_a_single_file(folder: Path, tmp_path: Path) -> None:
    sharded = write_checkpoint(tmp_path / "sharded", shard_size="8KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2 and not (sharded / "model.safetensors").exists()
    assert torch.equal(logits(load_transformer(sharded, "float64")), logits(load_transformer(folder, "float64")))
    missing = sorted(sharded.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(UserError, match=rf"{missing.name} does not exist; only safetensors checkpoints are read"):
        load_transformer(sharded, "float64")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", r"config\.json does not exist; want a checkpoint folder with config\.json and \*\.safetensors"),
        ("model.safetensors", r"model\.safetensors does not exist; only safetensors checkpoints are read"),
    ],
)
def test_a_missing_file_is_named(folder: Path, name: str, message: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=message):
        loaded(folder)


def test_a_missing_folder_and_a_missing_tokenizer_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere/config\.json does not exist"):
        loaded(folder / "nowhere")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match=r"no tokenizer in '.*checkpoint': expected one of tokenizer\.json"):
        loaded(folder)


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(QUERY), f"weight '{QUERY}' is missing from the safetensors files"),
        (lambda w: w.pop("lm_head.weight"), r"weight 'lm_head\.weight' is missing"),
        (lambda w: w.pop("model.norm.weight"), r"weight 'model\.norm\.weight' is missing"),
        (lambda w: w.update({QUERY: torch.zeros(24, 23)}), r"shape \(24, 23\), config\.json says \(24, 24\)"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(25)}), r"shape \(25,\), config\.json says \(24,\)"),
        (
            lambda w: w.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(2, 2), "z": torch.zeros(1)}),
            r"2 weights have no place in this architecture, first 'model\.layers\.2\.mlp",
        ),
        (lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(24)}), "1 weights have no place"),
    ],
)
def test_a_missing_extra_or_misshapen_weight_is_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    change_weights(folder, change)
    with pytest.raises(UserError, match=message) as caught:
        load_transformer(folder, "float64", "cpu")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_rotary_tables_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    want = logits(load_transformer(folder, "float64", "cpu"))
    change_weights(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}))
    assert torch.equal(logits(load_transformer(folder, "float64", "cpu")), want)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, r"dtype 'int8' is not known; one of bfloat16, float16, float32, float64\."),
        ({"device": "gpu"}, r"device 'gpu' is not known; use auto, cpu, cuda or cuda:N\."),
        ({"threads": 0}, r"model\.threads=0: want at least 1"),
        ({"threads": -2}, r"model\.threads=-2: want at least 1"),
        ({"slim_mask": [0, 2]}, r"kept layers \[0, 2\] must be distinct integers from 0 to 1"),
        ({"slim_mask": "nowhere.json"}, r"'nowhere\.json' does not exist; make one with"),
    ],
)
def test_a_setting_out_of_bounds_is_refused_in_one_line(folder: Path, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        loaded(folder, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(UserError, match=f"device '{device}' was asked for, but this machine has no usable CUDA"):
        resolve_device(device)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("device", ["mps", "meta", "xla"])
def test_a_device_of_another_kind_is_refused(device: str) -> None:
    with pytest.raises(UserError, match=f"device '{device}'"):
        resolve_device(device)


def test_threads_are_set_and_null_is_torchs_choice(
    folder: Path, keep_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.model.load.OWN_THREADS", 3)
    loaded(folder, threads=2)
    assert torch.get_num_threads() == 2
    loaded(folder)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)  # by whoever else
    loaded(folder)
    assert torch.get_num_threads() == 1


def test_the_slim_mask_comes_with_its_name(folder: Path, tmp_path: Path) -> None:
    file = write_mask(tmp_path / "half.json", [1], depth=2)
    from_file, from_list = loaded(folder, slim_mask=str(file)), loaded(folder, slim_mask=[1])
    assert from_file.slim_mask is not None and from_file.slim_mask == from_list.slim_mask
    assert from_file.slim_mask.layers == (1,)
    assert from_file.mask_name == str(file) and from_list.mask_name == "[1]"


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", vocab_size=len(WORDS) - 1)
    with pytest.raises(UserError, match=rf"the tokenizer has {len(WORDS)} tokens, the embedding only {len(WORDS) - 1}"):
        loaded(folder)
    exact = write_checkpoint(tmp_path / "exact", vocab_size=len(WORDS))
    assert loaded(exact).transformer.weights.head.shape[0] == len(WORDS)


def test_padding_rows_are_never_drawn(tmp_path: Path) -> None:
    """Rows beyond the tokenizer can hold anything, here the largest logits of all."""
    folder = write_checkpoint(tmp_path / "checkpoint", loud_from=len(WORDS))
    assert int(logits(load_transformer(folder, "float64", "cpu"))[-1].argmax()) >= len(WORDS)
    cut = loaded(folder).transformer
    assert cut.spec.vocab_size == 40
    assert torch.allclose(logits(cut), logits(load_transformer(folder, "float64", "cpu"))[:, : len(WORDS)])


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        (2, 1, {2}),  # the generation config decides where it says something
        ([1, 2], 1, {1, 2}),
        (None, 1, {1}),
        (None, [1, 4], {1, 4}),
        (None, None, set()),
    ],
)
def test_eos_ids_are_read_from_the_checkpoint(
    folder: Path, generation: int | list[int] | None, config: int | list[int] | None, want: set[int]
) -> None:
    change_json(folder / "generation_config.json", eos_token_id=generation)
    change_json(folder / "config.json", eos_token_id=config)
    assert loaded(folder).tokenizer.eos_ids == want


def test_a_checkpoint_without_a_generation_config_is_read(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert loaded(folder).tokenizer.eos_ids == {1}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{broken", b"\xff\xfe\x00\x80", b"[]"], ids=["broken", "binary", "list"])
def test_json_that_cannot_be_read_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        loaded(folder)


@pytest.mark.parametrize("content", [b"", b"not a safetensors file at all", b"\x10\x00\x00\x00\x00\x00\x00\x00{}"])
def test_weights_that_cannot_be_read_are_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_transformer(folder, "float64", "cpu")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"])
def test_a_config_without_a_needed_key_is_refused_by_name(folder: Path, key: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=key):
        load_transformer(folder, "float64", "cpu")


def test_an_index_without_its_map_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        load_transformer(folder, "float64", "cpu")


def test_a_tokenizer_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{broken")
    spec = ModelSpec.from_hf(json.loads((folder / "config.json").read_text()), "c")
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(folder, spec)
