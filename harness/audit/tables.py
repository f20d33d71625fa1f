"""Tables of an audit: Markdown for reading, one CSV with a wrong token a line, one with the shares."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

import pandas as pd

from harness.audit.records import AuditedOutput, Share, SlimToken, shares, worst_first
from harness.compare import divide
from harness.records import RunRecord
from harness.report.lines import DASH
from harness.report.tables import markdown_table

WORST = 20
"""Prompts in the Markdown and on the page; the CSV has all."""

TOKEN_COLUMNS = ("task", "arm", "example_id", *(known.name for known in fields(SlimToken)), "effect")


def text_of(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def quoted(text: str) -> str:
    """A token's text where line breaks and control characters can be seen."""
    return "(none)" if not text else "`" + json.dumps(text, ensure_ascii=False)[1:-1].replace("`", "'") + "`"


def token_frame(outputs: Sequence[AuditedOutput]) -> pd.DataFrame:
    """Every wrong token and every near-tie of a token, in full precision."""
    found = [
        {
            **{"task": output.task, "arm": output.arm, "example_id": output.example_id},
            **asdict(token),
            "effect": output.effects.get(token.position),
        }
        for output in outputs
        for token in output.tokens
        if token.wrong or token.near_tie
    ]
    return pd.DataFrame(found, columns=list(TOKEN_COLUMNS))


def share_frame(found: Sequence[Share]) -> pd.DataFrame:
    columns = [*(known.name for known in fields(Share)), "share"]
    return pd.DataFrame([asdict(one) | {"share": one.share} for one in found], columns=columns)


def summary_frame(outputs: Sequence[AuditedOutput]) -> pd.DataFrame:
    """One line per task and arm: how often, how far, and what the worst prompt lost."""
    found = []
    for task, arm in dict.fromkeys((output.task, output.arm) for output in outputs):
        mine = [output for output in outputs if (output.task, output.arm) == (task, arm)]
        decided = sum(len(output.tokens) for output in mine)
        wrong = [token for output in mine for token in output.wrong]
        changes = [output.score_change for output in mine if output.wrong and output.score_change is not None]
        found.append(
            {
                "task": task,
                "arm": arm,
                "prompts": str(len(mine)),
                "prompts with wrong tokens": str(sum(bool(output.wrong) for output in mine)),
                "decided by the slim verifier": str(decided),
                "wrong": str(len(wrong)),
                "share": text_of(divide(len(wrong), decided), 3),
                "near-ties": str(sum(token.near_tie for output in mine for token in output.tokens)),
                "largest gap (nats)": text_of(max((token.gap for token in wrong), default=None), 2),
                "worst score change": text_of(min(changes, default=None), 1),
                "mean score change": text_of(divide(sum(changes), len(changes)), 1),
            }
        )
    return pd.DataFrame(found)


def worst_frame(outputs: Sequence[AuditedOutput]) -> pd.DataFrame:
    """The worst prompts, each with its worst token."""
    found = []
    for output in worst_first(outputs)[:WORST]:
        worst = max(output.wrong, key=lambda token: token.gap)
        found.append(
            {
                "task": output.task,
                "arm": output.arm,
                "example": output.example_id,
                "wrong tokens": str(len(output.wrong)),
                "first at": str(output.wrong[0].position + 1),
                "score": f"{output.metric} {text_of(output.score, 1)} ({text_of(output.baseline_score, 1)})",
                "full goes on at the first": text_of(
                    output.continuations[0].score if output.continuations else None, 1
                ),
                "worst token": quoted(worst.text),
                "full verifier": quoted(worst.wanted_text),
                "gap (nats)": text_of(worst.gap, 2),
                "route": worst.route.value,
                "confidence": text_of(worst.confidence, 2),
                "at": str(worst.position + 1),
            }
        )
    return pd.DataFrame(found)


def shares_frame(found: Sequence[Share], by: str) -> pd.DataFrame:
    """One line per task and arm, one column a value."""
    mine = [one for one in found if one.by == by]
    values = list(dict.fromkeys(one.value for one in mine))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for one in mine:
        blank = {"task": one.task, "arm": one.arm, **dict.fromkeys(values, DASH)}
        lines.setdefault((one.task, one.arm), blank)[one.value] = f"{text_of(one.share, 3)} of {one.decided}"
    return pd.DataFrame(lines.values())


def explanation(run: RunRecord) -> str:
    """What counts as wrong in this run."""
    rule = (
        "it is not the full verifier's likeliest token and the difference is more than rounding (else: near-tie)"
        if run.temperature == 0
        else "the full verifier would keep less than half of such draws of the slim verifier"
    )
    return (
        "A token that the slim verifier decided (an accepted draft, or one it wrote) is wrong when, the text before it "
        f"given, {rule}. Gap: log-probability of the full verifier's likeliest token minus that of the token, nats. "
        "Score change: minus the baseline's, whose score stands in brackets. Effect of a wrong token: what the score "
        "is when the full verifier goes on, greedily, behind it minus what it is when it goes on in its place; behind "
        "it means from the next wrong token on, and the last effect measured is that of all that follows too. Effects "
        "are measured for the worst prompts alone. Confidence: probability / largest probability under the slim "
        "verifier, of the token in the output."
    )


def markdown(run: RunRecord, outputs: Sequence[AuditedOutput], facts: Sequence[str]) -> str:
    """The tables of one audit."""
    found = shares(outputs)
    parts = [f"# Audit of run {run.run_id}", explanation(run), "## Summary", markdown_table(summary_frame(outputs))]
    worst = worst_frame(outputs)
    if worst.empty:
        parts.append("No token of the slim verifier is wrong.")
    else:
        parts += ["## Worst prompts", markdown_table(worst)]
    for by in dict.fromkeys(one.by for one in found):
        if by != "all":
            parts += [f"## Share of wrong tokens by {by}", markdown_table(shares_frame(found, by))]
    parts += ["## Run", "\n".join(f"- {fact}" for fact in facts)]
    return "\n\n".join(parts) + "\n"


def files(run: RunRecord, outputs: Sequence[AuditedOutput], facts: Sequence[str], name: str) -> Mapping[str, str]:
    """File names and their text."""
    return {
        f"{name}.md": markdown(run, outputs, facts),
        f"{name}.csv": token_frame(outputs).to_csv(index=False, lineterminator="\n"),
        f"{name}_shares.csv": share_frame(shares(outputs)).to_csv(index=False, lineterminator="\n"),
    }
