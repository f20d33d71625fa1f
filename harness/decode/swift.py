"""SWIFT, lossless (Xia et al., arXiv 2410.06916): self-speculation whose skipped layers are searched while decoding."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from harness.decode.base import Block
from harness.decode.length import Fixed, Length
from harness.decode.speculative import Speculative
from harness.drafters.base import Drafter
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError, unknown
from harness.model.load import Model
from harness.model.slim import evenly_spaced, kept_count
from harness.model.tiers import Tiers
from harness.model.transfer import to_device, to_host
from harness.sampling import Chooser, Sampling, top
from harness.timing import outside_the_clock

CLOCKS = ("inside", "outside")


@dataclass(frozen=True, slots=True)
class Plan:
    """How layers are searched; the defaults are the source's (hemingkx/SWIFT, ``eval_llama.sh``).

    Args:
        skip_ratio: share of layers skipped. The source skips attention and MLP apart; here whole layers.
        context: the first output tokens of a prompt, on which a mask is scored.
        bayes_every: every so many steps the proposal is Bayesian, else random.
        steps: masks that are scored, at most.
        patience: the search ends when so many in a row were no better.
        enough: the search ends above this score.
        seed: of the proposals.

    Raises:
        UserError: a value out of its bounds.
    """

    skip_ratio: float = 0.45
    context: int = 50
    bayes_every: int = 25
    steps: int = 1000
    patience: int = 300
    enough: float = 0.93
    seed: int = 2024

    def __post_init__(self) -> None:
        for name in ("context", "bayes_every", "steps", "patience"):
            if getattr(self, name) < 1:
                raise UserError(f"swift: plan.{name}={getattr(self, name)}: want at least 1.")
        if not 0 < self.enough <= 1:
            raise UserError(f"swift: plan.enough={self.enough}: want a share above 0, at most 1.")


class Search:
    """Proposes which inner layers to keep; the first and the last one always stay, as in the source.

    The Bayesian proposal has the largest numbers at the point that Optuna's Gaussian process asks for, one number from
    0 to 1 a layer; the source has another Gaussian process and its upper confidence bound (reading: ours).

    Raises:
        UserError: a ratio that would skip the first or the last layer.
    """

    def __init__(self, plan: Plan, depth: int) -> None:
        self.plan = plan
        self.inner = range(1, depth - 1)
        self.ends = (0, depth - 1)
        self.count = kept_count(depth, plan.skip_ratio) - 2
        if not 0 <= self.count <= len(self.inner):
            raise UserError(
                f"swift: skip_ratio={plan.skip_ratio} leaves {self.count + 2} of {depth} layers; first and last stay."
            )
        self.rng = random.Random(plan.seed)
        self.study: Any = None
        self.scored = 0
        self.best = 0.0
        self.no_better = 0

    @property
    def ended(self) -> bool:
        plan = self.plan
        return self.best > plan.enough or self.scored >= plan.steps or self.no_better >= plan.patience

    def propose(self) -> tuple[int, ...]:
        """Layers to keep, ascending."""
        if (self.scored + 1) % self.plan.bayes_every:
            chosen = self.rng.sample(self.inner, self.count)
        else:
            chosen = self.surrogate().propose(self.count)
        return tuple(sorted({*chosen, *self.ends}))

    def learn(self, layers: Sequence[int], score: float) -> bool:
        """Note the score of a proposal; True if it is the best so far."""
        self.scored += 1
        self.surrogate().learn(layers, score)
        better = score > self.best
        self.best = max(self.best, score)
        self.no_better = 0 if better else self.no_better + 1
        return better

    def surrogate(self) -> "Surrogate":
        if self.study is None:
            self.study = Surrogate(self.inner, self.plan.seed)
        return self.study


class Surrogate:
    """Optuna's Gaussian process over the masks that were scored: 1 where a layer was kept, 0 where it was not."""

    def __init__(self, inner: Sequence[int], seed: int) -> None:
        import optuna  # a second to load, and only this needs it

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.optuna: Any = optuna
        self.inner = inner
        self.space = {str(layer): optuna.distributions.FloatDistribution(0.0, 1.0) for layer in inner}
        self.study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GPSampler(seed=seed))

    def propose(self, count: int) -> list[int]:
        """The ``count`` layers with the largest numbers at the point to try next."""
        trial = self.study.ask(self.space)
        # What is scored is the corner near the point, which ``learn`` adds; the point itself is not.
        self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        return sorted(self.inner, key=lambda layer: (-trial.params[str(layer)], layer))[:count]

    def learn(self, layers: Sequence[int], score: float) -> None:
        params = {name: float(int(name) in layers) for name in self.space}
        self.study.add_trial(self.optuna.trial.create_trial(params=params, distributions=self.space, value=score))


