"""Which masks a search tries, and in which order: random ones, neighbours of the best, and Bayesian proposals.

DIMR (eq. 13 of VIA-SD) proposes by Bayesian optimisation at every theta-th step and at random at the others, and stops
at S steps or when the best has not changed for long; it leaves theta and S open. This is the search of SWIFT
(arXiv 2410.06916), whose constants are the default of ``job=search``. SWIFT proposes from a Gaussian process with an
upper confidence bound; here it is Optuna's Gaussian process with expected improvement (reading: ours).
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter
from typing import Any

from harness.errors import UserError, unknown
from harness.model.slim import LayerMask, Mask, inner_kept, inner_sublayers_kept, sublayers_of

UNITS = ("layers", "sublayers")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A mask and what it costs: mean step cost in nats and the share of positions with the full verifier's argmax.

    ``proposal`` says how the search came to it: ``random``, ``exchange`` or ``bayes``. ``seconds`` are those of
    proposing and scoring.
    """

    mask: Mask
    cost: float
    agreement: float
    positions: int
    seconds: float
    proposal: str = "random"


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """The space of masks and how it is searched.

    Args:
        depth: layers of the model; the first and the last one always stay, as in SWIFT.
        skip_ratio: share of layers, or of sublayers, to skip.
        units: ``layers``, or ``sublayers``: attention and MLP apart.
        steps: masks to evaluate, at most.
        bayes_every: a Bayesian proposal at every so many steps; None: none.
        patience: stop when the best mask has not changed for so many steps; None: go on.
        exchange: probability that any other proposal exchanges one kept and one skipped unit of the best mask so far
            instead of being drawn uniformly. 0 is the paper's; more is ours.
        where: what stands before a setting's name in errors.

    Raises:
        UserError: settings outside their bounds.
    """

    depth: int
    skip_ratio: float
    steps: int
    seed: int
    units: str = "layers"
    bayes_every: int | None = None
    patience: int | None = None
    exchange: float = 0.0
    where: str = "job."

    def __post_init__(self) -> None:
        if self.units not in UNITS:
            raise unknown(f"{self.where}units", self.units, UNITS)
        if self.steps < 1:
            raise UserError(f"{self.where}steps={self.steps}: want at least 1 mask.")
        for name, value in (("bayes_every", self.bayes_every), ("patience", self.patience)):
            if value is not None and value < 1:
                raise UserError(f"{self.where}{name}={value}: want at least 1 step, or null for none.")
        if not 0 <= self.exchange <= 1:
            raise UserError(f"{self.where}exchange={self.exchange}: want a probability.")
        assert self.kept >= 0, "a ratio that cannot be is refused in there"

    @property
    def kept(self) -> int:
        """Units of a mask besides those that always stay."""
        return (inner_kept if self.units == "layers" else inner_sublayers_kept)(self.depth, self.skip_ratio)

    @property
    def most(self) -> int:
        """Evaluations until the steps or the masks are used up."""
        return min(self.steps, math.comb(len(self.inner), self.kept))

    @property
    def inner(self) -> range:
        """All units that may be skipped: inner layers by index, or sublayers as ``sublayers_of`` numbers them."""
        return range(1, self.depth - 1) if self.units == "layers" else range(2 * (self.depth - 2))

    def mask(self, chosen: set[int]) -> Mask:
        if self.units == "layers":
            return LayerMask.of([0, *chosen, self.depth - 1], self.depth)
        return sublayers_of(sorted(chosen), self.depth)


