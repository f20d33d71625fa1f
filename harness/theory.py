"""The quantities of the paper's theory, from distributions over the vocabulary. Pure tensors, one row a position.

The paper's letters: p the drafter (``draft``), q' the slim verifier (``slim``), q the full one (``full``); M' is the
largest probability of q' at a position. Rows of probabilities sum to 1. Costs are in nats.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from harness.sampling import widen

Rows = Float[Tensor, "N V"]
Numbers = Float[Tensor, "N"]


def step_cost(
    verifier_logits: Float[Tensor, "N V"], proposer_logits: Float[Tensor, "N V"], alpha: float, beta: float
) -> Float[Tensor, "N"]:
    """R(q||p) of eq. 9 and 11, in nats, from the full softmax at temperature 1.

    z1 = log(1 - alpha) + log p - log q;  z2 = log(beta) + log p - log q;
    R(q||p) = sum_v p ReLU(z1) + sum_v q ReLU(z2), with q the verifier and p the proposer. The block cost C of eq. 10 is
    the sum over a block's positions.
    """
    log_q = torch.log_softmax(widen(verifier_logits), dim=-1)
    log_p = torch.log_softmax(widen(proposer_logits), dim=-1)
    gap = log_p - log_q
    first = log_p.exp() * (gap + math.log(1 - alpha)).clamp(min=0)
    second = log_q.exp() * (gap + math.log(beta)).clamp(min=0)
    return (first + second).sum(dim=-1)


def gain(full_draft: float, slim_draft: float, full_slim: float) -> float:
    """Delta of eq. 7 for the slim verifier as the intermediate: C(q||p) - C(q'||p) - C(q||q'). Positive: it pays."""
    return full_draft - slim_draft - full_slim


def total_variation(one: Rows, other: Rows) -> Numbers:
    """Half the sum of absolute differences, from 0 to 1."""
    return (one - other).abs().sum(dim=-1) / 2


class Regions(NamedTuple):
    """The tokens that a gate would accept (A), regenerate (B) and escalate (C): a partition of the vocabulary."""

    accept: Bool[Tensor, "N V"]
    regenerate: Bool[Tensor, "N V"]
    escalate: Bool[Tensor, "N V"]


def regions(slim: Rows, accept_at: float, keep_at: float) -> Regions:
    """By the ratio q'(v)/M', as ``kernels.gate.route_block`` routes a drafted v.

    A from ``accept_at`` on, else B from ``keep_at`` on, else C; B is empty where ``keep_at`` is the larger one.
    """
    ratio = slim / slim.amax(dim=-1, keepdim=True)
    accept = ratio >= accept_at
    regenerate = ~accept & (ratio >= keep_at)
    return Regions(accept, regenerate, ~accept & ~regenerate)


def mass(draft: Rows, tokens: Bool[Tensor, "N V"]) -> Numbers:
    """Probability that a draft is one of ``tokens``: P(A), P(B), P(C) of App. B, v drawn from p."""
    return (draft * tokens).sum(dim=-1)


def deltas(draft: Rows, slim: Rows, alpha1: float, alpha2: float) -> tuple[Numbers, Numbers]:
    """delta1 and delta2 as eq. B.11 defines them: P(q'(v) >= (1 - alpha1) M') and P(q'(v) < (1 - alpha2) M'), v from p.

    With the paper's alpha2 < alpha1 the two events overlap, and the sum may pass 1.
    """
    ratio = slim / slim.amax(dim=-1, keepdim=True)
    return mass(draft, ratio >= 1 - alpha1), mass(draft, ratio < 1 - alpha2)


def mixture(draft: Rows, slim: Rows, full: Rows, delta1: Numbers, delta2: Numbers) -> Rows:
    """Eq. 14: pi = (1 - delta2) [(1 - delta1) p + delta1 q'] + delta2 q."""
    one, two = delta1[:, None], delta2[:, None]
    return (1 - two) * ((1 - one) * draft + one * slim) + two * full


def three_way(draft: Rows, slim: Rows, full: Rows, found: Regions) -> Rows:
    """The other form, B.7: pi = P(A) p + P(B) q' + P(C) q."""
    shares = (mass(draft, tokens)[:, None] for tokens in found)
    return sum(share * law for share, law in zip(shares, (draft, slim, full), strict=True))  # type: ignore[return-value]


def exact_law(draft: Rows, slim: Rows, full: Rows, found: Regions) -> Rows:
    """What the first position of a block really emits when the slim token ends a block at B (Alg. 1).

    pi(v) = p(v) 1_A(v) + p(v) 1_C(v) min(1, q(v)/p(v)) + P(B) q'(v) + R_C r(v) with R_C = sum over C of max(0, p - q)
    and r = norm(max(0, q - p)). Neither ``mixture`` nor ``three_way``: those put weight on all of p, a decoder on p
    within A alone. Reading, ours: derived from the algorithms; the paper has no such equation.
    """
    over, under = (draft - full).clamp(min=0), (full - draft).clamp(min=0)
    refused = mass(over, found.escalate)[:, None]
    total = under.sum(dim=-1, keepdim=True)
    residual = torch.where(total > 0, under / total, full)  # nothing is refused where p is q
    kept = draft * found.accept + torch.minimum(draft, full) * found.escalate
    return kept + mass(draft, found.regenerate)[:, None] * slim + refused * residual
