"""Markdown, CSV and console tables of one or more runs. Numbers come from ``harness.metrics``; here they get words.

Markdown and console round for reading; the CSV is tidy (one number a line) and in full precision.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness.compare import BASELINE, DIVERGENCE_METRICS, PAIR_METRICS
from harness.fidelity import FIDELITY_METRICS
from harness.metrics import RATIOS
from harness.records import Divergence, commit_text
from harness.report import pass_at_k
from harness.report.frames import (
    FIDELITY_COLUMNS,
    RATE_COLUMNS,
    ROUTE_COLUMNS,
    TIME_COLUMNS,
    fidelity_frame,
    positions_frame,
    rates_frame,
    results_frame,
    tidy_frame,
    tidy_positions_frame,
    times_frame,
)
from harness.report.lines import DASH, RunReport, lines, number
from harness.report.predicted import (
    DEFINITIONS,
    REMARK,
    costs_frame,
    costs_remark,
    predicted_csv,
    unpredicted,
)
from harness.report.quality import quality_frame, reading
from harness.store import DIVERGENCES, write_atomic

DEFINED = (
    *("speedup_decode", *DEFINITIONS, "speedup_end_to_end", "near_ties", "faults"),
    *(*FIDELITY_COLUMNS, *RATE_COLUMNS, *ROUTE_COLUMNS, *TIME_COLUMNS),
)
"""Metrics whose definitions stand below the tables."""


def definition(metric: str) -> str:
    """The formula of a metric in one line."""
    if metric in RATIOS:
        return RATIOS[metric].definition
    definitions = DEFINITIONS | {known.name: known.definition for known in PAIR_METRICS}
    definitions |= {known.name: known.definition for known in DIVERGENCE_METRICS}
    definitions |= {known.name: known.definition for known in FIDELITY_METRICS}
    return definitions[metric]


def notes(reports: Sequence[RunReport]) -> list[str]:
    """Notes of the runs, then what was not run and why; one a line."""
    said = dict.fromkeys(report.remark for report in reports if report.remark)
    reasons = {name: why for report in reports for name, why in report.not_run.items()}
    return [*(f"Note: {note}" for note in said), *(f"Not run: {name}: {why}" for name, why in reasons.items())]


def identity(report: RunReport) -> list[str]:
    """Which run it was, on what: one fact a line."""
    run, env = report.run, report.run.env
    settings = {
        "seed": run.seed,
        "temperature": run.temperature,
        **{key: report.settings.get(key, DASH) for key in ("gamma", "max_new_tokens", "limit")},
    }
    versions = ", ".join(f"{name} {env[name]}" for name in ("python", "torch", "transformers") if name in env)
    facts = {
        "device": "{}",
        "cpu": "{}",
        "cores": "{} cores",
        "threads": "{} threads",
        "dtype": "{}",
        "numerics": "numerics {}",
    }
    machine = ", ".join(text.format(env[key]) for key, text in facts.items() if key in env)
    found = [
        f"run `{run.run_id}` ({run.status}), {run.created}" + (f", cell `{run.cell}`" if run.cell else ""),
        f"model {run.model}; " + ", ".join(f"{key} {value}" for key, value in settings.items()),
        f"slim verifier: layers {env.get('slim_mask', DASH)}, cache mode {env.get('slim_cache', DASH)}",
        f"commit {commit_text(run.git_commit, run.git_dirty)}; {versions or DASH}",
        f"machine: {machine or DASH}; load average at start {env.get('load_average', DASH)}",
    ]
    if "readings" in env:
        found.append(f"reading, ours: {env['readings']}")
    for task, source in run.data.items():
        version = source.commit or source.revision or DASH
        prompts = run.prompts_sha.get(task, DASH)
        shots = source.shots and f"{source.shots.rows} shots from {source.shots.kind}, {source.shots.location}, "
        found.append(
            f"data of {task}: {source.kind}, {source.location}, {source.split}, version {version}, {source.rows} rows, "
            f"{shots or ''}sha256 {source.sha256[:12]}, prompts sha256 {prompts[:12]}"
        )
    found += report.remarks
    if run.resumed:
        found.append(
            f"gone on with {run.resumed} times after it had stopped: {run.split} prompts were split between two "
            f"processes, {run.dropped} half-written lines dropped"
        )
    return [*found, report.note] if report.note else found


def differences(reports: Sequence[RunReport]) -> Text | None:
    """How many outputs of lossless arms differ from greedy, in one line that stands out; None where none does."""
    judged = [one for report in reports for one in report.divergences]
    if not judged:
        return None
    outputs = sum(line.n for line in lines(reports) if line.arm.lossless and line.arm.arm != BASELINE)
    faults = sum(len(report.faults) for report in reports)
    gap = max((one.gap for one in judged if one.gap is not None), default=None)
    files = ", ".join(f"runs/{report.run.run_id}/{DIVERGENCES}" for report in reports if report.divergences)
    return Text(
        f"{len(judged)} of {outputs} outputs of lossless arms differ from greedy: {len(judged) - faults} near-ties, "
        f"{faults} faults" + ("" if gap is None else f", largest gap {gap:.2g} logits") + f"; see {files}",
        style="bold red" if faults else "yellow",
    )


def _fault(one: Divergence, several: bool) -> str:
    """One fault in words: where it is, the two tokens, and the numbers it was judged by."""
    where = f"{one.run_id}, " if several else ""
    mine, theirs = ("none" if token is None else token for token in (one.arm_token, one.baseline_token))
    found = (
        f"{where}{one.task}, example {one.example_id}, {one.arm}: output token {one.position + 1} is {mine}, "
        f"greedy has {theirs}"
    )
    if one.gap is None or one.distance is None or one.bound is None:
        return found
    return f"{found}; gap {one.gap:.2g}, distance {one.distance:.2g}, bound {one.bound:.2g} logits"


def markdown_table(frame: pd.DataFrame) -> str:
    """Text cells as they are, in Markdown."""
    escaped = frame.map(lambda cell: str(cell).replace("|", r"\|"))
    return str(escaped.to_markdown(index=False, disable_numparse=True))


def faults_of(reports: Sequence[RunReport]) -> list[str]:
    """Every fault in words."""
    return [_fault(fault, len(reports) > 1) for report in reports for fault in report.faults]


def sections(reports: Sequence[RunReport]) -> list[tuple[str, pd.DataFrame, str]]:
    """The tables of a page that have a line: heading, text cells, and how to read them."""
    scorers_of = [report.scorers for report in reports]
    written = [report.programs for report in reports if report.programs]
    foretold = [one for report in reports for one in report.predicted]
    lead = ("Intervals: 95 % bootstrap over prompts. Quality on a 0-100 scale.", *([REMARK] if foretold else []))
    found = [
        ("Results", results_frame(reports), "\n\n".join((*lead, *unpredicted(foretold)))),
        ("Quality", quality_frame([(report.run, report.rows) for report in reports], DASH), reading(scorers_of)),
        ("pass@k", pass_at_k.pass_frame(written, DASH), pass_at_k.REMARK),
        ("Fidelity", fidelity_frame(reports), "No task is asked: scores of the full verifier, outside the clock."),
        ("Rates", rates_frame(reports), ""),
        ("Drafts kept, by place in the block", positions_frame(reports), "Kept / drafted, all prompts pooled."),
        ("Times", times_frame(reports), ""),
        ("Costs and closed form", costs_frame(foretold, len(reports) > 1, DASH), costs_remark(foretold)),
    ]
    return [(head, frame, remark) for head, frame, remark in found if not frame.empty]


def markdown(reports: Sequence[RunReport], title: str) -> str:
    """The whole page: results, quality, rates, acceptance by position, identity of the runs, definitions."""
    parts = [f"# {title}", *notes(reports)]
    for head, frame, remark in sections(reports):
        parts += [f"## {head}", markdown_table(frame), *([remark] if remark else [])]
        if head == "Results" and (faults := faults_of(reports)):
            parts += ["## Faults", "\n".join(f"- {fault}" for fault in faults)]
    facts = [fact for report in reports for fact in identity(report)]
    parts += ["## Run", "\n".join(f"- {fact}" for fact in facts)]
    parts += ["## Definitions", "\n".join(f"- `{name}`: {definition(name)}" for name in DEFINED)]
    parts.append(f"{DASH} means undefined (0/0) or not applicable.")
    return "\n\n".join(parts) + "\n"


def console_table(title: str, columns: Sequence[str], caption: str) -> Table:
    """An empty table for a terminal; the first column and ``quality`` are words, the others numbers."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.box, table.collapse_padding, table.pad_edge = SIMPLE_HEAD, True, False
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 or name == "quality" else "right", overflow="fold")
    return table


