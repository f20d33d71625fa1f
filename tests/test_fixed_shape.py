"""Forwards of one shape: the same values as any other forward, and to the last bit wherever a row is."""

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.decode.autoregressive import Autoregressive
from harness.model.random_weights import random_transformer
from harness.model.spec import ModelSpec
from harness.model.tiers import Tiers
from harness.model.toy import toy_spec
from harness.sampling import Sampling
from tests.arms import CAPACITY, DRAFTERS, METHODS, PROMPT, VOCAB, model_of, output, tiers_with
from tests.toys import shapes_unchecked

LENGTH = 48
SPECS: dict[str, ModelSpec] = {
    "llama": toy_spec(vocab_size=VOCAB, layers=3),
    "window": replace(toy_spec(vocab_size=VOCAB, layers=3), window=8, sliding=frozenset((0, 2))),
    "softcap": replace(toy_spec(vocab_size=VOCAB, layers=3), attn_softcap=20.0, logit_softcap=15.0),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def partitions(length: int, block: int) -> Iterator[list[int]]:
    """Ways to cut a sequence into forwards: one by one, as long as possible, and at random, longer than a block too."""
    rng = random.Random(0)
    yield [1] * length
    yield [block] * (length // block) + [length % block] * (length % block > 0)
    for longest in (block, 3 * block):
        cut: list[int] = []
        while sum(cut) < length:
            cut.append(min(rng.randint(1, longest), length - sum(cut)))
        yield cut


def run(tiers: Tiers, tokens: Sequence[int], cut: Sequence[int], block: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of as many rows of each forward as it gives, NaN for the others; and the cache's entries."""
    tiers.rollback(0)
    rows, end = [], 0
    for count in cut:
        end += count
        given = min(count, block or count)
        logits = tiers.full.forward(tokens[:end], rows=given)
        rows.append(torch.cat((logits.new_full((count - given, logits.shape[1]), float("nan")), logits)))
    cache = tiers.cache
    return torch.cat(rows), cache.keys[:, :, :end].clone(), cache.values[:, :, :end].clone()


def made(spec: ModelSpec, dtype: torch.dtype, block: int | None, graphs: bool = False) -> Tiers:
    model = random_transformer(spec, 0, dtype)
    return Tiers(model, model.new_cache(CAPACITY), block, graphs)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fixed_shape_computes_what_any_other_does(name: str, dtype: torch.dtype) -> None:
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    bound = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
    plain = made(SPECS[name], dtype, None)
    fixed = made(SPECS[name], dtype, 6)
    fixed.cache.keys.fill_(9.0)  # what lies behind the end must not be seen
    fixed.cache.values.fill_(9.0)
    for cut in partitions(LENGTH, 6):
        for want, got in zip(run(plain, tokens, cut, 6), run(fixed, tokens, cut, 6), strict=True):
            assert torch.allclose(got, want, atol=bound, rtol=0, equal_nan=True)


@pytest.mark.parametrize("block", [2, 6, 8, 9, 17, 33])
@pytest.mark.parametrize("name", SPECS)
def test_a_row_does_not_depend_on_its_place_nor_on_the_other_rows(name: str, block: int) -> None:
    """In bfloat16, to the last bit: logits and cache entries of one sequence, cut into forwards in four ways."""
    tiers = made(SPECS[name], torch.bfloat16, block)
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    first = run(tiers, tokens, [1] * LENGTH, block)
    for cut in partitions(LENGTH, block):
        for want, got in zip(first, run(tiers, tokens, cut, block), strict=True):
            seen = ~got.isnan()
            assert torch.equal(got[seen], want[seen])


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("method", ["speculative", "always_escalate"])
def test_lossless_methods_write_the_greedy_tokens_in_bfloat16(method: str, drafter: str) -> None:
    for seed in range(3):
        model = model_of(seed, torch.bfloat16)
        with shapes_unchecked() if seed else nullcontext():
            want = output(Autoregressive(tiers_with(model, 6, False), Sampling()))
            make = DRAFTERS[drafter](model, (*PROMPT, *want))
            assert output(METHODS[method](tiers_with(model, 6, False), model, make, Sampling())) == want
