"""Stored outputs judged token by token: what the slim verifier decided, and whether the full one would have.

A token is wrong when the full verifier, the text before it given, would not have written it:

* greedy: it is not the full verifier's likeliest token, and further below it than rounding explains
  (``harness.divergence.NOISE``: the forwards here have other shapes than those of the decoding);
* sampling: the full verifier would have kept less than half of such draws of the slim verifier, q(v) < q'(v) / 2 in the
  laws that are sampled from (temperature, top-p, top-k). Reading: ours. Lossless verification of a draw from q' keeps
  it with probability min(1, q/q').

Text is given, so a wrong token does not make those behind it wrong. Nothing of the run is needed but tokens and traces.
Of several slim verifiers the one that decided a token is asked about it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from harness.audit.records import AuditedOutput, Decision, SlimToken
from harness.divergence import NOISE
from harness.model.tiers import Tier, Tiers
from harness.model.tokenizer import Tokenizer
from harness.records import BlockTrace, Generation, Route, SampleRecord
from harness.rescore import block_logits, of_tokens, text_logits
from harness.sampling import Sampling, top

KEPT_AT_LEAST = 0.5
"""Share of such draws that the full verifier must keep for a sampled token to pass."""


class FullView(NamedTuple):
    """The full verifier at one position: its likeliest token, how many logits the output's is below it, and the
    distance that rounding explains; the probability of the output's token in the law that is sampled from.
    """

    wanted: int
    distance: float
    bound: float
    law: float


class SlimView(NamedTuple):
    """The slim verifier there: q'(v)/M', and q'(v) in the law that is sampled from."""

    confidence: float
    law: float


@dataclass(frozen=True, slots=True)
class Writes:
    """What the slim verifier writes itself: in place of a regenerated draft (``ending=slim``), behind a block that is
    kept whole (``bonus=slim``).
    """

    regenerated: bool = True
    bonus: bool = False


SLIM_ENDING = Writes()


def decided(block: BlockTrace, writes: Writes = SLIM_ENDING) -> Iterator[tuple[int, Decision, int]]:
    """Places in a block, from 0, of the emitted tokens that a slim verifier decided: how, and which one, from 0."""
    for place, route in enumerate(block.routes):
        who = block.deciders[place] if block.deciders else 0
        if route is Route.ACCEPT and place < block.kept:
            yield place, Decision.ACCEPT, who
        if route is Route.REGENERATE and writes.regenerated and place == block.kept < block.emitted:
            yield place, Decision.REGENERATE, who
    if block.bonus and writes.bonus:
        yield block.kept, Decision.BONUS, block.slim_forwards - 1 if block.deciders else 0


def law_of(logits: Float[Tensor, "R V"], tokens: Sequence[int], sampling: Sampling) -> list[float]:
    """Probability of each row's token in the law that is sampled from."""
    return of_tokens(sampling.warp(logits), tokens).tolist()


def full_views(tiers: Tiers, prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> list[FullView]:
    """The full verifier at every output position; afterwards its cache holds prompt and output."""
    unit = torch.finfo(tiers.model.dtype).eps * NOISE[tiers.model.dtype]
    found: list[FullView] = []
    for logits in text_logits(tiers.full, prompt, output):
        tokens = output[len(found) : len(found) + len(logits)]
        wide = logits.double()
        best = top(wide)
        distance = (wide.amax(-1) - of_tokens(wide, tokens)).tolist()
        bound = (unit * wide.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1)).tolist()
        law = law_of(logits, tokens, sampling)
        found += map(FullView, best.tolist(), distance, bound, law)
    return found


def slim_views(
    tiers: Tiers,
    slims: Sequence[Tier],
    prompt: Sequence[int],
    generation: Generation,
    sampling: Sampling,
    writes: Writes,
) -> dict[int, SlimView]:
    """Each slim verifier at the positions that it decided; the cache must hold prompt and output, and is used up."""
    found: dict[int, SlimView] = {}
    for index, slim in enumerate(slims):
        places = [[place for place, _, who in decided(block, writes) if who == index] for block in generation.blocks]
        tiers.full.prefill((*prompt, *generation.token_ids[:-1]))  # what the one before has used up
        counts = [max(mine, default=-1) + 1 for mine in places]
        for number, logits in block_logits(tiers, slim, prompt, generation, counts):
            start = generation.blocks[number].start
            tokens = generation.token_ids[start : start + counts[number]]
            wide = logits.double()
            confidence = (of_tokens(wide, tokens) - wide.amax(-1)).exp().tolist()
            views = list(map(SlimView, confidence, law_of(logits, tokens, sampling)))
            found |= {start + place: views[place] for place in places[number]}
    return found


def judged(full: FullView, slim: SlimView, token: int, sampling: Sampling) -> tuple[bool, bool]:
    """Whether a token is wrong, and whether it is a near-tie."""
    if not sampling.greedy:
        return full.law < KEPT_AT_LEAST * slim.law or full.law == 0, False
    differs = token != full.wanted
    return differs and not full.distance < full.bound, differs and full.distance < full.bound


def audited(
    tiers: Tiers,
    slims: Sequence[Tier],
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    sample: SampleRecord,
    baseline: SampleRecord,
    sampling: Sampling,
    writes: Writes = SLIM_ENDING,
) -> AuditedOutput:
    """One output of an arm beside the baseline's: a pass of the full verifier, and each slim one's by block."""
    generation = sample.generation
    output = generation.token_ids
    full = full_views(tiers, prompt, output, sampling)
    views = slim_views(tiers, slims, prompt, generation, sampling, writes)
    pieces = pieces_of(tokenizer, output)
    tokens = []
    for block in generation.blocks:
        for place, route, who in decided(block, writes):
            at = block.start + place
            wrong, near_tie = judged(full[at], views[at], output[at], sampling)
            tokens.append(
                SlimToken(
                    position=at,
                    place=place + 1,
                    route=route,
                    confidence=views[at].confidence,
                    token=output[at],
                    text=pieces[at],
                    wanted=full[at].wanted,
                    wanted_text=tokenizer.decode([full[at].wanted]),
                    gap=full[at].distance / (sampling.temperature or 1.0),
                    wrong=wrong,
                    near_tie=near_tie,
                    slim=who + 1,
                )
            )
    metric = next(iter(sample.scores), "none")
    return AuditedOutput(
        task=sample.task,
        arm=sample.arm,
        example_id=sample.example_id,
        pieces=pieces,
        baseline_text=baseline.text,
        references=sample.references,
        metric=metric,
        score=sample.scores.get(metric),
        baseline_score=baseline.scores.get(metric),
        tokens=tuple(tokens),
    )


def pieces_of(tokenizer: Tokenizer, output: Sequence[int]) -> tuple[str, ...]:
    """The text that each token adds; a token in the middle of a character adds none, the last one all of it."""
    found: list[str] = []
    done = ""
    for end in range(1, len(output) + 1):
        text = tokenizer.decode(output[:end])
        whole = text if end == len(output) else text.rstrip("\ufffd")
        found.append(whole[len(done) :] if len(whole) > len(done) else "")
        done = whole if len(whole) > len(done) else done
    return tuple(found)
