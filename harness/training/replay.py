"""Blocks that verification rejected, and how a student reads them again."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftedBlock:
    """A block as it was verified: ``start`` tokens stood before it; the verifier's logits before each of its tokens."""

    start: int
    drafts: tuple[int, ...]
    kept: int
    verifier: Float[Tensor, "G N"]


@dataclass(frozen=True, slots=True)
class Replay:
    """What speculative decoding wrote, prompt included, and the blocks of which verification rejected something.

    ``features``: what the drafter read of the verifier, at every token but the last; None where it reads nothing.
    """

    tokens: tuple[int, ...]
    blocks: tuple[DraftedBlock, ...]
    features: Float[Tensor, "S F"] | None = None


def laid_out(replay: Replay) -> tuple[Int[Tensor, "S"], Int[Tensor, "S"], Float[Tensor, "S S"], list[list[int]]]:
    """One row for a replay: what was written, then the drafts of each block behind each other.

    Returns tokens, positions, the mask (a draft sees what stood before its block, and its block up to itself), and for
    each block the places at which its drafts are predicted.
    """
    tokens, positions = list(replay.tokens), list(range(len(replay.tokens)))
    places: list[list[int]] = []
    spans: list[tuple[int, int, int]] = []
    for block in replay.blocks:
        inside = block.drafts[:-1]  # what the last draft would predict was not verified
        begin = len(tokens)
        places.append([block.start - 1, *range(begin, begin + len(inside))])
        spans.append((begin, begin + len(inside), block.start))
        tokens += inside
        positions += range(block.start, block.start + len(inside))
    size, written = len(tokens), len(replay.tokens)
    sees = torch.ones(size, size, dtype=torch.bool).tril()
    sees[written:, :] = False
    for begin, end, start in spans:
        sees[begin:end, :start] = True
        sees[begin:end, begin:end] = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
    mask = torch.zeros(size, size).masked_fill(~sees, float("-inf"))
    return torch.tensor(tokens), torch.tensor(positions), mask, places
