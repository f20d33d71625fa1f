"""The bound for gates that keep the full verifier's tokens: one that knows them beforehand."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.decode.accept import first_stop
from harness.decode.gate.base import ROUTES, Decision, Gate
from harness.errors import UserError
from harness.kernels.gate import ACCEPT, ESCALATE, REGENERATE
from harness.model.tiers import Tier, Tiers
from harness.sampling import Sampling, top
from harness.timing import outside_the_clock


class Oracle:
    """Greedy only: accept a draft that is the full verifier's argmax; else regenerate if the slim argmax is; else
    escalate. So every token is the full verifier's, by the fewest of its passes that a gate over these tiers can need.

    To know, it runs the full verifier on every block. Those passes are a tier of their own over provisional entries of
    the cache: they count as nobody's forwards, the real full verifier falls behind as it would without them, and they
    happen outside the clock (``harness.timing.outside_the_clock``): decode seconds and tier seconds are without them.
    Only the host's wait for work that is already queued stays, and the allocator's peak includes them.
    """

    name = "oracle"
    reachable = frozenset(ROUTES)
    lossless = True

    def over(self, tiers: Tiers, sampling: Sampling) -> Callable[[Sequence[int]], Gate]:
        """A gate for each text.

        Raises:
            UserError: the decoding is not greedy: there is no one token to foresee.
        """
        if not sampling.greedy:
            raise UserError(
                f"gate=oracle is for greedy decoding, temperature is {sampling.temperature:g}: set temperature=0, or "
                "choose another gate."
            )
        seer = tiers.provisional("oracle", range(tiers.model.spec.layers))
        return lambda text: Foresight(tiers, seer, text)


class Foresight:
    """The oracle's gate for the block behind ``text``; looks ahead once, however many verifiers ask."""

    name = Oracle.name
    reachable = Oracle.reachable
    lossless = Oracle.lossless

    def __init__(self, tiers: Tiers, seer: Tier, text: Sequence[int]) -> None:
        self.tiers = tiers
        self.seer = seer
        self.text = text
        self.coming: Tensor | None = None

    def __call__(self, scores: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]) -> Decision:
        if self.coming is None:
            with outside_the_clock(self.tiers):
                self.coming = top(self.seer.forward(self.text, len(tokens), tokens[:-1]))
        accepted = tokens == self.coming
        codes = torch.where(accepted, ACCEPT, torch.where(top(scores) == self.coming, REGENERATE, ESCALATE))
        return Decision(codes, first_stop(accepted))