def search(
    plan: SearchPlan, score: Callable[[Mask], Evaluation], remembered: Mapping[Mask, Evaluation] | None = None
) -> Iterator[Evaluation]:
    """Yield different masks with their costs until the plan says stop, or no mask is left.

    What is proposed depends on the plan and the costs alone. So a search that was killed is resumed by running it
    again: masks in ``remembered`` are not scored a second time, and everything comes as if nothing had happened.
    """
    known = remembered or {}
    proposer = Proposer(plan)
    lowest, unchanged = math.inf, 0
    for _ in range(plan.most):
        begun = perf_counter()
        chosen, proposal = proposer.propose()
        mask = plan.mask(chosen)
        found = known.get(mask)
        if found is None:
            found = replace(score(mask), proposal=proposal, seconds=perf_counter() - begun)
        proposer.learn(chosen, found.cost)
        unchanged = 0 if found.cost < lowest else unchanged + 1
        lowest = min(lowest, found.cost)
        yield found
        if plan.patience is not None and unchanged >= plan.patience:
            return


class Proposer:
    """Sets of units to keep, none of them twice."""

    def __init__(self, plan: SearchPlan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.bayes = None if plan.bayes_every is None else Surrogate(plan)
        self.seen: set[frozenset[int]] = set()
        self.best: set[int] = set()
        self.lowest = math.inf

    def propose(self) -> tuple[set[int], str]:
        """The next set and where it comes from."""
        every = self.plan.bayes_every
        if self.bayes is not None and every is not None and (len(self.seen) + 1) % every == 0:
            fresh = (chosen for chosen in self.bayes.propose() if frozenset(chosen) not in self.seen)
            if (chosen := next(fresh, None)) is not None:
                return chosen, "bayes"
        repeated = False  # then the next proposal is uniform: the neighbours of the best may be used up
        while True:
            skipped = sorted(set(self.plan.inner) - self.best)
            exchanging = bool(self.best and skipped) and not repeated and self.rng.random() < self.plan.exchange
            if exchanging:
                chosen = self.best - {self.rng.choice(sorted(self.best))} | {self.rng.choice(skipped)}
            else:
                chosen = set(self.rng.sample(self.plan.inner, self.plan.kept))
            if frozenset(chosen) not in self.seen:
                return chosen, "exchange" if exchanging else "random"
            repeated = True

    def learn(self, chosen: set[int], cost: float) -> None:
        self.seen.add(frozenset(chosen))
        if cost < self.lowest:
            self.best, self.lowest = chosen, cost
        if self.bayes is not None:
            self.bayes.learn(chosen, cost)


class Surrogate:
    """Optuna's Gaussian process over one number a unit: 1 where it is kept, 0 where it is skipped."""

    def __init__(self, plan: SearchPlan) -> None:
        import optuna  # a second to load, and only this needs it

        optuna.logging.set_verbosity(optuna.logging.ERROR)  # it is loud about what it could be faster with
        self.plan = plan
        self.optuna: Any = optuna
        self.space: dict[str, Any] = {
            str(unit): optuna.distributions.FloatDistribution(0.0, 1.0) for unit in plan.inner
        }
        self.study = optuna.create_study(sampler=optuna.samplers.GPSampler(seed=plan.seed))

    def propose(self) -> Iterator[set[int]]:
        """Masks at the point that is asked for, the nearest first: the best may well be one that was there before.

        The nearest keeps the units with the largest numbers; the others differ from it in one exchange.
        """
        trial = self.study.ask(self.space)
        # The mask is a corner near the point; ``learn`` adds that corner, and the point itself is never evaluated.
        self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        numbers = {unit: trial.params[str(unit)] for unit in self.plan.inner}
        ranked = sorted(numbers, key=lambda unit: (-numbers[unit], unit))
        kept, skipped = ranked[: self.plan.kept], ranked[self.plan.kept :]
        yield set(kept)
        for out, into in sorted(product(kept, skipped), key=lambda pair: (numbers[pair[0]] - numbers[pair[1]], pair)):
            yield set(kept) - {out} | {into}

    def learn(self, chosen: set[int], cost: float) -> None:
        params = {name: float(int(name) in chosen) for name in self.space}
        self.study.add_trial(self.optuna.trial.create_trial(params=params, distributions=self.space, value=cost))
