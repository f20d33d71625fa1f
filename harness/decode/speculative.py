"""Two tiers: speculative decoding, lossless (Leviathan et al., arXiv 2211.17192) or by another rule of acceptance."""

from collections.abc import Callable, Sequence

from harness.decode.base import Block, plain_step
from harness.decode.length import Fixed, Length
from harness.decode.rule import Lossless, Rule
from harness.drafters.base import Drafter, check_probs
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.model.transfer import to_host
from harness.records import Route
from harness.sampling import Chooser, Sampling


class Speculative:
    """Draft, score the block with the full verifier, keep the accepted prefix, correct or add a bonus token.

    What is accepted and what follows is for ``rule`` to say: ``Lossless``, whose output law is the full verifier's at
    any temperature, unless another is named. The method goes by its rule's name.

    Raises:
        UserError: a gamma below 1, or a rule that reads the drafter's probabilities with a drafter that has none.
    """

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        gamma: int,
        drafter: Callable[[Tiers, Sampling, Model], Drafter],
        length: Callable[[Drafter], Length] = Fixed,
        rule: Callable[[Sampling], Rule] = Lossless,
    ) -> None:
        check_gamma(gamma)
        self.rule = rule(sampling)
        self.name = self.rule.name
        self.tiers = tiers
        self.sampling = sampling
        self.gamma = gamma
        self.drafter = drafter(tiers, sampling, model)
        self.length = length(self.drafter)
        if self.rule.reads_drafter:
            check_probs(self.drafter, self.name)

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    @property
    def gate_name(self) -> str | None:
        return self.rule.settings

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
            return plain_step(self.tiers.full, self.rule, tokens, asked, chooser)
        logits = self.tiers.full.forward(tokens, drafted + 1, draft.tokens)
        stop, last = self.rule.judge(logits, draft, chooser)
        *drafts, kept, last_token = to_host(draft.tokens, stop, last)
        self.length.note(drafted, kept)
        return Block(
            tokens=(*drafts[:kept], last_token),
            asked=asked,
            drafted=drafted,
            routes=(Route.ESCALATE,) * min(kept + 1, drafted),
            kept=kept,
            bonus=kept == drafted,
            looked_up=draft.looked_up,
        )

    def finish(self, text: Sequence[int]) -> None:
        self.length.finish(text)


def check_gamma(gamma: int) -> None:
    if gamma < 1:
        raise UserError(f"gamma={gamma}: want at least 1 drafted token a block.")
