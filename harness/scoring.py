"""Quality metrics, and the text normalisers and answer matchers behind them. Every value lies on a 0-100 scale.

Metrics are looked up by name in ``METRICS``. The libraries are imported on first use, so reading names and units
costs nothing. A plain string where a list of texts belongs raises ``TypeError``: scoring it letter by letter
would give a low number that looks real.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.bleu import BLEU


@dataclass(frozen=True)
class Metric:
    """One quality measure.

    ``sample``  value of one prediction against its references (all equally right); None when there is no reference.
    ``corpus``  value of many predictions, ``references[i]`` belonging to ``predictions[i]``; None when there are none.
    For every metric but BLEU it is the mean of the sample values.
    """

    name: str
    unit: str
    higher_is_better: bool
    sample: Callable[[str, Sequence[str]], float | None]
    corpus: Callable[[Sequence[str], Sequence[Sequence[str]]], float | None]


def _texts(value: Sequence[str]) -> Sequence[str]:
    """``value`` itself, refused when it is one string, whose items would be letters."""
    if isinstance(value, str):
        raise TypeError(f"want a list of texts, got one string: {value[:40]!r}")
    return value


def _pairs(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    """Predictions with their references; ValueError unless there is one list of references a prediction."""
    if len(_texts(predictions)) != len(references):
        raise ValueError(f"{len(predictions)} predictions, but references for {len(references)}")
    return list(zip(predictions, references, strict=True))


# BLEU


@cache
def _bleu(effective_order: bool) -> "BLEU":
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(effective_order=effective_order)


def bleu_sample(prediction: str, references: Sequence[str]) -> float | None:
    """Sentence BLEU of sacrebleu, with its effective order: a short text is not zero for want of 4-grams."""
    return _bleu(True).sentence_score(prediction, _texts(references)).score if references else None


def bleu_corpus(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float | None:
    """Corpus BLEU of sacrebleu with its defaults (13a tokeniser, mixed case, exponential smoothing).

    Equals the direct call. Not the mean of ``bleu_sample``: counts are pooled over the corpus.
    """
    pairs = [(prediction, _texts(texts)) for prediction, texts in _pairs(predictions, references) if texts]
    if not pairs:
        return None
    # sacrebleu wants one stream a reference position and leaves out the None of a sample with fewer references.
    streams = cast("list[list[str]]", [list(stream) for stream in zip_longest(*(texts for _, texts in pairs))])
    return _bleu(False).corpus_score([prediction for prediction, _ in pairs], streams).score


# ROUGE

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
def _rouge(kind: str) -> "RougeScorer":
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=True)


def rouge_sample(kind: str, prediction: str, references: Sequence[str]) -> float | None:
    """F-measure of rouge-score for ``kind`` (``rouge2``, ``rougeLsum``), the best over the references.

    With the Porter stemmer (``use_stemmer=True``). rouge-score takes lines as the sentences of ROUGE-Lsum, so both
    texts are first split into sentences by ``sentences``. Its tokeniser knows only a-z and 0-9: a text without them,
    and for ROUGE-2 a text of one word, scores 0 even against itself.
    """
    if not references:
        return None
    lined = ["\n".join(sentences(text)) for text in (*_texts(references), prediction)]
    return 100.0 * _rouge(kind).score_multi(lined[:-1], lined[-1])[kind].fmeasure


# Question answering, as in SQuAD

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """The normaliser of the official SQuAD script: lower case, no ASCII punctuation, no articles, single spaces.

    >>> normalize_answer("The  U.S. Senate!")
    'us senate'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DROP_PUNCTUATION)).split())


def exact_match_sample(prediction: str, references: Sequence[str]) -> float | None:
    """100 when the prediction equals a reference after ``normalize_answer``, else 0."""
    if not references:
        return None
    return 100.0 * (normalize_answer(prediction) in map(normalize_answer, _texts(references)))


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
    return 100.0 * max(_f1(words, normalize_answer(text).split()) for text in _texts(references))


# Arithmetic

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
    wanted = {Decimal(number) for text in _texts(references) if (number := final_number(text)) is not None}
    got = final_number(prediction)
    return 100.0 * (got is not None and Decimal(got) in wanted)


# The registry


def _mean_of(
    sample: Callable[[str, Sequence[str]], float | None],
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
) -> float | None:
    values = [sample(prediction, texts) for prediction, texts in _pairs(predictions, references)]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _mean_metric(name: str, unit: str, sample: Callable[[str, Sequence[str]], float | None]) -> Metric:
    return Metric(name, unit, True, sample, partial(_mean_of, sample))


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("bleu", "BLEU", True, bleu_sample, bleu_corpus),
        _mean_metric("rouge2", "ROUGE", partial(rouge_sample, "rouge2")),
        _mean_metric("rougeLsum", "ROUGE", partial(rouge_sample, "rougeLsum")),
        _mean_metric("exact_match", "%", exact_match_sample),
        _mean_metric("f1", "F1", f1_sample),
        _mean_metric("accuracy", "%", accuracy_sample),
    )
}
