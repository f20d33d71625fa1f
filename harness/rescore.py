"""Finished outputs scored again with their text given, outside every clock: what each tier makes of every token.

The full verifier processes prompt and output in one forward of ``ROWS`` tokens at a time. A tier over the full
verifier's cache is asked block by block, over what it had when the block was decoded: the entries that the full
verifier had committed by then and its own behind them. A model beside it processes the whole text as well. Nothing of
the decoding is needed but tokens and traces; numbers agree with those of the decoding but for rounding, since rows
stand in other shapes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from harness.decode.base import Method
from harness.drafters.base import TierDrafter
from harness.model.cache import Tail
from harness.model.tiers import Tier, Tiers
from harness.model.transfer import to_device
from harness.records import BlockTrace, FidelityRecord, Generation, SampleRecord
from harness.sampling import top, widen

ROWS = 128
"""Output tokens of a forward: bounds the memory of their logits."""


def text_logits(tier: Tier, prompt: Sequence[int], output: Sequence[int]) -> Iterator[Float[Tensor, "R V"]]:
    """Logits of the position of each output token, in pieces; ``tier`` has a cache of its own.

    What the cache holds of the prompt is used again: cut it to nothing first when it is another one's.
    """
    tier.rollback(len(prompt) - 1)
    tier.prefill(prompt[:-1])
    for piece in to_device((prompt[-1], *output[:-1]), tier.model.input_device).split(ROWS):
        yield tier.plain_forward(piece, rows=len(piece))


def block_logits(
    tiers: Tiers, tier: Tier, prompt: Sequence[int], generation: Generation, counts: Sequence[int]
) -> Iterator[tuple[int, Float[Tensor, "R V"]]]:
    """For each block with a count, its index and the logits of ``tier`` at its first ``counts[index]`` tokens.

    ``tier`` reads the cache of the full verifier in ``tiers``, which must hold prompt and output. The last block comes
    first, since the cache is cut to what was committed before each: it is used up.
    """
    lengths = committed_lengths(len(prompt), generation.blocks)
    for index in reversed(range(len(counts))):
        if count := counts[index]:
            tiers.rollback(lengths[index])
            end = generation.blocks[index].start + count - 1
            yield index, tier.forward((*prompt, *generation.token_ids[:end]), count)


def committed_lengths(prompt: int, blocks: Sequence[BlockTrace]) -> list[int]:
    """Positions that the full verifier had committed before each block, behind a prompt of ``prompt`` tokens.

    A pass of it leaves all of the text processed but its last token. Not covered: a drafter that made it catch up
    within a block that then needed no pass (``features: catch_up``): its tokens count as committed.
    """
    found = []
    length = prompt - 1
    for block in blocks:
        found.append(length)
        if block.full_forwards:
            length = prompt + block.start + block.emitted - 1
    return found


def log_law(logits: Float[Tensor, "R V"], temperature: float) -> Float[Tensor, "R V"]:
    """Logarithms of the softmax at ``temperature``, at 1 when that is 0; before top-p and top-k, so none is zero.

    Reading: ours. A greedy law is one-hot, of which no ratio says how wrong a token is.
    """
    return torch.log_softmax(widen(logits) / (temperature or 1.0), dim=-1)


def of_tokens(table: Float[Tensor, "R V"], tokens: Sequence[int]) -> Float[Tensor, "R"]:
    """Each row's entry at its token."""
    return table.gather(-1, to_device(tokens, table.device)[:, None])[:, 0]


def full_scores(
    tiers: Tiers, prompt: Sequence[int], output: Sequence[int], temperature: float
) -> tuple[int, list[float]]:
    """How many output tokens are the full verifier's likeliest, and the log-probability of each; one forward."""
    greedy = 0
    found: list[float] = []
    for logits in text_logits(tiers.full, prompt, output):
        tokens = output[len(found) : len(found) + len(logits)]
        greedy += int((top(logits) == to_device(tokens, logits.device)).sum())
        found += of_tokens(log_law(logits, temperature), tokens).tolist()
    return greedy, found


def kept_drafts(generation: Generation) -> list[int]:
    """Output positions of the drafts that were accepted."""
    return [block.start + place for block in generation.blocks for place in range(block.kept)]


def draft_scores(
    tiers: Tiers, tier: Tier, prompt: Sequence[int], generation: Generation, temperature: float
) -> list[float]:
    """Log-probability of each accepted draft under the tier that drafted it.

    A tier over the full verifier's cache, which must hold prompt and output, costs a forward for each block; another
    model one for the whole text.
    """
    output = generation.token_ids
    if isinstance(tier.cache, Tail):
        found: list[float] = []
        kept = [block.kept for block in generation.blocks]
        for index, logits in block_logits(tiers, tier, prompt, generation, kept):
            start = generation.blocks[index].start
            found[:0] = of_tokens(log_law(logits, temperature), output[start : start + kept[index]]).tolist()
        return found
    every: list[float] = []
    tier.rollback(0)
    for logits in text_logits(tier, prompt, output):
        tokens = output[len(every) : len(every) + len(logits)]
        every += of_tokens(log_law(logits, temperature), tokens).tolist()
    return [every[place] for place in kept_drafts(generation)]


def fidelity_records(
    methods: Mapping[str, Method], prompt: Sequence[int], samples: Sequence[SampleRecord], temperature: float
) -> Iterator[FidelityRecord]:
    """The record of each of ``samples``, outputs of arms after the same ``prompt``; ``methods`` are by arm.

    All arms share one cache, so the prompt is processed once, and the same output once unless a drafter needs the
    cache as that output fills it. Overshoot is known of drafters that draw from a tier whose layers stayed the same;
    None of all others.
    """
    known: dict[tuple[int, ...], tuple[int, list[float]]] = {}
    for index, sample in enumerate(samples):
        method, output = methods[sample.arm], sample.generation.token_ids
        drafter = getattr(method, "drafter", None)
        tier = drafter.tier if isinstance(drafter, TierDrafter) and not drafter.tier.changed else None
        if index == 0:
            method.tiers.rollback(0)
        if output not in known or (tier is not None and isinstance(tier.cache, Tail)):
            known[output] = full_scores(method.tiers, prompt, output, temperature)
        greedy, full = known[output]
        overshoot = None
        if tier is not None:
            drafted = draft_scores(method.tiers, tier, prompt, sample.generation, temperature)
            accepted = kept_drafts(sample.generation)
            overshoot = tuple(mine - full[place] for mine, place in zip(drafted, accepted, strict=True))
        nll = -math.fsum(full)
        finite = all(map(math.isfinite, (nll, *(overshoot or ()))))
        yield FidelityRecord(
            run_id=sample.run_id,
            task=sample.task,
            example_id=sample.example_id,
            arm=sample.arm,
            tokens=len(output),
            greedy=greedy,
            nll=nll if finite else None,
            overshoot=overshoot if finite else None,
        )
