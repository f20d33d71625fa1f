"""Routing of a drafted block: reference and kernel against plain Python in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.decode.gate import ROUTES
from harness.kernels.gate import ACCEPT, ESCALATE, REGENERATE, Routed, route_block
from harness.records import Route
from tests.kernels import DEVICE, ROUTERS, SIZES, as_read, block_of, implementations, seeded

CASES = ((1, False, False), (8, True, False), (8, False, True), (5, True, True))
"""Tokens of the block, whether scores are masked, whether the largest is there several times."""


def routed_by_hand(scores: Tensor, tokens: Tensor, accept_at: float, keep_at: float) -> dict[str, Any]:
    ratios, tops, codes = [], [], []
    for row, token in zip(scores.double().tolist(), tokens.tolist(), strict=True):
        ratios.append(math.exp(row[token] - max(row)))
        tops.append(row.index(max(row)))
        codes.append(ACCEPT if ratios[-1] >= accept_at else REGENERATE if ratios[-1] >= keep_at else ESCALATE)
    stop = next((place for place, code in enumerate(codes) if code != ACCEPT), len(codes))
    return {"ratio": pytest.approx(ratios, rel=2e-5), "top": tops, "codes": codes, "stop": stop}


@implementations(ROUTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocabulary", SIZES)
def test_routes_are_those_of_plain_python(run: Callable[..., Routed], vocabulary: int, dtype: torch.dtype) -> None:
    for seed, (gamma, masked, tied) in enumerate(CASES):
        scores, tokens = block_of(seed, gamma, vocabulary, dtype, masked, tied)
        routed = run(scores, tokens, 0.5, 0.2)
        assert routed.ratio.dtype == torch.float32
        assert {routed.top.dtype, routed.codes.dtype, routed.stop.dtype} == {torch.int64}
        assert as_read(routed) == routed_by_hand(scores, tokens, 0.5, 0.2)


def test_the_blocks_above_take_every_route() -> None:
    for vocabulary in SIZES[2:]:
        blocks = [block_of(seed, gamma, vocabulary, torch.float32, *kind) for seed, (gamma, *kind) in enumerate(CASES)]
        routed = [routed_by_hand(scores, tokens, 0.5, 0.2) for scores, tokens in blocks]
        assert {code for block in routed for code in block["codes"]} == {ACCEPT, REGENERATE, ESCALATE}


@implementations(ROUTERS)
def test_every_stop_is_found(run: Callable[..., Routed]) -> None:
    for gamma in (1, 2, 5, 8):
        for stop in range(gamma + 1):
            scores = torch.zeros(gamma, 33, device=DEVICE)
            scores[stop:, 7] = torch.arange(gamma - stop, device=DEVICE) % 3 + 1.0  # positions after it differ
            tokens = torch.full((gamma,), 4, device=DEVICE)
            routed = run(scores, tokens, 0.9, 0.3)
            assert int(routed.stop) == stop
            assert routed.codes.tolist() == [ACCEPT] * stop + [
                (REGENERATE, ESCALATE, ESCALATE)[i % 3] for i in range(gamma - stop)
            ]


@implementations(ROUTERS)
def test_the_first_of_equal_scores_is_the_top(run: Callable[..., Routed]) -> None:
    """In one block of the kernel, in several, in the last and unfinished one, and where all scores are equal."""
    places = [(700, 3), (3, 700, 701), (1024, 255, 256), (999, 1024)]
    scores = torch.full((5, 1025), -2.0, dtype=torch.bfloat16, device=DEVICE)
    for row, equal in enumerate(places):
        scores[row, list(equal)] = 1.5
    tokens = torch.tensor([700, 701, 1024, 1024, 17], device=DEVICE)
    routed = run(scores, tokens, 1.0, 0.5)
    assert routed.top.tolist() == [3, 3, 255, 999, 0]
    assert routed.ratio.tolist() == [1.0] * 5
    assert int(routed.stop) == 5, "a draft that ties with the top has its ratio, which is exactly 1"


@implementations(ROUTERS)
def test_a_masked_draft_has_ratio_0(run: Callable[..., Routed]) -> None:
    scores = torch.full((2, 300), -torch.inf, device=DEVICE)
    scores[:, 299] = -3.0
    routed = run(scores, torch.tensor([299, 1], device=DEVICE), 0.5, 1e-30)
    assert as_read(routed) == {"ratio": [1.0, 0.0], "top": [299, 299], "codes": [ACCEPT, ESCALATE], "stop": 1}
    assert run(scores, torch.tensor([299, 1], device=DEVICE), 0.5, 0.0).codes.tolist() == [ACCEPT, REGENERATE]


@implementations(ROUTERS)
def test_a_threshold_that_is_exactly_met_passes(run: Callable[..., Routed]) -> None:
    scores, tokens = block_of(0, 8, 97, torch.float32, masked=False, tied=False)
    for place, ratio in enumerate(run(scores, tokens, 0.5, 0.2).ratio.tolist()):
        above = float(torch.nextafter(torch.tensor(ratio), torch.tensor(2.0)))
        for accept_at, keep_at, want in (
            (ratio, ratio / 2, ACCEPT),
            (above, ratio, REGENERATE),
            (above, above, ESCALATE),
            (ratio, above, ACCEPT),  # thresholds the other way round: accepting comes first
        ):
            assert int(run(scores, tokens, accept_at, keep_at).codes[place]) == want


@implementations(ROUTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_may_be_any_view(run: Callable[..., Routed], dtype: torch.dtype) -> None:
    whole = torch.randn(12, 700, generator=seeded(1)).to(DEVICE, dtype)
    views = (whole[2:10, 5:402], whole[::2, 1:], whole[:, ::3], whole.T[:5], whole[:1].expand(4, -1), whole[3:4])
    for scores in views:
        tokens = torch.arange(2 * len(scores), device=DEVICE)[::2]
        assert as_read(run(scores, tokens, 0.2, 0.05)) == routed_by_hand(scores, tokens, 0.2, 0.05)


def test_float64_stays_float64() -> None:
    scores, tokens = block_of(3, 5, 97, torch.float64, masked=True, tied=False)
    routed = route_block(scores, tokens, 0.5, 0.2)
    assert routed.ratio.dtype == torch.float64
    want = (scores.gather(-1, tokens[:, None])[:, 0] - scores.amax(-1)).exp()
    assert torch.equal(routed.ratio, want)
    close = float(want[0])
    assert int(route_block(scores, tokens, close, 0.0).codes[0]) == ACCEPT
    assert int(route_block(scores, tokens, math.nextafter(close, 2.0), 0.0).codes[0]) == REGENERATE


def test_codes_are_places_in_the_tuple_of_routes() -> None:
    assert [ROUTES[code] for code in (ACCEPT, REGENERATE, ESCALATE)] == [Route.ACCEPT, Route.REGENERATE, Route.ESCALATE]
