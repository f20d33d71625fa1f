"""Formulas of the theory written out a token at a time, for tests that compare."""

import math
from collections.abc import Sequence


def log_softmax(logits: Sequence[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in logits))
    return [value - total for value in logits]


def plain_cost(verifier: Sequence[float], proposer: Sequence[float], alpha: float, beta: float) -> float:
    """Eq. 9 and 11 a token at a time, q the verifier and p the proposer."""
    cost = 0.0
    for log_q, log_p in zip(log_softmax(verifier), log_softmax(proposer), strict=True):
        cost += math.exp(log_p) * max(0.0, math.log(1 - alpha) + log_p - log_q)
        cost += math.exp(log_q) * max(0.0, math.log(beta) + log_p - log_q)
    return cost
