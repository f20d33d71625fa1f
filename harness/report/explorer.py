"""Any runs side by side, from run folders or from a file of runs exported from Weights & Biases: one frame, one figure.

What is read of an export is what ``log=wandb`` sends: the resolved config under ``settings``, the run's record under
``run``, and numbers named ``<task>/<arm>/<metric>``. Intervals are not among them.
"""

import ast
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.compare import BASELINE
from harness.errors import UserError, unknown
from harness.report.figures import LEVEL, MARKERS, PAGE_WIDTH, STYLE, colour, wrapped
from harness.report.lines import RunReport
from harness.report.swept import swept_values

OVER_TASKS = ("all_tasks", "headline")
"""What begins the names of numbers over several tasks: other numbers than those of a task."""
COLUMNS = ("run", "experiment", "task", "arm", "lossless", "metric", "value", "low", "high")


@dataclass(frozen=True)
class Explored:
    """A run with its config. ``numbers``: (task, arm, metric, value, low, high); ``lossless`` by arm, where known."""

    run: str
    config: Mapping[str, Any]
    lossless: Mapping[str, bool]
    numbers: tuple[tuple[str, str, str, float, float | None, float | None], ...]


def from_reports(reports: Iterable[RunReport]) -> list[Explored]:
    """Runs read from disk."""
    found = []
    for report in reports:
        numbers = [
            (row.task, row.arm, row.metric, row.value, row.low, row.high)
            for row in report.rows
            if row.value is not None
        ]
        lossless = {arm.arm: arm.lossless for arm in report.run.arms}
        found.append(Explored(report.run.run_id, tidied(report.settings), lossless, tuple(numbers)))
    return found


def from_wandb(path: str | Path) -> list[Explored]:
    """Runs of a file exported from W&B.

    One of: the CSV of a table of runs, a column each for a key of config and summary; a CSV or a JSON list with
    ``name``, ``config`` and ``summary`` of each run, as W&B's documentation exports them with its API.

    Raises:
        UserError: the file is not there, is neither, or has no run with a number of an arm.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file} is not there: give a CSV or JSON file of runs exported from W&B.")
    try:
        if file.suffix == ".json":
            rows = json.loads(file.read_text(encoding="utf-8"))
        else:
            rows = pd.read_csv(file).to_dict("records")
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file} cannot be read ({error}): want a CSV or JSON file of runs exported from W&B."
        ) from error
    listed = rows if isinstance(rows, list) else [rows]
    found = [explored(whole(row)) for row in listed if isinstance(row, Mapping)]
    kept = [one for one in found if one.numbers]
    if not kept:
        raise UserError(f"{file} has no number named TASK/ARM/METRIC: export config and summary of runs of log=wandb.")
    return kept


def whole(row: Mapping[str, Any]) -> dict[str, Any]:
    """One run as ``name``, ``config`` nested and ``summary`` flat, of either kind of export."""
    name = str(row.get("name") or row.get("Name") or row.get("id") or "run")
    if "config" in row and "summary" in row:
        config, summary = literal(row["config"]), literal(row["summary"])
        return {"name": name, "config": unwrapped(config), "summary": summary if isinstance(summary, Mapping) else {}}
    known = {str(key): value for key, value in row.items() if not (isinstance(value, float) and math.isnan(value))}
    summary = {key: value for key, value in known.items() if key.count("/") == 2}
    return {
        "name": name,
        "config": nested({key: literal(value) for key, value in known.items() if "/" not in key}),
        "summary": summary,
    }


def literal(value: Any) -> Any:
    """What a cell of a CSV says: JSON, or Python as ``str`` of a dict writes it; anything else as it is."""
    if not (isinstance(value, str) and value[:1] in ("{", "[")):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value)
        except (ValueError, SyntaxError):
            continue
    return value


def unwrapped(config: Any) -> dict[str, Any]:
    """``{"gamma": {"value": 5}}``, as W&B's files have it, as ``{"gamma": 5}``."""
    if not isinstance(config, Mapping):
        return {}
    return {
        key: value["value"] if isinstance(value, Mapping) and set(value) in ({"value"}, {"value", "desc"}) else value
        for key, value in config.items()
    }


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of dotted keys.

    >>> nested({"settings.gate.alpha1": 0.5, "model": "toy"})
    {'settings': {'gate': {'alpha1': 0.5}}, 'model': 'toy'}
    """
    made: dict[str, Any] = {}
    for key, value in values.items():
        node, (*parts, last) = made, key.split(".")
        for part in parts:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = value
    return made


def explored(row: Mapping[str, Any]) -> Explored:
    """A run of an export; numbers over all tasks, and of anything but an arm, are left out."""
    config, numbers = row["config"], []
    for key, value in row["summary"].items():
        parts = str(key).split("/")
        if len(parts) == 3 and parts[0] not in (*OVER_TASKS, "live") and is_number(value):
            numbers.append((parts[0], parts[1], parts[2], float(value), None, None))
    record = config.get("run") if isinstance(config.get("run"), Mapping) else {}
    arms = literal(record.get("arms") or [])
    known = [arm for arm in arms if isinstance(arm, Mapping) and {"arm", "lossless"} <= set(arm)]
    settings = config.get("settings", {key: value for key, value in config.items() if key != "run"})
    return Explored(
        str(record.get("run_id", row["name"])),
        tidied(settings if isinstance(settings, Mapping) else {}),
        {arm["arm"]: bool(arm["lossless"]) for arm in known},
        tuple(numbers),
    )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def tidied(node: Any) -> Any:
    """Whole numbers without a point, as a CSV cannot tell 5 from 5.0; tuples as lists."""
    if isinstance(node, Mapping):
        return {str(key): tidied(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [tidied(value) for value in node]
    return int(node) if isinstance(node, float) and node.is_integer() else node


def explore(runs: Sequence[Explored]) -> pd.DataFrame:
    """One number a line: ``COLUMNS``, then a column for each setting in which the runs differ."""
    values = swept_values([one.config for one in runs])
    found = [
        {
            **dict(zip(COLUMNS, (one.run, str(one.config.get("name", "")), task, arm), strict=False)),
            **{"lossless": one.lossless.get(arm), "metric": metric, "value": value, "low": low, "high": high},
            **{key: setting for key, setting in settings.items() if key not in COLUMNS},
        }
        for one, settings in zip(runs, values, strict=True)
        for task, arm, metric, value, low, high in one.numbers
    ]
    return pd.DataFrame(found, columns=list(dict.fromkeys([*COLUMNS, *(key for row in found for key in row)])))


def settings_of(frame: pd.DataFrame) -> list[str]:
    """The settings in which the frame's runs differ."""
    return [column for column in frame.columns if column not in COLUMNS]


