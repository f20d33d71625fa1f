"""The folder of a trained drafter: written, read back, checked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.drafters.weights import layer_shapes, load_drafter, own_layers, own_spec, save_drafter
from harness.errors import UserError
from harness.model.load import Shape
from harness.model.spec import ModelSpec
from tests.toys import CPU, tiny_model

MODEL = tiny_model(0, kept=(0, 1))
CONFIG = {"model": "tiny", "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}
MADE_BY = {"command": "python -m harness", "data": "none", "seed": 3, "seconds": 1.5, "held_out": {"loss": 2.0}}


def shapes(config: Mapping[str, Any], verifier: ModelSpec) -> dict[str, Shape]:
    return layer_shapes(own_spec(config, verifier)) | {"model.norm.weight": (verifier.hidden_size,)}


def tensors(config: Mapping[str, Any] = CONFIG, head: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    wanted = shapes(config, MODEL.transformer.spec)
    return {name: torch.randn(shape, generator=generator) for name, shape in wanted.items()} | {
        "head_tokens": torch.randperm(97, generator=generator)[:head]
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_drafter(tmp_path / "one", "small_lm", CONFIG, tensors(), MADE_BY)
    return tmp_path / "one"


def test_what_is_written_is_read_back_in_bfloat16(folder: Path) -> None:
    found = load_drafter(folder, "small_lm", MODEL, shapes)
    assert found.config == {"kind": "small_lm", **CONFIG}
    assert found.card["seed"] == 3 and len(found.card["sha256"]) == 64
    want = tensors()
    assert found.head_tokens is not None and torch.equal(found.head_tokens, want.pop("head_tokens"))
    assert all(torch.equal(found.tensors[name], tensor.bfloat16()) for name, tensor in want.items())
    spec = own_spec(found.config, MODEL.transformer.spec)
    layers = own_layers(spec, found.tensors, torch.float64, CPU)
    assert len(layers) == spec.layers == 2 and layers[0].down.shape == (32, 20)


def test_the_card_can_be_read_by_people(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    for part in ("`small_lm` drafter for tiny", "python -m harness", "| loss | 2.0 |", "7 rows of the verifier's"):
        assert part in text


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Other weights with a card that says so."""
    held = load_file(folder / "model.safetensors") | change
    card = json.loads((folder / "card.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    save_drafter(folder, config.pop("kind"), config, {k: v for k, v in held.items() if v is not None}, card)


NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NAME: None}, f"weight '{NAME}' is missing"),
        ({NAME: torch.zeros(3, 4)}, rf"weight '{NAME}' has shape \(3, 4\), config.json says \(32, 20\)"),
        ({"more": torch.zeros(1)}, "1 weights have no place in this drafter, first 'more'"),
        ({"head_tokens": torch.tensor([1, 97])}, "must be distinct token ids from 0 to 96"),
        ({"head_tokens": torch.tensor([1, 1])}, "must be distinct token ids"),
        ({"head_tokens": torch.tensor([], dtype=torch.long)}, "at least one"),
        ({"head_tokens": torch.tensor([1.0, 2.0])}, "must be distinct token ids"),
    ],
)
def test_weights_that_do_not_fit_are_named(folder: Path, change: dict, message: str) -> None:
    rewrite(folder, change)
    with pytest.raises(UserError, match=message):
        load_drafter(folder, "small_lm", MODEL, shapes)


def test_weights_that_are_not_the_cards_are_refused(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    save_file({**held, NAME: held[NAME] * 2}, folder / "model.safetensors")
    with pytest.raises(UserError, match="its card says"):
        load_drafter(folder, "small_lm", MODEL, shapes)


def test_another_kind_verifier_or_no_drafter_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a drafter of kind 'small_lm': want 'eagle'"):
        load_drafter(folder, "eagle", MODEL, shapes)
    save_drafter(folder, "small_lm", CONFIG | {"model": "other"}, tensors(), MADE_BY)
    with pytest.raises(UserError, match="was made for 'other', the model is 'tiny'"):
        load_drafter(folder, "small_lm", MODEL, shapes)
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        load_drafter(tmp_path, "small_lm", MODEL, shapes)
    save_drafter(folder, "small_lm", CONFIG | {"hidden_size": 16}, tensors(), MADE_BY)
    with pytest.raises(UserError, match="the drafter is 16 wide"):
        load_drafter(folder, "small_lm", MODEL, shapes)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors does not exist"):
        load_drafter(folder, "small_lm", MODEL, shapes)


def test_a_card_says_how_the_drafter_was_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data, held_out"):
        save_drafter(tmp_path, "small_lm", CONFIG, tensors(), {"command": "", "seed": 0, "seconds": 0.0})
    with pytest.raises(ValueError, match="no model"):
        save_drafter(tmp_path, "small_lm", {}, tensors(), MADE_BY)
