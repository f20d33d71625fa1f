"""Routing of a drafted block from the slim verifier's scores: confidence ratios, argmax, routes and first stop."""

from dataclasses import dataclass
from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.kernels.backend import constexpr, jit, on_device, power_of_two, tl

ACCEPT, REGENERATE, ESCALATE = range(3)

BLOCK = 4096
"""Entries of a row that a program reads at once."""


@dataclass(frozen=True, slots=True)
class Routed:
    """What a gate says of a block, on the device of its scores.

    Attributes:
        ratio: the confidence ratio q'(v)/M' of the drafted token v, M' the largest probability (VIA-SD, App. B).
        top: the largest score's token, the first among equals.
        codes: ``ACCEPT``, ``REGENERATE`` or ``ESCALATE``.
        stop: the first position that is not accepted, G if there is none.
    """

    ratio: Float[Tensor, "G"]
    top: Int[Tensor, "G"]
    codes: Int[Tensor, "G"]
    stop: Int[Tensor, ""]


def route_block(scores: Float[Tensor, "G V"], tokens: Int[Tensor, "G"], accept_at: float, keep_at: float) -> Routed:
    """Accept a token where its ratio is at least ``accept_at``, else regenerate from ``keep_at`` on, else escalate.

    Args:
        scores: logits or log-probabilities, -inf for masked tokens; at least one entry of a row is finite. Ratios are
            computed in float32, those of float64 scores in float64.
        tokens: the drafted tokens.
    """
    # Triton takes the thresholds in float32: in float64 a ratio could be compared with another number.
    if on_device(scores) and scores.dtype != torch.float64:
        return route_block_triton(scores, tokens, accept_at, keep_at)
    return route_block_reference(scores, tokens, accept_at, keep_at)


def route_block_reference(
    scores: Float[Tensor, "G V"], tokens: Int[Tensor, "G"], accept_at: float, keep_at: float
) -> Routed:
    largest, top = scores.max(dim=-1)  # documented to give the first among equals
    drafted = scores.gather(-1, tokens[:, None])[:, 0]
    wide = torch.promote_types(scores.dtype, torch.float32)
    ratio = (drafted.to(wide) - largest.to(wide)).exp()
    accepted = ratio >= accept_at
    codes = torch.where(accepted, ACCEPT, torch.where(ratio >= keep_at, REGENERATE, ESCALATE))
    return Routed(ratio, top, codes, accepted.cumprod(dim=0).sum())


def route_block_triton(
    scores: Float[Tensor, "G V"],
    tokens: Int[Tensor, "G"],
    accept_at: float,
    keep_at: float,
    block: int = BLOCK,
) -> Routed:
    """One program per row, in float32 throughout."""
    assert scores.dtype != torch.float64, "float64 is for the reference"
    gamma, vocabulary = scores.shape
    routed = Routed(
        ratio=scores.new_empty(gamma, dtype=torch.float32),
        top=scores.new_empty(gamma, dtype=torch.int64),
        codes=scores.new_empty(gamma, dtype=torch.int64),
        stop=scores.new_full((), gamma, dtype=torch.int64),
    )
    with torch.cuda.device_of(scores):
        route_rows[(gamma,)](
            *(scores, tokens.contiguous(), routed.ratio, routed.top, routed.codes, routed.stop),
            *(vocabulary, *scores.stride(), accept_at, keep_at),
            *(ACCEPT, REGENERATE, ESCALATE, min(block, power_of_two(vocabulary))),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return routed


@jit
@no_type_check
def route_rows(
    scores,
    tokens,
    ratios,
    tops,
    codes,
    stop,
    vocabulary,
    row_stride,
    column_stride,
    accept_at,
    keep_at,
    ACCEPT: constexpr,
    REGENERATE: constexpr,
    ESCALATE: constexpr,
    BLOCK: constexpr,
):
    """Each lane keeps the first largest entry it has seen; lanes are compared once, after the last block.

    Rows agree on ``stop``, which holds G before, by an atomic minimum: the result does not depend on their order.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = lanes
    for begin in tl.range(0, vocabulary, BLOCK, num_stages=3):
        columns = begin + lanes
        score = tl.load(scores + columns * column_stride, mask=columns < vocabulary, other=float("-inf"))
        score = score.to(tl.float32)
        better = score > best
        best = tl.where(better, score, best)
        place = tl.where(better, columns, place)
    largest = tl.max(best, axis=0)
    drafted = tl.load(scores + tl.load(tokens + row) * column_stride).to(tl.float32)
    ratio = tl.exp(drafted - largest)
    accepted = ratio >= accept_at
    tl.store(ratios + row, ratio)
    tl.store(tops + row, tl.min(tl.where(best == largest, place, vocabulary), axis=0))
    tl.store(codes + row, tl.where(accepted, ACCEPT, tl.where(ratio >= keep_at, REGENERATE, ESCALATE)))
    tl.atomic_min(stop, row, mask=accepted == 0, sem="relaxed")
