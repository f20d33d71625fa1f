"""Three tiers: VIA-SD (arXiv 2606.12243, Alg. 1 and 2)."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from harness.decode.accept import first_stop, keep_probability, residual
from harness.decode.base import Block, plain_step
from harness.decode.gate import ACCEPT, ESCALATE, REGENERATE, Gate, routes_of
from harness.decode.speculative import check_gamma
from harness.drafters.base import Drafter
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.records import Route
from harness.sampling import Chooser, Sampling, widen

GATE_PROBS = ("raw", "warped")


class ViaSD:
    """Draft, score the block with the slim verifier, route each token, call the full verifier only on escalation.

    At the first token that is not accepted by the slim verifier: regenerate draws from the slim verifier and ends the
    block (Alg. 1 appends that token); escalate scores the whole block with the full verifier in one pass, keeps the
    token with probability min(1, q/p), and otherwise replaces it from the residual and ends the block. No full pass
    at a stop, no bonus token. With A, B, C the sets of drafts that are accepted, regenerated, escalated, one position
    emits v with probability

        p(v) 1_A(v) + p(v) 1_C(v) min(1, q(v)/p(v)) + p(B) q'(v) + R_C r(v),
        R_C = sum over u in C of max(0, p(u) - q(u)),   r = norm(max(0, q - p)),

    which is not the full verifier's law unless everything is escalated.

    Args:
        gate_probs: ``raw``, the gate reads the slim softmax at temperature 1 whatever the sampling; ``warped``, it
            reads the distribution that is sampled from. Draws and acceptance always use the warped ones.
    """

    name = "via_sd"

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        gamma: int,
        drafter: Callable[[Tiers, Sampling, Model], Drafter],
        gate: Gate,
        gate_probs: str = "raw",
    ) -> None:
        check_gamma(gamma)
        if gate_probs not in GATE_PROBS:
            raise UserError(f"gate_probs={gate_probs!r}: want one of {', '.join(GATE_PROBS)}.")
        if model.slim_mask is None:
            raise UserError(
                "via_sd needs a slim verifier and the model has no layer mask: set model.slim_mask to a file "
                "written by job=search or to a list of kept layers."
            )
        self.tiers = tiers
        self.sampling = sampling
        self.gamma = gamma
        self.gate = gate
        self.gate_probs = gate_probs
        self.slim = tiers.provisional("slim", model.slim_mask.layers)
        self.drafter = drafter(tiers, sampling, model)

    @property
    def lossless(self) -> bool:
        return self.gate.reachable == {Route.ESCALATE}

    @property
    def drafter_name(self) -> str:
        return self.drafter.name

    @property
    def gate_name(self) -> str:
        return self.gate.name

    def tier_roles(self) -> tuple[Tier | None, Tier | None]:
        return self.drafter.tier, self.slim

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        asked = min(self.gamma, remaining)
        draft = self.drafter.draft(tokens, asked, chooser)
        drafted = len(draft.tokens)
        if not drafted:
            return plain_step(self.tiers.full, self.sampling, tokens, asked, chooser)
        scored = (*tokens, *draft.tokens[:-1])  # the last draft needs no successor: there is no bonus
        slim_logits = self.slim.forward(scored, rows=drafted)
        codes = self.gate(self.read_by_gate(slim_logits), torch.tensor(draft.tokens, device=slim_logits.device))
        keep = codes == ACCEPT
        kept = first_stop(keep)
        full_probs = None
        if kept < drafted and codes[kept] == ESCALATE:
            full_probs = self.sampling.warp(self.tiers.full.forward(scored, rows=drafted))
            keep = keep | ((codes == ESCALATE) & chooser.accept(keep_probability(full_probs, draft)))
            kept = first_stop(keep)
        correction: tuple[int, ...] = ()
        if kept < drafted:
            if codes[kept] == REGENERATE:
                correction = (chooser.draw(self.sampling.warp(slim_logits[kept : kept + 1])[0]),)
            else:
                assert full_probs is not None
                correction = (chooser.draw(residual(full_probs[kept], draft, kept)),)
        return Block(
            tokens=(*draft.tokens[:kept], *correction),
            asked=asked,
            drafted=drafted,
            routes=routes_of(codes[: kept + 1].tolist()),
            kept=kept,
        )

    def read_by_gate(self, slim_logits: Float[Tensor, "G V"]) -> Float[Tensor, "G V"]:
        """The slim distributions the gate sees."""
        if self.gate_probs == "warped":
            return self.sampling.warp(slim_logits)
        return torch.softmax(widen(slim_logits), dim=-1)
