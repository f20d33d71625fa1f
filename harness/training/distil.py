"""Distillation from written texts (``objective=kd``), and how good a student is on held-out ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.training.data import Batch, TextData, collate, grouped
from harness.training.objectives import forward_kl
from harness.training.students import Student

CHUNK = 128
"""Rows of logits that lie in memory at a time: few enough for a CPU's cache, many enough for a product's speed."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """Forward KL against the verifier's law at every position, weighted."""

    student: Student
    data: TextData
    prompt_weight: float

    def __call__(self, chosen: Sequence[int], step: int) -> Tensor:
        batch = collate([self.data.trained[index] for index in chosen])
        total, weight = torch.zeros(()), torch.zeros(())
        said = list(self.student.predictions(batch))
        weights = [one.weight * torch.where(one.in_reply, 1.0, self.prompt_weight) for one in said]
        used = torch.cat([one.places[each > 0] for one, each in zip(said, weights, strict=True)])
        verifier = Laws(self.student, batch, used)
        for one, each in zip(said, weights, strict=True):
            kept = each > 0
            total = total + verifier.divergence(one.states[kept], one.head, one.places[kept], each[kept])
            weight = weight + each.sum()
        return total / weight.clamp(min=1e-6)


class Laws:
    """The verifier's laws over the head's tokens at some places of a batch, made once for all predictions."""

    def __init__(self, student: Student, batch: Batch, places: Int[Tensor, "R"]) -> None:
        used = places.unique()
        self.row = torch.full((batch.tokens.numel(),), -1)
        self.row[used] = torch.arange(len(used))
        features = batch.features.flatten(0, 1)[used]
        self.probs = torch.empty(len(used), len(student.rows))
        self.entropy = torch.empty(len(used))
        with torch.no_grad():
            for begin in range(0, len(used), CHUNK):
                part = slice(begin, begin + CHUNK)
                logits = student.borrowed.capped(features[part].float() @ student.rows.T)
                log = torch.log_softmax(logits.float(), -1)
                torch.exp(log, out=self.probs[part])
                self.entropy[part] = -(self.probs[part] * log).sum(-1)

    def divergence(
        self,
        states: Float[Tensor, "R E"],
        head: Callable[[Tensor], Tensor],
        places: Int[Tensor, "R"],
        weights: Float[Tensor, "R"],
    ) -> Float[Tensor, ""]:
        """Sum of KL(verifier || student), weighted; differentiable in ``states``."""
        return Divergence.apply(states, head, self, places, weights)


class Divergence(torch.autograd.Function):
    """``Laws.divergence``, forward and backward of a few rows at a time, so that all logits never lie in memory.

    With z the student's logits and p the verifier's law: KL = -H(p) - p z + log sum exp z, and softmax(z) - p is its
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        head: Callable[[Tensor], Tensor],
        laws: Laws,
        places: Tensor,
        weights: Tensor,
    ) -> Tensor:
        total, gradient = torch.zeros(()), torch.empty_like(states)
        for begin in range(0, len(states), CHUNK):
            part = slice(begin, begin + CHUNK)
            rows = laws.row[places[part]]
            law, weight = laws.probs[rows], weights[part]
            with torch.enable_grad():
                own = states[part].detach().requires_grad_()
                logits = head(own)
            wide = logits.detach().float()
            size = wide.logsumexp(-1)
            total += ((size - (law * wide).sum(-1) - laws.entropy[rows]) * weight).sum()
            slope = (wide - size[:, None]).exp_().sub_(law).mul_(weight[:, None])
            (gradient[part],) = torch.autograd.grad(logits, own, slope.to(logits.dtype))
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None, None


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
