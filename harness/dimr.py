"""Choosing the layers of the slim verifier: the step cost of VIA-SD and a seeded random search over masks.

The paper calls the search DIMR. Here it is random search alone; a proposal is either drawn uniformly or made from the
best mask so far by exchanging one kept and one skipped layer. The first and the last layer always stay, as in SWIFT,
whose search DIMR builds on.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.errors import UserError
from harness.model.cache import Entries
from harness.model.slim import LayerMask, kept_count
from harness.model.tiers import Tiers
from harness.model.transformer import Transformer
from harness.sampling import RandomChooser, Sampling, widen


def step_cost(
    verifier_logits: Float[Tensor, "S V"], proposer_logits: Float[Tensor, "S V"], alpha: float, beta: float
) -> Float[Tensor, "S"]:
    """R(q||p) of eq. 9 and 11, in nats, from the full softmax at temperature 1.

    z1 = log(1 - alpha) + log p - log q;  z2 = log(beta) + log p - log q;
    R(q||p) = sum_v p ReLU(z1) + sum_v q ReLU(z2), with q the verifier and p the proposer.
    """
    log_q = torch.log_softmax(widen(verifier_logits), dim=-1)
    log_p = torch.log_softmax(widen(proposer_logits), dim=-1)
    gap = log_p - log_q
    first = log_p.exp() * (gap + math.log(1 - alpha)).clamp(min=0)
    second = log_q.exp() * (gap + math.log(beta)).clamp(min=0)
    return (first + second).sum(dim=-1)


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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A mask and what it costs: mean step cost in nats and the share of positions with the full verifier's argmax."""

    mask: LayerMask
    cost: float
    agreement: float
    positions: int
    seconds: float


def evaluate(mask: LayerMask, texts: Sequence[CalibrationText], block: int, alpha: float, beta: float) -> Evaluation:
    """Score ``mask`` in ``shared`` cache mode, block by block, as the slim tier runs in decoding.

    Each block of ``block`` positions starts from the full verifier's committed entries. Blocks are taken from the end
    of the text to its beginning, so that an overwritten entry is never read again.
    """
    begun = perf_counter()
    cost, agree, positions = 0.0, 0, 0
    for text in texts:
        text.restore()
        slim = text.tiers.provisional("slim", mask.layers)
        first, last = text.prompt_length - 1, len(text.tokens) - 1
        for start in reversed(range(first, last, block)):
            end = min(start + block, last)
            text.tiers.rollback(start)
            logits = slim.forward(text.tokens[:end], rows=end - start)
            wanted = text.full_logits[start - first : end - first]
            cost += float(step_cost(wanted, logits, alpha, beta).sum())
            agree += int((wanted.argmax(-1) == logits.argmax(-1)).sum())
            positions += end - start
        text.tiers.others.remove(slim)
    return Evaluation(mask, cost / positions, agree / positions, positions, perf_counter() - begun)


def inner_layers(depth: int, skip_ratio: float, evaluations: int, alpha: float, beta: float, exchange: float) -> int:
    """Layers a mask keeps besides the first and the last one; checks the settings of a search.

    Raises:
        UserError: settings outside their bounds.
    """
    if not (0 <= alpha < 1 and 1 - alpha <= beta < math.inf):
        raise UserError(f"alpha={alpha}, beta={beta}: want 0 <= alpha < 1 and beta >= 1 - alpha (eq. 8), finite.")
    if evaluations < 1:
        raise UserError(f"evaluations={evaluations}: want at least 1 mask.")
    if not 0 <= exchange <= 1:
        raise UserError(f"exchange={exchange}: want a probability.")
    kept = kept_count(depth, skip_ratio) - 2
    if not 0 <= kept <= depth - 2:
        raise UserError(f"skip_ratio={skip_ratio} leaves {kept + 2} of {depth} layers; first and last always stay.")
    return kept


def random_search(
    texts: Sequence[CalibrationText],
    depth: int,
    skip_ratio: float,
    evaluations: int,
    seed: int,
    block: int,
    alpha: float = 0.0,
    beta: float = 1.0,
    exchange: float = 0.5,
) -> Iterator[Evaluation]:
    """Yield ``evaluations`` different masks that keep L - round(r L) layers, each with its cost.

    ``exchange`` is the probability that a proposal exchanges one layer of the best mask so far instead of being drawn
    uniformly. Fewer masks are yielded where fewer exist.

    Raises:
        UserError: as ``inner_layers``.
    """
    kept = inner_layers(depth, skip_ratio, evaluations, alpha, beta, exchange)
    inner = range(1, depth - 1)
    rng = random.Random(seed)
    seen: set[LayerMask] = set()
    best: set[int] = set()
    lowest, repeated = math.inf, False
    while len(seen) < min(evaluations, math.comb(len(inner), kept)):
        skipped = sorted(set(inner) - best)
        exchanging = bool(best and skipped) and not repeated and rng.random() < exchange
        if exchanging:
            chosen = best - {rng.choice(sorted(best))} | {rng.choice(skipped)}
        else:
            chosen = set(rng.sample(inner, kept))
        mask = LayerMask.of([0, *chosen, depth - 1], depth)
        repeated = mask in seen  # then the next proposal is uniform: the neighbours of the best may be used up
        if repeated:
            continue
        seen.add(mask)
        found = evaluate(mask, texts, block, alpha, beta)
        if found.cost < lowest:
            best, lowest = chosen, found.cost
        yield found
