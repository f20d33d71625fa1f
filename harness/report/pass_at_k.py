"""pass@k over runs that differ in their seed alone: each run wrote one program a prompt and arm."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from harness.quality import standard_error
from harness.records import RunRecord, SampleRecord
from harness.scoring import pass_at_k

SAMPLED = (1, 2, 5, 10, 20, 50, 100)
"""The k that get a column, as far as there are runs."""
PROGRAM = "pass@1"
FREE = frozenset(("seed", "run_name", "name", "results_dir", "log", "rerun", "fail_fast", "shard"))
"""Settings in which the runs may differ."""

REMARK = "Unbiased estimator of the HumanEval paper over the runs' programs, mean over prompts ± standard error."


@dataclass(frozen=True, slots=True)
class Programs:
    """Which programs of one run passed, by task, arm and prompt (example id with the prompt's digest)."""

    seed: int
    group: str
    passed: Mapping[tuple[str, str, str], bool]


def programs(run: RunRecord, samples: Sequence[SampleRecord], settings: Mapping[str, Any]) -> Programs:
    """What a run has to add. Runs of one ``group`` have all settings in common but their seed."""
    same = {key: value for key, value in settings.items() if key not in FREE}
    passed = {
        (sample.task, sample.arm, f"{sample.example_id}/{sample.prompt_sha}"): score == 100
        for sample in samples
        if (score := sample.scores.get(PROGRAM)) is not None
    }
    return Programs(run.seed, json.dumps([run.model, same], sort_keys=True, default=str), passed)


def pass_frame(runs: Sequence[Programs], dash: str) -> pd.DataFrame:
    """One line per task and arm, one column per k, as text; empty unless some runs differ in their seed alone."""
    groups: dict[str, dict[int, Programs]] = defaultdict(dict)
    for run in runs:
        if run.passed:
            groups[run.group].setdefault(run.seed, run)  # the same seed again writes the same programs
    found = []
    for seeds in groups.values():
        if len(seeds) > 1:
            found += _lines(list(seeds.values()), dash)
    return pd.DataFrame(found).fillna(dash)


def _lines(runs: Sequence[Programs], dash: str) -> list[dict[str, str]]:
    results: dict[tuple[str, str], dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for (task, arm, prompt), passed in run.passed.items():
            results[task, arm][prompt].append(passed)
    return [
        {"task": task, "arm": arm, "runs": str(len(runs)), "prompts": str(len(prompts))}
        | {f"pass@{k}": _estimate(list(prompts.values()), k, dash) for k in SAMPLED if k <= len(runs)}
        for (task, arm), prompts in results.items()
    ]


def _estimate(prompts: Sequence[Sequence[bool]], k: int, dash: str) -> str:
    values = [value for one in prompts if (value := pass_at_k(len(one), sum(one), k)) is not None]
    if not values:
        return dash
    error = f" ± {100 * standard_error(np.array(values)):.1f}" if len(values) > 1 else ""
    return f"{100 * sum(values) / len(values):.1f}{error} %"
