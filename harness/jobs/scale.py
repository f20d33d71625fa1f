"""Latency of pairs that do not fit here, predicted by a roofline under measured traces: ``job=scale``. No torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.cost import Shape
from harness.errors import UserError, unknown
from harness.jobs.plausibility import chosen
from harness.report.figures import save
from harness.report.paper_numbers import read_shapes
from harness.report.scale import (
    CALIBRATED,
    ScaledPair,
    Traced,
    devices_for,
    page,
    scaled,
    tidy,
    traced,
    validation_frame,
    validation_rows,
)
from harness.report.scale_figure import scale_figure, validation_figure
from harness.report.tables import markdown_table
from harness.roofline import Load, Machine, Timed, calibrated, load_of
from harness.speed.numbers import median_span
from harness.speed.records import ForwardTime
from harness.store import check_writable, from_json, read, read_config, write_atomic

FITTED_ON = "full"
MACHINE_KEYS = ("bandwidth", "compute", "layer_overhead_s", "memory_bytes", "source")
PAIR_KEYS = ("drafter", "full")
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of a number by dtype."""


def report_scale(
    results_dir: str,
    machines: Mapping[str, Any],
    pairs: Mapping[str, Any],
    contexts: Sequence[int],
    runs: str | Sequence[str] | None = None,
    reference: str | None = None,
    batch: int = 1,
    weight_bytes: float = 2.0,
    cache_bytes: float = 2.0,
    skip_ratio: float = 0.45,
    speed: str | None = None,
    speed_model: str = "smollm2_135m",
    speed_machine: str | None = None,
    paper: str = "results/paper",
) -> list[Path]:
    """Write tables ``scale`` and ``scale_validation`` and their figures under ``results_dir``; return the paths.

    Args:
        machines: by name ``bandwidth``, ``compute``, ``layer_overhead_s``, ``memory_bytes`` and ``source``.
        pairs: by name ``drafter`` and ``full``, models of ``configs.csv`` in ``paper``.
        contexts: cached tokens behind which the traced output begins.
        runs: ids of runs whose traces are used; None: the newest finished one, where there is none those below
            ``reference``.
        weight_bytes, cache_bytes: bytes of a weight, and of a number in the cache.
        skip_ratio: of slim verifiers whose own is not in the run's settings.
        speed: a record of ``job=speed`` or a folder whose newest one is taken; None: no validation.
        speed_model: the model that it timed, of ``configs.csv``; ``speed_machine`` the constants it is held against.

    Raises:
        UserError: a constant out of bounds, an unknown model or key, no run, or no such record.
    """
    tables, figures = Path(results_dir) / "tables", Path(results_dir) / "figures"
    for folder in (tables, figures):
        check_writable(folder)
    shapes, read_in = read_shapes(Path(paper))
    known = {name: machine_of(name, node) for name, node in machines.items()}
    check_sizes(contexts, batch, pairs, [name for name in known if name != speed_machine])
    if not 0 <= skip_ratio < 1:
        raise UserError(f"job.skip_ratio={skip_ratio}: want a share of the layers, 0 to below 1.")
    if speed_machine is not None and speed_machine not in known:
        raise unknown("job.speed_machine", speed_machine, known)

    arms: list[Traced] = []
    reasons: dict[str, str] = {}
    facts = []
    for folder in chosen(results_dir, runs, reference):
        data, settings = read(folder), read_config(folder)
        found, why = traced(data.run, data.samples, settings, skip_ratio)
        arms += found
        reasons |= why
        facts.append(f"run `{data.run.run_id}`, model {data.run.model}, {len(data.samples)} samples")
    if not arms:
        told = "; ".join(f"{arm}: {reason}" for arm, reason in reasons.items()) or "no run has a method"
        raise UserError(f"no forwards follow from a trace ({told}): run +experiment=quickstart first.")

    shares = sorted({0.0, *(arm.slim_skip for arm in arms), *(arm.draft_skip or 0.0 for arm in arms)})
    rows = []
    for name, node in pairs.items():
        small, full = (shape_of(shapes, name, node, key) for key in PAIR_KEYS)
        loads = {share: load_of(full, weight_bytes, cache_bytes, share) for share in shares}
        pair = ScaledPair(name, load_of(small, weight_bytes, cache_bytes), loads)
        for device, machine in known.items():
            if device == speed_machine:
                continue
            memory = machines[device].get("memory_bytes")
            devices = devices_for(pair, memory, max(contexts), batch)
            rows += [
                scaled(device, machine, devices, pair, context, batch, arm) for context in contexts for arm in arms
            ]

    used = {model: read_in[model] for node in pairs.values() for model in (node["drafter"], node["full"])}
    screen = Console()
    checks = [] if speed is None else validated(Path(speed), speed_model, shapes, known, speed_machine)
    said = "No measured forwards were given (`job.speed`)."
    if checks:
        frame = validation_frame(checks, FITTED_ON)
        said = f"{markdown_table(frame)}\n\n{VALIDATION} Record: `{speed_record(Path(str(speed))).name}`."
        for line in frame.to_dict("records"):
            screen.print(", ".join(f"{key} {value}" for key, value in line.items()), highlight=False)
        known |= {CALIBRATED: checks[-1][1]}
    paths = [tables / "scale.md", tables / "scale.csv"]
    write_atomic(paths[0], page(rows, known, reasons, used, facts, said))
    write_atomic(paths[1], tidy(rows).to_csv(index=False, lineterminator="\n"))
    paths += save(scale_figure(rows), figures, "scale")
    if checks:
        paths.append(tables / "scale_validation.csv")
        write_atomic(paths[-1], validation_rows(checks).to_csv(index=False, lineterminator="\n"))
        paths += save(validation_figure(checks), figures, "scale_validation")
    for path in paths:
        screen.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    return paths


