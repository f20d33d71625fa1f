"""A dry run: the cells of a bench run, what each would read and hold, and what is missing here. Loads no weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.compare import BASELINE
from harness.config import called
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Method
from harness.errors import UserError
from harness.memory import held_bytes
from harness.model.load import Model, known_dtype
from harness.model.random_weights import CPU, parameters
from harness.model.spec import ModelSpec
from harness.model.tiers import Tier, TierGroup, Tiers
from harness.model.transformer import Transformer
from harness.pairing import visits_a_prompt
from harness.preflight import Config, missing_of, nodes, target
from harness.rehearsal import bare_model, rehearsed
from harness.report.lines import DASH
from harness.report.tables import console_table
from harness.sampling import Sampling

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
    """One line an arm: its tiers and the bytes that each adds in weights, its caches; then what is not run, and why.

    Where a checkpoint is not here the pair's stated sizes are used, marked "about"; dashes where nothing is known.
    """
    arms = [BASELINE, *(arm for arm in config["methods"] if arm != BASELINE)]
    cells = len(arms) * len(config["tasks"])
    decodings = len(config["tasks"]) * config["limit"] * visits_a_prompt(config["pairing"], arms)
    not_run = {name: why for name, why in config.get("not_run", {}).items() if why}
    model = known_model(config["model"])
    remarks = [
        "weights are loaded once for all arms, and the arms share the full verifier's cache; caches are those of all "
        "tiers with the hidden states that heads read; " + PROMPT_NOTE,
        *(["about: from pair.sizes, where a checkpoint is not here"] if sizes(config) else []),
        *(f"not run: {name}: {why}" for name, why in not_run.items()),
    ]
    table = console_table(
        f"{len(arms)} arms x {len(config['tasks'])} tasks = {cells} cells, at most {cells * config['limit']} outputs "
        f"of at most {config['max_new_tokens']} tokens, decoded {decodings} times (pairing={config['pairing']})",
        ("arm", "method", "drafter", "slim verifier", "full weights", "drafter's", "slim's", "caches"),
        "\n".join(remarks),
    )
    full = amount(
        weight_bytes(config["model"], None if model is None else model.transformer.spec),
        about_weights(config, str(config["model"].get("full"))),
    )
    for arm in arms:
        node = config["methods"].get(arm, {})
        drafter, slim = node.get("drafter"), node.get("slim")
        method = None if model is None else method_of(config, arm, model)
        draft_bytes, slim_bytes, cache_bytes = (None, None, None) if method is None else held(method)
        table.add_row(
            arm,
            last(node) or "Autoregressive",
            last(drafter) or DASH,
            slim_name(slim, config["model"]) if method is None else slim_text(method),
            full,
            amount(draft_bytes, about_weights(config, *paths(drafter))),
            amount(slim_bytes, about_weights(config, *paths(slim))),
            amount(cache_bytes, about_cache(config)),
        )
    for name in not_run:
        table.add_row(name, *[DASH] * 7)
    return table


def known_model(node: Config) -> Model | None:
    """The full verifier without its weights; None where its shape is not here yet, or it is refused."""
    try:
        return bare_model(node)
    except UserError:
        return None


def method_of(config: Config, arm: str, model: Model) -> Method | None:
    """The arm as the run would build it, for the longest prompt that tasks allow; None where it is refused."""
    capacity = positions(config)
    if arm not in config["methods"]:
        return Autoregressive(Tiers(model.transformer, model.transformer.new_cache(capacity)), Sampling())
    try:
        return rehearsed(config, arm, model, capacity)
    except UserError:
        return None


def slim_text(method: Method) -> str:
    """Its slim verifiers, a line each: where they are from and whose cache they read."""
    found = [f"{one.source}, {one.cache} cache" for one in getattr(method, "slim_verifiers", ())]
    return "\n".join(found) or DASH


def held(method: Method) -> tuple[int, int, int]:
    """Bytes of the weights that drafter and slim verifiers add to the full one's, and of all that is kept by position.

    A tier of the full verifier's own layers adds none.
    """
    full = method.tiers.model.weights
    draft, slim = method.tier_roles()
    slims = slim.tiers if isinstance(slim, TierGroup) else (slim,)
    added = [
        held_bytes(full, *(part for tier in tiers if tier is not None for part in weights_of(tier))) - held_bytes(full)
        for tiers in ((draft,), slims)
    ]
    return added[0], added[1], held_bytes(*((tier.cache, tier.features) for tier in method.tiers.every))


def weights_of(tier: Tier) -> list[Any]:
    """The weights that a tier runs with, those of a head included; no tables."""
    head = getattr(tier, "head", None) or getattr(tier, "heads", None)
    parts = [] if head is None else [getattr(head, known.name) for known in fields(head)]
    inner = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
    return [one.weights if isinstance(one, Transformer) else one for one in (tier.model, *inner)]


def search_table(config: Config) -> Table:
    """What a search of a mask would score, and with which weights."""
    job = config["job"]
    table = console_table(
        f"search of a mask that skips {job['skip_ratio']:g}: at most {job['evaluations']} masks on {job['prompts']} "
        f"prompts of each of {len(config['tasks'])} tasks, {job['new_tokens']} tokens each",
        ("model", "full weights"),
        "scored masks run parts of the full verifier: no further weights",
    )
    model = known_model(config["model"])
    spec = None if model is None else model.transformer.spec
    full = str(config["model"].get("full", last(config["model"])))
    table.add_row(full, amount(weight_bytes(config["model"], spec), about_weights(config, full)))
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
    """Keys and values of every layer for ``positions``, of a full verifier that is not here."""
    if (known := sizes(config).get(config["model"].get("full"))) is None:
        return None
    item = known_dtype(config["model"]["dtype"]).itemsize
    return float(2 * known["layers"] * known["kv_heads"] * known["head_dim"] * item * positions(config))


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
    ratio = "" if slim.get("skip_ratio") is None else f" {slim['skip_ratio']:g}"
    return f"{last(slim)}{ratio}{': ' if files else ''}{', '.join(files)}"


def paths(tier: Any) -> list[str]:
    """The folders or hub ids that a drafter or a slim verifier reads weights from."""
    return [node["path"] for _, node in nodes(tier) if isinstance(node.get("path"), str)]


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


def weight_bytes(model: Config, spec: ModelSpec | None) -> int | None:
    """Of the full verifier in the dtype it runs in."""
    if spec is None:
        return None
    return sum(parameters(spec, [CPU]).values()) * known_dtype(model["dtype"]).itemsize


def positions(config: Config) -> int:
    """Of the longest prompt that tasks allow, its output and one block."""
    gammas = [config["gamma"], *(node.get("gamma", 0) for node in config["methods"].values())]
    longest = max((node.get("max_input_tokens") or 0 for node in config["tasks"].values()), default=0)
    return int(longest + config["max_new_tokens"] + 1 + max(gammas))


def size(count: int | None) -> str:
    """Bytes in a unit for reading; a dash where they are not known."""
    if count is None:
        return DASH
    power = min(3, int(math.log(count, 1024))) if count else 0
    return f"{count / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def last(node: Any) -> str:
    """The name of what a node calls."""
    return target(node).rpartition(".")[2] if isinstance(node, Mapping) else ""
