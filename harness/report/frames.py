"""Tables of runs as frames: of text for reading, rounded; and tidy ones, one number a line and in full precision."""

from collections.abc import Sequence
from dataclasses import asdict, fields

import pandas as pd

from harness.fidelity import FIDELITY_METRICS
from harness.positions import PositionRow
from harness.report.lines import DASH, Line, RunReport, lines, number
from harness.report.predicted import predicted_rows

RATE_COLUMNS = (
    "reject_rate",
    "draft_waste",
    "full_rate",
    "block_full_rate",
    "drafting_block_full_rate",
    "mean_accept_length",
    "accepted_drafts_per_block",
    "mean_drafted",
    "plain_steps",
)
ROUTE_COLUMNS = ("accept_share", "regenerate_share", "escalate_share")
TIME_COLUMNS = {
    "mean_prompt_tokens": 1,
    "input_cut_share": 2,
    "length_stop_share": 2,
    "mean_prefill_s": 3,
    "mean_decode_s": 3,
    "decode_tokens_per_s": 2,
    "end_to_end_tokens_per_s": 2,
    "draft_pass_ms": 1,
    "slim_pass_ms": 1,
    "full_pass_ms": 1,
    "draft_time_share": 3,
    "slim_time_share": 3,
    "full_time_share": 3,
}
"""Columns of the table of times, with their decimals."""
FIDELITY_COLUMNS = (
    *("token_agreement", "exact_sequence_share", "first_divergence"),
    *(known.name for known in FIDELITY_METRICS),
)


def _lead(line: Line, several: bool) -> dict[str, str]:
    """Columns that say which line it is; the run only where there is more than one."""
    run = {"run": line.run.run_id, "cell": line.run.cell or DASH} if several else {}
    return {**run, "task": line.task, "arm": line.arm.arm}


def results_frame(reports: Sequence[RunReport]) -> pd.DataFrame:
    """Quality and speed, one line per task and arm, as text."""
    found = []
    for line in lines(reports):
        primary, *others = line.run.task_metrics[line.task]
        source = line.run.data.get(line.task)
        found.append(
            {
                **_lead(line, len(reports) > 1),
                "lossless": "yes" if line.arm.lossless else "**lossy**",
                "n": str(line.n),
                "quality": line.quality([primary], interval=True),
                "speedup, decode": line.speedup("speedup_decode"),
                **line.foretold(),
                "speedup, end to end": line.speedup("speedup_end_to_end"),
                "agreement with greedy": line.span("token_agreement"),
                "near-ties": line.value("near_ties", 0),
                "faults": line.faults("**{}**"),
                "further quality": line.quality(others, interval=True),
                "drafter": line.arm.drafter or DASH,
                "gate": line.arm.gate or DASH,
                "data": source.kind if source else DASH,
                "pairing": line.run.pairing,
                "output tokens": line.value("mean_output_tokens", 1),
                "baseline's output tokens": number(line.baseline.get("mean_output_tokens"), 1),
            }
        )
    for name in dict.fromkeys(name for report in reports for name in report.not_run):
        found.append(dict.fromkeys(found[0], DASH) | {"arm": name, "quality": "not run"})
    return pd.DataFrame(found)


def fidelity_frame(reports: Sequence[RunReport]) -> pd.DataFrame:
    """How far outputs are from the full verifier's own, one line per task and arm, as text."""
    return pd.DataFrame(
        [
            {**_lead(line, len(reports) > 1), **{name: line.value(name, 3) for name in FIDELITY_COLUMNS}}
            for line in lines(reports)
        ]
    )


def rates_frame(reports: Sequence[RunReport]) -> pd.DataFrame:
    """Rates of drafting and verifying, one line per task and arm, as text."""
    return pd.DataFrame(
        [
            {**_lead(line, len(reports) > 1), **{name: line.value(name, 3) for name in (*RATE_COLUMNS, *ROUTE_COLUMNS)}}
            for line in lines(reports)
        ]
    )


def times_frame(reports: Sequence[RunReport]) -> pd.DataFrame:
    """Measured seconds and rates, and how prompts were cut and outputs ended, as text."""
    return pd.DataFrame(
        [
            {
                **_lead(line, len(reports) > 1),
                **{name: line.value(name, digits) for name, digits in TIME_COLUMNS.items()},
            }
            for line in lines(reports)
        ]
    )


def positions_frame(reports: Sequence[RunReport]) -> pd.DataFrame:
    """Kept / drafted at each place of a block, one line per task and arm that drafted, as text."""
    last = max((row.position for report in reports for row in report.positions), default=0)
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for report in reports:
        for row in report.positions:
            run = {"run": row.run_id, "cell": report.run.cell or DASH} if len(reports) > 1 else {}
            blank = {**run, "task": row.task, "arm": row.arm, **{str(place + 1): DASH for place in range(last)}}
            cell = found.setdefault((row.run_id, row.task, row.arm), blank)
            cell[str(row.position)] = DASH if row.accept_rate is None else f"{row.accept_rate:.3f}"
    return pd.DataFrame(found.values())


def tidy_frame(reports: Sequence[RunReport]) -> pd.DataFrame:
    """One number a line with everything that identifies it; undefined values are empty."""
    found = []
    for report in reports:
        arms = {arm.arm: arm for arm in report.run.arms}
        for row in (*report.rows, *predicted_rows(report.rows, report.predicted)):
            source = report.run.data.get(row.task)
            identity = asdict(row) | asdict(arms[row.arm]) | {"data": source.kind if source else None}
            found.append(
                identity
                | {"git_commit": report.run.git_commit, "temperature": report.run.temperature}
                | {"pairing": report.run.pairing}
            )
            if report.remark:
                found[-1]["note"] = report.remark
    return pd.DataFrame(found)


def tidy_positions_frame(reports: Sequence[RunReport]) -> pd.DataFrame:
    """Counts and rates by draft position; the columns alone where no arm drafted."""
    rates = ("accept_rate", "accept_rate_if_examined")
    columns = [*(known.name for known in fields(PositionRow)), *rates]
    found = [
        [*(getattr(row, column) for column in columns), report.run.cell]
        for report in reports
        for row in report.positions
    ]
    return pd.DataFrame(found, columns=[*columns, "cell"])
