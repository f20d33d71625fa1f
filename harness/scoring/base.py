"""What a quality metric is, and what all families share. Every value lies on a 0-100 scale.

A corpus value is a function of sums: each prediction gives a row of numbers, the rows are summed, and the sum is made
into the value. A mean sums (value, 1); BLEU sums n-gram counts and lengths. So a resampled corpus costs a sum and no
second scoring, and two methods can be compared on the same draws (``harness.quality``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Sample = Callable[[str, Sequence[str]], float | None]


@dataclass(frozen=True)
class Metric:
    """One quality measure.

    ``sample``  value of one prediction against its references (all equally right); None when there is no reference.
    Where ``executes``, the prediction was run as a program, and ``sample`` is given the outcome of that.
    ``terms``  what the prediction adds to the corpus's sums; None when there is no reference.
    ``total``  the corpus value of summed terms.
    ``scorer``  who computed it with which settings, given the references: printed under the tables.
    ``companions``  names of metrics that are always reported beside this one.
    """

    name: str
    unit: str
    higher_is_better: bool
    sample: Sample
    terms: Callable[[str, Sequence[str]], Sequence[float] | None]
    total: Callable[[Sequence[float]], float | None]
    scorer: Callable[[Sequence[Sequence[str]]], str]
    is_mean: bool = True
    executes: bool = False
    companions: tuple[str, ...] = ()

    def corpus(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float | None:
        """Value of many predictions, ``references[i]`` belonging to ``predictions[i]``; None when there are none.

        Raises:
            ValueError: another number of predictions than of references.
            TypeError: one string where a list of texts belongs.
        """
        rows = [self.terms(prediction, found) for prediction, found in pairs(predictions, references)]
        known = [row for row in rows if row is not None]
        return self.total([sum(column) for column in zip(*known, strict=True)]) if known else None


def mean_metric(
    name: str,
    unit: str,
    sample: Sample,
    scorer: Callable[[], str],
    *,
    higher_is_better: bool = True,
    executes: bool = False,
    companions: tuple[str, ...] = (),
) -> Metric:
    """A metric whose corpus value is the mean of its sample values."""

    def terms(prediction: str, references: Sequence[str]) -> tuple[float, float] | None:
        value = sample(prediction, references)
        return None if value is None else (value, 1.0)

    def total(sums: Sequence[float]) -> float | None:
        return sums[0] / sums[1] if sums[1] else None

    return Metric(
        name,
        unit,
        higher_is_better,
        sample,
        terms,
        total,
        lambda _: scorer(),
        executes=executes,
        companions=companions,
    )


def texts(value: Sequence[str]) -> Sequence[str]:
    """``value`` itself, refused when it is one string, whose items would be letters."""
    if isinstance(value, str):
        raise TypeError(f"want a list of texts, got one string: {value[:40]!r}")
    return value


def pairs(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    """Predictions with their references; ValueError unless there is one list of references a prediction."""
    if len(texts(predictions)) != len(references):
        raise ValueError(f"{len(predictions)} predictions, but references for {len(references)}")
    return list(zip(predictions, references, strict=True))
