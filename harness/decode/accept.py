"""Pure tensor functions of acceptance: probability, length of the kept run."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from harness.drafters.base import Draft
from harness.sampling import Law


def keep_probability(verifier: Law, draft: Draft) -> Float[Tensor, "G"]:
    """min(1, q(v)/p(v)) for each drafted token v: the lossless rule (methods of Leviathan et al., arXiv 2211.17192)."""
    verified = verifier.of(draft.tokens)
    if draft.probs is None:
        return verified
    return (verified / draft.probs.gather(-1, draft.tokens[:, None])[:, 0]).clamp(max=1.0)


def first_stop(kept: Bool[Tensor, "G"]) -> Int[Tensor, ""]:
    """Length of the leading run of True."""
    return kept.int().cumprod(0).sum()
