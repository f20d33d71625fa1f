"""Self-speculation: the slim verifier itself drafts, so that there is no tier between it and the full one."""

from collections.abc import Callable, Sequence

from harness.decode.slim import Slim, masked, only
from harness.drafters.base import TierDrafter
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.sampling import Sampling


class SelfSlim(TierDrafter):
    """Drafts with the verifier that ``slim`` makes, in its cache mode: what a third tier of the same layers must beat.

    Raises:
        UserError: as ``slim`` does, or it makes several.
    """

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        slim: Callable[[Tiers, Model], Slim | Sequence[Slim]] = masked,
    ) -> None:
        made = only(slim(tiers, model), "self_slim")
        made.tier.name = "draft"
        self.slim_verifiers = (made,)
        size = made.source if made.skip_ratio is None else f"{made.skip_ratio:.2g}"
        super().__init__(f"self_slim({size}, {made.cache})", made.tier, sampling)
