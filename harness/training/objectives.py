"""What is minimised. Laws are over the rows of the student's head: what it cannot say, it cannot learn to say."""

import torch
from jaxtyping import Float
from torch import Tensor

DECAY = 0.8
"""Weight of a rejected token relative to the one before it, in Draft-OPD (arXiv 2605.29343)."""


def forward_kl(verifier: Float[Tensor, "R N"], student: Float[Tensor, "R N"]) -> Float[Tensor, "R"]:
    """KL(verifier || student) in nats, of logits."""
    log_verifier, log_student = torch.log_softmax(verifier.float(), -1), torch.log_softmax(student.float(), -1)
    return (log_verifier.exp() * (log_verifier - log_student)).sum(-1)


def reverse_kl(verifier: Float[Tensor, "R N"], student: Float[Tensor, "R N"]) -> Float[Tensor, "R"]:
    """KL(student || verifier) in nats, of logits."""
    return forward_kl(student, verifier)


def draft_opd(
    verifier: Float[Tensor, "G N"], student: Float[Tensor, "G N"], kept: int, decay: float = DECAY
) -> Float[Tensor, ""]:
    """Sum over one drafted block of which verification kept ``kept`` tokens.

    Forward KL where a token was accepted; reverse KL from the first rejected one on, times decay^i for the i-th behind
    it (methods.md §6). Reading, ours: tokens behind the rejected one count as rejected, because verification dropped
    them too; the first rejected one has weight 1; the verifier's law is at temperature 1; the sum is divided by the
    block's drafted tokens where blocks are averaged.
    """
    rejected = torch.arange(len(student)) - kept
    weight = torch.where(rejected > 0, decay ** rejected.clamp(min=0).to(student.dtype), torch.ones(()))
    values = torch.where(rejected < 0, forward_kl(verifier, student), reverse_kl(verifier, student))
    return (weight * values).sum()
