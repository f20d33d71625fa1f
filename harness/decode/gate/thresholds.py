"""The paper's gates: thresholds on the ratio of the drafted token to the likeliest one, in two readings."""

from jaxtyping import Float, Int
from torch import Tensor

from harness.decode.gate.base import ROUTES, Decision, check_open_interval, ratio_table
from harness.errors import UserError
from harness.kernels.gate import route_block
from harness.records import Route


class Thresholds:
    """Escalate where the ratio is below ``keep_at`` (Alg. 2 asks that first), else accept from ``accept_at`` on.

    What lies between the two is regenerated; where ``accept_at`` is the lower one nothing does, and ``keep_at`` alone
    decides.
    """

    lossless = False

    def __init__(self, name: str, accept_at: float, keep_at: float, allow_unreachable: bool) -> None:
        self.name = name
        self.accept_at = max(accept_at, keep_at)
        self.keep_at = keep_at
        if Route.REGENERATE not in self.reachable and not allow_unreachable:
            raise UserError(
                f"gate {name}: no token can be regenerated, since it escalates below {keep_at:g} and accepts from "
                f"{self.accept_at:g} of the largest probability; change alpha1 and alpha2, or set "
                "gate.allow_unreachable=true."
            )

    @property
    def reachable(self) -> frozenset[Route]:
        # A ratio lies between 0 and 1, so accepting and escalating are always possible for thresholds inside (0, 1).
        return frozenset(ROUTES) if self.keep_at < self.accept_at else frozenset((Route.ACCEPT, Route.ESCALATE))

    def __call__(self, scores: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Decision:
        routed = route_block(scores, tokens, self.accept_at, self.keep_at)
        return Decision(routed.codes, routed.stop)

    def table(self, scores: Float[Tensor, "G V"]) -> Int[Tensor, "G V"]:
        return ratio_table(scores, self.accept_at, self.keep_at)


class Strictness(Thresholds):
    """alpha as strictness (reading of Fig. 6 and App. H.2): escalate below alpha2, else accept from alpha1.

    Raises:
        UserError: thresholds outside (0, 1), or alpha2 >= alpha1 (nothing would be regenerated).
    """

    def __init__(self, alpha1: float = 0.5, alpha2: float = 0.3, allow_unreachable: bool = False) -> None:
        check_open_interval(alpha1=alpha1, alpha2=alpha2)
        super().__init__(f"strictness({alpha1:g}, {alpha2:g})", alpha1, alpha2, allow_unreachable)


class Literal(Thresholds):
    """Algorithm 2's thresholds as printed: escalate below 1 - alpha2, else accept from 1 - alpha1, else regenerate.

    The published alpha1 = 0.5, alpha2 = 0.3 accept from 0.7 and escalate everything else.

    Raises:
        UserError: thresholds outside (0, 1), or alpha2 <= alpha1 (nothing would be regenerated).
    """

    def __init__(self, alpha1: float = 0.5, alpha2: float = 0.3, allow_unreachable: bool = False) -> None:
        check_open_interval(alpha1=alpha1, alpha2=alpha2)
        super().__init__(f"literal({alpha1:g}, {alpha2:g})", 1 - alpha1, 1 - alpha2, allow_unreachable)
