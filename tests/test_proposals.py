"""The mask search without a model: which masks it proposes, when it stops, and that a killed one can go on."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from harness import proposals
from harness.errors import UserError
from harness.model.slim import LayerMask, Mask, SublayerMask, kept_count
from harness.proposals import Evaluation, SearchPlan, search


def weighted(seed: int = 0) -> Callable[[Mask], Evaluation]:
    """Costs that are sums over skipped units, each unit with a weight of its own."""
    rng = random.Random(seed)
    weights = [[rng.uniform(0.1, 1.0) for _ in range(64)] for _ in range(2)]

    def score(mask: Mask) -> Evaluation:
        halves = (mask.kept, mask.kept) if isinstance(mask, LayerMask) else (mask.attention, mask.mlp)
        skipped = [weights[half][index] for half in (0, 1) for index, runs in enumerate(halves[half]) if not runs]
        return Evaluation(mask, sum(skipped), 1 - sum(skipped) / 99, 7, 0.0)

    return score


def searched(steps: int, seed: int = 0, skip_ratio: float = 0.3, depth: int = 8, **settings: Any) -> list[Evaluation]:
    return list(search(SearchPlan(depth, skip_ratio, steps, seed, **settings), weighted()))


def outcome(found: list[Evaluation]) -> list[tuple[Mask, float, str]]:
    return [(one.mask, one.cost, one.proposal) for one in found]


@pytest.mark.parametrize("units", proposals.UNITS)
@pytest.mark.parametrize("exchange", [0.0, 0.5, 0.9])
def test_search_is_seeded_and_repeats_no_mask(exchange: float, units: str) -> None:
    found = searched(12, exchange=exchange, units=units)
    masks = [one.mask for one in found]
    assert len(masks) == len(set(masks)) == 12
    assert outcome(searched(12, exchange=exchange, units=units)) == outcome(found)
    assert [one.mask for one in searched(12, seed=1, exchange=exchange, units=units)] != masks
    assert [one.mask for one in searched(5, exchange=exchange, units=units)] == masks[:5], "more steps only go on"


@pytest.mark.parametrize("skip_ratio", [0.0, 0.125, 0.3, 0.4375, 0.5, 0.75])
def test_every_mask_keeps_the_ends_and_the_right_number(skip_ratio: float) -> None:
    kept = 8 - round(8 * skip_ratio)
    found = searched(6, skip_ratio=skip_ratio)
    assert len(found) == min(6, math.comb(6, kept - 2))
    for one in found:
        assert isinstance(one.mask, LayerMask)
        assert len(one.mask.kept) == 8 and len(one.mask.layers) == kept == kept_count(8, skip_ratio)
        assert one.mask.kept[0] and one.mask.kept[-1]


@pytest.mark.parametrize("skip_ratio", [0.0, 0.3, 0.45, 0.75])
def test_every_sublayer_mask_keeps_both_halves_of_the_ends_and_the_right_number(skip_ratio: float) -> None:
    kept = 16 - round(16 * skip_ratio)
    for one in searched(6, skip_ratio=skip_ratio, units="sublayers"):
        assert isinstance(one.mask, SublayerMask)
        assert sum(one.mask.attention) + sum(one.mask.mlp) == kept
        assert all(half[end] for half in (one.mask.attention, one.mask.mlp) for end in (0, -1))
        assert one.mask.skip_ratio == pytest.approx(1 - kept / 16)


class Impatient(random.Random):
    """A source of randomness that takes endless proposals for what they are."""

    draws = 0

    def random(self) -> float:
        self.draws += 1
        assert self.draws < 5000, "the search goes on forever"
        return super().random()


@pytest.mark.parametrize("exchange", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_search_ends_when_no_mask_is_left(seed: int, exchange: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals.random, "Random", Impatient)
    found = searched(1000, seed=seed, exchange=exchange)
    assert len({one.mask for one in found}) == len(found) == math.comb(6, 4)


def test_proposals_exchange_one_layer_of_the_best_mask() -> None:
    lowest, best = math.inf, None
    for one in searched(6, exchange=1.0):
        assert best is None or len(set(one.mask.layers) - set(best.layers)) == 1
        assert one.proposal == ("random" if best is None else "exchange")
        if one.cost < lowest:
            lowest, best = one.cost, one.mask


@pytest.mark.parametrize("patience", [1, 4])
def test_search_stops_when_the_best_is_unchanged_for_long(patience: int) -> None:
    costs = [one.cost for one in searched(200, depth=12, skip_ratio=0.5)]
    best_so_far = [min(costs[: step + 1]) for step in range(len(costs))]
    unchanged = [step for step in range(patience, len(costs)) if best_so_far[step - patience] == best_so_far[step]]
    wanted = unchanged[0] + 1
    assert [one.cost for one in searched(200, depth=12, skip_ratio=0.5, patience=patience)] == costs[:wanted]


BAYES: dict[str, Any] = {"depth": 10, "skip_ratio": 0.5, "bayes_every": 4, "seed": 3}


@pytest.fixture(scope="module")
def whole() -> list[Evaluation]:
    """Under the plan that a killed search is compared with."""
    return searched(17, **BAYES)


def test_every_so_many_proposals_are_bayesian_and_seeded(whole: list[Evaluation]) -> None:
    assert len({one.mask for one in whole}) == 17
    kinds = {step: one.proposal for step, one in enumerate(whole, 1)}
    assert {step for step, kind in kinds.items() if kind == "bayes"} <= {4, 8, 12, 16}
    assert kinds[12] == kinds[16] == "bayes", "a proposal that was there before is the only other case"
    assert outcome(searched(9, **BAYES)) == outcome(whole[:9])


def test_bayesian_proposals_learn_what_costs(whole: list[Evaluation]) -> None:
    """With costs that add up, a proposal from 15 masks is cheaper than most masks drawn at random."""
    drawn = sorted(one.cost for one in searched(1000, depth=10, skip_ratio=0.5))
    assert whole[15].cost < drawn[len(drawn) // 3]


@pytest.mark.parametrize("killed_after", [1, 7, 16])
def test_a_killed_search_goes_on_as_if_nothing_had_happened(whole: list[Evaluation], killed_after: int) -> None:
    done = whole[:killed_after]
    scored: list[Mask] = []

    def counting(mask: Mask) -> Evaluation:
        scored.append(mask)
        return weighted()(mask)

    plan = SearchPlan(10, 0.5, 17, seed=3, bayes_every=4)
    resumed = list(search(plan, counting, {one.mask: one for one in done}))
    assert outcome(resumed) == outcome(whole)
    assert scored == [one.mask for one in whole[killed_after:]], "nothing is scored twice"


def test_going_on_with_other_costs_would_be_seen(whole: list[Evaluation]) -> None:
    plan = SearchPlan(10, 0.5, 17, seed=3, bayes_every=4)
    assert outcome(list(search(plan, weighted(1), {one.mask: one for one in whole[:7]}))) != outcome(whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "job.steps=0: want at least 1 mask."),
        ({"exchange": 1.1}, "job.exchange=1.1: want a probability."),
        ({"exchange": math.nan}, "job.exchange=nan"),
        ({"bayes_every": 0}, "job.bayes_every=0: want at least 1 step, or null for none."),
        ({"patience": 0}, "job.patience=0: want at least 1 step, or null for none."),
        ({"units": "layer"}, "unknown job.units 'layer': did you mean 'layers'"),
        ({"skip_ratio": 1.0}, "skip_ratio=1.0 leaves no layer of 8"),
        ({"skip_ratio": -0.2}, "skip_ratio=-0.2 leaves no layer of 8"),
        ({"skip_ratio": 0.9}, "skip_ratio=0.9 leaves 1 of 8 layers; first and last always stay."),
        ({"skip_ratio": 0.9, "units": "sublayers"}, "skip_ratio=0.9 of 16 sublayers: want 0 or more, and the four of"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        searched(**{"steps": 2} | settings)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
