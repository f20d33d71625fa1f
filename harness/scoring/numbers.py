"""The number that a worked answer ends in, as in GSM8K."""

import re
from collections.abc import Sequence
from decimal import Decimal

from harness.scoring.base import mean_metric, texts

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[-\u2212][$€£]?)?"  # a sign, not the minus of "10-3"
    r"[$€£]?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)


def _last_number(text: str) -> str | None:
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    return ("-" if found[-1]["sign"] else "") + found[-1]["digits"].replace(",", "")


def final_number(text: str) -> str | None:
    """The number a worked answer ends in, without commas and currency signs; None when there is none.

    It is the last number of the line that follows the last ``####`` with a number behind it; without such a mark the
    last number of the text.

    >>> final_number("3 * 6 = 18\\n#### $1,018.50."), final_number("so 5 apples are left")
    ('1018.50', '5')
    """
    for tail in reversed(text.split("####")[1:]):
        number = _last_number(tail.strip().partition("\n")[0])
        if number is not None:
            return number
    return _last_number(text)


def accuracy_sample(prediction: str, references: Sequence[str]) -> float | None:
    """100 when the final number equals that of a reference as a number (18.0 is 18), else 0."""
    if not references:
        return None
    wanted = {Decimal(number) for text in texts(references) if (number := final_number(text)) is not None}
    got = final_number(prediction)
    return 100.0 * (got is not None and Decimal(got) in wanted)


def unparsed_sample(prediction: str, references: Sequence[str]) -> float | None:
    """100 when the prediction holds no number to be right or wrong, else 0. ``accuracy`` counts it as wrong."""
    return 100.0 * (final_number(prediction) is None) if texts(references) else None


def _named() -> str:
    return "the number after the last #### that has one, else the last number; compared as decimals"


ACCURACY = mean_metric("accuracy", "%", accuracy_sample, _named, companions=("unparsed",))
UNPARSED = mean_metric("unparsed", "%", unparsed_sample, _named, higher_is_better=False)
