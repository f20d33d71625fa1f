"""Where a lossless arm's greedy output leaves the baseline's: a near-tie that rounding decides, or a fault.

At temperature 0 a lossless method writes the full verifier's greedy tokens. But a block of another length takes another
kernel path, and where two logits are nearly equal the rounding says which is larger; behind such a place the texts
differ for good. So the first difference is judged, by the logits there. They are computed once more, outside every
clock, on the path that the baseline took: prefill, then one token a forward.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from harness.compare import first_mismatch
from harness.model.tiers import Tiers
from harness.records import Divergence, SampleRecord

NOISE: Mapping[torch.dtype, float] = {
    torch.bfloat16: 4.0,
    torch.float16: 4.0,
    torch.float32: 32.0,
    torch.float64: 32.0,
}
"""How far below the largest logit a token may be in a near-tie, in units of the dtype's eps times the largest absolute
logit there.

Two logits of two forwards are four roundings of at most half a unit: 2 units between the two at the worst, and what the
layers below have rounded comes on top. Measured on the embedded model (30 layers), single steps against blocks of 2 to
8 tokens and against a prefill, as the change of the distance between the top logit and each of the next nine: in
bfloat16, the largest of the nine had median 0.6, 99th percentile 1.7 and maximum 2.6 over 409 positions, and tokens
that changed places were at most 1.2 apart; in float16 the maximum was 1.4. In float32 and float64, where sums are
rounded to the dtype as well, it was 9.3 and 7.5.

In bfloat16 the bound is 0.8 logits where the largest is 26, in float32 0.0001. The former is blunt: at 28 % of the
positions the second-best token is within it, so a wrong method shows in most of its prompts, not in every one. The
largest absolute logit is the scale because it fits the measured changes better than the top logit does.

Not covered: products in less than the model's dtype, such as TF32; what they change counts as a fault.
"""


def divergences(
    tiers: Tiers,
    prompt: Sequence[int],
    baseline: SampleRecord,
    others: Sequence[SampleRecord],
    noise: float | None = None,
) -> Iterator[Divergence]:
    """The first difference from ``baseline``, judged, of each of ``others`` that has one; all greedy, after ``prompt``.

    ``tiers``  the baseline's. Where nothing differs they are left alone.
    ``noise``  of ``NOISE`` by default; 0 where equal tokens are promised, so that every difference is a fault.
    """
    expected = baseline.generation.token_ids
    differing: dict[int, list[SampleRecord]] = defaultdict(list)
    for other in others:
        place = first_mismatch(other.generation.token_ids, expected)
        if place is not None:
            differing[place].append(other)
    if not differing:
        return
    dtype = tiers.model.dtype
    unit = torch.finfo(dtype).eps * (NOISE[dtype] if noise is None else noise)
    tiers.prefill(prompt)
    for place in range(max(differing) + 1):
        logits = tiers.full.forward((*prompt, *expected[:place]), rows=1)[0]
        for other in differing.get(place, ()):
            yield judged(other, expected, place, logits.double(), unit)


def judged(
    other: SampleRecord, expected: Sequence[int], place: int, logits: Float[Tensor, "V"], unit: float
) -> Divergence:
    """The record of a difference at output position ``place``; the bound is ``unit`` times the largest logit."""
    tokens = other.generation.token_ids
    baseline_token = expected[place] if place < len(expected) else None
    arm_token = tokens[place] if place < len(tokens) else None
    gap = distance = largest = bound = None
    if baseline_token is not None and arm_token is not None:
        top, second = logits.topk(2).values.tolist()
        lower = min(float(logits[baseline_token]), float(logits[arm_token]))
        size = float(logits.nan_to_num(0.0, 0.0, 0.0).abs().max())
        if all(math.isfinite(number) for number in (top, second, lower)):
            gap, distance, largest, bound = top - second, top - lower, size, unit * size
    return Divergence(
        run_id=other.run_id,
        task=other.task,
        example_id=other.example_id,
        arm=other.arm,
        position=place,
        baseline_token=baseline_token,
        arm_token=arm_token,
        gap=gap,
        distance=distance,
        largest_logit=largest,
        bound=bound,
        near_tie=distance is not None and bound is not None and distance < bound,
    )
