"""The plain settings of a run: types, defaults, meaning and limits, and what is checked before anything runs.

The groups (model, methods, gate, ...) are open: what one may hold is decided by the function or class that its
``_target_`` names, and ``check_calls`` holds it to that. Hydra is imported only to register and to call: everybody may
read this.
"""

import atexit
import functools
import importlib
import inspect
import os
import re
import shutil
import tempfile
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from harness.errors import UserError, unknown

SOURCES = ("auto", "local", "hub", "builtin")
NUMERICS = ("fastest", "fixed_shape")
PAIRINGS = ("once", "abba1", "abba3", "shared")
GROUPS = (
    *("experiment", "job", "method", "gate", "slim", "drafter", "length", "model", "pair", "task", "log", "launcher"),
)
"""The folders of ``conf/``, in the order in which help lists them."""

FILE_NAME = re.compile(r"\w[\w.-]{0,99}")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
HYDRA_KEYS = frozenset(("_target_", "_partial_", "_convert_", "_recursive_", "_args_"))
SCALARS = (bool, int, float, str, type(None))


def setting(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class RunSettings:
    """The settings that every decoding job takes, as one plain argument."""

    name: str = setting("run", "what is run, in file names and tables; an experiment sets it")
    run_name: str | None = setting(None, "label of this one run; null: made from the name and the time")
    results_dir: str = setting("results", "folder that receives runs, masks, tables and figures")
    seed: int = setting(0, "seed of every draw")
    limit: int = setting(8, "prompts a task")
    max_new_tokens: int = setting(64, "output tokens a prompt, at most")
    temperature: float = setting(0.0, "0 is greedy")
    top_p: float = setting(1.0, "nucleus sampling, in (0, 1]; 1 keeps every token")
    top_k: int = setting(0, "sample from the k likeliest tokens; 0 keeps every token")
    gamma: int = setting(5, "tokens drafted a block")
    numerics: str = setting("fastest", "fastest, or fixed_shape: equal tokens in low precision too")
    allow_code_execution: bool = setting(False, "let coding tasks run the programs that the model writes, in a sandbox")
    graphs: bool = setting(True, "CUDA only: replay captured graphs; false runs the same without")
    pairing: str = setting("abba1", "bench: order of baseline and methods: once, abba1, abba3 or shared")
    # OmegaConf knows no union with a list.
    cores: Any = setting(None, "pin to these, [0,1]; auto: to model.threads free ones, and to a free GPU")  # noqa: RUF009
    exclusive: bool = setting(False, "wait until nobody else measures on this machine, and let nobody in")


@dataclass(frozen=True)
class Settings(RunSettings):
    """The root of the composed config. An unknown key is an error, also when written with a plus."""

    data_dir: str | None = setting(None, "folder with the tasks' rows as JSONL")
    run: str | None = setting(None, "jobs that read a run: its id; null: the newest finished one")
    other: str | None = setting(None, "job=compare: run or sweep to compare run=A with; A may be a sweep too")
    sweep: str | None = setting(None, "job=report: name of a sweep, for one table and one figure over its cells")
    paper: Any = setting(None, "job=report: all, or tables of the paper such as table8, ours beside")  # noqa: RUF009
    format: Any = setting(None, "job=report: html, latex or both besides; html is one page")  # noqa: RUF009
    fidelity: bool = setting(True, "bench: score outputs again with the full verifier, after the clock has stopped")
    rerun: bool = setting(False, "bench: measure again what is finished already")
    fail_fast: bool = setting(False, "sweep: begin no further cell after one has failed")
    shard: str | None = setting(None, "sweep: run every n-th cell, from the i-th: i/n")
    dry_run: bool = setting(False, "bench: say what would run, what it needs and what is missing; run nothing")
    note: str = setting("", "what every table of the run has to say beside its numbers")
    source: str = setting("auto", f"where rows come from: {', '.join(SOURCES)}")
    job: Any = None
    model: Any = None
    pair: Any = None  # what stands beside the model of that name: drafters, masks
    drafter: Any = None  # of every method that names no other
    length: Any = None  # of drafted blocks
    gate: Any = None
    slim: Any = None  # verifier between drafter and full one
    methods: dict[str, Any] = field(default_factory=dict)  # the arms, by name
    tasks: dict[str, Any] = field(default_factory=dict)
    log: Any = None
    not_run: dict[str, Any] = field(default_factory=dict)  # rows that cannot be run, by name: the reason; null: it runs
    launcher: Any = None  # of a sweep's cells; Hydra's, which it configures
    drafters: dict[str, Any] = field(default_factory=dict)  # further drafters, by name, for arms to refer to
    slims: dict[str, Any] = field(default_factory=dict)  # further slim verifiers, by name, for arms to refer to


def register() -> None:
    """Give Hydra the schema of the root and the resolvers that ``conf/`` uses."""
    from hydra.core.config_store import ConfigStore

    schema = OmegaConf.structured(Settings)
    OmegaConf.set_readonly(schema, None)  # frozen is for Python; overrides still have to be written into the config
    ConfigStore.instance().store("settings", schema, provider="harness.config")
    OmegaConf.register_new_resolver("config_text", config_text, replace=True)
    OmegaConf.register_new_resolver("scratch_folder", scratch_folder, replace=True)
    OmegaConf.register_new_resolver("sweep_id", sweep_id, replace=True)


def config_text(*, _root_: DictConfig) -> str:
    """The whole config with every reference resolved, as YAML for a run folder.

    Of ``job`` it holds only what is not a reference: the rest would be a second copy.
    """
    job = plain(_root_, resolve=False)["job"]
    own = {key: value for key, value in job.items() if "${" not in str(value)}
    rest = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key not in ("job", "hydra")])
    return OmegaConf.to_yaml({"job": own}) + OmegaConf.to_yaml(rest, resolve=True)


