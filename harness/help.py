"""What the command line says: ``--help``, and one line for every mistake in it."""

import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from hydra.main import get_args_parser
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from harness.config import GROUPS, Settings
from harness.errors import UserError, forbidden, unknown

CONF = Path(__file__).resolve().parents[1] / "conf"

USAGE = """\
usage: python -m harness [+experiment=NAME] [KEY=VALUE ...] [-m]

Examples
  python -m harness +experiment=quickstart                  an experiment as shipped
  python -m harness +experiment=quickstart limit=2 gamma=3  the same with other settings
  python -m harness 'method=[autoregressive,via_sd]' task=web_questions gate.alpha1=0.6
  python -m harness model=toy limit=1                       seconds, no weights needed
  python -m harness -m drafter=prompt_lookup,self_skip      one run for each
  python -m harness +experiment=quickstart job=preflight    what is missing here to run it, and how to get it
  python -m harness +experiment=quickstart dry_run=true     the cells, their weights, data and memory; runs nothing
  python -m harness job=report                              tables and figures from results/
  python -m harness job=audit                               the worst case of the newest run, token by token
  python -m harness job=speed                               forwards, bandwidth, and decoding beside transformers
  python -m harness +experiment=quickstart --cfg job        show the config, run nothing
"""

HINTS = {
    "experiment": "+experiment=NAME",
    "job": "job=NAME",
    "method": "method=NAME or 'method=[A,B]'",
    "gate": "gate=NAME, then gate.KEY=VALUE",
    "slim": "slim=NAME, then slim.KEY=VALUE",
    "drafter": "drafter=NAME, then drafter.KEY=VALUE",
    "length": "length=NAME, then length.KEY=VALUE",
    "model": "model=NAME, then model.KEY=VALUE",
    "pair": "pair=NAME where another than the model's",
    "task": "task=NAME or 'task=[A,B]'",
    "log": "log=NAME",
    "launcher": "launcher=NAME with -m, then hydra.launcher.KEY=VALUE",
}


def help_text(conf: Path = CONF) -> str:
    parts = [USAGE]
    for group in GROUPS:
        rows = [(name, comment(conf / group / f"{name}.yaml")) for name in options(conf, group)]
        parts.append(f"{group}: {HINTS[group]}\n{table(rows)}")
    settings = [item for item in fields(Settings) if "help" in item.metadata and item.default is not MISSING]
    rows = [
        (f"{item.name}={'null' if item.default is None else item.default}", item.metadata["help"]) for item in settings
    ]
    parts.append(f"settings: KEY=VALUE\n{table(rows)}")
    parts.append("--version: this program's version; --hydra-help: the other flags (--cfg, --info, --multirun, ...).\n")
    return "\n".join(parts)


