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
from harness.decode.nested import Reviewed
from harness.drafters.base import Composite, Drafter
from harness.drafters.heads import HeadTier
from harness.drafters.medusa import MedusaTier
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
            start = generation.blocks[index].start
            text, tokens = (*prompt, *generation.token_ids[:start]), generation.token_ids[start : start + count]
            if isinstance(tier, HeadTier | MedusaTier):
                yield index, drafted_again(tier, text, tokens)
            else:
                yield index, tier.forward((*text, *tokens[:-1]), count)


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


def origins(drafter: Drafter, block: BlockTrace) -> Sequence[Tier | None]:
    """The tier whose law each accepted draft of a block is from; None where it is from a table."""
    drafts = drafter.origins(block) if isinstance(drafter, Composite) else [drafter.tier] * block.drafted
    return drafts[: block.kept]


def can_draft_again(method: Method) -> bool:
    """Whether the law of every draft is known once the decoding is over.

    Not where it changed between blocks, as with layers that are searched or chosen anew: which ones ran is not in the
    trace. Nor where drafts were reviewed over entries that the full verifier made of drafts before them, to catch up
    for a head within a block.
    """
    drafter = getattr(method, "drafter", None)
    if drafter is None or (drafter.has_probs and drafter.tier is None):
        return False
    reviewed = isinstance(drafter, Reviewed) and isinstance(drafter.tier.cache, Tail)
    caught_up = any(
        isinstance(tier, HeadTier | MedusaTier) and tier.source.slim is None for tier in method.tiers.others
    )
    changed = drafter.tier is not None and drafter.tier.changed
    return not changed and not (reviewed and caught_up)


def draft_scores(
    tiers: Tiers, drafter: Drafter, prompt: Sequence[int], generation: Generation, temperature: float
) -> list[float]:
    """Log-probability of each accepted draft under the law of the drafter that made it; 0 where that is a table.

    The law of a model is its softmax at the run's temperature, 1 when that is 0, as for the full verifier: greedy
    drafting is one-hot too, and says nothing of how sure the drafter was. A table has no other law than the one-hot
    one, so that its overshoot is -log of the full verifier's probability.

    The full verifier's cache must hold prompt and output. A tier over it, and a head, which reads its hidden states,
    cost a forward or a block of drafting for each block; another model one for the whole text.
    """
    made = [origins(drafter, block) for block in generation.blocks]
    known: dict[int, float] = {}
    for tier in dict.fromkeys(tier for block in made for tier in block if tier is not None):
        tiers.full.prefill((*prompt, *generation.token_ids[:-1]))  # what the tier before has used up
        last = [max((place for place, one in enumerate(block) if one is tier), default=-1) for block in made]
        scores = tier_scores(tiers, tier, prompt, generation, [place + 1 for place in last], temperature)
        for trace, block in zip(generation.blocks, made, strict=True):
            mine = (trace.start + place for place, one in enumerate(block) if one is tier)
            known |= {place: scores[place] for place in mine}
    return [known.get(place, 0.0) for place in kept_drafts(generation)]


def tier_scores(
    tiers: Tiers, tier: Tier, prompt: Sequence[int], generation: Generation, counts: Sequence[int], temperature: float
) -> dict[int, float]:
    """By output position, log-probability under ``tier`` of the first ``counts[index]`` tokens of each block at least.

    A ``tier`` whose law depends on the blocks uses up the cache of the full verifier, others leave it as it is.
    """
    output = generation.token_ids
    found: dict[int, float] = {}
    if isinstance(tier.cache, Tail) or isinstance(tier, HeadTier | MedusaTier):
        for index, logits in block_logits(tiers, tier, prompt, generation, counts):
            start = generation.blocks[index].start
            tokens = output[start : start + counts[index]]
            found |= enumerate(of_tokens(log_law(logits, temperature), tokens).tolist(), start)
        return found
    tier.rollback(0)
    for logits in text_logits(tier, prompt, output):
        tokens = output[len(found) : len(found) + len(logits)]
        found |= enumerate(of_tokens(log_law(logits, temperature), tokens).tolist(), len(found))
    return found


def drafted_again(tier: HeadTier | MedusaTier, text: Sequence[int], tokens: Sequence[int]) -> Float[Tensor, "G V"]:
    """Logits of a head that drafts ``tokens`` behind ``text``, from the features that it had there.

    The full verifier's are those that ``tiers`` hold; what a slim one has to give behind them is made again.
    """
    if tier.source.slim is not None:
        tier.source.slim.prefill(text[:-1])
    tier.source.reach(text[:-1])
    tier.prefill(text[:-1])
    given = iter(to_device(tokens, tier.model.device).split(1))
    graphs, tier.graphs = tier.graphs, False  # a graph would draw as it did when it was captured
    uniforms = torch.zeros(len(tokens), device=tier.model.device)
    _, logits = tier.extend(text, len(tokens), lambda logits, _: (next(given), logits), uniforms)
    tier.graphs = graphs
    return logits


def fidelity_records(
    methods: Mapping[str, Method], prompt: Sequence[int], samples: Sequence[SampleRecord], temperature: float
) -> Iterator[FidelityRecord]:
    """The record of each of ``samples``, outputs of arms after the same ``prompt``; ``methods`` are by arm.

    All arms share one cache, so the prompt is processed once, and the same output once, unless a drafter needs the
    cache as that output fills it, or a head the hidden states. Overshoot is None where ``can_draft_again`` says no.
    """
    known: dict[tuple[int, ...], tuple[int, list[float]]] = {}
    for index, sample in enumerate(samples):
        method, output = methods[sample.arm], sample.generation.token_ids
        drafter = method.drafter if can_draft_again(method) else None  # type: ignore[attr-defined]
        fresh = reads_blocks = False
        if drafter is not None:
            asked = {tier for block in sample.generation.blocks for tier in origins(drafter, block) if tier}
            fresh = any(isinstance(tier, HeadTier | MedusaTier) for tier in asked)
            reads_blocks = fresh or any(isinstance(tier.cache, Tail) for tier in asked)
        if index == 0 or fresh:
            method.tiers.rollback(0)
        if output not in known or reads_blocks:
            known[output] = full_scores(method.tiers, prompt, output, temperature)
        greedy, full = known[output]
        overshoot = None
        if drafter is not None:
            drafted = draft_scores(method.tiers, drafter, prompt, sample.generation, temperature)
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
