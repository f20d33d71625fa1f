"""Speculative cascades (Faster Cascades via Speculative Decoding, Narasimhan et al., arXiv 2405.19261).

Here p is the drafter's law and q the full verifier's; the paper has the letters the other way round. The general recipe
(Alg. 4) holds each drafted position to a target law pi made of p and q: v is kept with probability min(1, pi(v)/p(v)),
and otherwise replaced from norm(max(0, pi - p)), so that the position emits pi exactly. What pi is, a deferral rule
says, one small class each. Formulas and bounds of alpha were read in the authors' code (google-research,
speculative_cascades_gemma.ipynb), which drafts one token at a time.
"""

import sys
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from harness.decode.rule import Verdict, drawn_from, held_to
from harness.decode.sets import check_between, near_top
from harness.drafters.base import Draft
from harness.sampling import Chooser, Dense, Law, Sampling, widen


@dataclass(frozen=True, slots=True)
class Seen:
    """The two laws at each draft: as sampled from (greedy: one-hot), and raw, at temperature 1 without truncation."""

    drafter: Float[Tensor, "G V"]
    verifier: Float[Tensor, "G V"]
    raw_drafter: Float[Tensor, "G V"]
    raw_verifier: Float[Tensor, "G V"]


@runtime_checkable
class Deferral(Protocol):
    """A rule that makes the target law. ``lossless``: the target is the verifier's law whatever the two laws are."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    @property
    def reads_drafter(self) -> bool: ...

    def target(self, seen: Seen) -> Float[Tensor, "G V"]: ...


class Cascade:
    """Hold every drafted position to the target of ``deferral``.

    A bonus token and one behind no draft have no p and come from q, as if deferred (reading: ours). Maxima and
    thresholds read raw probabilities as the authors' code does; the target itself is made of what is sampled from.

    Greedy decoding, as in that code: p and q in the target are one-hot on the two likeliest tokens, and the deferral
    still reads raw probabilities. So the draft is kept if it is the verifier's token or the rule does not defer.

    When sampling, a draft brings the law it was drawn from alone. Its raw law is recovered as norm(p^T), which lacks
    the tokens that top-k and top-p cut off, and those whose probability at a temperature T far below 1 is rounded to
    zero (reading: ours).
    """

    reading = "bonus tokens come from the verifier"

    def __init__(self, sampling: Sampling, deferral: Deferral) -> None:
        self.sampling = sampling
        self.deferral = deferral
        self.name = deferral.name
        self.settings = deferral.settings
        self.lossless = deferral.lossless
        self.reads_drafter = deferral.reads_drafter

    def law(self, logits: Float[Tensor, "R V"]) -> Law:
        return self.sampling.law(logits)

    def judge(self, logits: Float[Tensor, "R V"], draft: Draft, chooser: Chooser) -> Verdict:
        verified = self.sampling.warp(logits)
        drafted = drawn_from(draft, verified)
        raw = torch.softmax(widen(logits[:-1]), dim=-1)
        target = self.deferral.target(Seen(drafted, verified[:-1], self.raw(draft, drafted), raw))
        return held_to(Dense(torch.cat((target, verified[-1:]))), draft, chooser)

    def raw(self, draft: Draft, drafted: Float[Tensor, "G V"]) -> Float[Tensor, "G V"]:
        if draft.logits is not None:
            return draft.distributions()
        if self.sampling.temperature in (0, 1):
            return drafted
        powers = drafted.pow(self.sampling.temperature)
        return powers / powers.sum(dim=-1, keepdim=True)


def kept_at(seen: Seen, keep: Bool[Tensor, "G 1"]) -> Float[Tensor, "G V"]:
    """Sequence-wise deferral: pi = p at the positions that are kept, q at those that are deferred."""
    return torch.where(keep, seen.drafter, seen.verifier)


def kept_tokens(seen: Seen, keep: Bool[Tensor, "G V"]) -> Float[Tensor, "G V"]:
    """Token-specific deferral (eq. 11): pi(v) = p(v) where v is kept, and the rest of p's mass is spread as q is."""
    deferred = (seen.drafter * ~keep).sum(dim=-1, keepdim=True)
    return seen.drafter * keep + deferred * seen.verifier


