"""``objective=draft_opd``: learn from the blocks that verification rejected (Draft-OPD, arXiv 2605.29343)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.model.load import Model
from harness.training.data import TextData
from harness.training.decoding import FAMILIES, Replay, drafter_folder, rollout
from harness.training.objectives import draft_opd
from harness.training.students import SmallStudent


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """The student as it is now decodes the chosen prompts; then its rejected blocks are replayed.

    Reading, ours: greedy drafting and verification; every step decodes anew, so that no block is of an older student;
    a text whose blocks were all kept teaches nothing.
    """

    student: SmallStudent
    data: TextData
    model: Model
    gamma: int
    new_tokens: int

    def __call__(self, chosen: Sequence[int], step: int) -> Tensor:
        losses = [replay_loss(self.student, replay) for replay in self.replays(chosen) if replay.blocks]
        if not losses:
            return torch.stack([parameter.sum() * 0.0 for parameter in self.student.parameters()]).sum()
        return torch.cat(losses).mean()

    def replays(self, chosen: Sequence[int]) -> list[Replay]:
        """What the student as it is now makes of the prompts."""
        texts = [self.data.trained[index] for index in chosen]
        with drafter_folder(self.student) as folder, torch.autocast("cpu", enabled=False):
            drafter = partial(FAMILIES[self.student.kind], path=str(folder))
            head = self.student.borrowed.head_tokens
            prompts = [text.tokens[: text.prompt_length] for text in texts]
            return [rollout(self.model, drafter, prompt, self.gamma, self.new_tokens, head) for prompt in prompts]


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


def replay_loss(student: SmallStudent, replay: Replay) -> Float[Tensor, "b"]:
    """The loss of each block, per drafted token."""
    tokens, positions, mask, places = laid_out(replay)
    hidden = student.hidden(tokens[None], student.rotary.at(positions), mask)[0]
    return torch.stack(
        [
            draft_opd(block.verifier, student.logits(hidden[where]), block.kept) / len(block.drafts)
            for block, where in zip(replay.blocks, places, strict=True)
        ]
    )
