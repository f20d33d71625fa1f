"""SWIFT, lossless (Xia et al., arXiv 2410.06916): self-speculation whose skipped layers are searched while decoding."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from harness.decode.base import Block
from harness.decode.length import Fixed, Length
from harness.decode.speculative import Speculative
from harness.drafters.base import Drafter
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError, unknown
from harness.model.load import Model
from harness.model.slim import Mask
from harness.model.sublayers import skipping
from harness.model.tiers import Tiers
from harness.model.transfer import to_device, to_host
from harness.proposals import Evaluation, SearchPlan, search
from harness.sampling import Chooser, Sampling, top
from harness.timing import outside_the_clock

CLOCKS = ("inside", "outside")


@dataclass(frozen=True, slots=True)
class Plan:
    """How layers are searched; the defaults are the source's (hemingkx/SWIFT, ``eval_llama.sh``).

    Args:
        skip_ratio: share of the model skipped, as ``harness.model.slim`` counts it.
        units: ``sublayers``, attention and MLP apart as in the source, or whole ``layers``.
        context: the first output tokens of a prompt, on which a mask is scored.
        bayes_every: every so many steps the proposal is Bayesian, else random; None: all are random.
        steps: masks that are scored, at most.
        patience: the search ends when so many in a row were no better; None: it goes on.
        enough: the search ends above this score.
        seed: of the proposals.

    Raises:
        UserError: a value out of its bounds.
    """

    skip_ratio: float = 0.45
    units: str = "sublayers"
    context: int = 50
    bayes_every: int | None = 25
    steps: int = 1000
    patience: int | None = 300
    enough: float = 0.93
    seed: int = 2024

    def __post_init__(self) -> None:
        if self.context < 1:
            raise UserError(f"methods.swift.plan.context={self.context}: want at least 1 token.")
        if not 0 < self.enough <= 1:
            raise UserError(f"methods.swift.plan.enough={self.enough}: want a share above 0, at most 1.")

    def over(self, depth: int) -> SearchPlan:
        """The search over a model of ``depth`` layers."""
        return SearchPlan(
            depth,
            self.skip_ratio,
            self.steps,
            self.seed,
            self.units,
            self.bayes_every,
            self.patience,
            where="methods.swift.plan.",
        )


class Swift(Speculative):
    """The full verifier drafts with layers left out, and after each verification one more choice of them is tried.

    A choice is scored by one pass over the first ``plan.context`` tokens that were written after the prompt, reading
    the full verifier's entries of the prompt: the share of positions where it says the token that stands there. The
    best choice drafts from then on. The search, that of ``harness.proposals``, goes on from prompt to prompt until the
    plan ends it; only the tokens to score on are each prompt's own. The output law is the full verifier's at any
    temperature: which layers draft depends on what is written already.

    It begins with evenly spaced layers left out; in the source, every second one. The source's draft is a tree that
    ends at a token of less than 0.8; here ``length=confidence`` is the nearest, of one branch (reading: ours).

    The host waits once more where a choice is scored. Graphs of the draft tier are captured anew when its layers
    change; scoring runs without.

    Args:
        clock: ``inside``, the search is part of the decoding time, as it is in the source; ``outside``, decode seconds
            are without it. Two arms that differ in this alone find the same layers and give both figures.

    Raises:
        UserError: no such clock, or a plan that does not fit the model.
    """

    reading = "one branch in place of a tree, Optuna's Gaussian process"

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        gamma: int,
        plan: Plan | None = None,
        length: Callable[[Drafter], Length] = Fixed,
        clock: str = "inside",
    ) -> None:
        if clock not in CLOCKS:
            raise unknown("swift clock", clock, CLOCKS)
        self.plan = Plan() if plan is None else plan
        plan_here = self.plan.over(model.transformer.spec.layers)
        self.search = search(plan_here, self.evaluated)
        self.ended = False
        self.best = 0.0
        self.skipping = SelfSkip(tiers, sampling, model, self.plan.skip_ratio)
        self.scorer = tiers.provisional("search", self.skipping.tier.layers)
        self.scorer.block, self.scorer.graphs = None, False
        self.known: tuple[Sequence[int], int] = ((), 0)  # a text to score on, and how much of it is the prompt
        self.clock = clock
        self.prompt_length: int | None = None
        super().__init__(tiers, sampling, model, gamma, lambda *_: self.skipping, length)
        self.name = "swift"

    @property
    def drafter_name(self) -> str:
        return f"{self.length.name}, searched with the search {self.clock} the clock"

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        if self.prompt_length is None:
            self.prompt_length = len(tokens)
        if len(tokens) - self.prompt_length >= self.plan.context and not self.ended:
            self.known = tokens[: self.prompt_length + self.plan.context], self.prompt_length
            with nullcontext() if self.clock == "inside" else outside_the_clock(self.tiers):
                self.try_another()
        return super().step(tokens, remaining, chooser)

    def try_another(self) -> None:
        """Score one more choice of layers, and draft with it if it is the best."""
        found = next(self.search, None)
        if found is not None and found.agreement > self.best:
            self.best = found.agreement
            self.skipping.tier.change_layers(found.mask.layers, skipping(self.tiers.model, found.mask))
        self.ended = found is None or self.best > self.plan.enough

    def evaluated(self, mask: Mask) -> Evaluation:
        """What ``mask`` says of the tokens behind the prompt, each given those before; one pass over all of them.

        The pass overwrites entries that the full verifier has committed, which are put back.
        """
        text, prompt_length = self.known
        cache = self.tiers.cache
        length, first, count = cache.length, prompt_length - 1, len(text) - prompt_length
        committed = cache.read(first, len(text) - 1)
        cache.rollback(first)
        self.scorer.change_layers(mask.layers, skipping(self.tiers.model, mask))
        said = top(self.scorer.forward(text[:-1], rows=count))
        cache.write(first, committed)
        cache.begin(0)  # every tail is void
        cache.length = length
        (right,) = to_host((said == to_device(text[prompt_length:], said.device)).sum())
        return Evaluation(mask, 1 - right / count, right / count, count, 0.0)

    learns_in_steps = True  # a finished text does not tell which layers were tried

    def finish(self, text: Sequence[int]) -> None:
        self.prompt_length = None
        super().finish(text)