def console(reports: Sequence[RunReport]) -> list[Table]:
    """Two tables for a terminal of 120 columns: quality and speed, then rates. Full names stand in the Markdown."""
    results = console_table(
        "Quality and speed, with 95 % intervals over prompts",
        ("arm", "lossless", "quality", "agree", "differ", "speedup decode", "end to end", "tokens"),
        "quality: (minus the baseline's); agree: tokens equal to the greedy baseline's; differ: prompts where a\n"
        "lossless arm differs from it, by near-ties of the logits / by faults; below a decode speedup: what costs\n"
        "and trace predict, with the error, and the ceiling, which has every draft accepted; tokens: mean output of\n"
        "the arm / of the baseline",
    )
    rates = console_table(
        "Rates",
        ("arm", "reject", "waste", "full", "block full", "drafting", "length", "kept", "drafted", "plain", "routes"),
        "reject: examined drafts not kept; waste: drafted, not emitted; full: full passes per token;\n"
        "block full: blocks with a full pass; drafting: the same of blocks that drafted; length: tokens per block;\n"
        "kept, drafted: per block that drafted; plain: blocks with no draft;\n"
        "routes: shares accepted / regenerated / escalated of examined drafts",
    )
    for table in (results, rates):
        table.caption = "\n".join((*notes(reports), str(table.caption)))
    foretold = [one for report in reports for one in report.predicted]
    results.caption = "\n".join((str(results.caption), *unpredicted(foretold)))
    previous: tuple[str, ...] = ()
    for line in lines(reports):
        source = line.run.data.get(line.task)
        head = (
            line.task + (f", {line.run.run_id}" if len(reports) > 1 else ""),
            "",
            f"n={line.n}" + (f", {source.kind}" if source else ""),
        )
        if head != previous:
            results.add_section()
            results.add_row(*(escape(cell) for cell in head), style="bold")
            rates.add_section()
            rates.add_row(escape(", ".join(filter(None, head))), style="bold")
        previous = head
        below = [] if line.arm.arm == BASELINE else [", ".join(line.foretold().values())]
        results.add_row(
            escape(line.arm.arm),
            "yes" if line.arm.lossless else "[bold]lossy[/bold]",
            line.quality(line.run.task_metrics[line.task], interval=False).replace("; ", "\n"),
            line.value("token_agreement"),
            f"{line.value('near_ties', 0)}/{line.faults('[bold red]{}[/bold red]')}",
            escape("\n".join([line.speedup("speedup_decode"), *below])),
            escape(line.speedup("speedup_end_to_end")),
            f"{line.value('mean_output_tokens', 1)} / {number(line.baseline.get('mean_output_tokens'), 1)}",
        )
        shares = "/".join(line.value(name) for name in ROUTE_COLUMNS)
        rates.add_row(escape(line.arm.arm), *(line.value(name) for name in RATE_COLUMNS), shares)
    for name in dict.fromkeys(name for report in reports for name in report.not_run):
        for table in (results, rates):
            table.add_section()
            table.add_row(escape(name), *[DASH] * (len(table.columns) - 1))
    return [results, rates]


def write_tables(reports: Sequence[RunReport], folder: Path, name: str) -> list[Path]:
    """``<name>.md``, ``.csv``, ``_positions.csv`` and, of predicted speedups, ``_predicted.csv``; each whole or not."""
    files = {
        folder / f"{name}.md": markdown(reports, name),
        folder / f"{name}.csv": tidy_frame(reports).to_csv(index=False, lineterminator="\n"),
        folder / f"{name}_positions.csv": tidy_positions_frame(reports).to_csv(index=False, lineterminator="\n"),
    }
    foretold = [one for report in reports for one in report.predicted]
    if any(one.predicted is not None for one in foretold):
        files[folder / f"{name}_predicted.csv"] = predicted_csv(foretold)
    for path, text in files.items():
        write_atomic(path, text)
    return list(files)
