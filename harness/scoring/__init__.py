"""Quality metrics by name, one file a family, and the normalisers and answer matchers behind them.

The libraries are imported on first use, so reading names and units costs nothing. A plain string where a list of texts
belongs raises ``TypeError``: scoring it letter by letter would give a low number that looks real.
"""

from collections.abc import Iterable

from harness.scoring.answers import EXACT_MATCH, F1, normalize_answer
from harness.scoring.base import Metric
from harness.scoring.code import PASS_AT_1, TIMEOUT, pass_at_k
from harness.scoring.numbers import ACCURACY, UNPARSED, final_number
from harness.scoring.summarization import ROUGE1, ROUGE2, ROUGE_LSUM, sentences
from harness.scoring.translation import BLEU, CHRF

__all__ = ["METRICS", "Metric", "final_number", "normalize_answer", "pass_at_k", "sentences", "with_companions"]

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *(BLEU, CHRF),
        *(ROUGE1, ROUGE2, ROUGE_LSUM),
        *(EXACT_MATCH, F1),
        *(ACCURACY, UNPARSED),
        *(PASS_AT_1, TIMEOUT),
    )
}


def with_companions(names: Iterable[str]) -> tuple[str, ...]:
    """The metrics named, then those that always stand beside them: ``accuracy`` brings ``unparsed``."""
    named = tuple(names)
    beside = (companion for name in named for companion in METRICS[name].companions)
    return tuple(dict.fromkeys((*named, *beside)))
