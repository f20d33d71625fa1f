"""A Llama cut to its first layers: the same weights, readable by us and by transformers, made once."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.errors import UserError
from harness.model.load import load_tokenizer, load_transformer, read_spec
from harness.model.truncated import first_layers_folder, is_llama
from harness.speed.forwards import first_layers
from tests.toys import write_checkpoint


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return write_checkpoint(tmp_path / "big", num_hidden_layers=4)


def test_the_first_layers_are_the_sources(source: Path) -> None:
    cut, whole = load_transformer(first_layers_folder(source, 2), "float64"), load_transformer(source, "float64")
    assert cut.spec.layers == 2
    for mine, base in zip(cut.weights.layers, whole.weights.layers[:2], strict=True):
        assert torch.equal(mine.qkv, base.qkv) and torch.equal(mine.down, base.down)
    for name in ("embed", "norm", "head"):
        assert torch.equal(getattr(cut.weights, name), getattr(whole.weights, name))
    tokens = torch.tensor([3, 4, 5, 6])
    logits = [
        model.forward(tokens, model.new_cache(8), range(2), rows=4) for model in (cut, whole, first_layers(whole, 2))
    ]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_transformers_reads_it_and_the_tokenizer_is_the_same(source: Path) -> None:
    folder = first_layers_folder(source, 2)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, local_files_only=True).eval()
    ours = load_transformer(folder, "float64")
    tokens = torch.tensor([3, 4, 5, 6])
    got = ours.forward(tokens, ours.new_cache(8), range(2), rows=4)
    torch.testing.assert_close(theirs(tokens[None]).logits[0].detach(), got, rtol=1e-4, atol=1e-4)
    mine, base = (load_tokenizer(place, read_spec(place)) for place in (folder, source))
    assert (mine.digest, mine.eos_ids) == (base.digest, base.eos_ids)


def test_it_is_made_once_and_again_for_another_source(source: Path) -> None:
    said: list[str] = []
    folder = first_layers_folder(source, 2, said.append)
    assert first_layers_folder(source, 2, said.append) == folder and len(said) == 1
    other = {folder, first_layers_folder(source, 3)}
    write_checkpoint(source, seed=1, num_hidden_layers=4)
    assert len(other | {first_layers_folder(source, 2)}) == 3


def test_a_damaged_one_is_made_again(source: Path) -> None:
    folder = first_layers_folder(source, 2)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    assert first_layers_folder(source, 2) == folder
    assert (folder / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("count", [0, 4, 9])
def test_a_number_of_layers_that_is_no_cut_is_refused(count: int, source: Path) -> None:
    with pytest.raises(UserError, match=f"has 4 layers: cut to {count}, want fewer, 1 at least"):
        first_layers_folder(source, count)


def test_another_architecture_is_refused(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    assert not is_llama(source)
    with pytest.raises(UserError, match="only a Llama is cut to its first layers, not a 'mistral'"):
        first_layers_folder(source, 2)
