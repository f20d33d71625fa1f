"""BLEU and chrF of sacrebleu, with its defaults and its signatures."""

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, cast

from harness.scoring.base import Metric, texts

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric as Scorer


@cache
def _scorer(kind: str) -> "Scorer":
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    return CHRF() if kind == "chrf" else BLEU(effective_order=kind == "sentence_bleu")


def bleu_sample(prediction: str, references: Sequence[str]) -> float | None:
    """Sentence BLEU of sacrebleu, with its effective order: a short text is not zero for want of 4-grams."""
    return _scorer("sentence_bleu").sentence_score(prediction, texts(references)).score if references else None


def chrf_sample(prediction: str, references: Sequence[str]) -> float | None:
    """Sentence chrF of sacrebleu with its defaults (chrF2: characters up to 6-grams, no words, beta 2)."""
    return _scorer("chrf").sentence_score(prediction, texts(references)).score if references else None


def terms(kind: str, prediction: str, references: Sequence[str]) -> Sequence[float] | None:
    """The counts and lengths from which sacrebleu makes a corpus score, of one prediction.

    Its own significance tests resample these same rows; it has no public name for them. That their sum gives the
    score of the public call is held by a test.
    """
    if not references:
        return None
    streams = [[text] for text in texts(references)]
    return cast("Sequence[float]", _scorer(kind)._extract_corpus_statistics([prediction], streams)[0])


def total(kind: str, sums: Sequence[float]) -> float:
    """Corpus score of summed terms. Not the mean of the sample values: counts are pooled over the corpus."""
    return float(_scorer(kind)._compute_score_from_stats([int(value) for value in sums]).score)


def signature(kind: str, name: str, references: Sequence[Sequence[str]]) -> str:
    """sacrebleu's signature of a corpus score, with the number of references in it."""
    found = dict(_scorer(kind).__dict__)
    counts = {len(one) for one in references if one}
    found["num_refs"] = counts.pop() if len(counts) == 1 else -1  # -1 reads "var"
    return f"sacrebleu {name}|{_scorer(kind)._SIGNATURE_TYPE(found)}"


BLEU = Metric(
    "bleu",
    "BLEU",
    True,
    bleu_sample,
    partial(terms, "bleu"),
    partial(total, "bleu"),
    partial(signature, "bleu", "BLEU"),
    is_mean=False,
)
"""Corpus BLEU with sacrebleu's defaults: 13a tokeniser, mixed case, exponential smoothing."""
CHRF = Metric(
    "chrf",
    "chrF",
    True,
    chrf_sample,
    partial(terms, "chrf"),
    partial(total, "chrf"),
    partial(signature, "chrf", "chrF2"),
    is_mean=False,
)
"""Corpus chrF2 with sacrebleu's defaults."""
