"""Acceptance by place in the block: counts over all prompts, rates derived on reading."""

from dataclasses import dataclass

from harness.compare import Samples, divide
from harness.metrics import cells_of
from harness.records import Route, RunRecord


@dataclass(frozen=True, slots=True)
class PositionRow:
    """What became of the drafts at one place of a block; ``position`` counts from 1.

    Counts over all prompts; ``accept``, ``regenerate`` and ``escalate`` are the routes of those examined.
    """

    run_id: str
    arm: str
    task: str
    position: int
    drafted: int
    examined: int
    kept: int
    accept: int
    regenerate: int
    escalate: int

    @property
    def accept_rate(self) -> float | None:
        """kept / drafted: unconditional, falls along the block (vLLM's per-position acceptance)."""
        return divide(self.kept, self.drafted)

    @property
    def accept_rate_if_examined(self) -> float | None:
        """kept / examined: given that all drafts before it were kept."""
        return divide(self.kept, self.examined)


def position_rows(run: RunRecord, samples: Samples) -> list[PositionRow]:
    """One row per task, arm and draft position; none for an arm that never drafted."""
    found = []
    for task, arm, cell in cells_of(run, samples):
        blocks = [block for sample in cell for block in sample.generation.blocks]
        for place in range(max((block.drafted for block in blocks), default=0)):
            routes = [block.routes[place] for block in blocks if len(block.routes) > place]
            found.append(
                PositionRow(
                    run.run_id,
                    arm,
                    task,
                    place + 1,
                    drafted=sum(block.drafted > place for block in blocks),
                    examined=len(routes),
                    kept=sum(block.kept > place for block in blocks),
                    accept=routes.count(Route.ACCEPT),
                    regenerate=routes.count(Route.REGENERATE),
                    escalate=routes.count(Route.ESCALATE),
                )
            )
    return found
