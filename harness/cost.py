"""What speculative decoding can gain, from costs and rates alone: predicted speedups, ceilings, break-even.

In the closed forms a cost is seconds of a forward over seconds of the full verifier's at one token; ``c`` is the
drafter's, per drafted token, ``c'`` the slim verifier's, per block. Assumed there, with batch 1 and few tokens: a pass
over a block of gamma costs as much as one over a single token (memory-bound), and nothing besides forwards costs
anything. Rates count every draft as accepted independently with one probability. The last part takes none of this for
granted: there the time of a forward by rows and context is fitted to measured seconds.

Sources: Leviathan et al. (arXiv 2211.17192), theorem 3.8, for two tiers; for three the same count of passes.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from harness.errors import UserError


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a forward, in full passes: ``draft`` per drafted token, ``slim`` per block."""

    draft: float
    slim: float

    def __post_init__(self) -> None:
        for name in ("draft", "slim"):
            if not (value := getattr(self, name)) >= 0 or math.isinf(value):
                raise UserError(f"cost {name}={value}: want a number of full passes, 0 or more.")


@dataclass(frozen=True, slots=True)
class Shape:
    """The matrices of a model that a decoding step reads. Norms and biases are left out: they are no thousandth.

    ``architecture`` is ``decoder`` or ``encoder-decoder``: of the latter the decoder, whose layers attend to the
    encoder too; the keys and values for that are made once. ``mlp_matrices`` is 3 with a gated MLP, else 2.
    """

    model: str
    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied_head: bool
    mlp_matrices: int

    def layer_weights(self) -> int:
        """Weights of one layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key)
        cross = 2 * self.hidden_size * query if self.architecture == "encoder-decoder" else 0
        return attention + cross + self.mlp_matrices * self.hidden_size * self.intermediate_size

    def read_weights(self, layers: int | None = None) -> int:
        """Weights that one step reads: of ``layers`` (all of them), and of the head.

        The embedding is looked up, not read; tied to the head, it is the head that is counted.
        """
        kept = self.layers if layers is None else layers
        return kept * self.layer_weights() + self.vocab_size * self.hidden_size

    def kept_layers(self, skip_ratio: float) -> int:
        """Layers left when ``skip_ratio`` of them are skipped, as the slim verifiers count."""
        if not 0 <= skip_ratio < 1:
            raise UserError(f"skip_ratio={skip_ratio}: want a share of the layers, 0 to below 1.")
        return self.layers - round(skip_ratio * self.layers)


def kept_share(full: Shape, skip_ratio: float) -> float:
    """c' of a slim verifier by the bytes it reads: the head and the layers kept, over all layers and the head."""
    return full.read_weights(full.kept_layers(skip_ratio)) / full.read_weights()


def weight_share(drafter: Shape, full: Shape, draft_bytes: float = 1.0) -> float:
    """c by the bytes a drafter reads over those of the full verifier; ``draft_bytes``: of a weight over a weight's."""
    return draft_bytes * drafter.read_weights() / full.read_weights()


def _check(acceptance: float, gamma: int) -> None:
    if not 0 <= acceptance <= 1:
        raise UserError(f"acceptance={acceptance}: want a probability.")
    if gamma < 1:
        raise UserError(f"gamma={gamma}: want at least 1 drafted token a block.")


def _geometric(rate: float, terms: int) -> float:
    """1 + rate + ... + rate^(terms - 1)."""
    return float(terms) if rate == 1 else (1 - rate**terms) / (1 - rate)


def tokens_per_block(acceptance: float, gamma: int, bonus: int) -> float:
    """Expected output tokens of a block: kept drafts and a correction, or with ``bonus`` 1 the token behind them all.

    Raises:
        UserError: ``acceptance`` is no probability, or ``gamma`` below 1.
    """
    _check(acceptance, gamma)
    return _geometric(acceptance, gamma + bonus)


def speculative_speedup(acceptance: float, gamma: int, draft_cost: float) -> float:
    """Two tiers over one: tokens per block / (gamma c + 1). Some gamma pays if and only if acceptance > c."""
    return tokens_per_block(acceptance, gamma, bonus=1) / (gamma * draft_cost + 1)


