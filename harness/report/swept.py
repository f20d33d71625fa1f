"""What a sweep varied: the settings in which its cells' configs differ, said once each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.cells import EXCLUDED

NOT_SWEPT = frozenset((*EXCLUDED, "job", "pair", "hydra"))
"""Keys of a config that name a run or say where it goes: two cells that differ in these alone are the same."""
COPIES = ("methods", "tasks", "slims", "drafters")
"""Groups whose nodes hold resolved copies of other settings."""
MISSING = object()


def flat(node: Any, key: str = "") -> dict[str, Any]:
    """The values of a config by dotted key; a list is one value.

    >>> flat({"gamma": 5, "slim": {"masks": ["a", "b"]}})
    {'gamma': 5, 'slim.masks': ('a', 'b')}
    """
    if isinstance(node, Mapping):
        parts = [flat(value, f"{key}.{name}".strip(".")) for name, value in node.items()]
        return {name: value for part in parts for name, value in part.items()}
    return {key: tuple(map(str, node)) if isinstance(node, list) else node}


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config that make its run another measurement, by dotted key."""
    return {key: value for key, value in flat(config).items() if key.split(".")[0] not in NOT_SWEPT}


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """By key what each config has there, ``MISSING`` where it has nothing, of the keys in which they differ."""
    cells = [identity(config) for config in configs]
    columns = {key: [cell.get(key, MISSING) for cell in cells] for cell in cells for key in cell}
    return {key: found for key, found in columns.items() if len(set(map(repr, found))) > 1}


def is_copy(key: str) -> bool:
    return key.split(".")[0] in COPIES


def swept_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys of the settings in which configs differ, each setting once.

    Left out: what only comes with the choice of a group (``slim.seed`` where some slim verifiers have none), and the
    copies that arms and tasks hold of a setting that is named already.
    """
    own: dict[str, list[Any]] = {}
    for key, found in sorted(differing(configs).items(), key=lambda item: is_copy(item[0])):
        if not is_copy(key) or repr(found) not in map(repr, own.values()):
            own[key] = found
    chosen = [key.removesuffix("_target_") for key in own if key.endswith("._target_")]
    return [
        key for key, found in own.items() if not (MISSING in found and any(key.startswith(group) for group in chosen))
    ]


def swept_values(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each config the settings in which they differ, by name; a choice of a group has the name of the group."""
    keys = swept_keys(configs)
    return [
        {key.removesuffix("._target_"): readable(key, cell.get(key, MISSING)) for key in keys}
        for cell in map(identity, configs)
    ]


def unswept_arms(configs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Arms whose numbers the sweep can have changed by chance alone: it varied settings of other arms only.

    Empty where something was varied that is of all arms, such as a temperature.
    """
    found = differing(configs)
    of_arms = {repr(values) for key, values in found.items() if key.startswith("methods.")}
    if not found or any(repr(values) not in of_arms for values in found.values()):
        return set()
    changed = {key.split(".")[1] for key in found if key.startswith("methods.")}
    return {arm for config in configs for arm in config.get("methods", {})} - changed


def readable(key: str, value: Any) -> Any:
    """Numbers as they are; a target by its last part, files by their names."""
    if value is MISSING or value is None:
        return "none"
    if isinstance(value, tuple):
        return " + ".join(Path(item).stem for item in value)
    if isinstance(value, str):
        return value.rpartition(".")[2] if key.endswith("_target_") else Path(value).stem if "/" in value else value
    return value
