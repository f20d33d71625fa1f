"""A dry run: the cells of a bench run, what each would read and hold, and what is missing here. Loads no weights."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.compare import BASELINE
from harness.config import called, check_call
from harness.drafters.weights import drafter_folder
from harness.errors import UserError
from harness.hub import closed
from harness.model.embedded import FOLDER
from harness.model.load import find_checkpoint, known_dtype, read_spec
from harness.model.made import cache_dir
from harness.model.random_weights import CPU, parameters
from harness.model.spec import ModelSpec
from harness.preflight import FIRST_LOOK, Config, missing_of, nodes, target
from harness.report.tables import DASH, console_table

PROMPT_NOTE = "positions: max_input_tokens, output and one block; the template's own tokens come on top"


def print_plan(config: Config) -> None:
    """Print the plan of a resolved config whose calls have been checked."""
    screen = Console()
    if not screen.is_terminal:
        screen.width = 120
    for table in (arms_table(config), data_table(config)):
        screen.print(table)
    missing = missing_of(config)
    screen.print(f"missing here: {len(missing) or 'nothing'}", highlight=False)
    for line in missing:
        screen.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    screen.print("dry_run=true: nothing was run", highlight=False)


def arms_table(config: Config) -> Table:
    """One line an arm: its tiers and the bytes of their weights, its cache."""
    methods = {BASELINE: {"_target_": "harness.decode.autoregressive.Autoregressive"}, **config["methods"]}
    tasks = len(config["tasks"])
    cells = len(methods) * tasks
    spec = spec_of(config["model"])
    table = console_table(
        f"{len(methods)} arms x {tasks} tasks = {cells} cells, at most {cells * config['limit']} outputs of at most "
        f"{config['max_new_tokens']} tokens",
        ("arm", "method", "drafter", "full weights", "drafter's weights", "cache of the longest prompt"),
        "weights are loaded once for all arms, and the arms share the full verifier's cache; " + PROMPT_NOTE,
    )
    for arm, node in methods.items():
        drafter = node.get("drafter")
        table.add_row(
            arm,
            last(node),
            last(drafter) or DASH,
            size(weight_bytes(config["model"], spec)),
            size(drafter_bytes(drafter)),
            size(cache_bytes(config, spec)),
        )
    return table


def data_table(config: Config) -> Table:
    """One line a task: where its rows would come from."""
    table = console_table(
        "Data", ("task", "rows", "source", "where"), "auto: data_dir, then the hub, then built-in rows"
    )
    for name, node in config["tasks"].items():
        dataset = getattr(called(node), "dataset", None)
        where = node.get("data_dir") or getattr(dataset, "path", None) or DASH
        table.add_row(name, str(config["limit"]), str(node.get("source", DASH)), str(where))
    return table


def spec_of(model: Config) -> ModelSpec | None:
    """The full verifier's shape, from its config alone; None where that is not here yet."""
    if "config" in model:
        return ModelSpec.from_hf(model["config"], "model.config")
    if "full" not in model:  # a toy, made in no time
        check_call("model", model, model)
        return called({**model, "slim_mask": None})().transformer.spec
    try:
        if model["full"] == "embedded":
            return read_spec(cache_dir() / FOLDER)
        with closed(FIRST_LOOK):
            return read_spec(find_checkpoint(model["full"], model.get("revision"), None)[0])
    except UserError:
        return None


def weight_bytes(model: Config, spec: ModelSpec | None) -> int | None:
    """Of the full verifier in the dtype it runs in."""
    if spec is None:
        return None
    return sum(parameters(spec, [CPU]).values()) * known_dtype(model["dtype"]).itemsize


def cache_bytes(config: Config, spec: ModelSpec | None) -> int | None:
    """Keys and values of every layer for the longest prompt that tasks allow, its output and one block."""
    if spec is None:
        return None
    gammas = [config["gamma"], *(node.get("gamma", 0) for node in config["methods"].values())]
    longest = max((node.get("max_input_tokens") or 0 for node in config["tasks"].values()), default=0)
    positions = longest + config["max_new_tokens"] + 1 + max(gammas)
    entry = 2 * spec.layers * spec.kv_heads * spec.head_dim * known_dtype(config["model"]["dtype"]).itemsize
    return positions * entry


def drafter_bytes(drafter: Any) -> int | None:
    """Bytes of the weight files of all folders that a drafter reads, as they are stored; 0 without any."""
    folders = [node["path"] for _, node in nodes(drafter) if isinstance(node.get("path"), str)]
    try:
        found = [path for folder in folders for path in Path(drafter_folder(folder)).glob("*.safetensors")]
    except UserError:
        return None
    return sum(path.stat().st_size for path in found)


def size(count: int | None) -> str:
    """Bytes in a unit for reading; a dash where they are not known."""
    if count is None:
        return DASH
    power = min(3, int(math.log(count, 1024))) if count else 0
    return f"{count / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def last(node: Any) -> str:
    """The name of what a node calls."""
    return target(node).rpartition(".")[2] if isinstance(node, Mapping) else ""
