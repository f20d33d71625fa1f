"""Pure tensor functions of acceptance: probability, residual, length of the kept run."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from harness.drafters.base import Draft


def keep_probability(verifier_probs: Float[Tensor, "G V"], draft: Draft) -> Float[Tensor, "G"]:
    """min(1, q(v)/p(v)) for each drafted token v: the lossless rule (methods of Leviathan et al., arXiv 2211.17192)."""
    tokens = torch.tensor(draft.tokens, device=verifier_probs.device)[:, None]
    verified = verifier_probs.gather(-1, tokens)[:, 0]
    if draft.probs is None:
        return verified
    return (verified / draft.probs.gather(-1, tokens)[:, 0]).clamp(max=1.0)


def residual(verifier_probs: Float[Tensor, "V"], draft: Draft, position: int) -> Float[Tensor, "V"]:
    """norm(max(0, q - p)) at a block position: what replaces a draft that the lossless rule refused.

    Where q and p are equal to rounding the residual has no mass, and a refusal has no probability; q is returned then.
    """
    if draft.probs is None:
        left = verifier_probs.clone()
        left[draft.tokens[position]] = 0.0
    else:
        left = (verifier_probs - draft.probs[position]).clamp(min=0.0)
    mass = left.sum()
    return left / mass if mass > 0 else verifier_probs


def first_stop(kept: Bool[Tensor, "G"]) -> int:
    """Length of the leading run of True."""
    return int(kept.int().cumprod(0).sum())
