"""Decoding on a CUDA device: the same tokens with graphs, without, and in one shape; and one wait a block."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from harness.decode import base as base_module
from harness.decode import speculative as speculative_module
from harness.decode import via_sd as via_sd_module
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.model.load import Model
from harness.model.random_weights import random_transformer
from harness.model.slim import LayerMask
from harness.model.tiers import Tiers
from harness.model.tokenizer import ByteTokenizer
from harness.model.toy import toy_spec
from harness.model.transfer import to_host
from harness.sampling import RandomChooser, Sampling
from harness.timing import warm_up
from tests.arms import DRAFTERS, METHODS, PROMPT, VOCAB

CUDA = torch.device("cuda")
SAMPLINGS = [Sampling(), Sampling(0.8), Sampling(1.0, top_p=0.8)]


def model_of(seed: int, dtype: torch.dtype) -> Model:
    transformer = random_transformer(toy_spec(vocab_size=VOCAB, layers=4), seed, dtype, 0.5, 2.0, [CUDA])
    return Model("toy", transformer, ByteTokenizer(), LayerMask.of([0, 1, 3], 4), "test")


def tiers_of(model: Model, block: int | None, graphs: bool) -> Tiers:
    return Tiers(model.transformer, model.transformer.new_cache(96), block, graphs)


def output(method, seed: int) -> tuple[int, ...]:
    decoder = Decoder(method)
    decoder.prefill(PROMPT)
    return decoder.decode(StopRule(40), RandomChooser(seed, CUDA)).token_ids


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("drafter", ["prompt_lookup", "self_skip"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_the_same_with_and_without_graphs(method: str, drafter: str, sampling: Sampling) -> None:
    for seed in range(3):
        model = model_of(seed, torch.float64)
        make = DRAFTERS[drafter](model, ())
        tiers = [tiers_of(model, None, graphs) for graphs in (False, True)]
        plain, replayed = (output(METHODS[method](each, model, make, sampling), seed) for each in tiers)
        assert replayed == plain
        assert not any(tier.replays for tier in tiers[0].every) and tiers[1].full.replays


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drafter", ["prompt_lookup", "self_skip"])
@pytest.mark.parametrize("method", ["speculative", "always_escalate"])
def test_one_shape_gives_the_greedy_tokens_in_bfloat16(method: str, drafter: str, graphs: bool) -> None:
    for seed in range(3):
        model = model_of(seed, torch.bfloat16)
        want = output(Autoregressive(tiers_of(model, 6, graphs), Sampling()), 0)
        make = DRAFTERS[drafter](model, (*PROMPT, *want))
        assert output(METHODS[method](tiers_of(model, 6, graphs), model, make, Sampling()), 0) == want


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_host_waits_for_what_a_block_decided_and_for_nothing_else(
    method: str, graphs: bool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a block; VIA-SD a second time where it escalates, since the full pass depends on the routes."""
    model = model_of(0, torch.float32)
    tiers = tiers_of(model, None, graphs)
    made = METHODS[method](tiers, model, DRAFTERS["self_skip"](model, ()), sampling)
    reads = 0

    def reading(*tensors: torch.Tensor) -> list[int]:
        nonlocal reads
        reads += 1
        torch.cuda.set_sync_debug_mode("default")
        found = to_host(*tensors)
        torch.cuda.set_sync_debug_mode("error")
        return found

    chooser = RandomChooser(0, CUDA)
    warm_up(tiers, 6, 40, lambda tokens, count: made.drafter.draft(tokens, count, chooser))  # type: ignore[attr-defined]
    decoder = Decoder(made)
    decoder.prefill(PROMPT)
    for module in (base_module, speculative_module, via_sd_module):
        monkeypatch.setattr(module, "to_host", reading)
    with waiting_is_an_error():
        blocks = decoder.decode(StopRule(36), chooser).blocks
    drafting = [block for block in blocks if block.drafted]
    escalated = sum(block.full_forwards for block in drafting) if made.tier_roles()[1] is not None else 0
    assert len(drafting) > 3
    assert reads == len(blocks) + escalated
