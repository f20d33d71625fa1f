"""The sweeper of ``conf/hydra/sweeper``. Hydra takes plugins from the package ``hydra_plugins`` alone."""

from collections.abc import Sequence
from dataclasses import replace

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from harness.runs_of_sweep import SharingLoader


class CheckedSweeper(BasicSweeper):
    """Makes the runs that Hydra's own sweeper makes, of which is known before it starts that all can be composed."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Let the launcher compose as little as it can."""
        loader = SharingLoader(hydra_context.config_loader.get_search_path())
        context = replace(hydra_context, config_loader=loader)
        super().setup(hydra_context=context, task_function=task_function, config=config)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: ``harness.launch.PreflightOfSweep`` has composed every run, and this would do so once more."""
