"""Three tiers, lossless: the slim verifier drafts for the full one, and has a drafter (TriForce, arXiv 2404.11912)."""

from collections.abc import Callable, Sequence

from harness.decode.length import Fixed, Length
from harness.decode.nested import Reviewed
from harness.decode.slim import Slim, masked, only
from harness.decode.speculative import Speculative, check_gamma
from harness.drafters.base import Drafter
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.sampling import Sampling


class Hierarchical(Speculative):
    """Hierarchical speculation: drafter to slim to full, with the lossless rule at each link.

    The slim verifier reviews ``slim_blocks`` blocks of the drafter one after the other, each by min(1, q'/p) and its
    residual, so that its tokens have its own law q'. One pass of the full verifier then scores all of them against q'
    by min(1, q/q'), so that what is emitted has the law q. With one slim block this costs the passes of three-tier
    decoding that always escalates, and q' as proposal instead of p; with more, the full verifier runs less often.

    A block of the trace is one of the full verifier: its drafts are the slim verifier's tokens. What that one refused
    of the drafter's is in the number of draft forwards alone.

    TriForce nests two links in the same way, with another middle tier; how many slim blocks go into a full one is
    reading: ours.

    Args:
        gamma: tokens that the full verifier scores at once, besides the one it adds; at most.
        slim_gamma: tokens drafted for a slim block, at most.
        slim_blocks: slim blocks to a full one, at most.

    Raises:
        UserError: a number below 1, or a model without a slim verifier.
    """

    reading = "how many slim blocks go into a full one"

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        gamma: int,
        drafter: Callable[[Tiers, Sampling, Model], Drafter],
        slim_gamma: int,
        slim_blocks: int = 2,
        length: Callable[[Drafter], Length] = Fixed,
        slim: Callable[[Tiers, Model], Slim | Sequence[Slim]] = masked,
    ) -> None:
        check_gamma(gamma)
        if slim_gamma < 1 or slim_blocks < 1:
            raise UserError(f"hierarchical: slim_gamma={slim_gamma}, slim_blocks={slim_blocks}: want at least 1 each.")
        self.slim_verifiers = (only(slim(tiers, model), "hierarchical"),)  # before the drafter: it may read them
        self.slim = self.slim_verifiers[0].tier
        inner = drafter(tiers, sampling, model)
        reviewed = Reviewed(tiers, self.slim, sampling, length(inner), slim_gamma, slim_blocks)
        super().__init__(tiers, sampling, model, gamma, lambda *_: reviewed)
        self.name = "hierarchical"
        self.inner = inner

    def tier_roles(self) -> tuple[Tier | None, Tier | None]:
        return self.inner.tier, self.slim
