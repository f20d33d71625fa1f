"""Lossy speculative sampling: a lenient ratio, and a residual of its own."""

from jaxtyping import Float
from torch import Tensor

from harness.decode.accept import first_stop
from harness.decode.rule import Verdict, drawn_from, held_to, ratios
from harness.decode.sets import check_between
from harness.drafters.base import Draft
from harness.errors import UserError
from harness.sampling import Chooser, Law, Sampling


class Lossy:
    """Keep v with probability min(1, q(v) / ((1 - alpha) p(v))), else draw from norm(max(0, q/beta - p)).

    One position emits v with probability k(v) + (1 - sum of k) norm(max(0, q/beta - p))(v), where
    k = min(p, q / (1 - alpha)); a bonus token has the law q. After Tran-Thien (VIA-SD, App. A, beta >= 1 - alpha).
    With beta = 1 the residual is that of Leviathan et al. and of the code of Faster Cascades, whose lenience is alpha:
    alpha = 0, beta = 1 is speculative decoding. alpha = 1 keeps every draft that q allows at all, as that code does.
    Where a beta above 1 leaves the residual without mass, the token is drawn from q (reading: ours).

    Greedy decoding: p and q are one-hot, a draft is kept if it is the full verifier's and replaced by that otherwise,
    whatever alpha and beta: lossless.

    Raises:
        UserError: alpha outside [0, 1], or a beta of 0 or less or below 1 - alpha.
    """

    name = "lossy"
    reads_drafter = False

    def __init__(self, sampling: Sampling, alpha: float = 0.5, beta: float = 1.0) -> None:
        check_between("lossy", 0.0, 1.0, alpha=alpha)
        if not (beta > 0 and 1 - alpha <= beta < float("inf")):
            raise UserError(f"lossy: beta={beta}: want more than 0 and at least 1 - alpha = {1 - alpha:g}.")
        self.sampling = sampling
        self.alpha = alpha
        self.beta = beta
        self.settings = f"alpha={alpha:g}, beta={beta:g}"
        self.lossless = sampling.greedy or (alpha == 0 and beta == 1)

    def law(self, logits: Float[Tensor, "R V"]) -> Law:
        return self.sampling.law(logits)

    def judge(self, logits: Float[Tensor, "R V"], draft: Draft, chooser: Chooser) -> Verdict:
        if self.sampling.greedy:
            return held_to(self.law(logits), draft, chooser)
        verified = self.sampling.warp(logits)
        drafted = drawn_from(draft, verified)
        lenient = ratios(verified, drafted, draft.tokens) / (1 - self.alpha)
        # 0/0, at alpha = 1 where q(v) = 0, is a refusal.
        stop = first_stop(chooser.accept(lenient.nan_to_num(nan=0.0).clamp(max=1.0)))
        return Verdict(stop, chooser.replace(verified / self.beta, drafted, draft.tokens, stop))
