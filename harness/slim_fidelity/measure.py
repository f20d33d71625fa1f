"""Slim verifiers, and a drafter, on text that the full verifier wrote: what each says at the same positions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from harness.decode.slim import Slim
from harness.dimr import CalibrationText, block_logits
from harness.drafters.base import Drafter
from harness.errors import UserError
from harness.model.cache import Tail
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.sampling import Sampling, top, widen
from harness.slim_fidelity.records import SlimFacts, SlimFidelitySum
from harness.theory import deltas, exact_law, mass, mixture, regions, step_cost, three_way, total_variation

MakeSlim = Callable[[Tiers, Model], Slim]
MakeDrafter = Callable[[Tiers, Sampling, Model], Drafter]


@dataclass(frozen=True, slots=True)
class Margins:
    """What the quantities depend on besides the distributions.

    ``alpha``, ``beta``: of the step cost (eq. 9). ``accept_at``, ``keep_at``: the gate's thresholds on q'(v)/M'.
    ``alpha1``, ``alpha2``: of delta1 and delta2 (eq. B.11).
    """

    alpha: float
    beta: float
    accept_at: float
    keep_at: float
    alpha1: float
    alpha2: float


def drafting_tier(drafter: Drafter) -> Tier:
    """Raises UserError for a drafter without a model to ask for its distribution."""
    if type(drafter.tier) is not Tier:
        raise UserError(
            f"job=fidelity asks the drafter for its distribution at every position, and {drafter.name} has no tier: "
            "choose self_skip, early_exit or small_lm."
        )
    return drafter.tier


def draft_logits(
    text: CalibrationText, model: Model, drafter: MakeDrafter, block: int
) -> tuple[str, Float[Tensor, "N V"]]:
    """The drafter's name, and what it says of each token of the continuation."""
    others = list(text.tiers.others)
    made = drafter(text.tiers, Sampling(), model)
    logits = block_logits(text, drafting_tier(made), block)
    text.tiers.others[:] = others
    return made.name, logits


def slim_logits(
    text: CalibrationText, model: Model, make: MakeSlim, kind: str, block: int
) -> tuple[SlimFacts, Float[Tensor, "N V"]]:
    """What is known of a slim verifier, and what it says of each token of the continuation."""
    slim = make(text.tiers, model)
    logits = block_logits(text, slim.tier, block)
    text.tiers.others.remove(slim.tier)
    facts = SlimFacts(slim.source, kind, slim.skip_ratio, slim.cache, slim.layers, bytes_of(slim.tier))
    return facts, logits


def bytes_of(tier: Tier) -> int:
    """Bytes that a position takes in a cache of the tier's own; 0 of a provisional tail, whose room is the full's."""
    if isinstance(tier.cache, Tail):
        return 0
    storages = tier.cache.storages  # type: ignore[attr-defined]
    return sum(part.nbytes for storage in storages for part in storage) // tier.cache.capacity


def quantities(
    full: Float[Tensor, "N V"], slim: Float[Tensor, "N V"], draft: Float[Tensor, "N V"], margins: Margins
) -> dict[str, Float[Tensor, "N"]]:
    """Everything in ``harness.slim_fidelity.numbers.QUANTITIES`` at each position, from logits, at temperature 1."""
    q, slim_q, p = (torch.softmax(widen(logits), dim=-1) for logits in (full, slim, draft))
    found = regions(slim_q, margins.accept_at, margins.keep_at)
    delta1, delta2 = deltas(p, slim_q, margins.alpha1, margins.alpha2)
    pair = (margins.alpha, margins.beta)
    return {
        "agreement": (top(full) == top(slim)).double(),
        "tv_slim": total_variation(slim_q, q),
        "cost_full_slim": step_cost(full, slim, *pair),
        "cost_full_draft": step_cost(full, draft, *pair),
        "cost_slim_draft": step_cost(slim, draft, *pair),
        "accept": mass(p, found.accept),
        "regenerate": mass(p, found.regenerate),
        "escalate": mass(p, found.escalate),
        "delta1": delta1,
        "delta2": delta2,
        "tv_draft": total_variation(p, q),
        "tv_mixture": total_variation(mixture(p, slim_q, q, delta1, delta2), q),
        "tv_three_way": total_variation(three_way(p, slim_q, q, found), q),
        "tv_exact": total_variation(exact_law(p, slim_q, q, found), q),
    }


def by_place(
    slim: str, task: str, example_id: str, terms: Mapping[str, Float[Tensor, "N"]], block: int
) -> Sequence[SlimFidelitySum]:
    """Positions 1, 1 + block, 1 + 2 block, ... of the continuation stand at place 1."""
    count = len(terms["agreement"])
    return [
        SlimFidelitySum(
            slim=slim,
            task=task,
            example_id=example_id,
            place=start + 1,
            positions=len(range(start, count, block)),
            sums={name: float(term[start::block].double().sum()) for name, term in terms.items()},
        )
        for start in range(min(block, count))
    ]
