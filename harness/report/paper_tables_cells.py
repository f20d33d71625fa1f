"""The cells of a paper's table: ours, the paper's and their difference, or why there is none of ours.

Ours are of finished runs named after the table, and of the cards of searched masks. A run fills the paper's rows only
with the paper's models, at its gamma and temperature; any other one gets rows of its own, without a difference.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import pandas as pd

from harness.report.paper_tables_sources import Number, Source
from harness.report.paper_tables_spec import Column, Pair, PaperTable, Row
from harness.report.predicted import CEILING, PREDICTED

Published = dict[tuple[str, str, str, str], list[tuple[float | None, float]]]


@dataclass(frozen=True)
class Block:
    """Rows of one pair of models; ``paper`` only where it is the paper's own. ``sources`` newest first.

    ``temperature``: None where each column has its own. ``why``: there is no source.
    """

    label: str
    paper: Pair | None
    temperature: float | None
    sources: tuple[Source, ...]
    why: str = ""


@dataclass(frozen=True)
class Cell:
    """``ours`` in the paper's unit; where it has no value, ``why``.

    ``predicted`` and ``ceiling``: of our decode speedup, as ``harness.report.predicted`` has them; else without value.
    """

    block: Block
    row: Row
    column: Column
    ours: Number
    paper: float | None
    source: Source | None
    why: str
    predicted: float | None = None
    ceiling: float | None = None

    @property
    def lossy(self) -> bool:
        return self.row.lossy or (self.source is not None and bool(self.source.lossy & set(self.row.arms)))

    @property
    def difference(self) -> float | None:
        return None if self.ours.value is None or self.paper is None else self.ours.value - self.paper


def cells(
    table: PaperTable, sources: Sequence[Source], numbers: pd.DataFrame, failures: Mapping[str, str]
) -> list[Cell]:
    """Every cell, by blocks and rows: the paper's in its order, then those of other models.

    ``failures``: why a run of this table failed, by the model's name in ``conf/model``.
    """
    found = []
    known = by_cell(numbers[numbers["source"] == table.name])
    for block in blocks(table, sources, failures):
        for row in table.rows:
            if (row.method is None and not block.sources) or (block.paper is None and not row.arms):
                continue  # neither the paper has it nor we
            for column in table.columns:
                ours, source, why = measured(block, row, column)
                theirs = published(known, block, row, column)
                found.append(Cell(block, row, column, ours, theirs, source, why, *foretold(source, row, column)))
    return found


def by_cell(known: pd.DataFrame) -> Published:
    """One table's numbers by pair, method, task and metric; each with its temperature, None where none is stated."""
    found: Published = {}
    for row in known.to_dict("records"):
        key = (row["pair"], row["method"], "" if pd.isna(row["task"]) else row["task"], row["metric"])
        temperature = None if pd.isna(row["temperature"]) else float(row["temperature"])
        found.setdefault(key, []).append((temperature, float(row["value"])))
    return found


def published(known: Published, block: Block, row: Row, column: Column) -> float | None:
    """The paper's value; None where it has none. Numbers without a temperature are of any."""
    if block.paper is None or row.method is None:
        return None
    wanted = block.temperature if column.temperature is None else column.temperature
    numbers = known.get((block.paper.key, row.method, column.task, column.metric), [])
    fitting = [number for temperature, number in numbers if wanted is None or temperature in (None, wanted)]
    if len(fitting) > 1:
        raise ValueError(f"{len(fitting)} numbers of the paper for {block.label}, {row.label}, {column}")
    return fitting[0] if fitting else None


# Rows.


def blocks(table: PaperTable, sources: Sequence[Source], failures: Mapping[str, str]) -> Iterator[Block]:
    """The paper's pairs at each temperature, then what was run with other models or settings."""
    left = list(sources)
    for temperature in table.temperatures or (None,):
        for pair in table.pairs:
            mine = tuple(one for one in sources if not pair.impossible and fits(table, pair, temperature, one))
            left = [one for one in left if one not in mine]
            why = "" if mine else why_not(table, pair, sources, failures)
            yield Block(pair.label + at(table, temperature), pair, temperature, mine, why)
    groups: dict[str, list[Source]] = {}
    for one in left:
        groups.setdefault(stand_in(table, one), []).append(one)
    for label, members in groups.items():
        yield Block(label, None, own_temperature(table, members[0]), tuple(members))


def fits(table: PaperTable, pair: Pair, temperature: float | None, source: Source) -> bool:
    """Whether it was run with the paper's models, gamma and temperature."""
    if not same_models(pair, source) or source.gamma not in (None, table.gamma):
        return False
    return source.temperature in ((None, *column_temperatures(table)) if temperature is None else (temperature,))


def same_models(pair: Pair, source: Source) -> bool:
    """By the names of the checkpoints: a folder with the name of the hub's counts as it."""
    return same(source.full, pair.full) and (source.drafter is None or same(source.drafter, pair.drafter))


