"""Self-speculation: the slim verifier itself drafts, so that there is no tier between it and the full one."""

from harness.drafters.base import TierDrafter
from harness.errors import UserError
from harness.model.load import Model
from harness.model.sublayers import skipping
from harness.model.tiers import Tiers
from harness.sampling import Sampling


class SelfSlim(TierDrafter):
    """``self_skip`` over the layers of ``model.slim_mask``: what a third tier has to beat, with the same mask.

    Raises:
        UserError: the model has no layer mask.
    """

    def __init__(self, tiers: Tiers, sampling: Sampling, model: Model) -> None:
        mask = model.slim_mask
        if mask is None:
            raise UserError(
                "self_slim drafts with the slim verifier's layers and the model has no layer mask: set model.slim_mask "
                "to a file written by job=search or to a list of kept layers, or use drafter=self_skip."
            )
        tier = tiers.provisional("draft", mask.layers, skipping(tiers.model, mask))
        super().__init__(f"self_slim({mask.skip_ratio:.2g})", tier, sampling)
