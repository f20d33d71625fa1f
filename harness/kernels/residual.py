"""The draw that replaces a refused draft, or the bonus token where none was refused."""

from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.kernels.backend import blocks, constexpr, jit, on_device, power_of_two, tl

BLOCK = 1024
"""Entries of the vocabulary a program of the first stage: 128k of them keep 125 multiprocessors busy."""


def sample_residual(
    verifier: Float[Tensor, "R V"],
    draft: Float[Tensor, "G V"] | None,
    tokens: Int[Tensor, "G"],
    stop: Int[Tensor, ""],
    noise: Float[Tensor, "V"],
) -> Int[Tensor, ""]:
    """A token from norm(max(0, q - p)) at row ``stop`` (Leviathan et al., arXiv 2211.17192), q verifier and p draft.

    The draw is an exponential race: the largest weight/noise wins, the first among equals. As the smallest of
    independent Exp(weight) times is v's with probability weight[v]/sum, the race draws from the normalised weights
    without their sum; ``torch.multinomial`` draws one sample so. A weight of 0 never wins against another.

    Args:
        verifier: probabilities in float32 or float64, as those of ``draft``.
        draft: what each of ``tokens`` was drawn from; None, if each was certain: p is one-hot.
        stop: position of the refused draft. G, where R is G + 1, if none was refused: the bonus token is drawn from q.
            Also drawn from q is what replaces a draft where q and p are equal to rounding: a residual without mass.
        noise: independent draws from Exp(1), larger than 0 as those of ``Tensor.exponential_`` are.
    """
    choose = sample_residual_triton if on_device(verifier) else sample_residual_reference
    return choose(verifier, draft, tokens, stop, noise)


def sample_residual_reference(
    verifier: Float[Tensor, "R V"],
    draft: Float[Tensor, "G V"] | None,
    tokens: Int[Tensor, "G"],
    stop: Int[Tensor, ""],
    noise: Float[Tensor, "V"],
) -> Int[Tensor, ""]:
    race = residual_weights(verifier, draft, tokens, stop) / noise
    # Not argmax: max with a dimension also gives the first among equals, and is the faster one on a CPU.
    return race.max(dim=0).indices


def residual_weights(
    verifier: Float[Tensor, "R V"], draft: Float[Tensor, "G V"] | None, tokens: Int[Tensor, "G"], stop: Int[Tensor, ""]
) -> Float[Tensor, "V"]:
    """What ``sample_residual`` draws from, not normalised."""
    refused = stop < len(tokens)
    place = stop.clamp(max=len(tokens) - 1)[None]
    verified = verifier.index_select(0, stop[None])[0]
    if draft is None:
        token = tokens.index_select(0, place)
        weight = verified.index_copy(0, token, verified.index_select(0, token) * ~refused)
    else:
        drafted = draft.index_select(0, place)[0]
        weight = torch.addcmul(verified, drafted, refused.to(drafted.dtype), value=-1).clamp_(min=0)
    return torch.where(weight.amax() > 0, weight, verified)


def sample_residual_triton(
    verifier: Float[Tensor, "R V"],
    draft: Float[Tensor, "G V"] | None,
    tokens: Int[Tensor, "G"],
    stop: Int[Tensor, ""],
    noise: Float[Tensor, "V"],
    block: int = BLOCK,
) -> Int[Tensor, ""]:
    """Two stages: many programs race their part of the vocabulary, then one compares the winners.

    A single program over 128k entries would wait for memory some tens of times in turn, on one multiprocessor of more
    than a hundred. Nothing is added up and nothing depends on which program is first, so the draw is that of the
    reference to the last bit: subtraction, maximum and division are all rounded as IEEE wants.
    """
    vocabulary = len(noise)
    block = min(block, power_of_two(vocabulary))
    parts = blocks(vocabulary, block)
    keys = noise.new_empty(2, parts)
    places = tokens.new_empty(2, parts)
    winner = stop.new_empty(())
    with torch.cuda.device_of(verifier):
        race_part[(parts,)](
            *(verifier, draft, tokens.contiguous(), stop, noise.contiguous(), keys, places),
            *(len(tokens), vocabulary, *verifier.stride(), *(draft.stride() if draft is not None else (0, 0)), block),
            enable_fp_fusion=False,
        )
        race_winners[(1,)](
            *(keys, places, winner, parts, vocabulary, power_of_two(parts)),
            enable_fp_fusion=False,
        )
    return winner


@jit
@no_type_check
def race_part(
    verifier,
    draft,
    tokens,
    stop,
    noise,
    keys,
    places,
    gamma,
    vocabulary,
    verifier_row,
    verifier_column,
    draft_row,
    draft_column,
    BLOCK: constexpr,
):
    """The winner of one part of the vocabulary, by the residual in row 0 of ``keys`` and by the verifier in row 1."""
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    row = tl.load(stop)
    refused = row < gamma
    verified = tl.load(verifier + row * verifier_row + columns * verifier_column, mask=inside, other=0.0)
    if draft is None:
        certain = tl.load(tokens + row, mask=refused, other=vocabulary)
        weight = tl.where(columns == certain, 0.0, verified)
    else:
        mask = columns < tl.where(refused, vocabulary, 0)
        drafted = tl.load(draft + row * draft_row + columns * draft_column, mask=mask, other=0.0)
        weight = tl.maximum(verified - drafted, 0.0)
    times = tl.load(noise + columns, mask=inside, other=1.0)
    store_winner(keys, places, part, divide(weight, times), columns, vocabulary)
    store_winner(keys + parts, places + parts, part, divide(verified, times), columns, vocabulary)


@jit
@no_type_check
def store_winner(keys, places, part, key, columns, vocabulary):
    best = tl.max(key, axis=0)
    tl.store(keys + part, best)
    tl.store(places + part, tl.min(tl.where(key == best, columns, vocabulary), axis=0))


@jit
@no_type_check
def divide(weight, times):
    """Triton's own division is rounded as IEEE wants in float64 alone."""
    if weight.dtype == tl.float64:
        return weight / times
    else:
        return tl.div_rn(weight, times)


@jit
@no_type_check
def race_winners(keys, places, winner, parts, vocabulary, BLOCK: constexpr):
    """The winner among the parts: by the residual, or by the verifier where no part has any residual."""
    lanes = tl.arange(0, BLOCK)
    inside = lanes < parts
    residual = tl.load(keys + lanes, mask=inside, other=0.0)
    row = tl.where(tl.max(residual, axis=0) > 0, 0, parts)
    key = tl.load(keys + row + lanes, mask=inside, other=0.0)
    place = tl.load(places + row + lanes, mask=inside, other=vocabulary)
    tl.store(winner, tl.min(tl.where(key == tl.max(key, axis=0), place, vocabulary), axis=0))
