"""The baseline: the full verifier alone, one token a forward."""

from collections.abc import Sequence

from harness.decode.base import Block, plain_step
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.sampling import Chooser, Sampling


class Autoregressive:
    """Plain decoding through the same tier, cache and stop rule as every other method.

    ``model`` is not needed; methods are all made with the same arguments.
    """

    name = "autoregressive"
    lossless = True
    drafter_name = None
    gate_name = None

    def __init__(self, tiers: Tiers, sampling: Sampling, model: Model | None = None) -> None:
        self.tiers = tiers
        self.sampling = sampling

    def tier_roles(self) -> tuple[Tier | None, Tier | None]:
        return None, None

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        return plain_step(self.tiers.full, self.sampling, tokens, 0, chooser)

    def finish(self, text: Sequence[int]) -> None:
        pass
