"""Three tiers: VIA-SD (arXiv 2606.12243, Alg. 1 and 2)."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.decode.accept import first_stop, keep_probability
from harness.decode.base import Block, plain_step
from harness.decode.gate import Foreseeing, Gate, routes_of
from harness.decode.length import Fixed, Length
from harness.decode.slim import Slim, masked
from harness.decode.speculative import check_gamma
from harness.drafters.base import Draft, Drafter
from harness.errors import UserError
from harness.kernels.gate import ACCEPT, ESCALATE, REGENERATE
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.model.transfer import to_host
from harness.sampling import Chooser, Sampling

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
        slim: makes the slim verifier (``harness.decode.slim``).
    """

    name = "via_sd"

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        gamma: int,
        drafter: Callable[[Tiers, Sampling, Model], Drafter],
        gate: Gate | Foreseeing,
        gate_probs: str = "raw",
        length: Callable[[Drafter], Length] = Fixed,
        slim: Callable[[Tiers, Model], Slim] = masked,
    ) -> None:
        check_gamma(gamma)
        if gate_probs not in GATE_PROBS:
            raise UserError(f"gate_probs={gate_probs!r}: want one of {', '.join(GATE_PROBS)}.")
        self.tiers = tiers
        self.sampling = sampling
        self.gamma = gamma
        self.gate = gate
        self.gate_of = gate.over(tiers, sampling) if isinstance(gate, Foreseeing) else lambda text: gate
        self.gate_probs = gate_probs
        self.slim_verifier = slim(tiers, model)
        self.slim = self.slim_verifier.tier
        self.drafter = drafter(tiers, sampling, model)
        self.length = length(self.drafter)

    @property
    def lossless(self) -> bool:
        return self.gate.lossless

    @property
    def drafter_name(self) -> str:
        return self.length.name

    @property
    def gate_name(self) -> str:
        return self.gate.name

    def tier_roles(self) -> tuple[Tier | None, Tier | None]:
        return self.drafter.tier, self.slim

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        asked = min(self.length.ask(self.gamma), remaining)
        draft = self.length.draft(tokens, asked, chooser)
        drafted = len(draft)
        if not drafted:
            return plain_step(self.tiers.full, self.sampling, tokens, asked, chooser)
        # The last draft needs no successor, as there is no bonus, and is processed by neither verifier.
        slim_logits = self.slim.forward(tokens, drafted, draft.tokens[:-1])
        codes, stop = self.gate_of(tokens)(self.read_by_gate(slim_logits), draft.tokens)
        wanted = codes.take(stop.clamp(max=drafted - 1)) == REGENERATE
        regenerated = self.regenerate(slim_logits, stop.where(wanted, drafted), chooser)
        *read, kept, last = to_host(draft.tokens, codes, stop, regenerated)
        drafts, known = read[:drafted], read[drafted:]
        if kept < drafted and known[kept] == ESCALATE:
            kept, last = self.escalate(tokens, draft, codes, known, slim_logits, chooser)
        self.length.note(drafted, kept)
        return Block(
            tokens=(*drafts[:kept], *([last] if kept < drafted else [])),
            asked=asked,
            drafted=drafted,
            routes=routes_of(known[: kept + 1]),
            kept=kept,
        )

    def finish(self, text: Sequence[int]) -> None:
        self.length.finish(text)

    def escalate(
        self,
        tokens: Sequence[int],
        draft: Draft,
        codes: Int[Tensor, "G"],
        known: Sequence[int],
        slim_logits: Float[Tensor, "G V"],
        chooser: Chooser,
    ) -> tuple[int, int]:
        """Score the block with the full verifier; how many drafts are kept, and the token that follows them if any.

        ``known`` are the ``codes`` on the host. Drafts end at the first one that is regenerated, whatever comes behind.
        """
        full = self.sampling.law(self.tiers.full.forward(tokens, len(draft), draft.tokens[:-1]))
        kept = (codes == ACCEPT) | ((codes == ESCALATE) & chooser.accept(keep_probability(full, draft)))
        stop = first_stop(kept)
        refused = stop < (known.index(REGENERATE) if REGENERATE in known else len(draft))
        last = full.replace(draft.probs, draft.tokens, stop.where(refused, len(draft)), chooser)
        if REGENERATE in known:
            last = torch.where(refused, last, self.regenerate(slim_logits, stop.where(~refused, len(draft)), chooser))
        kept_drafts, token = to_host(stop, last)
        return kept_drafts, token

    def regenerate(
        self, slim_logits: Float[Tensor, "G V"], place: Int[Tensor, ""], chooser: Chooser
    ) -> Int[Tensor, "1"]:
        """A token from the slim verifier's distribution at ``place``; any, for certain, where that is G."""
        last = len(slim_logits) - 1
        law = self.sampling.law(slim_logits.index_select(0, place.clamp(max=last)[None]))
        return law.draw((place > last).long(), chooser)

    def read_by_gate(self, slim_logits: Float[Tensor, "G V"]) -> Float[Tensor, "G V"]:
        """The scores that the gate sees: logits, or logarithms of what is sampled from."""
        return self.sampling.warp(slim_logits).log() if self.gate_probs == "warped" else slim_logits
