"""Early exit: the first layers of the full verifier draft, through its own norm and head (LayerSkip)."""

from harness.drafters.base import TierDrafter
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.sampling import Sampling


class EarlyExit(TierDrafter):
    """Leaves the full verifier after ``layers`` layers, or after a share ``exit_ratio`` of them.

    Runs on the committed entries of the full verifier's cache, so it needs no cache and no prefill of its own; what it
    writes behind them is provisional. A model that was not trained to exit early drafts badly so.
    """

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        exit_ratio: float = 0.4,
        layers: int | None = None,
    ) -> None:
        depth = model.transformer.spec.layers
        if layers is None and not 0 < exit_ratio <= 1:
            raise UserError(f"early_exit: exit_ratio={exit_ratio}: want a share of the layers, above 0 and at most 1.")
        count = max(1, round(exit_ratio * depth)) if layers is None else layers
        if not 1 <= count <= depth:
            raise UserError(f"early_exit: layers={count}: want 1 to {depth}, as many as the model has.")
        super().__init__(f"early_exit({count})", tiers.provisional("draft", range(count)), sampling)
