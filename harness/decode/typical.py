"""Medusa's typical acceptance (arXiv 2401.10774): keep what the full verifier finds typical, however it was drafted."""

from jaxtyping import Float
from torch import Tensor

from harness.decode.accept import first_stop
from harness.decode.rule import Verdict, held_to
from harness.decode.sets import Eta
from harness.decode.truncated import Truncated
from harness.drafters.base import Draft
from harness.sampling import Chooser, Law, Sampling


class Typical:
    """Keep v where q(v) >= min(epsilon, delta exp(-H(q))); any other token is drawn from q on that set A, normalised.

    One position emits v with probability p(v) 1_A(v) + p(outside A) q_A(v), and a bonus token or one behind no draft
    has the law q_A. q is what is sampled from, after temperature, top-k and top-p.

    Medusa's code draws the token behind the kept drafts from q_A too when asked for typical sampling
    (``get_typical_one_token``) and takes the likeliest one by default; taking q_A everywhere is reading: ours.
    Revisiting Lossy Verification (arXiv 2607.26627) models the rule as p on A, normalised. Medusa has a tree of drafts
    and keeps its longest path; here is one path.

    Greedy decoding keeps the full verifier's likeliest token alone, as Medusa's code does at temperature 0: lossless.
    """

    name = "typical"
    reading = "bonus tokens come from the truncated law too"
    reads_drafter = False

    def __init__(self, sampling: Sampling, epsilon: float = 0.09, delta: float = 0.3) -> None:
        self.sampling = sampling
        self.kept = Eta(epsilon, delta)
        self.settings = self.kept.name
        self.lossless = sampling.greedy
        self.law_of = Truncated(sampling, self.kept).law

    def law(self, logits: Float[Tensor, "R V"]) -> Law:
        return self.law_of(logits)

    def judge(self, logits: Float[Tensor, "R V"], draft: Draft, chooser: Chooser) -> Verdict:
        law = self.law(logits)
        if self.sampling.greedy:
            return held_to(law, draft, chooser)
        typical = self.kept(logits[:-1], self.sampling).gather(-1, draft.tokens[:, None])[:, 0]
        stop = first_stop(typical)
        return Verdict(stop, law.draw(stop, chooser))