class Swift(Speculative):
    """The full verifier drafts with layers left out, and after each verification one more choice of them is tried.

    A choice is scored by one pass over the first ``plan.context`` tokens that were written after the prompt, reading
    the full verifier's entries of the prompt: the share of positions where it says the token that stands there. The
    best choice drafts from then on. The search goes on from prompt to prompt until the plan ends it; only the tokens to
    score on are each prompt's own. The output law is the full verifier's at any temperature: which layers draft depends
    on what is written already.

    It begins with evenly spaced layers (the source: every second one). The source's draft is a tree that ends at a
    token of less than 0.8; here ``length=confidence`` is the nearest, of one branch (reading: ours).

    The host waits once more where a choice is scored. Graphs of the draft tier are captured anew when its layers
    change; scoring runs without.

    Args:
        clock: ``inside``, the search is part of the decoding time, as it is in the source; ``outside``, decode seconds
            are without it. Two arms that differ in this alone find the same layers and give both figures.

    Raises:
        UserError: no such clock, or a plan that does not fit the model.
    """

    name = "swift"

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
        depth = model.transformer.spec.layers
        self.search = Search(self.plan, depth)
        kept = evenly_spaced(depth, self.plan.skip_ratio).layers
        self.skipping = SelfSkip(tiers, sampling, model, mask=list(kept))
        self.scorer = tiers.provisional("search", kept)
        self.scorer.block, self.scorer.graphs = None, False
        self.clock = clock
        self.prompt_length: int | None = None
        super().__init__(tiers, sampling, model, gamma, lambda *_: self.skipping, length)

    @property
    def drafter_name(self) -> str:
        return f"{self.length.name}, searched with the search {self.clock} the clock"

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        if self.prompt_length is None:
            self.prompt_length = len(tokens)
        if len(tokens) - self.prompt_length >= self.plan.context and not self.search.ended:
            with self.timed():
                self.try_another(tokens[: self.prompt_length + self.plan.context], self.prompt_length)
        return super().step(tokens, remaining, chooser)

    def timed(self) -> AbstractContextManager[None]:
        return nullcontext() if self.clock == "inside" else outside_the_clock(self.tiers)

    def try_another(self, text: Sequence[int], prompt_length: int) -> None:
        """Score one more choice of layers on ``text`` behind the prompt, and draft with it if it is the best."""
        layers = self.search.propose()
        if self.search.learn(layers, self.agreement(layers, text, prompt_length)):
            self.skipping.tier.change_layers(layers)

    def agreement(self, layers: Sequence[int], text: Sequence[int], prompt_length: int) -> float:
        """Share of the tokens behind the prompt that ``layers`` say, given those before; one pass over all of them.

        The pass overwrites entries that the full verifier has committed, which are put back.
        """
        cache = self.tiers.cache
        length, first = cache.length, prompt_length - 1
        committed = cache.read(first, len(text) - 1)
        cache.rollback(first)
        self.scorer.change_layers(layers)
        said = top(self.scorer.forward(text[:-1], rows=len(text) - prompt_length))
        cache.write(first, committed)
        cache.begin(0)  # every tail is void
        cache.length = length
        (right,) = to_host((said == to_device(text[prompt_length:], said.device)).sum())
        return right / (len(text) - prompt_length)

    def finish(self, text: Sequence[int]) -> None:
        self.prompt_length = None
        super().finish(text)
