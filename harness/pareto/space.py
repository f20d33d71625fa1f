"""What a trial may choose, and the arms that a choice stands for."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from harness.errors import UserError, unknown

STRICTNESS = "harness.decode.gate.thresholds.Strictness"


class Asked(Protocol):
    """What is asked for a value: a trial of Optuna."""

    def suggest_float(self, name: str, low: float, high: float) -> float: ...

    def suggest_int(self, name: str, low: int, high: int) -> int: ...

    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


@dataclass(frozen=True)
class Point:
    """One choice of thresholds, depth and gamma."""

    alpha1: float
    alpha2: float
    skip_ratio: float
    gamma: int

    @property
    def text(self) -> str:
        return f"alpha1 {self.alpha1:.2f}, alpha2 {self.alpha2:.2f}, skip {self.skip_ratio:g}, gamma {self.gamma}"


@dataclass(frozen=True)
class Space:
    """Bounds, from and to, both included; ``alpha2_share`` is alpha2 / alpha1.

    Raises:
        UserError: bounds that are none, or outside what the gate, the slim verifier or a block can have.
    """

    alpha1: tuple[float, float]
    alpha2_share: tuple[float, float]
    skip_ratios: tuple[float, ...]
    gammas: tuple[int, int]

    def __post_init__(self) -> None:
        for key in ("alpha1", "alpha2_share"):
            check_bounds(key, getattr(self, key), lambda value: 0 < value < 1, "between 0 and 1")
        check_bounds("gammas", self.gammas, lambda value: type(value) is int and value >= 1, "whole numbers from 1")
        ratios = self.skip_ratios
        if not ratios or not all(type(ratio) in (int, float) and 0 < ratio < 1 for ratio in ratios):
            raise UserError(f"job.skip_ratios={list(ratios)}: want one share of layers at least, each between 0 and 1.")

    def ask(self, trial: Asked) -> Point:
        alpha1 = trial.suggest_float("alpha1", *self.alpha1)
        share = trial.suggest_float("alpha2_share", *self.alpha2_share)
        ratio = trial.suggest_categorical("skip_ratio", list(self.skip_ratios))
        return Point(alpha1, alpha1 * share, ratio, trial.suggest_int("gamma", *self.gammas))


def check_bounds(key: str, bounds: Any, allowed: Any, wanted: str) -> None:
    if len(bounds) != 2 or not all(type(value) in (int, float) and allowed(value) for value in bounds):
        raise UserError(f"job.{key}={list(bounds)}: want [FROM, TO], {wanted}.")
    if bounds[0] > bounds[1]:
        raise UserError(f"job.{key}={list(bounds)}: want [FROM, TO], the smaller one first.")


def check_arm(methods: Mapping[str, Any], arm: str) -> None:
    """
    Raises:
        UserError: there is no such arm, or none whose thresholds and depth could be searched.
    """
    if arm not in methods:
        raise unknown("job.arm", arm, methods)
    node = methods[arm]
    gate = node.get("gate") or {}
    if gate.get("_target_") != STRICTNESS:
        raise UserError(f"job=pareto searches the thresholds of gate=strictness; {arm} has another gate, or none.")
    if "skip_ratio" not in (node.get("slim") or {}):
        raise UserError(
            "job=pareto searches the slim verifier's skip_ratio, which this slim=NAME does not have: choose slim=even, "
            "or another that has one."
        )


def arms_at(methods: Mapping[str, Any], arm: str, point: Point) -> dict[str, Any]:
    """The methods' configs with ``arm`` set to ``point``, and every drafting arm to its gamma."""
    made: dict[str, Any] = copy.deepcopy(dict(methods))
    for node in made.values():
        if "gamma" in node:
            node["gamma"] = point.gamma
    set_to(made[arm], point)
    return made


def front_arms(methods: Mapping[str, Any], arm: str, points: Mapping[str, Point]) -> dict[str, Any]:
    """The methods' configs with a copy of ``arm`` for each point in its place."""
    made = {name: copy.deepcopy(node) for name, node in methods.items() if name != arm}
    for name, point in points.items():
        made[name] = copy.deepcopy(methods[arm])
        set_to(made[name], point)
    return made


def set_to(node: dict[str, Any], point: Point) -> None:
    node["gamma"] = point.gamma
    node["gate"] |= {"alpha1": point.alpha1, "alpha2": point.alpha2}
    node["slim"]["skip_ratio"] = point.skip_ratio
    if "mask" in node["slim"]:
        node["slim"]["mask"] = None