def explored_figure(frame: pd.DataFrame, metric: str = "speedup_decode", x: str = "run") -> Figure:
    """A metric by run or by a setting, a panel a task, a colour an arm, lossy arms hollow.

    A setting that is a number is the x axis, its marks joined where an arm has one at each value; of any other each
    value is a row, best read with names.

    Raises:
        UserError: no such metric or setting, or no number at all.
    """
    if frame.empty:
        raise UserError("there is no number to draw: give folders or exports with finished runs.")
    if x not in ("run", "experiment", *settings_of(frame)):
        raise unknown("x", x, ["run", "experiment", *settings_of(frame)])
    told = frame[(frame["arm"] != BASELINE) | ~frame["metric"].str.startswith("speedup")]  # over itself it is 1
    chosen = told[told["metric"] == metric]
    if chosen.empty:
        raise unknown("metric", metric, set(told["metric"]))
    tasks, places = list(dict.fromkeys(chosen["task"])), list(dict.fromkeys(chosen[x]))
    numeric = all(map(is_number, places))
    arms = {arm: lossless_of(group) for arm, group in chosen.groupby("arm", sort=False)}
    columns = min(2, len(tasks))
    rows = -(-len(tasks) // columns)
    with matplotlib.style.context(STYLE):
        height = 2.2 if numeric else 0.5 + max(0.35, 0.14 * len(arms)) * len(places)
        figure = Figure(figsize=(PAGE_WIDTH, 0.9 + 0.2 * len(arms) / 3 + rows * height), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=not numeric).flatten()
        looks = {arm: look(index, lossless) for index, (arm, lossless) in enumerate(arms.items(), 1)}
        for index, (axes, task) in enumerate(zip(grid, tasks, strict=False)):
            mine = chosen[chosen["task"] == task]
            for place, arm in enumerate(arms):
                shift = 0.0 if numeric else 0.7 * ((place + 0.5) / len(arms) - 0.5)
                draw(axes, mine[mine["arm"] == arm], x, places, numeric, shift, looks[arm])
            if metric.startswith("speedup"):
                (axes.axhline if numeric else axes.axvline)(1.0, **LEVEL)
            axes.set_title(task)
            bottom, left = index + columns >= len(tasks), index % columns == 0
            axes.tick_params(labelbottom=bottom)
            axes.set_xlabel((x if numeric else metric) if bottom else "")
            axes.set_ylabel(metric if numeric and left else "")
        if numeric and len(places) <= 8:
            grid[0].set_xticks(places, map(str, places))
        if not numeric:
            grid[0].set_yticks(range(len(places)), [wrapped(str(place), 26) for place in places])
            grid[0].set_ylim(len(places) - 0.5, -0.5)
        for axes in grid[len(tasks) :]:
            axes.set_axis_off()
        handles = [
            Line2D([], [], linestyle="", label=named(arm, lossless), **looks[arm]) for arm, lossless in arms.items()
        ]
        entry = 0.6 + 0.075 * max(len(str(handle.get_label())) for handle in handles)
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=max(1, min(len(handles), int(7.0 / entry))),
            title="Hollow: lossy. Bars: 95 % intervals over prompts, where the runs were read from disk.",
            title_fontsize=8,
        )
    return figure


def lossless_of(group: pd.DataFrame) -> bool | None:
    """Whether an arm is lossless in all its runs; None where no run says so or not."""
    known = group["lossless"].dropna()
    return None if known.empty else bool(known.all())


def named(arm: str, lossless: bool | None) -> str:
    return arm if lossless else f"{arm} (lossy)" if lossless is False else f"{arm} (lossless or not: not said)"


def look(index: int, lossless: bool | None) -> dict[str, Any]:
    marker = MARKERS[(index + index // len(MARKERS)) % len(MARKERS)]
    face = colour(index) if lossless else "white"
    return {"color": colour(index), "marker": marker, "markersize": 5, "markerfacecolor": face}


def draw(
    axes: Axes, rows: pd.DataFrame, x: str, places: Sequence[Any], numeric: bool, shift: float, style: Mapping[str, Any]
) -> None:
    """The marks of one arm in a panel with their intervals."""
    known = rows.sort_values(x) if numeric else rows
    at = [float(place) if numeric else places.index(place) + shift for place in known[x]]
    for where, low, high in zip(at, known["low"], known["high"], strict=True):
        if pd.notna(low) and pd.notna(high):
            ends = ([where, where], [low, high])
            axes.plot(*(ends if numeric else ends[::-1]), color=style["color"], linewidth=0.9, alpha=0.6)
    joined = numeric and known[x].is_unique  # else the runs differ in more than x
    axes.plot(*((at, known["value"]) if numeric else (known["value"], at)), linestyle="-" if joined else "", **style)
