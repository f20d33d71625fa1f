"""Between composing a config and running its job: it is checked, and a bench run starts only with all that it needs.

A sweep (``-m``) is checked whole before its first run: Hydra composes each run only when its turn has come.
"""

from itertools import product
from typing import Any, cast

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness.config import check_calls, checked_plain
from harness.errors import UserError
from harness.help import one_line_errors
from harness.preflight import listed, missing_packages, require

BENCH = "harness.jobs.bench.bench"
SEARCH = "harness.jobs.search.search"


def ready(cfg: DictConfig) -> bool:
    """Check a composed config; of a bench run also that nothing is missing. False of a dry run, which is printed.

    Raises:
        UserError: what is wrong with the config, or what is missing.
    """
    raw, resolved = checked_plain(cfg)
    job, dry = resolved["job"]["_target_"], resolved["dry_run"]
    if dry and job not in (BENCH, SEARCH):
        raise UserError("dry_run=true is for job=bench and job=search: leave it out, or choose one of them.")
    if job != BENCH and not dry:
        check_calls(raw, resolved)
        return True
    if missing := missing_packages(resolved):
        raise listed(missing)
    check_calls(raw, resolved)
    if dry:
        if not in_sweep():  # of a sweep all plans have been printed together
            from harness.plan import print_plan

            print_plan(resolved)
        return False
    require([resolved])
    return True


def in_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


class PreflightOfSweep(Callback):
    """Composes every run of the sweep, checks it, and asks once what all bench runs together miss.

    Covers what the command line and ``hydra.sweeper.params`` sweep, for Hydra's own sweeper. Not covered: sweepers that
    choose later runs by the results of earlier ones.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Hydra turns exceptions of callbacks into warnings; the SystemExit of one_line_errors passes.
        with one_line_errors():
            runs = runs_of(swept(config))
            cells = [plain_cell(overrides) for overrides in runs]
            require([cell for cell in cells if cell["job"]["_target_"] == BENCH and not cell["dry_run"]])
            if missing := [line for cell in cells if cell["dry_run"] for line in missing_packages(cell)]:
                raise listed(list(dict.fromkeys(missing)))
            if dry := [index for index, cell in enumerate(cells) if cell["dry_run"]]:
                from harness.plan import print_plans

                print_plans([cells[index] for index in dry], [" ".join(runs[index]) for index in dry])


def swept(config: DictConfig) -> list[str]:
    """The overrides of a sweep: those of ``hydra.sweeper.params``, then the command line's."""
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    given = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # references are of the run's config
    return [*(f"{key}={value}" for key, value in params.items()), *cast(list[str], given)]


def runs_of(overrides: list[str]) -> list[list[str]]:
    """The overrides of each run, in the order in which Hydra's sweeper makes them; of one key the last one counts."""
    choices: dict[str, list[str]] = {}
    for item in OverridesParser.create().parse_overrides(overrides):
        key = item.get_key_element()
        if item.is_sweep_override():
            choices[key] = [f"{key}={value}" for value in item.sweep_string_iterator()]
        else:
            choices[key] = [str(item.input_line)]
    return [list(one) for one in product(*choices.values())]


def plain_cell(overrides: list[str]) -> dict[str, Any]:
    """One run's config, resolved, its keys and values checked.

    Raises:
        UserError: what is wrong with it, and in which run.
    """
    try:
        return checked_plain(compose("config", overrides))[1]
    except UserError as error:
        raise UserError(f"{error} (in the run {' '.join(overrides)})") from error
