"""Programs scored by their tests: pass@k of HumanEval (https://arxiv.org/abs/2107.03374)."""

import math
from collections.abc import Sequence

from harness.scoring.base import mean_metric


def pass_at_k(programs: int, passed: int, k: int) -> float | None:
    """P(one of ``k`` programs drawn without replacement passes), of ``programs`` of which ``passed`` do; in 0..1.

    The unbiased estimator of the HumanEval paper, 1 - C(n - c, k) / C(n, k); None with fewer than ``k`` programs.

    Raises:
        ValueError: not 0 <= passed <= programs, or k below 1.

    >>> pass_at_k(programs=4, passed=1, k=2)
    0.5
    """
    if not 0 <= passed <= programs or k < 1:
        raise ValueError(f"want 0 <= passed <= programs and k >= 1, got {passed}, {programs}, {k}")
    if programs < k:
        return None
    return 1.0 - math.comb(programs - passed, k) / math.comb(programs, k)


def pass_sample(outcome: str, references: Sequence[str]) -> float:
    """pass@1 of the one program of a prompt: 100 where it passed its tests."""
    return 100.0 * (outcome == "passed")


def timeout_sample(outcome: str, references: Sequence[str]) -> float:
    """100 where the program ran out of time, which pass@1 counts as not passed."""
    return 100.0 * (outcome == "timeout")


def _named() -> str:
    return "unbiased estimator of the HumanEval paper, one program a prompt, run in a sandbox"


PASS_AT_1 = mean_metric("pass@1", "%", pass_sample, _named, executes=True, companions=("timeout",))
TIMEOUT = mean_metric("timeout", "%", timeout_sample, _named, higher_is_better=False, executes=True)
