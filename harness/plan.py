"""A dry run: the cells of a bench run, what each would read and hold, and what is missing here. Loads no weights."""

import math
from collections.abc import Mapping, Sequence
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
    print_plans([config])


def print_plans(configs: Sequence[Config], names: Sequence[str] = ()) -> None:
    """Print the plans of all runs of a sweep, each under its name, and once what they miss together."""
    screen = Console()
    if not screen.is_terminal:
        screen.width = 120
    missing: dict[str, None] = {}
    for index, config in enumerate(configs):
        if names:
            screen.print(f"run {index + 1} of {len(configs)}: {names[index]}", style="bold", highlight=False)
        if note := config.get("note"):
            screen.print(f"note: {note}", highlight=False, markup=False)
        searches = last(config["job"]) == "search"
        for table in (search_table(config) if searches else arms_table(config), data_table(config)):
            screen.print(table)
        needed = {**config, "methods": {}, "model": {**config["model"], "slim_mask": None}} if searches else config
        missing |= dict.fromkeys(missing_of(needed))
    screen.print(f"missing here: {len(missing) or 'nothing'}", highlight=False)
    for line in missing:
        screen.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    screen.print("dry_run=true: nothing was run", highlight=False)


def arms_table(config: Config) -> Table:
    """One line an arm: its tiers and the bytes of their weights, its cache. Below them what is not run, and why."""
    methods = {BASELINE: {"_target_": "harness.decode.autoregressive.Autoregressive"}, **config["methods"]}
    tasks = len(config["tasks"])
    cells = len(methods) * tasks
    spec = spec_of(config["model"])
    not_run = {name: why for name, why in config.get("not_run", {}).items() if why}
    remarks = [
        "weights are loaded once for all arms, and the arms share the full verifier's cache; " + PROMPT_NOTE,
        *(["about: from pair.sizes, since the checkpoint is not here"] if spec is None and sizes(config) else []),
        *(f"not run: {name}: {why}" for name, why in not_run.items()),
    ]
    table = console_table(
        f"{len(methods)} arms x {tasks} tasks = {cells} cells, at most {cells * config['limit']} outputs of at most "
        f"{config['max_new_tokens']} tokens",
        ("arm", "method", "drafter", "slim", "full weights", "drafter's weights", "slim weights", "cache"),
        "\n".join(remarks),
    )
    for arm, node in methods.items():
        drafter, slim = node.get("drafter"), node.get("slim")
        table.add_row(
            arm,
            last(node),
            last(drafter) or DASH,
            slim_name(slim, config["model"]),
            amount(weight_bytes(config["model"], spec), about_weights(config, str(config["model"].get("full")))),
            amount(drafter_bytes(drafter), about_weights(config, *paths(drafter))),
            amount(drafter_bytes(slim), about_weights(config, *paths(slim))),
            amount(cache_bytes(config, spec), about_cache(config)),
        )
    for name in not_run:
        table.add_row(name, *[DASH] * 7)
    return table


def search_table(config: Config) -> Table:
    """What a search of a mask would score, and with which weights."""
    job = config["job"]
    table = console_table(
        f"search of a mask that skips {job['skip_ratio']:g}: at most {job['evaluations']} masks on {job['prompts']} "
        f"prompts of each of {len(config['tasks'])} tasks, {job['new_tokens']} tokens each",
        ("model", "full weights"),
        "scored masks run parts of the full verifier: no further weights",
    )
    full = str(config["model"].get("full", last(config["model"])))
    table.add_row(full, amount(weight_bytes(config["model"], spec_of(config["model"])), about_weights(config, full)))
    return table


def sizes(config: Config) -> Config:
    """Rounded sizes of checkpoints by hub id, which the pair states: all there is to know before they are here."""
    return (config.get("pair") or {}).get("sizes") or {}


def about_weights(config: Config, *names: str) -> float | None:
    """Bytes of the weights of these checkpoints as ``sizes`` has them; None where it does not have them all."""
    if not names or any(name not in sizes(config) for name in names):
        return None
    item = known_dtype(config["model"].get("dtype", "bfloat16")).itemsize
    return sum(sizes(config)[name]["parameters"] for name in names) * item


def about_cache(config: Config) -> float | None:
    """As ``cache_bytes``, of a full verifier that is not here."""
    if (known := sizes(config).get(config["model"].get("full"))) is None:
        return None
    item = known_dtype(config["model"]["dtype"]).itemsize
    return float(2 * known["layers"] * known["kv_heads"] * known["head_dim"] * item * longest_sequence(config))


def amount(exact: int | None, about: float | None) -> str:
    return f"about {size(round(about))}" if exact is None and about is not None else size(exact)


def slim_name(slim: Any, model: Config) -> str:
    """Where an arm's slim verifier comes from, shortly."""
    if not isinstance(slim, Mapping):
        return DASH
    masks = slim.get("masks") or [slim.get("mask", slim.get("path"))]
    if last(slim) == "masked" and masks == [None]:
        masks = [model.get("slim_mask")]
    files = [Path(mask).stem if isinstance(mask, str) else "kept layers" for mask in masks if mask is not None]
    ratio = f" {slim['skip_ratio']:g}" if "skip_ratio" in slim else ""
    return f"{last(slim)}{ratio}{': ' if files else ''}{', '.join(files)}"


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
    entry = 2 * spec.layers * spec.kv_heads * spec.head_dim * known_dtype(config["model"]["dtype"]).itemsize
    return longest_sequence(config) * entry


def longest_sequence(config: Config) -> int:
    """Positions of the longest prompt that tasks allow, its output and one block."""
    gammas = [config["gamma"], *(node.get("gamma", 0) for node in config["methods"].values())]
    longest = max((node.get("max_input_tokens") or 0 for node in config["tasks"].values()), default=0)
    return int(longest + config["max_new_tokens"] + 1 + max(gammas))


def paths(tier: Any) -> list[str]:
    """The folders or hub ids that a drafter or a slim verifier reads weights from."""
    return [node["path"] for _, node in nodes(tier) if isinstance(node.get("path"), str)]


def drafter_bytes(drafter: Any) -> int | None:
    """Bytes of the weight files of all folders that a drafter reads, as they are stored; 0 without any."""
    try:
        with closed(FIRST_LOOK):
            found = [path for name in paths(drafter) for path in drafter_folder(name).glob("*.safetensors")]
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
