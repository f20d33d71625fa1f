"""Spec-Bench's questions (arXiv 2401.07851): 13 categories, those of MT-bench with two turns."""

from collections.abc import Mapping
from typing import Any

from tasks.mixed import Mixed
from tasks.source import Dataset, RowError


class SpecBench(Mixed):
    """A speed benchmark: Spec-Bench scores nothing. ROUGE-Lsum where a row has references (reading: ours).

    The set is on no hub; ``data_dir`` has ``spec_bench/question.jsonl`` as its repository does. Of a row with one turn
    every reference is equally right; of a row with several turns, each reference belongs to its turn.
    """

    name = "spec_bench"
    dataset = Dataset(
        *("", "default", "spec_bench", "spec_bench", "spec_bench"),
        calibration=(),
        shots=(),
        test_file="spec_bench/question.jsonl",
    )
    columns = ("category", "turns", "reference")

    def references(self, row: Mapping[str, Any], turn: int) -> tuple[str, ...]:
        given = row.get("reference", [])
        if not isinstance(given, list):
            raise RowError(f"column 'reference' holds {type(given).__name__}, want list")
        if len(row["turns"]) > 1:
            given = given[turn : turn + 1]
        flat = [text for one in given for text in (one if isinstance(one, list) else [one])]
        if not all(isinstance(text, str) for text in flat):
            raise RowError("column 'reference' holds something other than texts")
        return tuple(text for text in flat if text.strip())
