"""Exact match and F1 of short answers, as in SQuAD 2.0 (https://arxiv.org/abs/1806.03822, ``evaluate-v2.0.py``)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from harness.scoring.base import mean_metric, texts

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """The normaliser of the official SQuAD script: lower case, no ASCII punctuation, no articles, single spaces.

    >>> normalize_answer("The  U.S. Senate!")
    'us senate'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DROP_PUNCTUATION)).split())


def aliases(references: Sequence[str]) -> list[str]:
    """Normalised answers, those left out of which nothing remains; of no answer at all, the empty one.

    So the official SQuAD 2.0 script has it: a question without an answer is answered by saying nothing.
    """
    return [found for text in texts(references) if (found := normalize_answer(text))] or [""]


def exact_match_sample(prediction: str, references: Sequence[str]) -> float | None:
    """100 when the prediction equals a reference after ``normalize_answer``, else 0."""
    return 100.0 * (normalize_answer(prediction) in aliases(references)) if references else None


def _f1(prediction: list[str], reference: list[str]) -> float:
    """Token F1 in 0..1; with an empty side it is 1 only if both are empty (SQuAD 2.0)."""
    if not prediction or not reference:
        return float(prediction == reference)
    same = sum((Counter(prediction) & Counter(reference)).values())
    return 2.0 * same / (len(prediction) + len(reference))


def f1_sample(prediction: str, references: Sequence[str]) -> float | None:
    """Token F1 of the official SQuAD script, the best over the references: 2 * common / (predicted + expected)."""
    if not references:
        return None
    words = normalize_answer(prediction).split()
    return 100.0 * max(_f1(words, text.split()) for text in aliases(references))


def _named() -> str:
    return "normaliser and no-answer rule of SQuAD 2.0, best reference"


EXACT_MATCH = mean_metric("exact_match", "%", exact_match_sample, _named)
F1 = mean_metric("f1", "F1", f1_sample, _named)
