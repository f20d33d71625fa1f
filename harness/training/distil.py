"""Distillation from written texts (``objective=kd``), and how good a student is on held-out ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.training.data import TextData, collate, grouped
from harness.training.objectives import forward_kl
from harness.training.students import Student


@dataclass(frozen=True, slots=True)
class Distillation:
    """Forward KL against the verifier's law at every position, weighted."""

    student: Student
    data: TextData
    prompt_weight: float

    def __call__(self, chosen: Sequence[int], step: int) -> Tensor:
        batch = collate([self.data.trained[index] for index in chosen])
        total, weight = torch.zeros(()), torch.zeros(())
        for said in self.student.predictions(batch):
            with torch.no_grad():
                wanted = self.student.borrowed.capped(said.features.float() @ self.student.rows.T)
            each = said.weight * torch.where(said.in_reply, 1.0, self.prompt_weight)
            total = total + (forward_kl(wanted, said.logits) * each).sum()
            weight = weight + each.sum()
        return total / weight.clamp(min=1e-6)


@torch.no_grad()
def measure(student: Student, data: TextData, batch_tokens: int = 1024) -> Mapping[str, float]:
    """Of each prediction, on continuations of held-out texts: mean loss, and greedy acceptance.

    ``acceptance``: share of positions where the student's likeliest token is the full verifier's, of all its tokens.
    """
    sums: dict[str, list[float]] = {}
    texts = sorted(data.held_out, key=lambda text: len(text.tokens))
    for group in grouped(range(len(texts)), [len(text.tokens) for text in texts], batch_tokens):
        for said in student.predictions(collate([texts[index] for index in group])):
            here = said.in_reply
            features, logits = said.features[here].float(), said.logits[here]
            whole = student.borrowed.capped(features @ student.borrowed.head.T)
            own = student.borrowed.head_tokens[logits.argmax(-1)]
            loss = forward_kl(whole[:, student.borrowed.head_tokens], logits).sum()
            right = (own == whole.argmax(-1)).sum()
            kept = sums.setdefault(said.name, [0.0, 0.0, 0.0])
            for place, value in enumerate((loss, right, here.sum())):
                kept[place] += float(value)
    return {
        f"{name}/{key}": value / count
        for name, (loss, right, count) in sums.items()
        for key, value in (("loss", loss), ("acceptance", right))
        if count
    }
