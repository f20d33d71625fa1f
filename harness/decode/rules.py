"""What VIA-SD leaves open about the end of a block and the full verifier's judgement, as named settings."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.errors import UserError
from harness.kernels.gate import ACCEPT, ESCALATE, REGENERATE

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ending": ("slim", "full"),
        "escalate": ("token", "rest"),
        "escalated": ("lossless", "mixture"),
        "bonus": ("none", "slim", "full"),
    }
)
"""Every key with what it may be; the first is the default."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The four keys. "Paper" is VIA-SD (arXiv 2606.12243), whose two algorithms do not agree.

    Attributes:
        ending: who replaces a draft that the gate lets be regenerated. ``slim``: the slim verifier, and its token ends
            the block (Alg. 1 regenerates "using q' or fallback to q" and appends that). ``full``: the full verifier,
            drawing from q in a pass of its own (Alg. 2 appends the prefix alone, then "fallback to q at t + kappa"; so
            also step 4 of section 3.5). An escalated draft that is refused is replaced by the residual of its
            acceptance rule either way.
        escalate: whom an escalation concerns. ``token``: the escalated draft alone; those behind it keep their own
            routes (Alg. 2 asks q inside the loop, for this token). ``rest``: it and all behind it are judged by the
            next verifier, whose logits are there anyway (reading: ours). Both take one pass a block: Alg. 2 as printed
            takes one for each escalated token, with the same tokens in the end.
        escalated: what the full verifier accepts an escalated draft by (Alg. 2: "lossless or pi-based").
            ``lossless``: min(1, q/p), residual norm(max(0, q - p)). ``mixture``: the same with pi of eq. 14 for q.
        bonus: the token behind a block that is kept whole. ``none`` (Alg. 1: append all, t += gamma); ``slim``, of the
            last verifier that was asked, which costs no pass and is the full verifier's law in no gate; ``full``,
            which costs a pass wherever the block did not need one (both: ours).

    Raises:
        UserError: an unknown value.
    """

    ending: str = "slim"
    escalate: str = "token"
    escalated: str = "lossless"
    bonus: str = "none"

    def __post_init__(self) -> None:
        for key, known in CHOICES.items():
            if getattr(self, key) not in known:
                raise UserError(f"{key}={getattr(self, key)!r}: want one of {', '.join(known)}.")

    @property
    def reading(self) -> str:
        """What of it is ours."""
        ours = (f"escalate={self.escalate}" * (self.escalate == "rest"), f"bonus={self.bonus}" * (self.bonus != "none"))
        return ", ".join(filter(None, ours))

    @property
    def label(self) -> str:
        """The settings that are not the default ones, each with a comma before it."""
        values = ((item, getattr(self, item.name)) for item in fields(self))
        return "".join(f", {item.name}={value}" for item, value in values if value != item.default)

    @property
    def closes(self) -> dict[int, str]:
        """Who speaks last in a block whose last draft examined has this code: ``ACCEPT``, when all are kept."""
        return {REGENERATE: self.ending, ACCEPT: self.bonus}

    def spread(self, codes: Int[Tensor, "G"]) -> Int[Tensor, "G"]:
        """Codes of a block as they count."""
        if self.escalate == "token":
            return codes
        return torch.where((codes == ESCALATE).cumsum(0) > 0, ESCALATE, codes)

    def spread_table(self, codes: Int[Tensor, "G"], routes: Int[Tensor, "G V"]) -> Int[Tensor, "G V"]:
        """Codes of all tokens as they count in a block that has ``codes``."""
        if self.escalate == "token":
            return routes
        return torch.where(((codes == ESCALATE).cumsum(0) > 1)[:, None], ESCALATE, routes)


def mixture(
    draft: Float[Tensor, "G V"],
    slim: Float[Tensor, "G V"],
    full: Float[Tensor, "G V"],
    routes: Int[Tensor, "G V"],
) -> Float[Tensor, "G V"]:
    """pi = (1 - delta2) ((1 - delta1) p + delta1 q') + delta2 q (eq. 14).

    ``routes`` are the codes of all tokens. delta1 and delta2 are the drafter's mass on accepted and on escalated tokens
    at each position, as B.11 defines them; elsewhere the paper uses delta1 as if it were the mass on regenerated ones.
    """
    accepted, escalated = ((draft * (routes == code)).sum(dim=-1, keepdim=True) for code in (ACCEPT, ESCALATE))
    return (1 - escalated) * ((1 - accepted) * draft + accepted * slim) + escalated * full
