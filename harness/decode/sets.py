"""Sets of the tokens that the full verifier finds likely enough: what truncated sampling and lossy rules let through.

Each holds the likeliest token, so that greedy decoding is the same with and without it.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from harness.errors import UserError
from harness.sampling import Sampling, widen


@runtime_checkable
class TokenSet(Protocol):
    """``whole``: every token is in it, whatever the law."""

    @property
    def name(self) -> str: ...

    @property
    def whole(self) -> bool: ...

    def __call__(self, logits: Float[Tensor, "R V"], sampling: Sampling) -> Bool[Tensor, "R V"]: ...


class MinP:
    """Tokens of at least 1 - ``alpha`` times the largest probability, at temperature 1 whatever the sampling.

    The set of TokenV3 (Faster Cascades, arXiv 2405.19261, eq. 15), with p_base = 1 - alpha in Revisiting Lossy
    Verification (arXiv 2607.26627). Temperature 1 is what the code of Faster Cascades reads.
    """

    def __init__(self, alpha: float = 0.5) -> None:
        check_between("min_p", 0.0, 1.0, alpha=alpha)
        self.alpha = alpha
        self.name = f"min_p(alpha={alpha:g})"
        self.whole = alpha == 1

    def __call__(self, logits: Float[Tensor, "R V"], sampling: Sampling) -> Bool[Tensor, "R V"]:
        return near_top(torch.softmax(widen(logits), dim=-1), self.alpha)


class Eta:
    """Tokens of probability at least min(epsilon, delta exp(-H)), H the entropy in nats of what is sampled from.

    Medusa's typical acceptance (arXiv 2401.10774) and the set of eta-sampling. Its code adds 1e-5 inside the logarithm
    and keeps drafts strictly above the bound; neither is done here (reading: ours).
    """

    whole = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if not 0 < value < 1:  # exp(-H) is at most the largest probability, which stays inside below 1
                raise UserError(f"eta: {name}={value}: want more than 0 and less than 1.")
        self.epsilon = epsilon
        self.delta = delta
        self.name = f"eta(epsilon={epsilon:g}, delta={delta:g})"

    def __call__(self, logits: Float[Tensor, "R V"], sampling: Sampling) -> Bool[Tensor, "R V"]:
        probs = sampling.warp(logits)
        entropy = torch.special.entr(probs).sum(dim=-1, keepdim=True)
        return probs >= (self.delta * (-entropy).exp()).clamp(max=self.epsilon)


def near_top(probs: Float[Tensor, "R V"], alpha: float) -> Bool[Tensor, "R V"]:
    """Where a probability is at least 1 - ``alpha`` times the largest of its row."""
    return probs >= (1 - alpha) * probs.amax(dim=-1, keepdim=True)


def check_between(who: str, low: float, high: float, **values: float) -> None:
    """Refuse numbers outside a closed interval.

    Raises:
        UserError: the first one outside, or not a number.
    """
    for name, value in values.items():
        if not low <= value <= high:
            raise UserError(f"{who}: {name}={value}: want a number from {low:g} to {high:g}.")
