"""``python -m harness``: compose ``conf/``, check the result, build the job and call it. ``--help`` says what there is.

Hydra's config objects end here: a job gets plain values.
"""

import importlib
import os
import sys
from typing import NoReturn

import hydra
from hydra.main import get_args_parser
from omegaconf import DictConfig

from harness import __version__, sweeper
from harness.config import GROUPS, register
from harness.errors import UserError
from harness.help import CONF, help_text, one_line_errors
from harness.launch import ready, run_one
from harness.workers import own_log

register()  # on import, for the workers of a sweep: they find ``run`` here and nothing else of the command line
sweeper.register()


def main() -> None:
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        print(help_text(), end="")
    elif "--version" in arguments:
        print(f"harness {__version__}")
    else:
        os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us whole instead of being printed by Hydra
        with one_line_errors():
            if not CONF.is_dir():
                raise UserError(f"{CONF} does not exist: run from a checkout of the project.")
            sys.argv[1:] = sorted_arguments(arguments)
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run)()


def run(cfg: DictConfig) -> None:
    """One job; with ``--multirun``, each in turn."""
    with own_log(cfg), one_line_errors():
        run_one(job_of, cfg)


def job_of(cfg: DictConfig) -> None:
    """Check the config, build its job and call it. A dry run ends before its job."""
    if not ready(cfg):
        return
    job = hydra.utils.instantiate(cfg.job, _convert_="all", _partial_=True)
    # Called without Hydra's wrapper, which would stay on the stack of everything the job does.
    job.func(**job.keywords)


def sorted_arguments(arguments: list[str]) -> list[str]:
    """Overrides first, then flags: Hydra's parser takes overrides from one place only, and anything between is lost.

    Raises:
        UserError: what that parser would answer with its whole usage text; two values for one key, of which Hydra
            would take the last.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}; see python -m harness --help.")

    parser.error = refuse  # type: ignore[method-assign]
    overrides: list[str] = parser.parse_intermixed_args(arguments).overrides
    for item in overrides:
        if item.endswith("=null") and item.removesuffix("=null") in GROUPS:
            raise UserError(f"{item}: a group takes a name; see python -m harness --help.")
    values: dict[str, str] = {}
    for item in overrides:
        key = item.partition("=")[0].lstrip("+")
        if values.setdefault(key, item) != item:
            raise UserError(f"{values[key]} and {item} contradict each other: write {key}= once.")
    return overrides + [item for item in arguments if item not in overrides]


if __name__ == "__main__":
    # By its name, which ``__main__`` is not to the workers of a sweep: they are sent ``run`` by the name of its module.
    importlib.import_module("harness.__main__").main()
