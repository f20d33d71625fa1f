"""The table of quality: every metric of every arm, with its standard error, and the difference from the baseline."""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from harness.compare import BASELINE
from harness.metrics import DIFFERENCE
from harness.records import MetricRow, RunRecord

REMARK = (
    "± standard error [95 % interval], both over prompts; a difference is paired: the same prompts in both arms. "
    "An interval that holds 0 tells no difference."
)


def reading(scorers: Iterable[Mapping[str, str]]) -> str:
    """How to read the table, then who computed what with which settings, once where runs agree."""
    found = dict.fromkeys(f"- {what}: {scorer}" for run in scorers for what, scorer in run.items())
    return "\n".join([REMARK, "", *found])


def estimate(row: MetricRow | None, dash: str, sign: str = "") -> str:
    """A value as ``18.6 ± 2.1 [14.5, 22.8]``; ``sign`` is ``+`` for a difference."""
    if row is None or row.value is None:
        return dash
    found = f"{row.value:{sign}.1f}"
    if row.stderr is not None:
        found += f" ± {row.stderr:.1f}"
    return found if row.low is None or row.high is None else f"{found} [{row.low:{sign}.1f}, {row.high:{sign}.1f}]"


def signed(row: MetricRow | None) -> str:
    """A difference in brackets behind a value: `` (+2.8)``; nothing where there is none."""
    return "" if row is None or row.value is None else f" ({row.value:+.1f})"


def quality_frame(runs: Sequence[tuple[RunRecord, Sequence[MetricRow]]], dash: str) -> pd.DataFrame:
    """One line per task, arm and metric, as text; the run only where there is more than one."""
    found = []
    for run, rows in runs:
        known = {(row.task, row.arm, row.metric): row for row in rows}
        for (task, arm, name), row in known.items():
            if name in run.task_metrics[task]:
                apart = None if arm == BASELINE else known.get((task, arm, name + DIFFERENCE))
                found.append(
                    {
                        **({"run": run.run_id, "cell": run.cell or dash} if len(runs) > 1 else {}),
                        **{"task": task, "arm": arm, "metric": name, "unit": row.unit},
                        "better": "higher" if row.higher_is_better else "lower",
                        "value": estimate(row, dash),
                        f"minus {BASELINE}": estimate(apart, dash, "+"),
                    }
                )
    return pd.DataFrame(found)
