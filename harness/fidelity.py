"""How far outputs are from the full verifier's own: rates of ``FidelityRecord``s, without any task.

Rates are ratios of sums over prompts. Beside these stand three numbers from the stored tokens alone, in ``compare.py``:
``token_agreement``, ``first_divergence`` and ``exact_sequence_share``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from harness.compare import Interval, bootstrap, divide, ratio_of_sums
from harness.records import FidelityRecord, SampleRecord

Records = Sequence[FidelityRecord]

LENIENCES = (0.2, 0.4, 0.6, 0.8)
"""l of the region where the draft's probability is above the full verifier's / l (Revisiting Lossy Verification)."""


@dataclass(frozen=True)
class FidelityMetric:
    """A number from the records of all prompts of one arm and task; ``terms`` where it has an interval."""

    name: str
    unit: str
    higher_is_better: bool | None
    definition: str
    value: Callable[[Records], float | None]
    terms: Callable[[FidelityRecord], tuple[float, float]] | None = None

    def interval(self, records: Records, seed: int) -> Interval:
        """95 % bootstrap over prompts of the ratio of sums."""
        if self.terms is None or self.value(records) is None:
            return None
        return bootstrap(ratio_of_sums, np.array([self.terms(one) for one in records], dtype=float).T, seed)


def greedy_share(records: Records) -> float | None:
    return divide(sum(one.greedy for one in records), sum(one.tokens for one in records))


def nll_per_token(records: Records) -> float | None:
    known = [one.nll for one in records if one.nll is not None]
    return divide(math.fsum(known), sum(one.tokens for one in records)) if len(known) == len(records) else None


def overshoots(records: Records) -> list[float] | None:
    """All of them, in order; None where one record has none."""
    if any(one.overshoot is None for one in records):
        return None
    return [value for one in records for value in one.overshoot or ()]


def overshoot_share(records: Records, lenience: float) -> float | None:
    found = overshoots(records)
    return None if found is None else divide(sum(value > math.log(1 / lenience) for value in found), len(found))


def overshoot_tail(records: Records, percent: float) -> float | None:
    found = overshoots(records)
    return float(np.percentile(found, percent)) if found else None


FIDELITY_METRICS: tuple[FidelityMetric, ...] = (
    FidelityMetric(
        "greedy_share",
        "share",
        True,
        "Output tokens that are the full verifier's likeliest after the text before them, the arm's own text given / "
        "output tokens. Below 1 for greedy decoding itself in low precision: near-ties.",
        greedy_share,
        lambda one: (one.greedy, one.tokens),
    ),
    FidelityMetric(
        "nll_per_token",
        "nats",
        False,
        "-log of the full verifier's probability of the output, at the run's temperature (1 when greedy), before top-p "
        "and top-k / output tokens.",
        nll_per_token,
        lambda one: (one.nll or 0.0, one.tokens),
    ),
    *(
        FidelityMetric(
            f"overshoot_{lenience}",
            "share",
            False,
            f"Accepted drafts whose draft probability is above the full verifier's / {lenience} / accepted drafts; "
            "probabilities as for nll_per_token, 1 for a draft from a table; none without drafts, and none for swift "
            "and clasp, which draft with layers that change from block to block and are not stored.",
            partial(overshoot_share, lenience=lenience),
        )
        for lenience in LENIENCES
    ),
    *(
        FidelityMetric(
            f"overshoot_p{percent}",
            "nats",
            False,
            f"{percent}th percentile of log(draft probability / full probability) over accepted drafts.",
            partial(overshoot_tail, percent=percent),
        )
        for percent in (95, 99)
    ),
)
"""In the order of the tables."""


def records_of(samples: Sequence[SampleRecord], records: Records) -> list[FidelityRecord] | None:
    """The record of each sample; None where one has none, as in a run that was killed."""
    known = {(one.task, one.arm, one.example_id): one for one in records}
    found = [known.get((sample.task, sample.arm, sample.example_id)) for sample in samples]
    return [one for one in found if one is not None] if found and None not in found else None
