"""Runs or sweeps side by side, without measuring anything: ``python -m harness job=compare run=A other=B``."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.markup import escape

from harness.errors import UserError, unknown
from harness.jobs.report import WIDTH
from harness.quality import Estimate
from harness.report.lines import DASH
from harness.report.sweep import named_cells, overrides_of_cells
from harness.report.tables import console_table, markdown_table
from harness.side_by_side import PAIRED, Compared, Side, compared, differing, matched, pairing_of
from harness.store import RUN, check_writable, is_finished, read, read_config, results_of, write_atomic, writing

READING = (
    "B to A: a difference on the same prompts, or with an x a ratio. [95 % bootstrap interval over prompts]; one "
    "that holds 0, of a ratio 1, tells no difference. A speedup is over the baseline of its own run; prediction and "
    "ceiling are of all its prompts."
)


def compare(results_dir: str, run: str | None = None, other: str | None = None) -> list[Path]:
    """Print what differs, write ``results/tables/compare_A_B.md`` and ``.csv``, return their paths.

    ``run`` is A and ``other`` B: an id of a run, a name or id of a sweep, a run folder, or a folder with runs. By
    default B is the newest finished run, and A the newest finished one besides.

    Raises:
        UserError: no such run or sweep, nothing that both have, or files that cannot be read or written.
    """
    names, folders, notes = chosen(Path(results_dir), run, other)
    a, b = sides(folders)
    pairs, alone = matched(a, b)
    if not pairs:
        told = "; ".join(f"only in {side}: {label}" for side, label in alone)
        raise UserError(f"no run of {names[0]!r} goes with one of {names[1]!r} ({told}): name two runs of them.")
    numbers: list[Compared] = []
    notes += [f"only in {side}: {label}" for side, label in alone]
    unequal: dict[tuple[str, str, str], list[str]] = {}
    for label, mine, theirs in pairs:
        found, said = compared(label, mine, theirs)
        numbers += found
        notes += said
        for key, values in differing(mine, theirs).items():
            unequal.setdefault((key, *values), []).append(label)
    if not numbers:
        raise UserError(f"{names[0]!r} and {names[1]!r} have no arm and prompt in common: {'; '.join(notes)}.")
    if any(pairing_of(mine.run, theirs.run) != PAIRED for _, mine, theirs in pairs):
        notes.append("speeds called unpaired: the two were measured on different machines or days, or share a baseline")
    differences = pd.DataFrame(
        [
            {"key": key, "A": mine, "B": theirs, "in": "all" if len(labels) == len(pairs) else "; ".join(labels)}
            for (key, mine, theirs), labels in unequal.items()
        ]
    )
    tables = Path(results_dir) / "tables"
    check_writable(tables)
    path = tables / f"compare_{Path(names[0]).name}_{Path(names[1]).name}.md"
    frame = as_text(numbers)
    show(frame, differences, notes, names)
    with writing(tables):
        write_atomic(path, markdown(frame, differences, notes, names))
        write_atomic(path.with_suffix(".csv"), tidy(numbers).to_csv(index=False, lineterminator="\n"))
    for written in (path, path.with_suffix(".csv")):
        print(f"wrote {written}")
    return [path, path.with_suffix(".csv")]


Folders = tuple[list[Path], list[Path]]
"""Run folders of A and of B."""


def chosen(results: Path, run: str | None, other: str | None) -> tuple[tuple[str, str], Folders, list[str]]:
    """Names and run folders of A and B, and what has to be said of them."""
    if (run is None) != (other is None):
        raise UserError("job=compare wants both run=A and other=B, or none of them for the two newest finished runs.")
    if run is None or other is None:
        finished = [path.parent for path in sorted((results / "runs").glob(f"*/{RUN}")) if is_finished(path.parent)]
        if len(finished) < 2:
            raise UserError(
                f"{str(results)!r} has {len(finished)} finished runs, two are wanted: run=A other=B names them."
            )
        first, second = finished[-2:]
        return (first.name, second.name), ([first], [second]), []
    (a, said), (b, also) = folders_of(results, run), folders_of(results, other)
    return (run, other), (a, b), [f"{side}: {note}" for side, notes in (("A", said), ("B", also)) for note in notes]


def folders_of(results: Path, name: str) -> tuple[list[Path], list[str]]:
    """The folder of a run, or of all finished cells of a sweep in order of time; and a note on those not finished.

    Raises:
        UserError: there is nothing of that name, or nothing finished in it.
    """
    path = Path(name)
    if (results / "runs" / name / RUN).is_file():
        return [results / "runs" / name], []
    if (path / RUN).is_file():
        return [path], []
    cells, known = named_cells(results, name)
    if not cells and path.is_dir():
        cells = [found.parent for pattern in (f"*/{RUN}", f"runs/*/{RUN}") for found in path.glob(pattern)]
    elif not cells:
        known |= {found.parent.name for found in (results / "runs").glob(f"*/{RUN}")}
        raise (
            unknown("run or sweep", name, known)
            if known
            else UserError(f"{name!r}: no run and no sweep in {str(results)!r}: start one, or set results_dir=PATH.")
        )
    finished = sorted(filter(is_finished, cells))
    if not finished:
        raise UserError(f"{name!r} has no finished run: name a run, a sweep, or a folder that has one.")
    left = len(cells) - len(finished)
    return finished, [f"{left} of {len(cells)} cells did not finish and are left out"] if left else []


def sides(folders: Folders) -> Iterator[list[Side]]:
    """A's runs, then B's, as they are on disk."""
    given = {root: overrides_of_cells(root) for root in {results_of(folder) for side in folders for folder in side}}
    for side in folders:
        yield [
            Side(*read(folder)[:2], read_config(folder), given[results_of(folder)].get(folder.name, ""))
            for folder in side
        ]


def span(one: Estimate, digits: int, sign: str = "") -> str:
    if one.value is None:
        return DASH
    found = f"{one.value:{sign}.{digits}f}"
    return (
        found
        if one.low is None or one.high is None
        else f"{found} [{one.low:{sign}.{digits}f}, {one.high:{sign}.{digits}f}]"
    )


def changed(one: Compared, digits: int) -> str:
    """``+1.2 [0.1, 2.3]`` of a difference, ``x 1.20 [1.10, 1.30]`` of a ratio, a share as it is."""
    text = span(one.apart, digits, "" if one.is_ratio or one.unit == "share" else "+")
    return f"x {text}" if one.is_ratio and text != DASH else text


def as_text(numbers: Sequence[Compared]) -> pd.DataFrame:
    """One line a number; the settings of the run only where there are several."""
    several = any(one.cell for one in numbers)
    found = []
    for one in numbers:
        digits = 2 if one.is_ratio or one.unit == "share" else 1
        known = one.apart.value is not None
        found.append(
            {
                **({"cell": one.cell} if several else {}),
                **{"task": one.task, "arm": one.arm, "n": str(one.n), "metric": one.name},
                **{"A": span(one.a, digits), "B": span(one.b, digits)},
                "B to A": changed(one, digits),
                "pairing": one.pairing if known else DASH,
            }
        )
    return pd.DataFrame(found)


def tidy(numbers: Sequence[Compared]) -> pd.DataFrame:
    """One number a line in full precision, with columns for A's, B's and the difference or ratio."""
    found = []
    for one in numbers:
        line = {key: value for key, value in asdict(one).items() if key not in ("a", "b", "apart")}
        for name in ("a", "b", "apart"):
            line |= {f"{name}_{key}": value for key, value in asdict(getattr(one, name)).items()}
        found.append(line)
    return pd.DataFrame(found)


def markdown(frame: pd.DataFrame, differences: pd.DataFrame, notes: Sequence[str], names: tuple[str, str]) -> str:
    parts = [f"# {names[0]} and {names[1]}", f"A is `{names[0]}`, B is `{names[1]}`.", markdown_table(frame), READING]
    parts += ["## What differs in how they were made"]
    parts += ["Nothing." if differences.empty else markdown_table(differences)]
    parts += ["## Notes", "\n".join(f"- {note}" for note in notes)] if notes else []
    return "\n\n".join(parts) + "\n"


def show(frame: pd.DataFrame, differences: pd.DataFrame, notes: Sequence[str], names: tuple[str, str]) -> None:
    screen = Console()
    if not screen.is_terminal:
        screen.width = WIDTH
    for title, shown in ((f"A {names[0]}, B {names[1]}", frame), ("What differs in how they were made", differences)):
        table = console_table(title, list(shown.columns), "")
        for row in shown.itertuples(index=False):
            table.add_row(*(escape(str(cell)) for cell in row))
        screen.print(table)
    for note in notes:
        screen.print(note, markup=False, highlight=False, soft_wrap=True)
