"""Console, Markdown and CSV tables of a speed measurement. Numbers come from ``harness.speed.numbers``."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from rich.markup import escape
from rich.table import Table

from harness.report.lines import DASH, RunReport
from harness.report.tables import console_table, identity, markdown_table
from harness.speed.numbers import RATIOS, limit
from harness.speed.records import COPY, SpeedRecord, SpeedRow
from harness.store import write_atomic

Cell = Callable[[SpeedRow], str]

TIERS, HEADS = ("tier", "context"), ("ratio", "context")
RATIO_LINE = "; ".join(f"{name} = {top} / {bottom}" for name, (top, bottom) in RATIOS.items()) + "; median over repeats"
SHARE = (
    "Share of the limit = bytes that must be read / median seconds / bandwidth. Bytes: matrices, biases and norms of "
    "the executed layers, keys and values of context + block positions (fewer behind a sliding window), final norm, "
    "head, and one embedding row a token."
)
COMPARED = (
    "Greedy; prompts as the same token ids, dtype, threads, end-of-sequence ids and length limit are those of both "
    "sides; no stop strings. Tokens/s: tokens after those that came first / seconds after these, sums over prompts. "
    "First: seconds from the call to the first tokens, prefill included. Equal: positions with the same token / "
    "positions of the longer output."
)
ARMS = (
    "Outside: (decode seconds - seconds within forwards) / decode seconds. Of the limit: bytes that forwards of one "
    "token must read / their seconds / bandwidth, prompts pooled. Held: weights, caches, saved tails and tables, each "
    "storage once; on CUDA with the arm's part of the allocator's peak."
)


def plain(digits: int = 2) -> Cell:
    return lambda row: DASH if row.value is None else f"{row.value:.{digits}f}"


def spanned(digits: int = 2) -> Cell:
    """``2.31 [1.90, 2.70]``"""

    def cell(row: SpeedRow) -> str:
        if row.value is None or row.low is None or row.high is None:
            return plain(digits)(row)
        return f"{row.value:.{digits}f} [{row.low:.{digits}f}, {row.high:.{digits}f}]"

    return cell


def percent(row: SpeedRow) -> str:
    return DASH if row.value is None else f"{100 * row.value:.0f} %"


def mib(row: SpeedRow) -> str:
    return DASH if row.value is None else f"{row.value / 2**20:.1f}"


COMPARISON: dict[str, tuple[str, Cell, Cell]] = {
    "prompts": ("speedup_decode", lambda row: str(row.n), lambda row: str(row.n)),
    "speedup, decode": ("speedup_decode", spanned(), spanned()),
    "end to end": ("speedup_end_to_end", plain(), spanned()),
    "ours tokens/s": ("ours_tokens_per_s", plain(1), spanned(1)),
    "theirs": ("theirs_tokens_per_s", plain(1), spanned(1)),
    "ours first s": ("ours_first_s", plain(), spanned()),
    "theirs first s": ("theirs_first_s", plain(), spanned()),
    "equal tokens": ("token_agreement", plain(), spanned()),
}
"""Columns of the comparison: metric, cell on the console, cell in Markdown."""
ARM: dict[str, tuple[str, Cell, Cell]] = {
    "tokens/s": ("tokens_per_s", plain(1), spanned(1)),
    "of the limit": ("bandwidth_share", plain(), spanned()),
    "outside": ("outside_share", plain(3), spanned(3)),
    "sampled tokens/s": ("tokens_per_s_sampled", plain(1), spanned(1)),
    "sampled outside": ("outside_share_sampled", plain(3), spanned(3)),
    "held MiB": ("held_bytes", mib, mib),
    "held / speculative": ("held_over_speculative", plain(3), plain(3)),
}


def shapes(rows: Sequence[SpeedRow], metric: str) -> tuple[list[int], dict[tuple[str, int], dict[int, SpeedRow]]]:
    """Block sizes, and the numbers of each (name, context) by block size."""
    found: dict[tuple[str, int], dict[int, SpeedRow]] = {}
    for row in rows:
        if row.metric == metric and row.block is not None and row.context is not None:
            found.setdefault((row.name, row.context), {})[row.block] = row
    return sorted({block for line in found.values() for block in line}), found


def shape_frame(rows: Sequence[SpeedRow], metric: str, cell: Cell, heads: tuple[str, str]) -> pd.DataFrame:
    """A line for each name and context, a column for each block size."""
    blocks, found = shapes(rows, metric)
    return pd.DataFrame(
        [
            dict(zip(heads, (name, str(context)), strict=True)) | {str(block): cell(line[block]) for block in blocks}
            for (name, context), line in found.items()
        ]
    )


def column_frame(
    rows: Sequence[SpeedRow], table: str, head: str, columns: dict[str, tuple[str, Cell, Cell]], wide: bool
) -> pd.DataFrame:
    """A line for each name, a column for each metric."""
    found: dict[str, dict[str, SpeedRow]] = {}
    for row in rows:
        if row.table == table:
            found.setdefault(row.name, {})[row.metric] = row
    return pd.DataFrame(
        [
            {head: name}
            | {title: (long if wide else short)(line[metric]) for title, (metric, short, long) in columns.items()}
            for name, line in found.items()
        ]
    )


def bandwidth_frame(rows: Sequence[SpeedRow]) -> pd.DataFrame:
    made = [{"product": row.name, "GB/s": spanned(1)(row)} for row in rows if row.table == "bandwidth"]
    return pd.DataFrame(made)


def forward_frame(rows: Sequence[SpeedRow]) -> pd.DataFrame:
    """Milliseconds with the share of the limit behind them, for the console."""
    blocks, times = shapes(rows, "forward_ms")
    _, shares = shapes(rows, "bandwidth_share")
    return pd.DataFrame(
        [
            {"tier": name, "context": str(context)}
            | {str(block): f"{plain(1)(line[block])} ({percent(shares[name, context][block])})" for block in blocks}
            for (name, context), line in times.items()
        ]
    )


def limit_line(record: SpeedRecord) -> str:
    """What the limit is, and how large the matrix was beside the cache."""
    most = limit(record.products)
    kind = COPY if any(product.product == COPY for product in record.products) else "the faster product"
    size = max((product.moved_bytes for product in record.products if product.product != COPY), default=0)
    cache = "unknown" if record.cache_bytes is None else f"{record.cache_bytes / 2**20:.0f} MiB"
    rate = DASH if most is None else f"{most / 1e9:.1f} GB/s"
    return f"Limit: {rate}, of {kind}; a matrix of {size / 2**20:.0f} MiB, last cache {cache}."


def compared_on(record: SpeedRecord) -> str:
    """Which prompts each comparison is on, or why there is none."""
    found: dict[str, list[str]] = {}
    for pair in record.comparisons:
        runs = [one for one in record.decodes if one.arm == pair.ours and not one.sampled]
        tasks = {task: sum(one.task == task for one in runs) for task in dict.fromkeys(one.task for one in runs)}
        prompts = ", ".join(f"{count} of {task}" for task, count in tasks.items())
        found.setdefault(f"not measured ({pair.reason})" if pair.reason else prompts, []).append(pair.name)
    return "; ".join(f"{', '.join(names)}: {what}" for what, names in found.items()) + "."


def console(record: SpeedRecord, rows: Sequence[SpeedRow]) -> list[Table]:
    """Tables for a terminal of 120 columns; intervals and the rest stand in the Markdown."""
    compared = f"{COMPARED}\n{compared_on(record)}"
    parts = (
        ("Memory bandwidth", bandwidth_frame(rows), limit_line(record)),
        ("Milliseconds a forward (share of the limit), by tokens in the block", forward_frame(rows), SHARE),
        ("Cost of a forward beside the full verifier's", shape_frame(rows, "time_ratio", plain(), HEADS), RATIO_LINE),
        ("Beside transformers", column_frame(rows, "comparison", "ours / theirs", COMPARISON, False), compared),
        ("Outside forwards, and memory", column_frame(rows, "arm", "arm", ARM, False), ARMS),
    )
    return [drawn(title, frame, caption) for title, frame, caption in parts if not frame.empty]


def drawn(title: str, frame: pd.DataFrame, caption: str) -> Table:
    table = console_table(title, list(frame.columns), caption)
    table.columns[0].no_wrap = True
    for line in frame.itertuples(index=False):
        table.add_row(*(escape(str(cell)) for cell in line))
    return table


def markdown(record: SpeedRecord, rows: Sequence[SpeedRow], title: str) -> str:
    """The whole page: every table with its intervals, and which run on what machine it was."""
    compared = f"{COMPARED}\n\n{compared_on(record)}"
    sections = (
        ("Memory bandwidth", bandwidth_frame(rows), limit_line(record)),
        ("Milliseconds a forward", shape_frame(rows, "forward_ms", spanned(), TIERS), "Median over repeats."),
        ("Share of the bandwidth limit", shape_frame(rows, "bandwidth_share", spanned(), TIERS), SHARE),
        ("Cost beside the full verifier", shape_frame(rows, "time_ratio", spanned(3), HEADS), f"{RATIO_LINE}."),
        ("Beside transformers", column_frame(rows, "comparison", "ours / theirs", COMPARISON, True), compared),
        ("Outside forwards, and memory", column_frame(rows, "arm", "arm", ARM, True), ARMS),
    )
    parts = [f"# {title}"]
    for head, frame, remark in sections:
        if not frame.empty:
            parts += [f"## {head}", markdown_table(frame), remark]
    facts = identity(RunReport(record.run, (), (), record.settings))
    facts += [f"every arm greedy; those with sampled numbers also at temperature {record.run.temperature:g}"]
    facts += [f"tier {name}: {what}" for name, what in record.tiers.items()]
    parts += ["## Run", "\n".join(f"- {fact}" for fact in (*facts, *record.notes))]
    parts.append(
        f"Columns of forwards are tokens in the block. Intervals: 95 %. {DASH} means undefined or not measured."
    )
    return "\n\n".join(parts) + "\n"


def tidy_frame(record: SpeedRecord, rows: Sequence[SpeedRow]) -> pd.DataFrame:
    """One number a line with what identifies it; what is undefined is empty."""
    run = record.run
    same = {"run_id": run.run_id, "model": run.model, "git_commit": run.git_commit}
    same |= {key: run.env.get(key) for key in ("device", "dtype", "threads")}
    return pd.DataFrame([same | asdict(row) for row in rows])


def write_tables(record: SpeedRecord, rows: Sequence[SpeedRow], folder: Path, name: str) -> list[Path]:
    """``<name>.md`` and ``<name>.csv``, each whole or not at all."""
    texts = {
        folder / f"{name}.md": markdown(record, rows, name),
        folder / f"{name}.csv": tidy_frame(record, rows).to_csv(index=False, lineterminator="\n"),
    }
    for path, text in texts.items():
        write_atomic(path, text)
    return list(texts)
