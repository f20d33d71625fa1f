"""Two tiers, lossy: Big Little Decoder (Kim et al., arXiv 2302.07863), fallback and rollback."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from harness.decode.accept import first_stop
from harness.decode.base import Block, plain_step
from harness.decode.speculative import check_gamma
from harness.drafters.base import Draft, Drafter, Remembering, check_probs, joined, pieces
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.model.transfer import to_host
from harness.records import Route
from harness.sampling import Chooser, Sampling, top, widen


class BiLD:
    """The small model writes greedily while it is sure; the large one reads along and goes back where it is shocked.

    Fallback: the small model hands over at the first position where its largest probability is below ``fallback``, or
    after ``gamma`` tokens; what it would have said there is not used. Rollback: the large model scores all of them in
    one pass; the first x_i with -log p_L(x_i) > ``rollback`` is replaced by the large model's argmax, which ends the
    block. Where there is none, the large model's argmax follows the small model's tokens. Probabilities are softmaxes
    at temperature 1.

    Every token that the large model finds merely unlikely stays: the output is not the large model's. As in the
    authors' code (kssteven418/BigLittleDecoder), a token that is the large model's argmax is never rolled back; there
    it also ends the search for a rollback, here those behind it are judged too (reading: ours). There the large model
    writes the first token of a text alone and one more behind each rollback; here the small one goes on (reading:
    ours).

    On the CPU the small model stops at the token that it is unsure of; on an accelerator it writes all ``gamma``, and
    what is behind that token is not used, so that the host reads once a block.

    Args:
        gamma: small steps before the large model must look, 10 in the source.
        fallback: alpha_FB, a probability; 0.6 in the source.
        rollback: alpha_RB, in nats; 5 in the source, which tries 2 to 5.

    Raises:
        UserError: sampling, thresholds out of bounds, or a drafter without probabilities.
    """

    name = "bild"
    lossless = False
    reading = "rollback looks behind the large model's own tokens, and the small one begins a text"
    gate_name = None

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        gamma: int,
        drafter: Callable[[Tiers, Sampling, Model], Drafter],
        fallback: float = 0.6,
        rollback: float = 5.0,
    ) -> None:
        check_gamma(gamma)
        if not sampling.greedy:
            raise UserError(f"bild decodes greedily alone, temperature={sampling.temperature:g}: set temperature=0.")
        if not 0 <= fallback <= 1:
            raise UserError(f"bild: fallback={fallback}: want a probability, 0 (never) to 1.")
        if not 0 <= rollback < math.inf:
            raise UserError(f"bild: rollback={rollback}: want 0 nats (all but certain tokens) or more, finite.")
        self.tiers = tiers
        self.sampling = sampling
        self.gamma = gamma
        self.drafter = drafter(tiers, sampling, model)
        check_probs(self.drafter, self.name)
        self.fallback = fallback
        self.rollback = rollback

    @property
    def drafter_name(self) -> str:
        return f"{self.drafter.name}, until below {self.fallback:g}"

    def tier_roles(self) -> tuple[Tier | None, Tier | None]:
        return self.drafter.tier, None

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        asked = min(self.gamma, remaining - 1)  # the large model adds a token to whatever is kept
        draft, sure = self.write(tokens, asked, chooser)
        if not len(draft):
            return plain_step(self.tiers.full, self.sampling, tokens, asked, chooser)
        logits = self.tiers.full.forward(tokens, len(draft) + 1, draft.tokens)
        largest = top(logits)
        handed_over = first_stop(sure)
        kept_run = torch.minimum(handed_over, first_stop(self.kept(logits, largest, draft.tokens)))
        added = largest.index_select(0, kept_run[None])
        *ids, drafted, kept, last = to_host(draft.tokens, handed_over, kept_run, added)
        return Block(
            tokens=(*ids[:kept], last),
            asked=asked,
            drafted=drafted,
            routes=(Route.ESCALATE,) * min(kept + 1, drafted),
            kept=kept,
            bonus=0 < drafted == kept,
        )

    def write(self, tokens: Sequence[int], asked: int, chooser: Chooser) -> tuple[Draft, Bool[Tensor, "G"]]:
        """The small model's tokens and where it was sure; on the CPU none behind the first that it was unsure of."""
        drafts: list[Draft] = []
        sures: list[Tensor] = []
        for piece in pieces(self.drafter, tokens, asked, chooser):
            sure = piece.distributions().amax(dim=-1) >= self.fallback
            count = len(piece)
            if self.tiers.model.device.type == "cpu":
                (count,) = to_host(first_stop(sure))
            drafts.append(piece.first(count))
            sures.append(sure[:count])
            if count < len(piece):
                break
        if not drafts:
            return self.drafter.draft(tokens, 0, chooser), torch.empty(0, dtype=torch.bool)
        return joined(drafts), torch.cat(sures)

    def kept(
        self, logits: Float[Tensor, "R V"], largest: Int[Tensor, "R"], tokens: Int[Tensor, "G"]
    ) -> Bool[Tensor, "G"]:
        """Which of the small model's tokens the large one lets stand, each by itself."""
        count = len(tokens)
        surprise = -torch.log_softmax(widen(logits[:count]), dim=-1).gather(-1, tokens[:, None])[:, 0]
        return (surprise <= self.rollback) | (largest[:count] == tokens)

    def finish(self, text: Sequence[int]) -> None:
        if isinstance(self.drafter, Remembering):
            self.drafter.finish(text)
