"""What an audit finds, and its counts: tokens that the slim verifier decided, prompts with both texts, shares."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.compare import divide

BINS = 5
"""Bins of confidence, of equal width from 0 to 1."""

PART = 16
"""Output tokens of a bin of positions."""


class Decision(StrEnum):
    """How a slim verifier decides a token: it lets a draft pass, or writes one itself."""

    ACCEPT = "accept"
    REGENERATE = "regenerate"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class SlimToken:
    """An output token that a slim verifier decided: an accepted draft, or one that it wrote.

    ``position``  output tokens before it; ``place`` in its block, from 1.
    ``confidence``  its probability under the slim verifier / the largest there (q'(v)/M', temperature 1). Of an
    accepted draft this is what the gates of the paper read; of a regenerated token it is not: its draft is not stored.
    ``slim``  which slim verifier it was, from 1.
    ``wanted``  the full verifier's likeliest token there, ``wanted_text`` as text; equal to ``token`` where it agrees.
    ``gap``  log of the full verifier's probability of ``wanted`` minus that of ``token``, at the run's temperature (1
    when greedy); 0 where they are equal.
    ``wrong``  the full verifier would not have written it: see ``harness.audit.judge``.
    ``near_tie``  it differs, by less than rounding can explain, and does not count as wrong.
    """

    position: int
    place: int
    route: Decision
    confidence: float
    token: int
    text: str
    wanted: int
    wanted_text: str
    gap: float
    wrong: bool
    near_tie: bool
    slim: int = 1

    def __post_init__(self) -> None:
        if self.wrong and self.near_tie:
            raise ValueError(f"a near-tie is not wrong, got {self}")


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the text would have been had the full verifier gone on, greedily, in place of the token at ``position``.

    ``score`` in the output's metric, None where it has none.
    """

    position: int
    text: str
    score: float | None


@dataclass(frozen=True, slots=True)
class AuditedOutput:
    """An output beside the baseline's. ``pieces`` are the texts of its tokens; ``tokens`` those of the slim verifiers.

    ``metric`` is the task's first; ``score`` and ``baseline_score`` of this prompt, None where it has none.
    ``continuations`` from before each of the first wrong tokens, in order; none where they were not asked for.
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
    continuations: tuple[Continuation, ...] = ()

    @property
    def effects(self) -> dict[int, float | None]:
        """By position of a wrong token, what it did to the score: score if the full verifier goes on behind it minus
        score if it goes on in its place.

        Behind it means from before the next wrong token: in between the method's text stands. The last continuation is
        compared with the output as it is, so that its effect is that of all that follows too, and all of them add up
        to what the first wrong token and all behind it cost.
        """
        scores = [*(one.score for one in self.continuations), self.score]
        return {
            one.position: None if after is None or before is None else after - before
            for one, before, after in zip(self.continuations, scores, scores[1:], strict=False)
        }

    @property
    def wrong(self) -> tuple[SlimToken, ...]:
        return tuple(token for token in self.tokens if token.wrong)

    @property
    def largest_gap(self) -> float:
        return max((token.gap for token in self.wrong), default=0.0)

    @property
    def score_change(self) -> float | None:
        """Score minus the baseline's: of all its wrong tokens together; ``effects`` tells them apart."""
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
    if token.route is not Decision.ACCEPT:
        return "written by slim"
    lower = min(BINS - 1, math.floor(token.confidence * BINS))
    return f"{lower / BINS:.1f} to {(lower + 1) / BINS:.1f}"


def position_bin(token: SlimToken) -> str:
    first = token.position // PART * PART
    return f"{first + 1} to {first + PART}"


SLIM = "slim verifier"

GROUPS: dict[str, Callable[[SlimToken], str]] = {
    "all": lambda token: "all",
    "route": lambda token: token.route.value,
    "confidence": confidence_bin,
    "place in the block": lambda token: str(token.place),
    "output position": position_bin,
    SLIM: lambda token: str(token.slim),
}
"""What the share of wrong tokens is looked at by; the last one where there are several."""


def shares(outputs: Sequence[AuditedOutput]) -> list[Share]:
    """Every share of every task and arm; values in rising order."""
    found = []
    for task, arm in dict.fromkeys((output.task, output.arm) for output in outputs):
        mine = [token for output in outputs if (output.task, output.arm) == (task, arm) for token in output.tokens]
        for by, value_of in GROUPS.items():
            if by == SLIM and all(token.slim == 1 for token in mine):
                continue
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
