"""The sweeper of ``conf/hydra/sweeper``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hydra.core.plugins import Plugins
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from harness.runs_of_sweep import SharingLoader

PLUGINS = Plugins.instance()  # made here, it runs the modules of Hydra's plugins anew: before one of them is imported
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402

NAME = "hydra_plugins.harness.CheckedSweeper"
"""As Hydra knows it, which takes plugins by the names of that package alone."""


class CheckedSweeper(BasicSweeper):
    """Makes the runs that Hydra's own sweeper makes, of which is known before it starts that all can be composed."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Let the launcher compose as little as it can."""
        loader = SharingLoader(hydra_context.config_loader.get_search_path())
        context = replace(hydra_context, config_loader=loader)
        super().setup(hydra_context=context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> Any:
        """Also a launcher that fails is followed by what ends a sweep, to which Hydra alone would not come."""
        try:
            return super().sweep(arguments)
        except Exception as error:
            assert self.hydra_context is not None and self.config is not None
            self.hydra_context.callbacks.on_multirun_end(config=self.config, error=error)
            raise

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: ``harness.launch.PreflightOfSweep`` has composed every run, and this would do so once more."""


def register() -> None:
    """Let Hydra find the sweeper."""
    PLUGINS.class_name_to_class[NAME] = CheckedSweeper
