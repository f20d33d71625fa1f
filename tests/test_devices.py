"""Layers spread over several devices: where they lie, and that the path changes no number."""

from pathlib import Path

import pytest
import torch

from harness.decode.base import Decoder, StopRule
from harness.decode.gate import Strictness
from harness.decode.via_sd import ViaSD
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.model import load as load_module
from harness.model.load import Model, load_transformer, spread
from harness.model.slim import LayerMask
from harness.model.tiers import Tiers
from harness.model.tokenizer import ByteTokenizer
from harness.model.transformer import Transformer
from harness.sampling import RandomChooser, Sampling
from tests.families import write_reference
from tests.toys import CPU, tiny

META = torch.device("meta")
TOKENS = torch.arange(20)


def logits_of(model: Transformer) -> torch.Tensor:
    return model.forward(TOKENS, model.new_cache(20), range(model.spec.layers), rows=20)


def test_layers_are_spread_evenly_and_in_order() -> None:
    places = [torch.device("cuda", index) for index in range(3)]
    assert [place.index for place in spread(7, places)] == [0, 0, 0, 1, 1, 2, 2]
    assert [place.index for place in spread(3, places)] == [0, 1, 2]
    assert spread(4, [CPU]) == [CPU] * 4
    for wrong in ([], places):
        with pytest.raises(UserError, match=f"names {len(wrong)} devices: want 1 to 2"):
            spread(2, wrong)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "smollm3"])
def test_one_device_named_twice_changes_nothing(name: str, tmp_path: Path) -> None:
    write_reference(name, tmp_path)
    one, twice = (load_transformer(tmp_path, "float64", device) for device in ("cpu", ["cpu", "cpu"]))
    assert twice.devices == (CPU,)
    want = logits_of(one)
    assert torch.equal(logits_of(twice), want)
    twice.devices = (CPU, CPU)  # takes the path of several devices, on one
    assert torch.equal(logits_of(twice), want)


@pytest.mark.parametrize("name", ["llama_biases", "qwen3", "gemma2", "gemma3", "smollm3"])
def test_layers_caches_and_head_are_where_they_were_put(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second device is one that has shapes and no values: an operation across devices would fail."""
    write_reference(name, tmp_path)
    monkeypatch.setattr(load_module, "resolve_device", torch.device)  # it lets nobody run on the second device
    model = load_transformer(tmp_path, "float32", ["cpu", "meta"])
    half = (model.spec.layers + 1) // 2
    assert model.layer_devices == (CPU,) * half + (META,) * (model.spec.layers - half)
    assert (model.input_device, model.device, model.devices) == (CPU, META, (CPU, META))
    assert model.weights.embed.device == CPU and model.weights.head.device == model.weights.norm.device == META
    cache = model.new_cache(40)
    assert [keys.device for keys, _ in cache.storages] == [CPU, META]
    assert [keys.device for keys, _ in cache.layers] == list(model.layer_devices)
    for count in (20, 1, 5):
        logits = model.forward(torch.arange(count), cache, range(model.spec.layers), rows=count)
        assert logits.device == META and logits.shape == (count, model.spec.vocab_size)
    skipped = model.forward(torch.arange(2), cache, (0, model.spec.layers - 1), rows=1)
    assert skipped.device == META
    assert all(bool(keys[:, :28].any()) for keys, _ in cache.layers[:half])
    with pytest.raises(ValueError, match="too many values"):
        _ = cache.keys


def test_tails_take_turns_in_several_storages_too() -> None:
    transformer = tiny(3, layers=4, layer_scale=0.3)
    model = Model("tiny", transformer, ByteTokenizer(), LayerMask.of([0, 1, 3], 4), "test")

    def decoded(split: bool) -> tuple[int, ...]:
        cache = transformer.new_cache(80)
        if split:
            keys, values = cache.storages[0]
            cache.storages = [(keys[:1], values[:1]), (keys[1:], values[1:])]
        tiers = Tiers(transformer, cache)
        method = ViaSD(tiers, Sampling(), model, 4, lambda t, s, m: SelfSkip(t, s, m, mask=[0, 3]), Strictness())
        decoder = Decoder(method)
        decoder.prefill([1, 2, 3, 4])
        return decoder.decode(StopRule(60), RandomChooser(0, CPU)).token_ids

    assert decoded(split=True) == decoded(split=False)
