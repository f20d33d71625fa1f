"""Blocks, samples and runs made by hand, for tests of what is computed from them."""

from harness.compare import BASELINE
from harness.records import (
    SCHEMA,
    ArmRecord,
    BlockTrace,
    DataSource,
    Divergence,
    Generation,
    Route,
    RunRecord,
    SampleRecord,
    StopReason,
)

A, R, E = Route.ACCEPT, Route.REGENERATE, Route.ESCALATE


def plain(start: int) -> BlockTrace:
    return BlockTrace(start, 0, 0, (), 0, 1, 0, 0, 0, 1)


# Three drafts kept through all routes but regenerate, then the fourth regenerated: no full pass saved.
MIXED = BlockTrace(0, 4, 4, (A, E, A, R), 3, 4, 0, 4, 1, 1)
# First draft rejected by the full verifier; the other two never examined.
REJECTED = BlockTrace(4, 4, 3, (E,), 0, 1, 0, 3, 1, 1)
# All kept, decided without the full verifier.
CHEAP = BlockTrace(5, 2, 2, (A, A), 2, 2, 0, 2, 1, 0)
# Two-tier block with its bonus token.
BONUS = BlockTrace(0, 2, 2, (E, E), 2, 3, 1, 2, 0, 1)
# End-of-sequence inside the kept prefix: five drafted, the stop rule leaves three.
CUT = BlockTrace(3, 5, 5, (E, E, E), 3, 3, 0, 5, 0, 1)


def sample(
    blocks: tuple[BlockTrace, ...] = (),
    *,
    example: str = "1",
    arm: str = "via_sd",
    task: str = "translation",
    ids: tuple[int, ...] | None = None,
    decode_s: float = 1.0,
    prefill_s: float = 0.5,
    tokens: int | None = None,
    prediction: str = "4",
    scores: dict[str, float | None] | None = None,
) -> SampleRecord:
    if tokens is not None:
        blocks = tuple(plain(start) for start in range(tokens))
    if ids is not None and not blocks:
        blocks = tuple(plain(start) for start in range(len(ids)))
    count = sum(block.emitted for block in blocks)
    return SampleRecord(
        run_id="run",
        arm=arm,
        task=task,
        example_id=example,
        prompt_tokens=100,
        input_cut=0,
        prompt_sha=f"sha{example}",
        text=prediction,
        prediction=prediction,
        references=("4",),
        scores={"exact_match": 100.0} if scores is None else scores,
        prefill_s=prefill_s,
        decode_s=decode_s,
        peak_bytes=None,
        generation=Generation(tuple(range(count)) if ids is None else ids, blocks, StopReason.LENGTH),
    )


def run_record(arms: tuple[str, ...] = (BASELINE, "via_sd"), temperature: float = 0.0) -> RunRecord:
    return RunRecord(
        run_id="run",
        schema=SCHEMA,
        created="2026-01-31T09:15:00Z",
        model="toy",
        temperature=temperature,
        seed=0,
        arms=tuple(ArmRecord(arm, arm, None, None, arm == BASELINE) for arm in arms),
        data={"translation": DataSource("builtin", "rows.jsonl", "test", None, None, "0" * 64, 2)},
        prompts_sha={"translation": "0" * 64},
        task_metrics={"translation": ("exact_match",)},
        git_commit=None,
        git_dirty=None,
        env={},
        status="finished",
    )


def two_arms() -> list[SampleRecord]:
    blocks = (MIXED, REJECTED, CHEAP, plain(7))
    return [
        made
        for example in ("1", "2")
        for made in (
            sample(tokens=8, example=example, arm=BASELINE, decode_s=2.0),
            sample(blocks, example=example, decode_s=1.0, prediction="5", scores={"exact_match": 0.0}),
        )
    ]


def divergence(near_tie: bool = True, gap: float = 0.25, **identity: str) -> Divergence:
    """A judged difference of the sample that ``sample`` makes by default; the bound is 0.5."""
    known = {"run_id": "run", "task": "translation", "example_id": "1", "arm": "via_sd"} | identity
    return Divergence(
        **known,
        position=2,
        baseline_token=7,
        arm_token=8,
        gap=gap,
        distance=0.375 if near_tie else 1.5,
        largest_logit=16.0,
        bound=0.5,
        near_tie=near_tie,
    )
