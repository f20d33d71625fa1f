"""``objective=draft_opd``: learn from the blocks that verification rejected (Draft-OPD, arXiv 2605.29343)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from harness.model.load import Model
from harness.training.data import TextData
from harness.training.decoding import FAMILIES, drafter_folder, rollout
from harness.training.objectives import draft_opd
from harness.training.replay import Replay
from harness.training.students import Student


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """The student as it is now decodes the chosen prompts; then its rejected blocks are replayed.

    Reading, ours: greedy drafting and verification; every step decodes anew, so that no block is of an older student;
    a text whose blocks were all kept teaches nothing.
    """

    student: Student
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


def replay_loss(student: Student, replay: Replay) -> Float[Tensor, "b"]:
    """The loss of each block, per drafted token."""
    return torch.stack(
        [
            draft_opd(block.verifier, logits, block.kept) / len(block.drafts)
            for block, logits in zip(replay.blocks, student.replayed(replay), strict=True)
        ]
    )