def table(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "".join(f"  {name:{width}}  {text}".rstrip() + "\n" for name, text in rows)


def options(conf: Path, group: str) -> list[str]:
    """Names a group can be set to, those in subfolders with their folder."""
    folder = conf / group
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def comment(path: Path) -> str:
    """The first comment line of a config, past the ``# @package`` that Hydra reads on the first line only."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return next((line.lstrip("# ") for line in lines if line.startswith("#") and not line.startswith("# @")), "")


def fail(message: str, status: int = 2) -> NoReturn:
    """One line on stderr, and out. SystemExit passes through Hydra, which adds lines to every other exception."""
    print(f"harness: {message}", file=sys.stderr)
    raise SystemExit(status)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line and status 2 for what the user can mend; a bug keeps its traceback."""
    try:
        yield
    except Exception as error:
        if (line := mendable(error)) is None:
            raise
        fail(f"error: {line}")
    except KeyboardInterrupt:
        fail("interrupted", status=130)


def mendable(error: Exception) -> str | None:
    """One line for what the user can mend; None for a bug."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        return one_line(str(error.__cause__)) if isinstance(error.__cause__, UserError) else None
    if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
        return explain(error)
    if isinstance(error, UserError) or (isinstance(error, ValueError) and raised_by_hydra(error)):
        return one_line(str(error))
    return one_line(str(forbidden(error))) if isinstance(error, PermissionError) else None


def raised_by_hydra(error: ValueError) -> bool:
    """Hydra raises a few plain ValueErrors for what is written on the command line."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_globals.get("__name__", "").startswith("hydra.")


def explain(error: Exception) -> str:
    """One line for what Hydra or OmegaConf say in several, with near matches where a name is unknown."""
    text = str(error) or str(error.__cause__)
    if isinstance(error, OverrideParseException):
        return unreadable(error)
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        path = str(error.missing_cfg_file)
        group, _, name = path.partition("/") if path.split("/")[0] in GROUPS else path.rpartition("/")
        known = set(options(CONF, group)) | set(error.options or ())
        if group == "hydra/launcher" and name in options(CONF, "launcher"):  # a name of ours, whose plugin is not there
            return missing_launcher(name)
        return str(unknown(group, name, known))
    if found := re.match(r"Ambiguous value for argument '(.*)'", text):
        key, _, values = found[1].partition("=")
        return f"{found[1]!r} has several values: write '{key}=[{values}]' for a list, or add -m to run each."
    if found := re.match(r"Could not override '(\w+)'\. No match in the defaults list\.\n.*use (\S+)", text):
        return f"{found[1]} is not set yet: write {found[2]} (with the plus)."
    if found := re.match(r"Could not override '([\w.]+)'\.\nTo append", text):
        return str(unknown_key(found[1]))
    if found := re.match(r"In '(.+)': ConfigKeyError raised while composing config:\nKey '(.+?)' not in", text):
        return f"conf/{found[1]}.yaml: {unknown_key(found[2])}"
    if found := re.match(r"Error merging override (.+)", text):
        return f"{found[1]}: {str(error.__cause__).splitlines()[0]}"
    return one_line(text)


def missing_launcher(name: str) -> str:
    extra = name.split("_")[0]
    pins = "constraints-ray.txt" if extra == "ray" else "constraints.txt"
    command = f"python -m pip install -c {pins} -e '.[{extra}]'"
    return f"launcher={name} needs a package that is not installed: run `{command}`."


def unreadable(error: OverrideParseException) -> str:
    if "=" not in error.override and not error.override.startswith("~"):
        return f"{error.override!r} is not KEY=VALUE; an experiment is chosen with +experiment=NAME."
    return (
        f"cannot read {error.override!r} ({one_line(error.message)}); quote a list for the shell, 'KEY=[A,B]', and a "
        "text with special characters twice, 'KEY=\"VALUE\"'."
    )


def unknown_key(key: str) -> UserError:
    """Name the part of a dotted key that does not exist, with the keys that stand beside it."""
    node = composed(sys.argv[1:])
    known = {item.name for item in fields(Settings)} | (set() if "." in key else set(GROUPS))
    parent = ""
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node:
            return unknown(f"{parent} key".strip(), part, known)
        node = node[part]
        known = {str(name) for name in node if not str(name).startswith("_")} if isinstance(node, DictConfig) else set()
        parent = f"{parent}.{part}".strip(".")
    return UserError(f"{key} cannot be set here; `--cfg job` shows the composed config.")


def composed(arguments: Sequence[str]) -> DictConfig:
    """The config with the groups that the command line chose and nothing else; the default one if that fails too."""
    given = get_args_parser().parse_intermixed_args(arguments)
    choice = re.compile(rf"\+?({'|'.join(GROUPS)})(@[\w.]+)?=")
    searched = [f"hydra.searchpath=['file://{Path(given.config_dir).resolve()}']"] if given.config_dir else []
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            chosen = [item for item in given.overrides if choice.match(item)]
            return compose("config", [*searched, *chosen], return_hydra_config=True)
        except HydraException:
            return compose("config", searched, return_hydra_config=True)


def one_line(text: str) -> str:
    """Join lines, without the parts that only a developer of Hydra can use."""
    kept = []
    for line in text.split("Config search path:")[0].splitlines():
        line = line.strip()
        if line.startswith("full_key:") and line != "full_key:":
            kept.append(f"({line.removeprefix('full_key:').strip()})")
        elif line and not line.startswith(("object_type=", "reference_type=", "See http", "full_key:")):
            kept.append(line)
    return " ".join(kept)
