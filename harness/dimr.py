"""Choosing the layers of the slim verifier (DIMR): what a mask costs on text that the full verifier wrote itself.

Which masks are tried stands in ``harness.proposals``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.slim import masked_tier
from harness.errors import UserError
from harness.model.cache import Entries, Tail
from harness.model.slim import Mask
from harness.model.tiers import Tier, Tiers
from harness.model.transformer import Transformer
from harness.proposals import Evaluation
from harness.sampling import RandomChooser, Sampling
from harness.theory import step_cost


@dataclass(slots=True)
class CalibrationText:
    """One prompt continued by the full verifier, with its cache over all of it and its logits over the continuation.

    ``written`` are the cache entries from the last prompt token on, kept aside because scoring a mask overwrites them.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    tiers: Tiers
    full_logits: Float[Tensor, "N V"]
    written: Entries

    def restore(self) -> None:
        """Put the full verifier's entries back over the whole text."""
        cache = self.tiers.cache
        cache.write(self.prompt_length - 1, self.written)
        cache.begin(0)
        cache.length = len(self.tokens) - 1


def calibration_text(
    model: Transformer, prompt: Sequence[int], new_tokens: int, eos_ids: frozenset[int]
) -> CalibrationText:
    """Let the full verifier continue ``prompt`` greedily and remember its logits."""
    cache = model.new_cache(len(prompt) + new_tokens + 1)
    tiers = Tiers(model, cache)
    decoder = Decoder(Autoregressive(tiers, Sampling()))
    decoder.prefill(prompt)
    written = decoder.decode(StopRule(new_tokens, eos_ids), RandomChooser(0, model.device)).token_ids
    tokens = (*prompt, *written)
    begin, end = len(prompt) - 1, len(tokens) - 1
    tiers.rollback(begin)
    logits = tiers.full.forward(tokens[:-1], rows=len(written))
    return CalibrationText(tokens, len(prompt), tiers, logits, cache.read(begin, end))


def block_logits(text: CalibrationText, tier: Tier, block: int) -> Float[Tensor, "N V"]:
    """What ``tier`` says of each token of the continuation, as it runs in decoding.

    In ``shared`` mode each block of ``block`` positions starts from the full verifier's committed entries. Blocks are
    taken from the end of the text to its beginning, so that an overwritten entry is never read again. A tier with a
    cache of its own says the same whatever the block: it gets the prompt, then the whole continuation.
    """
    first, last = text.prompt_length - 1, len(text.tokens) - 1
    if not isinstance(tier.cache, Tail):
        tier.rollback(0)
        tier.prefill(text.tokens[:first])
        return tier.forward(text.tokens[:last], rows=last - first)
    text.restore()
    found: list[Tensor] = []
    for start in reversed(range(first, last, block)):
        end = min(start + block, last)
        text.tiers.rollback(start)
        found.append(tier.forward(text.tokens[:end], rows=end - start))
    return torch.cat(found[::-1])


def evaluate(
    mask: Mask, texts: Sequence[CalibrationText], block: int, alpha: float, beta: float, cache: str = "shared"
) -> Evaluation:
    """Score ``mask`` by the step cost C(z) of eq. 12 as a slim tier in cache mode ``cache``, in blocks of ``block``."""
    begun = perf_counter()
    cost, agree, positions = 0.0, 0, 0
    for text in texts:
        tier = masked_tier(text.tiers, mask, cache)
        logits = block_logits(text, tier, block)
        text.tiers.others.remove(tier)
        cost += float(step_cost(text.full_logits, logits, alpha, beta).sum())
        agree += int((text.full_logits.argmax(-1) == logits.argmax(-1)).sum())
        positions += len(logits)
    return Evaluation(mask, cost / positions, agree / positions, positions, perf_counter() - begun)


def check_margins(alpha: float, beta: float) -> None:
    """Raises UserError for margins outside those of eq. 8."""
    if not (0 <= alpha < 1 and 1 - alpha <= beta < math.inf):
        raise UserError(
            f"job.alpha={alpha}, job.beta={beta}: want 0 <= alpha < 1 and beta >= 1 - alpha (eq. 8), finite."
        )
