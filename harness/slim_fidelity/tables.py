"""Console, Markdown and CSV tables of a fidelity measurement. Numbers come from ``harness.slim_fidelity.numbers``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from rich.markup import escape
from rich.table import Table

from harness.compare import BASELINE, speedup, token_agreement
from harness.report.lines import DASH, RunReport
from harness.report.tables import console_table, identity, markdown_table
from harness.slim_fidelity.gains import TWO_TIERS, is_clear, pairs_of, signs
from harness.slim_fidelity.records import SlimFacts, SlimFidelityRecord, SlimFidelityRow
from harness.store import write_atomic

Cell = Callable[[SlimFidelityRow], str]
Numbers = Mapping[tuple[str, int | None, str], SlimFidelityRow]
"""By slim verifier, place and metric."""

FIDELITY = {"top-1": "agreement", "TV": "tv_slim", "R": "cost_full_slim"}
COSTS = {"C(q‖p)": "cost_full_draft", "C(q'‖p)": "cost_slim_draft", "C(q‖q')": "cost_full_slim", "Delta": "gain"}
ROUTES = {
    **{"P(A)": "accept", "P(B)": "regenerate", "P(C)": "escalate", "delta1": "delta1", "delta2": "delta2"},
    **{"TV p": "tv_draft", "TV eq. 14": "tv_mixture", "TV B.7": "tv_three_way", "TV exact": "tv_exact"},
}
GAINS = "Delta beside the gain in speed"
REMARKS = {
    "Fidelity": (
        "Top-1: share of positions where the slim verifier's likeliest token is the full verifier's. TV: total "
        "variation of q' from q. R: step cost R(q‖q') of eq. 9 in nats. Own: bytes that a cache of its own takes for "
        "a position. Text is the full verifier's own greedy one; distributions are softmaxes at temperature 1."
    ),
    "Top-1 by place in the block": (
        "In `shared` mode place 1 reads committed entries alone, later places also what the slim verifier wrote."
    ),
    "Costs of the chain": (
        "Per position, in nats; a block's cost (eq. 10) is the sum over its places. Delta = C(q‖p) - C(q'‖p) - "
        "C(q‖q') (eq. 7): above 0, the paper expects the slim verifier to pay."
    ),
    GAINS: (
        "Speedup: tokens/s of via_sd with this slim verifier / of speculative with the same drafter, decoding alone, "
        "the same prompts in turn. via_sd is **lossy**: agreement is its share of tokens equal to greedy's. Above 0, "
        "Delta promises a speedup above 1. Agree: whether the two signs do; in brackets where an interval contains "
        "the border."
    ),
    "Routes and laws": (
        "P(A), P(B), P(C): mass of the drafter's distribution that the gate accepts, regenerates, escalates. delta1, "
        "delta2: as eq. B.11 defines them, from job.delta_alphas. TV: distance from q of the drafter, of the mixture "
        "of eq. 14, of its other form B.7, and of what a block's first position really emits (Alg. 1, lossless "
        "acceptance on escalation). Reading, ours: the paper gives the mixtures, not the emitted law."
    ),
}


def plain(digits: int) -> Cell:
    return lambda row: DASH if row.value is None else f"{row.value:.{digits}f}"


def spanned(digits: int) -> Cell:
    """``0.63 [0.58, 0.67]``"""

    def cell(row: SlimFidelityRow) -> str:
        if row.value is None or row.low is None or row.high is None:
            return plain(digits)(row)
        return f"{row.value:.{digits}f} [{row.low:.{digits}f}, {row.high:.{digits}f}]"

    return cell


def indexed(rows: Sequence[SlimFidelityRow]) -> Numbers:
    return {(row.slim, row.place, row.metric): row for row in rows}


def head(facts: SlimFacts) -> dict[str, str]:
    """What every line begins with."""
    ratio = DASH if facts.skip_ratio is None else f"{facts.skip_ratio:.2f}"
    return {"slim verifier": facts.kind, "skips": ratio, "cache": facts.cache}


def frame(record: SlimFidelityRecord, found: Numbers, columns: Mapping[str, str], cell: Cell) -> pd.DataFrame:
    """A line for each slim verifier, a column for each metric."""
    return pd.DataFrame(
        [
            head(facts) | {title: cell(found[slim, None, metric]) for title, metric in columns.items()}
            for slim, facts in record.slims.items()
            if (slim, None, "gain") in found
        ]
    )


def fidelity_frame(record: SlimFidelityRecord, found: Numbers, cell: Cell) -> pd.DataFrame:
    made = frame(record, found, FIDELITY, cell)
    scored = [facts for slim, facts in record.slims.items() if (slim, None, "gain") in found]
    return made.assign(own=[str(facts.cache_bytes) for facts in scored])


def place_frame(record: SlimFidelityRecord, found: Numbers, cell: Cell) -> pd.DataFrame:
    places = sorted({place for _, place, _ in found if place is not None})
    return pd.DataFrame(
        [
            head(facts) | {str(place): cell(found[slim, place, "agreement"]) for place in places}
            for slim, facts in record.slims.items()
            if all((slim, place, "agreement") in found for place in places)
        ]
    )


def gains_frame(record: SlimFidelityRecord, found: Numbers, cell: Cell) -> pd.DataFrame:
    """Of the slim verifiers that were timed."""

    def line(slim: str, facts: SlimFacts) -> dict[str, str]:
        delta, faster = found[slim, None, "gain"], found[slim, None, "third_tier_speedup"]
        agree = found[slim, None, "signs_agree"].value
        said = DASH if agree is None else "yes" if agree else "no"
        clear = is_clear(delta, 0.0) and is_clear(faster, 1.0)
        return head(facts) | {
            "Delta": cell(delta),
            "speedup, lossy": cell(faster),
            "agree": said if clear else f"({said})",
            "agreement": cell(found[slim, None, "third_tier_agreement"]),
        }

    return pd.DataFrame(
        [line(slim, facts) for slim, facts in record.slims.items() if (slim, None, "signs_agree") in found]
    )


def two_tiers(record: SlimFidelityRecord) -> str:
    """What the two tiers that gains are over reach themselves."""
    pairs = pairs_of(record, TWO_TIERS, BASELINE)
    faster = speedup(pairs)
    times = DASH if faster is None else f"{faster:.2f}"
    text = f"speculative with {record.drafter} is {times} times as fast as one tier"
    agreement = token_agreement(pairs) if record.run.temperature == 0 else None
    return text + ("." if agreement is None else f", agreement {agreement:.2f}.")


def parts(
    record: SlimFidelityRecord, rows: Sequence[SlimFidelityRow], cell: Callable[[int], Cell]
) -> dict[str, pd.DataFrame]:
    """Every table by its title."""
    found = indexed(rows)
    return {
        "Fidelity": fidelity_frame(record, found, cell(2)),
        "Top-1 by place in the block": place_frame(record, found, cell(2)),
        "Costs of the chain": frame(record, found, COSTS, cell(2)),
        **({GAINS: gains_frame(record, found, cell(2))} if record.timed else {}),
        "Routes and laws": frame(record, found, ROUTES, cell(2)),
    }


def console(record: SlimFidelityRecord, rows: Sequence[SlimFidelityRow]) -> list[Table]:
    """Tables for a terminal; intervals stand in the Markdown."""
    made = []
    for title, lines in parts(record, rows, plain).items():
        table = console_table(title, list(lines.columns), str(signs(rows)) if title == GAINS else "")
        table.columns[0].no_wrap = True
        for line in lines.itertuples(index=False):
            table.add_row(*(escape(str(value)) for value in line))
        made.append(table)
    return made


def markdown(record: SlimFidelityRecord, rows: Sequence[SlimFidelityRow], title: str) -> str:
    """The whole page: every table with its intervals, what was scored, and which run on what machine it was."""
    page = [f"# {title}"]
    for name, lines in parts(record, rows, spanned).items():
        page += [f"## {name}", markdown_table(lines), REMARKS[name]]
        page += [f"{signs(rows)} {two_tiers(record)}"] if name == GAINS else []
    scored = [f"{facts.source}, {facts.cache}: keeps {facts.layers}" for facts in record.slims.values()]
    facts = [*identity(RunReport(record.run, (), (), record.settings)), f"drafter {record.drafter}; gate {record.gate}"]
    page += ["## Slim verifiers", "\n".join(f"- {line}" for line in scored)]
    page += ["## Run", "\n".join(f"- {fact}" for fact in facts)]
    positions = max((row.positions for row in rows), default=0)
    texts = max((row.n for row in rows), default=0)
    page.append(f"{positions} positions of {texts} texts. Intervals: 95 % bootstrap over texts.")
    return "\n\n".join(page) + "\n"


def tidy_frame(record: SlimFidelityRecord, rows: Sequence[SlimFidelityRow]) -> pd.DataFrame:
    """One number a line with what identifies it; what is undefined is empty."""
    run = record.run
    same = {"run_id": run.run_id, "model": run.model, "git_commit": run.git_commit}
    same |= {key: run.env.get(key) for key in ("device", "dtype")}
    same |= {"drafter": record.drafter, "gate": record.gate}
    return pd.DataFrame([same | asdict(row) for row in rows])


def write_tables(record: SlimFidelityRecord, rows: Sequence[SlimFidelityRow], folder: Path, name: str) -> list[Path]:
    """``<name>.md`` and ``<name>.csv``, each whole or not at all."""
    texts = {
        folder / f"{name}.md": markdown(record, rows, name),
        folder / f"{name}.csv": tidy_frame(record, rows).to_csv(index=False, lineterminator="\n"),
    }
    for path, text in texts.items():
        write_atomic(path, text)
    return list(texts)