def speculative_ceiling(gamma: int | None, draft_cost: float) -> float:
    """Every draft accepted; with ``gamma`` None the limit of long blocks, 1 / c."""
    if gamma is None:
        return 1 / draft_cost
    return (gamma + 1) / (gamma * draft_cost + 1)


def block_full_passes(accept: float, escalate: float, gamma: int) -> float:
    """Expected full passes of a block that is scored whole at its first escalation: P(a block escalates).

    ``accept`` and ``escalate`` are the gate's shares per examined draft; any other draft ends the block without one.
    """
    _check(accept, gamma)
    return escalate * _geometric(accept, gamma)


def three_tier_speedup(tokens: float, full_passes: float, gamma: int, costs: Costs) -> float:
    """Three tiers over one: tokens per block / (gamma c + c' + full passes per block)."""
    return tokens / (gamma * costs.draft + costs.slim + full_passes)


def ceiling(gamma: int, costs: Costs, bonus: int) -> float:
    """Three tiers with every draft accepted and no full pass: (gamma + bonus) / (gamma c + c')."""
    return (gamma + bonus) / (gamma * costs.draft + costs.slim)


def break_even(slim_cost: float) -> float:
    """Full passes per block below which a third tier beats two of equal tokens per block: 1 - c'."""
    return 1 - slim_cost


def break_even_at(tokens: float, gamma: float, costs: Costs) -> float:
    """The same where three tiers have ``tokens`` times the tokens per block: tokens (gamma c + 1) - gamma c - c'."""
    return tokens * (gamma * costs.draft + 1) - gamma * costs.draft - costs.slim


# Measured times instead of two constants.

KNOTS = (1, 2, 4, 6, 8, 16, 32)
"""Rows between which the time of a forward is a straight line; beyond the last one it stays so."""

Terms = Mapping[Hashable, float]
"""Sums over the forwards of a prompt, each to be weighted."""


@cache
def ramps(rows: int) -> tuple[float, ...]:
    """1, then for each pair of neighbouring knots how far ``rows`` is between them, 0 to 1.

    Weighted by what is not negative they sum to a time that never falls with rows, whatever its shape.
    """
    pairs = [(low, high) for low, high in pairwise(KNOTS)]
    within = [min(max(0.0, (rows - low) / (high - low)), 1.0) for low, high in pairs]
    beyond = max(0.0, (rows - KNOTS[-1]) / (KNOTS[-1] - KNOTS[-2]))
    return (1.0, *within[:-1], within[-1] + beyond)


def forward_terms(name: Hashable, shapes: Iterable[tuple[int, int]]) -> dict[Hashable, float]:
    """What the seconds of forwards of one tier are a weighted sum of; ``shapes`` are their rows and contexts.

    Terms: their number, the ramps between knots, the cached positions that they attend to, these for each row, and
    those of forwards of one row, whose attention may be another computation.
    """
    counts: Counter[int] = Counter()
    seen: Counter[int] = Counter()
    for rows, context in shapes:
        counts[rows] += 1
        seen[rows] += context
    if not counts:
        return {}
    columns = zip(*([n * part for part in ramps(rows)] for rows, n in counts.items()), strict=True)
    sums = [sum(column) for column in columns]
    attended = (sum(seen.values()), sum(rows * context for rows, context in seen.items()), seen[1])
    return {(name, place): value for place, value in enumerate((*sums, *map(float, attended)))}


def fitted(terms: Sequence[Terms], seconds: Sequence[float]) -> dict[Hashable, float]:
    """Seconds a unit of each term, none below 0, with which sums come nearest to ``seconds`` (least squares)."""
    names = list(dict.fromkeys(name for one in terms for name in one))
    table = np.array([[one.get(name, 0.0) for name in names] for one in terms], dtype=float).reshape(-1, len(names))
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0] = 1.0
    weights, _ = nnls(table / scale, np.array(seconds, dtype=float), maxiter=100 * (1 + len(names)))
    return dict(zip(names, (weights / scale).tolist(), strict=True))


def weighted(terms: Terms, weights: Mapping[Hashable, float]) -> float | None:
    """The seconds of a sum of terms; None where one of them was never measured."""
    if not terms.keys() <= weights.keys():
        return None
    return sum(value * weights[name] for name, value in terms.items())