def same(one: str, other: str) -> bool:
    return Path(one.partition("@")[0]).name.lower() == Path(other).name.lower()


def column_temperatures(table: PaperTable) -> set[float | None]:
    return {column.temperature for column in table.columns}


def own_temperature(table: PaperTable, source: Source) -> float | None:
    """Of rows of its own: None where the columns' temperatures have a place for it."""
    own_place = not table.temperatures and source.temperature in (None, *column_temperatures(table))
    return None if own_place else source.temperature


def at(table: PaperTable, temperature: float | None) -> str:
    """The temperature as part of a label, where it tells rows apart."""
    plain = temperature is None or table.temperatures == (temperature,)
    return "" if plain else f", temperature {temperature:g}"


def stand_in(table: PaperTable, source: Source) -> str:
    """What rows of other models or settings are called: what was run, and in place of what."""
    for pair in table.pairs:
        if same_models(pair, source):
            place = f"in place of {pair.label}" if pair.impossible else "not at the paper's setting"
            break
    else:
        place = "in place of the paper's models"
    drafter = f" with {Path(source.drafter).name}" if source.drafter else ""
    gamma = "" if source.gamma in (None, table.gamma) else f", gamma {source.gamma}"
    return f"{source.model}{drafter}, {place}{gamma}{at(table, own_temperature(table, source))}"


# Ours.


def measured(block: Block, row: Row, column: Column) -> tuple[Number, Source | None, str]:
    """Our value in the paper's unit and where it is from; or none, and why. Of several sources the newest with it."""
    nothing = Number(None)
    if why := row.impossible or block.why or column.impossible:
        return nothing, None, why
    wanted = column.temperature if block.temperature is None else block.temperature
    asked = [one for one in block.sources if wanted is None or one.temperature in (None, wanted)]
    for source in asked:
        if (number := number_of(source, row, column)) is not None:
            return number, source, ""
    return nothing, None, missing(asked[0], row, column) if asked else f"no run at temperature {wanted:g}"


def foretold(source: Source | None, row: Row, column: Column) -> tuple[float | None, float | None]:
    """Prediction and ceiling of a decode speedup of ours; None where there is none, and of everything else."""
    if source is None or column.ours != "speedup_decode":
        return None, None
    predicted, most = (number_of(source, row, replace(column, ours=metric)) for metric in (PREDICTED, CEILING))
    return predicted and predicted.value, most and most.value


def number_of(source: Source, row: Row, column: Column) -> Number | None:
    """The mean over the row's arms and the column's tasks, scaled; of a single one with its interval."""
    tasks = [task for task in column.tasks if any(key[1] == task for key in source.values)]
    found = [source.values.get((arm, task, column.ours), Number(None)) for arm in row.arms for task in tasks]
    known = [one.value for one in found if one.value is not None]
    if not found or len(known) < len(found) or len(tasks) < len(column.tasks) - column.spare:
        return None
    if len(found) > 1:
        counts = [one.n for one in found if one.n is not None]
        return Number(fmean(known) * column.scale, n=min(counts, default=None))
    value, low, high = (None if one is None else one * column.scale for one in found[0][:3])
    return Number(value, low, high, found[0].n)


def missing(source: Source, row: Row, column: Column) -> str:
    """Why a source has no value for a cell."""
    if reason := next((source.not_run[arm] for arm in row.arms if arm in source.not_run), None):
        return reason
    known_arms, known_tasks = ({key[place] for key in source.values} for place in (0, 1))
    if arms := [arm for arm in row.arms if arm not in known_arms]:
        return "the run has no such arm" if len(arms) == len(row.arms) else f"the run has no arm {', '.join(arms)}"
    if len(tasks := [task for task in column.tasks if task not in known_tasks]) > column.spare:
        return "the run is not of this set" if len(column.tasks) == 1 else f"the run has no {', '.join(tasks)}"
    return "undefined (0/0), or timed while another run was on the same cores"


def why_not(table: PaperTable, pair: Pair, sources: Sequence[Source], failures: Mapping[str, str]) -> str:
    """Why no run fills the rows of a pair."""
    if pair.impossible and any(same_models(pair, source) for source in sources):
        return pair.impossible
    failed = failures.get(pair.model)
    state = f"it failed: {failed}" if failed else f"not run: {lacking(pair)}"
    command = f"`python -m harness +experiment=paper/{table.name} model={pair.model}`"
    return "; ".join(filter(None, (pair.impossible, state, command)))


def lacking(pair: Pair) -> str:
    """What this machine lacks for a pair, found out without torch: weights in the hub's cache, a CUDA device."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    names = dict.fromkeys((pair.full, pair.drafter))
    away = [name for name in names if not (cache / f"models--{name.replace('/', '--')}" / "snapshots").is_dir()]
    lacks = [f"the weights of {' and '.join(away)}"] if away else []
    lacks += [] if any(Path("/dev").glob("nvidia[0-9]*")) else ["a GPU"]
    return f"this machine lacks {', and '.join(lacks)}" if lacks else "weights and a GPU are here"
