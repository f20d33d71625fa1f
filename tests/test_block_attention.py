"""A block of 1 to 8 queries against the same tokens one at a time: logits, cache entries, and nothing else touched.

Whichever attention path a dtype and a number of rows take, they must agree. Cache lengths lie where a window or a
kernel's tile ends.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.model.cache import KVCache
from harness.model.random_weights import random_transformer
from harness.model.toy import toy_spec
from harness.model.transformer import Transformer
from tests.toys import shapes_unchecked

LENGTHS = {"30 to 70": range(30, 71), "255 to 260": range(255, 261)}
LONGEST_BLOCK = 8
TOKENS = torch.randint(0, 97, (260 + LONGEST_BLOCK,), generator=torch.Generator().manual_seed(0))

GEMMA: dict[str, Any] = {
    **{"offset_norm": True, "post_norms": True, "activation": "gelu_pytorch_tanh", "embed_scale": 32**0.5},
    **{"attn_scale": 0.2, "attn_softcap": 2.0, "logit_softcap": 5.0, "sliding": frozenset((0,))},
}
SPECS: dict[str, dict[str, Any]] = {
    "llama": {},
    "multi_head": {"kv_heads": 4},
    "multi_query": {"kv_heads": 1},
    "mistral": {"window": 48, "sliding": frozenset((0, 1))},  # the window fills in the middle of the short lengths
    "gemma2_short_window": {**GEMMA, "window": 48},
    "gemma2_long_window": {**GEMMA, "window": 259},  # and here in the middle of the long ones
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.2}
"""Of logits of size 3 and entries of size 2, equal but for rounding; the last place of a bfloat16 near 10 is 0.06."""


@cache
def model_of(name: str, dtype: torch.dtype) -> Transformer:
    return random_transformer(replace(toy_spec(layers=2), **SPECS[name]), 0, dtype)


def stepped(model: Transformer) -> tuple[Tensor, KVCache]:
    """Logits after every token, each processed by itself, and the cache that this leaves."""
    filled = model.new_cache(len(TOKENS) + LONGEST_BLOCK)
    steps = [model.forward(token, filled, range(model.spec.layers), rows=1) for token in TOKENS.split(1)]
    return torch.cat(steps), filled


def entries(filled: KVCache) -> Tensor:
    """A copy of all keys and values, the positions in the last place but one."""
    return torch.stack([torch.stack(layer) for layer in filled.layers])


def block_logits(model: Transformer, filled: KVCache, tokens: Tensor, fixed: bool) -> Tensor:
    """Of a block of its own length; or padded to the longest one, over the whole cache, as graphs and one shape do."""
    layers = range(model.spec.layers)
    if not fixed:
        return model.forward(tokens, filled, layers, rows=len(tokens))
    start = torch.tensor(filled.begin(LONGEST_BLOCK))
    padded = torch.nn.functional.pad(tokens, (0, LONGEST_BLOCK - len(tokens)))
    logits, _ = model.fixed_forward(padded, start, filled.layers, layers)
    filled.append(len(tokens))
    return logits[: len(tokens)]


def furthest(model: Transformer, steps: Transformer, lengths: range, fixed: bool = False) -> tuple[float, float]:
    """How far logits and entries of ``model`` in blocks are from those of ``steps`` in single steps, at most.

    Goes from long to short, so that every block finds the entries of single steps before it and wrong ones behind.
    """
    want, filled = stepped(steps)
    exact = entries(filled)
    off_logits = off_entries = 0.0
    for length in reversed(lengths):
        filled.rollback(length)
        for count in range(1, LONGEST_BLOCK + 1):
            end = length + count
            for keys, values in filled.layers:
                keys[:, length:] = values[:, length:] = 9.0
            logits = block_logits(model, filled, TOKENS[length:end], fixed)
            assert filled.length == end
            off_logits = max(off_logits, float((logits - want[length:end]).abs().max()))
            found = entries(filled)[..., :end, :]
            assert torch.equal(found[..., :length, :], exact[..., :length, :]), "entries before the block are kept"
            off_entries = max(off_entries, float((found - exact[..., :end, :]).abs().max()))
            filled.rollback(length)
    return off_logits, off_entries


@pytest.mark.parametrize("fixed", [False, True], ids=["own shape", "fixed shape"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_a_block_equals_single_steps(name: str, dtype: torch.dtype, lengths: str, fixed: bool) -> None:
    model = model_of(name, dtype)
    with shapes_unchecked():
        off_logits, off_entries = furthest(model, model, LENGTHS[lengths], fixed)
    assert off_logits < TOLERANCE[dtype]
    assert off_entries < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("mistral", {"window": 47}),
        ("gemma2_short_window", {"window": 49}),
        ("gemma2_long_window", {"window": 250}),
        ("gemma2_long_window", {"attn_softcap": None}),
        ("llama", {"attn_scale": 0.3}),
    ],
)
def test_another_window_cap_or_scale_is_noticed(name: str, changed: dict[str, Any], dtype: torch.dtype) -> None:
    """Shows that the bounds above can fail."""
    right = model_of(name, dtype)
    wrong = Transformer(replace(right.spec, **changed), right.weights)
    with shapes_unchecked():
        off_logits, _ = furthest(wrong, right, range(258, 260) if "long" in name else range(46, 50))
    assert off_logits > TOLERANCE[dtype]


@pytest.mark.parametrize("name", SPECS)
def test_fewer_rows_are_the_last_of_all(name: str) -> None:
    model = model_of(name, torch.float64)
    want, filled = stepped(model)
    for length in (258, 60, 40):
        for rows in range(LONGEST_BLOCK + 1):
            filled.rollback(length)
            end = length + LONGEST_BLOCK
            logits = model.forward(TOKENS[length:end], filled, range(model.spec.layers), rows)
            assert logits.shape == (rows, 97) and torch.allclose(logits, want[end - rows : end], rtol=0, atol=1e-9)
