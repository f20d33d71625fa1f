"""Two-tier rules of acceptance beside their closed forms, over two tables: each token given the one before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from harness.decode.block_verification import BlockVerification
from harness.decode.cascade import Cascade, Chow, Diff, Opt, Renormalised, TokenV1, TokenV2, TokenV3
from harness.decode.length import Fixed, Length
from harness.decode.lossy import Lossy
from harness.decode.rule import Lossless, Rule
from harness.decode.sets import Eta, MinP
from harness.decode.speculative import Speculative
from harness.decode.truncated import Truncated
from harness.decode.typical import Typical
from harness.drafters.base import Draft, Drafter, draft_with
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.sampling import Chooser, Sampling
from tests.toys import drafted, tiers_of, tiny_model

VOCAB = 5
Row = list[float]
RuleFactory = Callable[[Sampling], Rule]


@dataclass(frozen=True)
class At:
    """What a closed form may read at one position: p and q as sampled from, and both at temperature 1."""

    p: Row
    q: Row
    raw_p: Row
    raw_q: Row


def norm(weights: Sequence[float]) -> Row:
    return [weight / sum(weights) for weight in weights]


def above(one: Sequence[float], other: Sequence[float]) -> Row:
    return [max(0.0, a - b) for a, b in zip(one, other, strict=True)]


def lossy_form(at: At, alpha: float, beta: float) -> Row:
    keep = [min(p, q / (1 - alpha)) for p, q in zip(at.p, at.q, strict=True)]
    if (left := 1 - sum(keep)) < 1e-12:
        return keep
    residual = above([q / beta for q in at.q], at.p)
    residual = norm(residual if sum(residual) > 0 else at.q)
    return [k + left * r for k, r in zip(keep, residual, strict=True)]


def by_position(keep: Callable[[At], bool], at: At) -> Row:
    return at.p if keep(at) else at.q


def by_token(keep: Callable[[At, int], bool], at: At) -> Row:
    lost = sum(p for v, p in enumerate(at.p) if not keep(at, v))
    return [(p if keep(at, v) else 0.0) + lost * at.q[v] for v, p in enumerate(at.p)]


def restricted(law: Row, kept: Sequence[bool]) -> Row:
    return norm([prob if inside else 0.0 for prob, inside in zip(law, kept, strict=True)])


def min_p(at: At, alpha: float) -> list[bool]:
    return [q >= (1 - alpha) * max(at.raw_q) for q in at.raw_q]


def eta(at: At, epsilon: float, delta: float) -> list[bool]:
    entropy = -sum(q * float(torch.tensor(q, dtype=torch.float64).log()) for q in at.q if q > 0)
    bound = min(epsilon, delta * float(torch.tensor(-entropy, dtype=torch.float64).exp()))
    return [q >= bound for q in at.q]


def renormalised_form(at: At, alpha: float) -> Row:
    kept = min_p(at, alpha)
    return restricted(at.p, kept) if any(p for p, inside in zip(at.p, kept, strict=True) if inside) else at.q


def typical_form(at: At, epsilon: float, delta: float) -> Row:
    kept = eta(at, epsilon, delta)
    inside, lost = restricted(at.q, kept), sum(p for p, yes in zip(at.p, kept, strict=True) if not yes)
    return [(p if kept[v] else 0.0) + lost * inside[v] for v, p in enumerate(at.p)]


def distance(at: At) -> float:
    return sum(above(at.p, at.q))


@dataclass(frozen=True)
class Case:
    """A rule, the law of a drafted position in closed form, and that of a bonus token."""

    rule: RuleFactory
    form: Callable[[At], Row]
    bonus: Callable[[At], Row] = lambda at: at.q


def full(at: At) -> Row:
    return at.q


CASES: dict[str, Case] = {
    "speculative": Case(Lossless, full),
    "block_verification": Case(BlockVerification, full),
    "lossy": Case(partial(Lossy, alpha=0.4), partial(lossy_form, alpha=0.4, beta=1.0)),
    "lossy, small beta": Case(partial(Lossy, alpha=0.4, beta=0.7), partial(lossy_form, alpha=0.4, beta=0.7)),
    "lossy, large beta": Case(partial(Lossy, alpha=0.3, beta=1.2), partial(lossy_form, alpha=0.3, beta=1.2)),
    "lossy, no residual": Case(partial(Lossy, alpha=0.1, beta=1e6), partial(lossy_form, alpha=0.1, beta=1e6)),
    "cascade_chow": Case(
        partial(Cascade, deferral=Chow(0.55)), partial(by_position, lambda at: max(at.raw_p) >= 1 - 0.55)
    ),
    "cascade_diff": Case(
        partial(Cascade, deferral=Diff(0.05)), partial(by_position, lambda at: max(at.raw_p) >= max(at.raw_q) - 0.05)
    ),
    "cascade_opt": Case(
        partial(Cascade, deferral=Opt(0.2)),
        partial(by_position, lambda at: max(at.raw_p) >= max(at.raw_q) - 0.2 * distance(at)),
    ),
    "cascade_token_v1": Case(
        partial(Cascade, deferral=TokenV1(0.3)), partial(by_token, lambda at, v: at.raw_p[v] >= max(at.raw_q) - 0.3)
    ),
    "cascade_token_v2": Case(
        partial(Cascade, deferral=TokenV2(0.3)), partial(by_token, lambda at, v: at.raw_q[v] >= max(at.raw_q) - 0.3)
    ),
    "cascade_token_v3": Case(
        partial(Cascade, deferral=TokenV3(0.6)), partial(by_token, lambda at, v: min_p(at, 0.6)[v])
    ),
    "spec_cascade": Case(partial(Cascade, deferral=Renormalised(0.6)), partial(renormalised_form, alpha=0.6)),
    "typical": Case(
        partial(Typical, epsilon=0.3, delta=0.6),
        partial(typical_form, epsilon=0.3, delta=0.6),
        lambda at: restricted(at.q, eta(at, 0.3, 0.6)),
    ),
    "truncated": Case(
        partial(Truncated, kept=MinP(0.85)),
        lambda at: restricted(at.q, min_p(at, 0.85)),
        lambda at: restricted(at.q, min_p(at, 0.85)),
    ),
    "truncated_typical": Case(
        partial(Truncated, kept=Eta(0.3, 0.6)),
        lambda at: restricted(at.q, eta(at, 0.3, 0.6)),
        lambda at: restricted(at.q, eta(at, 0.3, 0.6)),
    ),
}
READS_DRAFTER = ("cascade_chow", "cascade_diff", "cascade_opt", "cascade_token_v1")


@cache
def table(seed: int, spread: float = 1.0) -> Tensor:
    """Logits of the next token, a row for each token before."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)