VALIDATION = (
    "Error: roofline / median of the measured repeats - 1. Calibrated: compute and the constant a layer fitted to the "
    f"forwards of the {FITTED_ON} tier alone, with the bandwidth as given; the other tiers were not looked at."
)


def machine_of(name: str, node: Any) -> Machine:
    """A machine of the config.

    Raises:
        UserError: an unknown or missing key, or a constant out of bounds.
    """
    check_keys(f"job.machines.{name}", node, MACHINE_KEYS, ("bandwidth", "compute"))
    numbers = {key: node[key] for key in MACHINE_KEYS[:3] if key in node}
    for key, value in (numbers | {"memory_bytes": node.get("memory_bytes") or 1}).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"job.machines.{name}.{key}={value!r}: want a number.")
    try:
        return Machine(**numbers, source=str(node.get("source") or ""))
    except UserError as error:
        raise UserError(f"job.machines.{name}: {error}") from error


def check_keys(where: str, node: Any, known: Sequence[str], needed: Sequence[str]) -> None:
    if not isinstance(node, Mapping):
        raise UserError(f"{where}={node!r}: want the keys {', '.join(needed)}.")
    for key in node:
        if key not in known:
            raise unknown(f"key {where}", str(key), known)
    if missing := [key for key in needed if key not in node]:
        raise UserError(f"{where} lacks {', '.join(missing)}: add {where}.{missing[0]}=VALUE.")


def check_sizes(contexts: Any, batch: Any, pairs: Mapping[str, Any], machines: Sequence[str]) -> None:
    """``machines``: those that pairs are predicted for."""
    listed = isinstance(contexts, Sequence) and bool(contexts)
    if not listed or any(type(one) is not int or one < 1 for one in contexts):
        raise UserError(f"job.contexts={contexts!r}: want numbers of cached tokens, at least one, each 1 or more.")
    if type(batch) is not int or batch < 1:
        raise UserError(f"job.batch={batch!r}: want at least 1 text at once.")
    for key, found, beside in (("pairs", pairs, ""), ("machines", machines, " besides job.speed_machine")):
        if not found:
            raise UserError(f"job.{key} is empty: want at least one{beside}.")


def shape_of(shapes: Mapping[str, Shape], pair: str, node: Any, key: str) -> Shape:
    check_keys(f"job.pairs.{pair}", node, PAIR_KEYS, PAIR_KEYS)
    if node[key] not in shapes:
        raise unknown(f"model job.pairs.{pair}.{key}", str(node[key]), shapes)
    return shapes[node[key]]


def validated(
    speed: Path, model: str, shapes: Mapping[str, Shape], machines: Mapping[str, Machine], named: str | None
) -> list[tuple[str, Machine, list[Timed]]]:
    """The measured forwards under the constants of ``named``, where there are some, and under those fitted to them."""
    if model not in shapes:
        raise unknown("model job.speed_model", model, shapes)
    timed = timed_forwards(speed_record(speed), shapes[model])
    begin = machines[named] if named is not None else next(iter(machines.values()))
    fitted = calibrated(begin, [one for one in timed if one.tier == FITTED_ON])
    found = [] if named is None else [(named, begin, timed)]
    return [*found, (CALIBRATED, fitted, timed)]


def speed_record(path: Path) -> Path:
    """The record itself, or the newest one of a folder."""
    found = [path] if path.is_file() else sorted(path.glob("*.json"))
    if not found:
        raise UserError(f"job.speed={path}: no record of job=speed there: measure one, or set job.speed=null.")
    return found[-1]


def timed_forwards(path: Path, shape: Shape) -> list[Timed]:
    """The forwards of a record, each with what it had to move.

    The record says the bytes that a forward must read; from two contexts follow those of a cached position, from these
    the layers of the tier.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        forwards: tuple[ForwardTime, ...] = from_json(tuple[ForwardTime, ...], stored["forwards"])
        size = SIZES[stored["run"]["env"]["dtype"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a record of job=speed ({error}): give another with job.speed=PATH.") from error
    found = []
    for tier in dict.fromkeys(one.tier for one in forwards):
        mine = [one for one in forwards if one.tier == tier]
        if len({one.context for one in mine}) < 2:
            raise UserError(f"{path}: {tier} was timed at one context, want two: give another with job.speed=PATH.")
        load = load_read(mine, shape, size)
        for one in mine:
            seconds = median_span(one.seconds)[0]
            if seconds:
                found.append(Timed(tier, load, one.block, one.context, seconds))
    return found


def load_read(forwards: Sequence[ForwardTime], shape: Shape, size: int) -> Load:
    """``size``: bytes of a number."""
    least = min(one.block for one in forwards)
    short, *_, long = sorted((one for one in forwards if one.block == least), key=lambda one: one.context)
    cache = (long.read_bytes - short.read_bytes) / (long.context - short.context)
    weight_bytes = short.read_bytes - (short.context + least) * cache
    layers = cache / (2 * shape.kv_heads * shape.head_dim * size)
    return Load(weight_bytes, cache, weight_bytes / size, layers)
