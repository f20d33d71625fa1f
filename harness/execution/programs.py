"""Scores of an output, programs by running them, and the leave to do so, which is asked before anything runs."""

from collections.abc import Mapping, Sequence

from harness.errors import UserError
from harness.execution.sandbox import check, run_candidate
from harness.records import Example
from harness.scoring import METRICS


def permit(metrics: Mapping[str, Sequence[str]], allowed: bool) -> None:
    """Refuse tasks (name to metrics) that run what a model wrote, unless allowed and containment holds.

    Raises:
        UserError: it is not allowed, or it cannot be contained here.
    """
    running = [task for task, names in metrics.items() if any(METRICS[name].executes for name in names)]
    if running and not allowed:
        raise UserError(
            f"{', '.join(running)}: scoring runs the programs that the model writes: add allow_code_execution=true to "
            "have each run in a sandbox, or leave the task out."
        )
    if running:
        check()


def score(metrics: Sequence[str], prediction: str, example: Example) -> dict[str, float | None]:
    """Sample values by metric. A program, ``prediction``, is run once, between the ``setup`` and ``tests`` of the row.

    Blocks until every process of it is gone. Never call it under a clock.
    """
    outcome = ""
    if any(METRICS[name].executes for name in metrics):
        program = "\n".join(filter(None, (example.meta.get("setup"), prediction)))
        outcome = run_candidate(program, example.meta["tests"]).outcome
    return {
        name: METRICS[name].sample(outcome if METRICS[name].executes else prediction, example.references)
        for name in metrics
    }