class Lenient:
    """What the rules share: ``alpha`` within ``bounds``, the larger the more is kept.

    Raises:
        UserError: alpha out of bounds.
    """

    name: str
    bounds: tuple[float, float] = (0.0, 1.0)
    reads_drafter = False

    def __init__(self, alpha: float = 0.5) -> None:
        low, high = self.bounds
        check_between(self.name, low, high, alpha=alpha)
        self.alpha = alpha
        self.settings = f"alpha={alpha:g}"

    @property
    def lossless(self) -> bool:
        return False


class Chow(Lenient):
    """Keep a position where max p >= 1 - alpha (eq. 2)."""

    name = "cascade_chow"
    reads_drafter = True

    def target(self, seen: Seen) -> Float[Tensor, "G V"]:
        return kept_at(seen, seen.raw_drafter.amax(dim=-1, keepdim=True) >= 1 - self.alpha)


class Diff(Lenient):
    """Keep a position where max p >= max q - alpha (eq. 5). Nothing is kept at alpha = -1."""

    name = "cascade_diff"
    bounds = (-1.0, 1.0)
    reads_drafter = True

    @property
    def lossless(self) -> bool:
        return self.alpha == -1

    def target(self, seen: Seen) -> Float[Tensor, "G V"]:
        if self.lossless:
            return seen.verifier
        small, full = (raw.amax(dim=-1, keepdim=True) for raw in (seen.raw_drafter, seen.raw_verifier))
        return kept_at(seen, small >= full - self.alpha)


class Opt(Lenient):
    """Keep a position where max p >= max q - alpha D (eq. 10), D the total variation of what is sampled from."""

    name = "cascade_opt"
    bounds = (-sys.float_info.max, sys.float_info.max)
    reads_drafter = True

    def target(self, seen: Seen) -> Float[Tensor, "G V"]:
        small, full = (raw.amax(dim=-1, keepdim=True) for raw in (seen.raw_drafter, seen.raw_verifier))
        distance = (seen.drafter - seen.verifier).clamp(min=0).sum(dim=-1, keepdim=True)
        return kept_at(seen, small >= full - self.alpha * distance)


class TokenV1(Lenient):
    """Keep a token where p(v) >= max q - alpha (eq. 13). Nothing is kept at alpha = -1."""

    name = "cascade_token_v1"
    bounds = (-1.0, 1.0)
    reads_drafter = True

    @property
    def lossless(self) -> bool:
        return self.alpha == -1

    def target(self, seen: Seen) -> Float[Tensor, "G V"]:
        if self.lossless:
            return seen.verifier
        bound = seen.raw_verifier.amax(dim=-1, keepdim=True) - self.alpha
        return kept_tokens(seen, seen.raw_drafter >= bound)


class TokenV2(Lenient):
    """Keep a token where q(v) >= max q - alpha (eq. 14). Nothing is kept below alpha = 0."""

    name = "cascade_token_v2"
    bounds = (-1.0, 1.0)

    @property
    def lossless(self) -> bool:
        return self.alpha < 0

    def target(self, seen: Seen) -> Float[Tensor, "G V"]:
        if self.lossless:
            return seen.verifier
        bound = seen.raw_verifier.amax(dim=-1, keepdim=True) - self.alpha
        return kept_tokens(seen, seen.raw_verifier >= bound)


class TokenV3(Lenient):
    """Keep a token where q(v) >= (1 - alpha) max q (eq. 15): the set that ``sets.MinP`` has."""

    name = "cascade_token_v3"

    def target(self, seen: Seen) -> Float[Tensor, "G V"]:
        return kept_tokens(seen, near_top(seen.raw_verifier, self.alpha))


class Renormalised(Lenient):
    """TokenV3's set A, and pi = p restricted to A and normalised: SpecCascade as arXiv 2607.26627 models it.

    TokenV3 spreads the mass of p outside A as q is, over all tokens; here it stays in A, in proportion to p (eqs. 12
    and 13 there). Where p has no mass in A, pi is q (reading: ours).
    """

    name = "spec_cascade"
    reading = "the verifier's law where the drafter has no mass in the set"

    def target(self, seen: Seen) -> Float[Tensor, "G V"]:
        inside = seen.drafter * near_top(seen.raw_verifier, self.alpha)
        mass = inside.sum(dim=-1, keepdim=True)
        return torch.where(mass > 0, inside / mass, seen.verifier)
