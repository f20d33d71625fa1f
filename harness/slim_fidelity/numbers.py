"""Every number that ``job=fidelity`` reports: means over positions, with 95 % bootstraps over texts."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from harness.compare import bootstrap, divide, ratio_of_sums
from harness.slim_fidelity.gains import gain_rows
from harness.slim_fidelity.records import SlimFidelityRecord, SlimFidelityRow, SlimFidelitySum

QUANTITIES: dict[str, str] = {
    "agreement": "share",  # argmax of q' is that of q
    "tv_slim": "share",  # total variation of q' from q
    "cost_full_slim": "nats",  # R(q||q'), eq. 9
    "cost_full_draft": "nats",  # R(q||p)
    "cost_slim_draft": "nats",  # R(q'||p)
    "accept": "share",  # P(A), P(B), P(C) under the gate, v from p
    "regenerate": "share",
    "escalate": "share",
    "delta1": "share",  # eq. B.11
    "delta2": "share",
    "tv_draft": "share",  # total variation of p from q
    "tv_mixture": "share",  # of eq. 14 from q
    "tv_three_way": "share",  # of B.7 from q
    "tv_exact": "share",  # of what is emitted from q
}
"""What is summed, and its unit. Costs are per position; a block's (eq. 10) is the sum over its places."""

BY_PLACE = ("agreement", "tv_slim", "cost_full_slim")
"""Quantities that are also given for each place in the block."""


def rows(record: SlimFidelityRecord) -> list[SlimFidelityRow]:
    """All numbers, slim verifier by slim verifier."""
    found: list[SlimFidelityRow] = []
    for slim in record.slims:
        sums = [one for one in record.sums if one.slim == slim]
        found += means(record, slim, None, sums, QUANTITIES)
        delta = mean(record, slim, None, "gain", "nats", sums, gain)
        found += [delta, *gain_rows(record, delta)]
        for place in sorted({one.place for one in sums}):
            at_place = [one for one in sums if one.place == place]
            found += means(record, slim, place, at_place, {name: QUANTITIES[name] for name in BY_PLACE})
    return found


def gain(one: SlimFidelitySum) -> float:
    """Delta of eq. 7: C(q||p) - C(q'||p) - C(q||q'), summed."""
    return one.sums["cost_full_draft"] - one.sums["cost_slim_draft"] - one.sums["cost_full_slim"]


def means(
    record: SlimFidelityRecord, slim: str, place: int | None, sums: Sequence[SlimFidelitySum], names: Mapping[str, str]
) -> Iterator[SlimFidelityRow]:
    for name, unit in names.items():
        yield mean(record, slim, place, name, unit, sums, lambda one, name=name: one.sums[name])  # type: ignore[misc]


def mean(
    record: SlimFidelityRecord,
    slim: str,
    place: int | None,
    metric: str,
    unit: str,
    sums: Sequence[SlimFidelitySum],
    term: Callable[[SlimFidelitySum], float],
) -> SlimFidelityRow:
    """Sum over all positions / their number; texts are what is resampled."""
    texts: dict[tuple[str, str], tuple[float, int]] = {}
    for one in sums:
        total, count = texts.get((one.task, one.example_id), (0.0, 0))
        texts[one.task, one.example_id] = (total + term(one), count + one.positions)
    columns = np.array(list(texts.values()), dtype=float).reshape(-1, 2).T
    low, high = bootstrap(ratio_of_sums, columns, record.run.seed) or (None, None)
    facts = record.slims[slim]
    return SlimFidelityRow(
        slim=slim,
        kind=facts.kind,
        skip_ratio=facts.skip_ratio,
        cache=facts.cache,
        place=place,
        metric=metric,
        unit=unit,
        value=divide(float(columns[0].sum()), float(columns[1].sum())),
        low=low,
        high=high,
        positions=int(columns[1].sum()),
        n=columns.shape[1],
    )
