"""What an audit finds, and its counts: tokens that the slim verifier decided, prompts with both texts, shares."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness.compare import divide
from harness.records import Route

BINS = 5
"""Bins of confidence, of equal width from 0 to 1."""

PART = 16
"""Output tokens of a bin of positions."""


@dataclass(frozen=True, slots=True)
class SlimToken:
    """An output token that the slim verifier decided: an accepted draft, or one that it wrote (regenerate).

    ``position``  output tokens before it; ``place`` in its block, from 1.
    ``confidence``  its probability under the slim verifier / the largest there (q'(v)/M', temperature 1). Of an
    accepted draft this is what the gates of the paper read; of a regenerated token it is not: its draft is not stored.
    ``wanted``  the full verifier's likeliest token there, ``wanted_text`` as text; equal to ``token`` where it agrees.
    ``gap``  log of the full verifier's probability of ``wanted`` minus that of ``token``, at the run's temperature (1
    when greedy); 0 where they are equal.
    ``wrong``  the full verifier would not have written it: see ``harness.audit.judge``.
    ``near_tie``  it differs, by less than rounding can explain, and does not count as wrong.
    """

    position: int
    place: int
    route: Route
    confidence: float
    token: int
    text: str
    wanted: int
    wanted_text: str
    gap: float
    wrong: bool
    near_tie: bool

    def __post_init__(self) -> None:
        if self.route is Route.ESCALATE:
            raise ValueError(f"the slim verifier decides no escalated token, got {self}")
        if self.wrong and self.near_tie:
            raise ValueError(f"a near-tie is not wrong, got {self}")


@dataclass(frozen=True, slots=True)
class AuditedOutput:
    """An output beside the baseline's. ``pieces`` are the texts of its tokens; ``tokens`` those of the slim verifier.

    ``metric`` is the task's first; ``score`` and ``baseline_score`` of this prompt, None where it has none.
    """

    task: str
    arm: str
    example_id: str
    pieces: tuple[str, ...]
    baseline_text: str
    references: tuple[str, ...]
    metric: str
    score: float | None
    baseline_score: float | None
    tokens: tuple[SlimToken, ...]

    @property
    def wrong(self) -> tuple[SlimToken, ...]:
        return tuple(token for token in self.tokens if token.wrong)

    @property
    def largest_gap(self) -> float:
        return max((token.gap for token in self.wrong), default=0.0)

    @property
    def score_change(self) -> float | None:
        """Score minus the baseline's. One prompt has one score: it is no property of one of its wrong tokens."""
        return None if self.score is None or self.baseline_score is None else self.score - self.baseline_score


@dataclass(frozen=True, slots=True)
class Share:
    """Wrong tokens among those that the slim verifier decided; ``by`` says what ``value`` is a value of."""

    task: str
    arm: str
    by: str
    value: str
    decided: int
    wrong: int
    near_ties: int

    @property
    def share(self) -> float | None:
        return divide(self.wrong, self.decided)


def worst_first(outputs: Iterable[AuditedOutput]) -> list[AuditedOutput]:
    """Outputs with wrong tokens: the largest loss of score first, then the largest gap."""
    found = [output for output in outputs if output.wrong]
    return sorted(found, key=lambda output: (output.score_change or 0.0, -output.largest_gap, output.example_id))


def confidence_bin(token: SlimToken) -> str:
    if token.route is not Route.ACCEPT:
        return "regenerated"
    lower = min(BINS - 1, math.floor(token.confidence * BINS))
    return f"{lower / BINS:.1f} to {(lower + 1) / BINS:.1f}"


def position_bin(token: SlimToken) -> str:
    first = token.position // PART * PART
    return f"{first + 1} to {first + PART}"


GROUPS: dict[str, Callable[[SlimToken], str]] = {
    "all": lambda token: "all",
    "route": lambda token: token.route.value,
    "confidence": confidence_bin,
    "place in the block": lambda token: str(token.place),
    "output position": position_bin,
}
"""What the share of wrong tokens is looked at by."""


def shares(outputs: Sequence[AuditedOutput]) -> list[Share]:
    """Every share of every task and arm; values in rising order."""
    found = []
    for task, arm in dict.fromkeys((output.task, output.arm) for output in outputs):
        mine = [token for output in outputs if (output.task, output.arm) == (task, arm) for token in output.tokens]
        for by, value_of in GROUPS.items():
            groups: dict[str, list[SlimToken]] = {}
            for token in sorted(mine, key=lambda token: (token.confidence, token.position, token.place)):
                groups.setdefault(value_of(token), []).append(token)
            for value in sorted(groups, key=natural):
                group = groups[value]
                wrong, ties = sum(token.wrong for token in group), sum(token.near_tie for token in group)
                found.append(Share(task, arm, by, value, len(group), wrong, ties))
    return found


def natural(value: str) -> tuple[float, str]:
    """Numbers by size, words behind them."""
    try:
        return float(value.split(" ")[0]), value
    except ValueError:
        return math.inf, value
