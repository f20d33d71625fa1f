"""The runs of a sweep: the overrides of each, and its config.

Hydra reads and merges some 25 files for a config, which takes it 100 ms, a fortieth of a small cell. Runs that differ
in plain values alone share a composed config, into a copy of which the values are put, in a tenth of that.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import product
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from harness.config import checked_plain
from harness.errors import UserError

KEPT = 8
"""Composed configs that are remembered: neighbours in a sweep share one, and each is a megabyte."""


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


def plain_cells(config: DictConfig, runs: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
    """The config of each run of the sweep that ``config`` is composed for, resolved, its keys and values checked.

    Raises:
        UserError: what is wrong with one, and in which run.
    """
    loader = SharingLoader(GlobalHydra.instance().config_loader().get_search_path())
    for run in runs:
        made = loader.load_sweep_config(config, list(run))
        with open_dict(made):
            del made["hydra"]
        try:
            yield checked_plain(made)[1]
        except UserError as error:
            raise UserError(f"{error} (in the run {' '.join(run)})") from error


class SharingLoader(ConfigLoaderImpl):
    """Hydra's loader, to which runs of one sweep that differ in plain values alone are one composition."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._parsed: dict[str, Override] = {}
        self._groups: dict[str, bool] = {}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """What Hydra's own would compose; by that itself where a value cannot be put in, as it says why."""
        overrides = [self._parse(one) for one in sweep_overrides]
        shared, values = self._parted(overrides)
        made = deepcopy(self._compose(master_config, tuple(str(one.input_line) for one in shared)))
        try:
            for one in values:
                OmegaConf.update(made, one.key_or_group, one.value(), merge=True)
        except OmegaConfBaseException:
            return super().load_sweep_config(master_config, sweep_overrides)
        made.hydra.overrides.task = sweep_overrides
        about = made.hydra.job.config.override_dirname
        made.hydra.job.override_dirname = get_overrides_dirname(
            overrides, kv_sep=about.kv_sep, item_sep=about.item_sep, exclude_keys=about.exclude_keys
        )
        return made

    def _parse(self, override: str) -> Override:
        if override not in self._parsed:
            (self._parsed[override],) = OverridesParser.create().parse_overrides([override])
        return self._parsed[override]

    def _compose(self, master: DictConfig, overrides: tuple[str, ...]) -> DictConfig:
        if overrides not in self._composed:
            if len(self._composed) == KEPT:
                self._composed.pop(next(iter(self._composed)))
            self._composed[overrides] = super().load_sweep_config(master, list(overrides))
        return self._composed[overrides]

    def _parted(self, overrides: Sequence[Override]) -> tuple[list[Override], list[Override]]:
        """What has to be composed with, and the plain values that may be put into a config composed without them.

        Hydra chooses groups first, wherever they stand; then it sets, adds and deletes keys in the order given. So
        nothing that stands before the last addition or deletion of a key is taken out.
        """
        shared: list[Override] = []
        values: list[Override] = []
        last = True
        for one in reversed(overrides):
            group = self._is_group(one.key_or_group) and not isinstance(one.value(), dict)
            plain = not group and one.type is OverrideType.CHANGE and one.package is None
            last &= group or plain
            (values if plain and last else shared).insert(0, one)
        return shared, values

    def _is_group(self, key: str) -> bool:
        if key not in self._groups:
            self._groups[key] = bool(self.get_group_options(key, results_filter=None))
        return self._groups[key]