class TableTier(Tier):
    """Answers with rows of a table and processes nothing."""

    rows_of: Tensor

    def forward(self, sequence: Sequence[int], rows: int, drafts: Tensor | None = None) -> Tensor:
        tokens = [*sequence, *(drafts.tolist() if drafts is not None else [])]
        return self.rows_of[tokens[-rows:]]


class TableDrafter:
    """Draws from a table; ``certain``: takes its likeliest tokens and says no more about them."""

    name = "table"

    def __init__(self, tier: Tier, sampling: Sampling, certain: bool) -> None:
        self.tier: Tier | None = None
        self.drafts_with = tier
        self.sampling = sampling
        self.has_probs = not certain

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        if self.has_probs:
            return draft_with(self.drafts_with, self.sampling, tokens, count, chooser)
        text = list(tokens)
        for _ in range(count):
            text.append(int(self.drafts_with.forward(text, 1).argmax()))
        return drafted(text[len(tokens) :])


@cache
def tiny() -> Model:
    return tiny_model(0, kept=(0,), vocab_size=VOCAB)


def two_tiers(
    rule: RuleFactory,
    sampling: Sampling,
    small: Tensor,
    large: Tensor,
    gamma: int = 2,
    certain: bool = False,
    length: Callable[[Drafter], Length] = Fixed,
) -> Speculative:
    """The real method over a drafter and a full verifier that are tables of logits."""
    tiers = tiers_of(tiny(), capacity=8)

    def tier(name: str, logits: Tensor) -> TableTier:
        made = TableTier(name, tiers.model, tiers.cache, range(1))
        made.rows_of = logits
        return made

    def drafter(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
        return TableDrafter(tier("draft", small), sampling, certain)

    tiers.full = tier("full", large)
    return Speculative(tiers, sampling, tiny(), gamma, drafter, length, rule)


def positions(sampling: Sampling, small: Tensor, large: Tensor, certain: bool = False) -> list[At]:
    """What a closed form reads behind each token."""
    p, raw_p = sampling.warp(small), Sampling(1.0).warp(small)
    if certain:
        p = raw_p = Sampling().warp(small)
    rows = (p, sampling.warp(large), raw_p, Sampling(1.0).warp(large))
    return [At(*(law[token].tolist() for law in rows)) for token in range(len(small))]
