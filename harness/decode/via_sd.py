"""Three tiers and more: VIA-SD (arXiv 2606.12243, Alg. 1 and 2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.decode.accept import first_stop, keep_probability
from harness.decode.base import Block, plain_step
from harness.decode.gate import Decision, Foreseeing, Gate, Tabled, routes_of
from harness.decode.length import Fixed, Length
from harness.decode.rules import Rules, mixture
from harness.decode.slim import Slim, masked
from harness.decode.speculative import check_gamma
from harness.drafters.base import Draft, Drafter
from harness.errors import UserError
from harness.kernels.gate import ACCEPT, ESCALATE, REGENERATE
from harness.model.load import Model
from harness.model.tiers import Tier, TierGroup, Tiers
from harness.model.transfer import to_host
from harness.sampling import Chooser, Dense, Law, Sampling

GATE_PROBS = ("raw", "warped")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the slim verifiers that were asked so far make of a block.

    ``codes`` and ``stop`` as in ``Decision``. ``words`` are at each position the logits of the last verifier that
    routed it: what is regenerated there is drawn from these; with a bonus of the slim verifier there is a row more.
    """

    codes: Int[Tensor, "G"]
    stop: Int[Tensor, ""]
    words: Float[Tensor, "R V"]


class ViaSD:
    """Draft, score the block with the slim verifier, route each token, call the full verifier only on escalation.

    At the first token that is not accepted by the slim verifier: regenerate draws from the slim verifier and ends the
    block (Alg. 1 appends that token); escalate scores the whole block with the full verifier in one pass, keeps the
    token with probability min(1, q/p), and otherwise replaces it from the residual and ends the block. No full pass
    at a stop, no bonus token. With A, B, C the sets of drafts that are accepted, regenerated, escalated, one position
    emits v with probability

        p(v) 1_A(v) + p(v) 1_C(v) min(1, q(v)/p(v)) + p(B) q'(v) + R_C r(v),
        R_C = sum over u in C of max(0, p(u) - q(u)),   r = norm(max(0, q - p)),

    which is not the full verifier's law unless everything is escalated. ``ending=full`` has q(v) for q'(v);
    ``escalated=mixture`` has pi(v) of eq. 14 for q(v) in the terms of C, with the residual norm(max(0, pi - p)).

    With several slim verifiers the drafts that one escalates are routed by the next, which runs only where the first
    draft that is not accepted is escalated; what the last one escalates goes to the full verifier.

    The host reads what a block decided once for each slim verifier that ran, and once more where the full one did.

    Args:
        gate_probs: ``raw``, the gate reads the slim softmax at temperature 1 whatever the sampling; ``warped``, it
            reads the distribution that is sampled from. Draws and acceptance always use the warped ones.
        ending, escalate, escalated, bonus: see ``Rules``.
        slim: makes the slim verifier, or several by decreasing skip ratio (``harness.decode.slim``).
    """

    name = "via_sd"
    reading = "the cache mode of the slim verifier"

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
        ending: str = "slim",
        escalate: str = "token",
        escalated: str = "lossless",
        bonus: str = "none",
        slim: Callable[[Tiers, Model], Slim | Sequence[Slim]] = masked,
    ) -> None:
        check_gamma(gamma)
        if gate_probs not in GATE_PROBS:
            raise UserError(f"gate_probs={gate_probs!r}: want one of {', '.join(GATE_PROBS)}.")
        made = slim(tiers, model)
        self.slim_verifiers = (made,) if isinstance(made, Slim) else tuple(made)
        self.slims = tuple(one.tier for one in self.slim_verifiers)
        self.rules = Rules(ending, escalate, escalated, bonus)
        if escalated == "mixture" and (len(self.slims) > 1 or not isinstance(gate, Tabled)):
            raise UserError(
                "escalated=mixture is for one slim verifier and a gate that routes by the slim scores alone: eq. 14 "
                f"needs the drafter's mass on every route; here are {len(self.slims)} and {gate.name}."
            )
        self.tiers = tiers
        self.sampling = sampling
        self.gamma = gamma
        self.gate = gate
        self.gate_of = gate.over(tiers, sampling) if isinstance(gate, Foreseeing) else lambda text: gate
        self.gate_probs = gate_probs
        self.drafter = drafter(tiers, sampling, model)
        self.length = length(self.drafter)

    @property
    def lossless(self) -> bool:
        return self.gate.lossless and self.rules.bonus != "slim"

    @property
    def drafter_name(self) -> str:
        return self.length.name

    @property
    def gate_name(self) -> str:
        several = f", {len(self.slims)} slim verifiers" if len(self.slims) > 1 else ""
        return self.gate.name + self.rules.label + several

    def tier_roles(self) -> tuple[Tier | None, TierGroup]:
        return self.drafter.tier, TierGroup(self.slims)

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        bonus = self.rules.bonus != "none"
        asked = min(self.length.ask(self.gamma), remaining - bonus)
        draft = self.length.draft(tokens, asked, chooser)
        drafted = len(draft)
        if not drafted:
            return plain_step(self.tiers.full, self.sampling, tokens, asked, chooser)
        gate = self.gate_of(tokens)
        verdict = None
        heard: list[list[int]] = []  # the codes after each slim verifier
        for slim in self.slims:
            logits = forward_over(slim, tokens, draft, self.rules.bonus == "slim")
            routed = gate(self.read_by_gate(logits[:drafted]), draft.tokens)
            verdict = self.heard(verdict, routed, logits)
            *read, kept, last = to_host(draft.tokens, verdict.codes, verdict.stop, self.closing_word(verdict, chooser))
            drafts, known = read[:drafted], read[drafted:]
            heard.append(known)
            end = known[kept] if kept < drafted else ACCEPT
            if end != ESCALATE:
                break
        assert verdict is not None
        if end == ESCALATE:
            kept, last = self.judged_by_full(tokens, draft, verdict, known, chooser)
        elif self.rules.closes[end] == "full":
            # Nothing is judged, so the drafts behind the kept ones need not be processed.
            words = self.tiers.full.forward(tokens, 1, draft.tokens[:kept])
            (last,) = to_host(self.sampling.law(words).draw(torch.zeros_like(verdict.stop), chooser))
        self.length.note(drafted, kept)
        return Block(
            tokens=(*drafts[:kept], *([last] if bonus or kept < drafted else [])),
            asked=asked,
            drafted=drafted,
            routes=routes_of(known[: kept + 1]),
            kept=kept,
            bonus=bonus and kept == drafted,
            looked_up=draft.looked_up,
            deciders=deciders(heard, kept + 1) if len(self.slims) > 1 else (),
        )

    def finish(self, text: Sequence[int]) -> None:
        self.length.finish(text)

    def heard(self, before: Verdict | None, routed: Decision, logits: Float[Tensor, "R V"]) -> Verdict:
        """The verdict so far with that of the next slim verifier on what was escalated to it."""
        if before is None:
            return Verdict(self.rules.spread(routed.codes), routed.stop, logits)
        asked = before.codes == ESCALATE
        codes = torch.where(asked, routed.codes, before.codes)
        here = torch.cat((asked, asked.new_ones(len(logits) - len(asked))))
        words = torch.where(here[:, None], logits, before.words)
        return Verdict(self.rules.spread(codes), first_stop(codes == ACCEPT), words)

    def closing_word(self, verdict: Verdict, chooser: Chooser) -> Int[Tensor, "1"]:
        """The token with which the slim verifier ends the block where that is up to it; any token where it is not."""
        codes = [code for code, who in self.rules.closes.items() if who == "slim"]
        if not codes:
            return torch.zeros_like(verdict.stop)[None]
        end = verdict.codes.take(verdict.stop.clamp(max=len(verdict.codes) - 1))  # ACCEPT where all are accepted
        wanted = reduce(torch.logical_or, [end == code for code in codes])
        return self.word(verdict.words, verdict.stop.where(wanted, len(verdict.words)), chooser)

    def judged_by_full(
        self, tokens: Sequence[int], draft: Draft, verdict: Verdict, known: Sequence[int], chooser: Chooser
    ) -> tuple[int, int]:
        """Score the block with the full verifier; how many drafts are kept, and the token that follows them if any.

        ``known`` are the codes on the host. Drafts end at the first one that is regenerated, whatever comes behind.
        """
        drafted, codes = len(draft), verdict.codes
        logits = forward_over(self.tiers.full, tokens, draft, self.rules.bonus == "full")
        judge = self.judge(draft, verdict, logits[:drafted])
        stop = first_stop((codes == ACCEPT) | ((codes == ESCALATE) & chooser.accept(keep_probability(judge, draft))))
        end = known.index(REGENERATE) if REGENERATE in known else drafted
        refused = stop < end
        last = judge.replace(draft.probs, draft.tokens, stop.where(refused, drafted), chooser)
        closer = self.rules.closes[ACCEPT if end == drafted else REGENERATE]
        if closer != "none":
            words = logits if closer == "full" else verdict.words
            last = torch.where(refused, last, self.word(words, stop.where(~refused, len(words)), chooser))
        kept, token = to_host(stop, last)
        return kept, token

    def judge(self, draft: Draft, verdict: Verdict, full: Float[Tensor, "G V"]) -> Law:
        """What escalated drafts are accepted against."""
        if self.rules.escalated == "lossless" or draft.probs is None:
            # A draft that was certain has all the drafter's mass: where it is escalated, pi is q.
            return self.sampling.law(full)
        assert isinstance(self.gate, Tabled)
        slim = verdict.words[: len(draft)]
        routes = self.rules.spread_table(verdict.codes, self.gate.table(self.read_by_gate(slim)))
        return Dense(mixture(draft.probs, self.sampling.warp(slim), self.sampling.warp(full), routes))

    def word(self, logits: Float[Tensor, "R V"], place: Int[Tensor, ""], chooser: Chooser) -> Int[Tensor, "1"]:
        """A token from a verifier's distribution at ``place``; any, for certain, where that is R."""
        last = len(logits) - 1
        law = self.sampling.law(logits.index_select(0, place.clamp(max=last)[None]))
        return law.draw((place > last).long(), chooser)

    def read_by_gate(self, slim_logits: Float[Tensor, "G V"]) -> Float[Tensor, "G V"]:
        """The scores that the gate sees: logits, or logarithms of what is sampled from."""
        return self.sampling.warp(slim_logits).log() if self.gate_probs == "warped" else slim_logits


def deciders(heard: Sequence[Sequence[int]], count: int) -> tuple[int, ...]:
    """Of the first ``count`` drafts, which slim verifier was the first not to escalate each; the last where all did.

    ``heard`` are the codes after each of them that ran.
    """
    last = len(heard) - 1
    return tuple(
        next((index for index, code in enumerate(codes) if code != ESCALATE), last)
        for codes in islice(zip(*heard, strict=True), count)
    )


def forward_over(tier: Tier, tokens: Sequence[int], draft: Draft, with_bonus: bool) -> Float[Tensor, "R V"]:
    """Logits at each draft, and with a bonus behind the last, which otherwise needs no successor and is left out."""
    drafted = len(draft)
    if with_bonus:
        return tier.forward(tokens, drafted + 1, draft.tokens)
    return tier.forward(tokens, drafted, draft.tokens[:-1])
