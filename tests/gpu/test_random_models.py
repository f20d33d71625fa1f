"""The shipped one-billion shape at full size. Needs 3 GB of device memory."""

from collections.abc import Iterator

import pytest
import torch
import yaml

from harness.help import CONF
from harness.model.load import Model
from harness.model.random_weights import available_bytes, parameters, random_model
from tests.toys import CPU

CONFIG = yaml.safe_load((CONF / "model" / "random_llama_1b.yaml").read_text())["config"]


def drawn(seed: int = 0) -> Model:
    return random_model("random_llama_1b", CONFIG, seed=seed, device="cuda")


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    yield drawn()


def test_the_weights_take_what_was_counted_and_drawing_them_little_more() -> None:
    torch.cuda.reset_peak_memory_stats()
    before, free = torch.cuda.memory_allocated(), available_bytes(torch.device("cuda"))
    model = drawn()
    taken, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    spec = model.transformer.spec
    weights = parameters(spec, [CPU])[CPU] * 2
    tables = spec.max_positions * spec.head_dim * 8  # cosines and sines of the rotary embedding in float32
    assert taken == pytest.approx(weights + tables, rel=0.01)
    assert peak < 1.05 * (weights + tables)
    assert free - available_bytes(torch.device("cuda")) > 0.98 * weights


def test_a_few_steps_at_full_size_give_finite_logits(model: Model) -> None:
    transformer, layers = model.transformer, range(model.transformer.spec.layers)
    tokens = torch.randint(0, transformer.spec.vocab_size, (340,), device=transformer.input_device)
    cache = transformer.new_cache(len(tokens))
    transformer.prefill(tokens[:320], cache, layers)
    for count in (1, 8, 1, 5, 2):
        begun = cache.length
        logits = transformer.forward(tokens[begun : begun + count], cache, layers, rows=count)
        assert logits.shape == (count, 128_256) and logits.dtype == torch.bfloat16
        assert bool(logits.isfinite().all()) and 2 < float(logits.float().std()) < 4


def test_a_seed_draws_the_same_weights_again(model: Model) -> None:
    def sample(drawn: Model) -> torch.Tensor:
        last = drawn.transformer.weights.layers[-1]
        return torch.cat([part.flatten()[::1001] for part in (drawn.transformer.weights.embed, last.qkv, last.down)])

    assert torch.equal(sample(drawn()), sample(model))
    assert not torch.equal(sample(drawn(seed=1)), sample(model))
