"""ROUGE-1, ROUGE-2 and ROUGE-Lsum of rouge-score."""

import re
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from harness.scoring.base import Metric, mean_metric, texts

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

# The escapes are curly quotes, and below the minus sign.
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'\u201d\u2019)\]]))\s+(?=[\"'\u201c\u2018(\[]?[A-Z0-9])")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Gen|Sen|Rep|Gov|Lt|Col|Sgt|No|vs|U\.S|U\.K|U\.N|[A-Z])\.$")


def sentences(text: str) -> list[str]:
    """Splits at line ends, and after ``.``, ``!`` or ``?`` before a capital or a digit; titles and initials stay whole.

    >>> sentences("Dr. Ada Roe spoke. It rained!")
    ['Dr. Ada Roe spoke.', 'It rained!']
    """
    found: list[str] = []
    for line in text.split("\n"):
        start_of_line = len(found)
        for part in filter(None, map(str.strip, _SENTENCE_END.split(line))):
            if len(found) > start_of_line and _ABBREVIATION.search(found[-1]):
                found[-1] += " " + part
            else:
                found.append(part)
    return found


@cache
def _scorer(kind: str) -> "RougeScorer":
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=True)


def rouge_sample(kind: str, prediction: str, references: Sequence[str]) -> float | None:
    """F-measure of rouge-score for ``kind`` (``rouge1``, ``rouge2``, ``rougeLsum``), the best over the references.

    With the Porter stemmer (``use_stemmer=True``). rouge-score takes lines as the sentences of ROUGE-Lsum, so both
    texts are first split into sentences by ``sentences``. Its tokeniser knows only a-z and 0-9: a text without them,
    and for ROUGE-2 a text of one word, scores 0 even against itself.
    """
    if not references:
        return None
    lined = ["\n".join(sentences(text)) for text in (*texts(references), prediction)]
    return 100.0 * _scorer(kind).score_multi(lined[:-1], lined[-1])[kind].fmeasure


def _named(kind: str) -> str:
    return f"rouge-score {version('rouge-score')} {kind}, F-measure, Porter stemmer, sentences on lines, best reference"


def _metric(kind: str) -> Metric:
    return mean_metric(kind, "ROUGE", partial(rouge_sample, kind), partial(_named, kind))


ROUGE1, ROUGE2, ROUGE_LSUM = _metric("rouge1"), _metric("rouge2"), _metric("rougeLsum")
