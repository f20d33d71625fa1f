"""Two tiers, lossless: speculative decoding (Leviathan et al., arXiv 2211.17192)."""

from collections.abc import Callable, Sequence

from harness.decode.accept import first_stop, keep_probability
from harness.decode.base import Block, plain_step
from harness.decode.length import Fixed, Length
from harness.drafters.base import Drafter
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.model.transfer import to_host
from harness.records import Route
from harness.sampling import Chooser, Sampling


class Speculative:
    """Draft, score the block with the full verifier, keep the longest accepted prefix, correct or add a bonus token.

    The output law is the full verifier's at any temperature.
    """

    name = "speculative"
    lossless = True
    gate_name = None

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        gamma: int,
        drafter: Callable[[Tiers, Sampling, Model], Drafter],
        length: Callable[[Drafter], Length] = Fixed,
    ) -> None:
        check_gamma(gamma)
        self.tiers = tiers
        self.sampling = sampling
        self.gamma = gamma
        self.drafter = drafter(tiers, sampling, model)
        self.length = length(self.drafter)

    @property
    def drafter_name(self) -> str:
        return self.length.name

    def tier_roles(self) -> tuple[Tier | None, Tier | None]:
        return self.drafter.tier, None

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        asked = min(self.length.ask(self.gamma), remaining - 1)  # the full verifier adds a token to whatever is kept
        draft = self.length.draft(tokens, asked, chooser)
        drafted = len(draft)
        if not drafted:
            return plain_step(self.tiers.full, self.sampling, tokens, asked, chooser)
        law = self.sampling.law(self.tiers.full.forward(tokens, drafted + 1, draft.tokens))
        stop = first_stop(chooser.accept(keep_probability(law, draft)))
        last = law.replace(draft.probs, draft.tokens, stop, chooser)
        *drafts, kept, last_token = to_host(draft.tokens, stop, last)
        self.length.note(drafted, kept)
        return Block(
            tokens=(*drafts[:kept], last_token),
            asked=asked,
            drafted=drafted,
            routes=(Route.ESCALATE,) * min(kept + 1, drafted),
            kept=kept,
            bonus=kept == drafted,
        )

    def finish(self, text: Sequence[int]) -> None:
        self.length.finish(text)


def check_gamma(gamma: int) -> None:
    if gamma < 1:
        raise UserError(f"gamma={gamma}: want at least 1 drafted token a block.")