def plain(cfg: DictConfig, resolve: bool) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=resolve))


@functools.cache
def scratch_folder() -> str:
    """A folder that lasts as long as the process: Hydra insists on writing its sweep's config somewhere."""
    folder = tempfile.mkdtemp(prefix="harness-sweep-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def sweep_id(*, _root_: DictConfig) -> str:
    """The same for all runs of a sweep, gone on with or spread over machines; of a single run its name and start."""
    folder, bar, _ = os.environ.get("HARNESS_SWEEP", "").rpartition("|")  # set by harness.launch
    return Path(folder).name if bar else f"{_root_.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def check(cfg: DictConfig) -> None:
    """Everything that can be said about a composed config before a model or a row is read.

    Raises:
        UserError: an unknown root key, a missing value, a value out of bounds, or arguments a target does not take.
    """
    check_calls(*checked_plain(cfg))


def checked_plain(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config in plain values, references as they stand and resolved, once its keys and values are found right.

    Raises:
        UserError: an unknown root key, a missing value, a value out of bounds, or no job.
    """
    drop_not_run(cfg)
    known = {item.name for item in fields(Settings)}
    for key in cfg:
        if key not in known:
            raise unknown("key", str(key), known | set(GROUPS))
    raw = plain(cfg, resolve=False)  # each resolution of the whole writes the config's text, some 20 ms
    missing = min(missing_keys(raw), key=lambda key: (key.count("."), key), default=None)
    if missing is not None:
        raise UserError(f"{missing} has no value: add {missing}={missing.rsplit('.')[-1].upper()}.")
    resolved = plain(cfg, resolve=True)
    check_values(resolved)
    for named in ("methods", "tasks"):
        for name, node in resolved[named].items():
            if not isinstance(node, dict) or "_target_" not in node:
                raise UserError(f"{named}.{name} is no complete choice (no _target_): drop it with ~{named}.{name}.")
    if not isinstance(raw["job"], dict) or "_target_" not in raw["job"]:
        raise UserError("no job is chosen: write job=bench, or another of `python -m harness --help`.")
    return raw, resolved


def missing_keys(value: Any, key: str = "") -> Iterator[str]:
    """Dotted keys of the values that are still to be given, in plain values with references as they stand."""
    if value == MISSING:
        yield key
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from missing_keys(inner, f"{key}.{name}".strip("."))


def drop_not_run(cfg: DictConfig) -> None:
    """Take out the arms that ``not_run`` gives a reason for; their names and reasons stay, for the tables."""
    for name in [name for name, why in (cfg.get("not_run") or {}).items() if why]:
        with open_dict(cfg.methods):
            cfg.methods.pop(name, None)


def check_values(config: Mapping[str, Any]) -> None:
    """Bounds of the plain settings; their types are held by the schema.

    Raises:
        UserError: the first value out of bounds.
    """
    bounds: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("seed", lambda value: 0 <= value < 2**63, "0 or more, below 2**63"),
        ("limit", lambda value: value >= 1, "at least 1 prompt a task"),
        ("max_new_tokens", lambda value: value >= 1, "at least 1"),
        ("temperature", lambda value: 0 <= value < float("inf"), "0 (greedy) or more"),
        ("top_p", lambda value: 0 < value <= 1, "more than 0 and at most 1 (1 keeps every token)"),
        ("top_k", lambda value: value >= 0, "0 (keeps every token) or more"),
        ("gamma", lambda value: value >= 1, "at least 1 drafted token a block"),
        (
            "name",
            lambda value: bool(FILE_NAME.fullmatch(value)),
            "a plain file name of letters, digits, '_', '-' and '.'",
        ),
    )
    for key, allowed, wanted in bounds:
        if not allowed(config[key]):
            raise UserError(f"{key}={config[key]}: want {wanted}.")
    cores = config["cores"]
    if not (
        cores in (None, "auto") or (isinstance(cores, list) and cores and all(type(core) is int for core in cores))
    ):
        raise UserError(f"cores={cores}: want null, auto, or a list of core numbers such as [0,1].")
    if config.get("shard") is not None:
        shard_of(config["shard"])
    for key, choices in (("source", SOURCES), ("numerics", NUMERICS), ("pairing", PAIRINGS)):
        if config[key] not in choices:
            raise unknown(key, config[key], choices)


def shard_of(shard: str) -> tuple[int, int]:
    """Which part of how many, from 1.

    Raises:
        UserError: it is not written as i/n, or there is no such part.

    >>> shard_of("2/3")
    (2, 3)
    """
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", shard)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"shard={shard}: want i/n with i from 1 to n, such as shard=1/4.")
    return int(found[1]), int(found[2])


def check_calls(raw: Mapping[str, Any], resolved: Mapping[str, Any]) -> None:
    """Hold every ``_target_`` that the job reaches to the signature of what it names.

    A ``_partial_`` node is called in the middle of a job, where a misspelt argument would cost all that was measured.
    ``raw`` has its references unresolved: through them an error names the key that the user wrote.

    Raises:
        UserError: no such target, an argument it does not take or lacks, or a scalar of the wrong type.
    """
    for key in dict.fromkeys(reachable(raw, "job")):
        node = select(resolved, key)
        if isinstance(node, dict) and "_target_" in node:
            check_call(key, node, select(raw, key))


def reachable(raw: Mapping[str, Any], key: str) -> Iterator[str]:
    """Dotted keys of the values under ``key``, references followed."""
    node = select(raw, key)
    if isinstance(node, str) and (reference := REFERENCE.fullmatch(node)):
        yield from reachable(raw, reference[1])
        return
    yield key
    for name in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield from reachable(raw, f"{key}.{name}")


def select(node: Any, key: str) -> Any:
    """The value at a dotted key of plain dicts and lists."""
    for part in key.split("."):
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node


def check_call(key: str, node: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    target = node["_target_"]
    signature = inspect.signature(locate(target, key))
    taken = {name: node[name] for name in node if name not in HYDRA_KEYS}
    parameters = signature.parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in taken:
            if name not in parameters:
                raise unknown(f"{key} key", name, parameters)
    for name, parameter in parameters.items():
        # What a partial call lacks is for its caller to add: tiers and the like, never a plain value.
        left_open = node.get("_partial_") and not is_scalar(kinds_of(parameter.annotation))
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in taken and parameter.default is parameter.empty and not variadic and not left_open:
            raise UserError(f"{key} lacks {name}: add {key}.{name}=VALUE.")
    for name, value in taken.items():
        if name in parameters and not fits(value, kinds := kinds_of(parameters[name].annotation)):
            reference = REFERENCE.fullmatch(str(raw[name]))
            wanted = " or ".join(
                "null" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in kinds
            )
            given = "null" if value is None else f"{value!r} ({type(value).__name__})"
            raise UserError(f"{reference[1] if reference else f'{key}.{name}'} is {given}: want {wanted}.")


def called(node: Mapping[str, Any]) -> Any:
    """What a node of plain values makes: a partial call where it says so. Hold it to ``check_call`` first."""
    from hydra.utils import instantiate

    return instantiate(dict(node), _convert_="all")


def locate(target: Any, key: str) -> Any:
    """The function or class at ``package.module.name``."""
    module_name, _, name = str(target).rpartition(".")
    if not module_name:
        raise UserError(f"{key}._target_={target}: want package.module.name.")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{key}._target_: there is no module {error.name!r} for {target!r}.") from error
        raise UserError(f"{key} needs the package {error.name!r}, which is not installed.") from error
    if not callable(found):
        raise UserError(f"{key}._target_: {module_name!r} has no function or class {name!r}.")
    return found


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """The alternatives an annotation names; none where it allows anything."""
    if annotation in (inspect.Parameter.empty, Any, object):
        return ()
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (type(None) if annotation is None else annotation,)


def fits(value: Any, kinds: tuple[Any, ...]) -> bool:
    """Whether a config value can be of one of these kinds; texts, lists and dicts pass where the kind is no scalar."""
    if not kinds or type(value) in kinds:
        return True
    if type(value) in (bool, int, float, type(None)) or is_scalar(kinds):
        # A bool is an int to Python and not to us; an int is as good as a float.
        return type(value) is int and float in kinds
    return True


def is_scalar(kinds: tuple[Any, ...]) -> bool:
    return bool(kinds) and all(kind in SCALARS for kind in kinds)
