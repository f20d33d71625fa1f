"""Self-skipping: the full verifier with many of its layers left out drafts for itself (Draft & Verify, SWIFT)."""

from collections.abc import Sequence

from harness.drafters.base import TierDrafter
from harness.model.load import Model
from harness.model.slim import Mask, evenly_spaced, read_mask
from harness.model.sublayers import skipping
from harness.model.tiers import Tiers
from harness.sampling import Sampling


class SelfSkip(TierDrafter):
    """Keeps the layers of ``mask`` (a file or a list), or skips evenly spaced ones at ``skip_ratio``.

    Runs on the committed entries of the full verifier's cache, so it needs no cache and no prefill of its own.
    """

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        skip_ratio: float = 0.6,
        mask: str | Sequence[int] | None = None,
    ) -> None:
        depth = model.transformer.spec.layers
        layer_mask: Mask = evenly_spaced(depth, skip_ratio) if mask is None else read_mask(mask, depth)
        name = f"self_skip({layer_mask.skip_ratio:.2g})"
        tier = tiers.provisional("draft", layer_mask.layers, skipping(tiers.model, layer_mask))
        super().__init__(name, tier, sampling)
