"""Lossless speculation on a truncated target: the fair partner of lossy rules that truncate."""

from jaxtyping import Float
from torch import Tensor

from harness.decode.rule import Verdict, held_to
from harness.decode.sets import TokenSet
from harness.drafters.base import Draft
from harness.sampling import Chooser, Dense, Law, Sampling


class Truncated:
    """The lossless rule with q_A = q restricted to a set A of likely tokens and normalised, in the place of q.

    Every token, also a bonus token or one behind no draft, has the law q_A: what sampling from the full verifier with
    the same truncation would write. Revisiting Lossy Verification (arXiv 2607.26627) asks that a rule which keeps
    drafts in A be compared with this one and not with plain sampling, since the truncation alone changes quality.

    It is lossless for q_A, not for q: tables call it lossy and name the law that it keeps. Greedy decoding is not
    changed by a truncation, so that there, or where A is everything, it is lossless without a condition.
    """

    name = "truncated"
    reads_drafter = False

    def __init__(self, sampling: Sampling, kept: TokenSet) -> None:
        self.sampling = sampling
        self.kept = kept
        self.settings = f"lossless for q on {kept.name}"
        self.lossless = sampling.greedy or kept.whole

    def law(self, logits: Float[Tensor, "R V"]) -> Law:
        if self.sampling.greedy:
            return self.sampling.law(logits)
        inside = self.sampling.warp(logits) * self.kept(logits, self.sampling)
        return Dense(inside / inside.sum(dim=-1, keepdim=True))

    def judge(self, logits: Float[Tensor, "R V"], draft: Draft, chooser: Chooser) -> Verdict:
        return held_to(self.law(logits), draft, chooser)
