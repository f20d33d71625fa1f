"""The configs of a sweep's runs are those that Hydra would compose, most of them without composing."""

from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness.runs_of_sweep import SharingLoader, runs_of
from tests.runs import main
from tests.toys import shapes_unchecked

SWEEPS = {
    "values": (["model=toy", "gamma=2,3", "gate.alpha1=0.5,0.7", "run_name='a b',c"], 1),
    "lists and references": (["model=toy", "seed=1,2", "cores=[0,1]", "name=x${limit}"], 1),
    "an experiment": (["model=toy", "+experiment=sweep/gamma", "gamma=1,2"], 1),
    "groups": (["drafter=self_skip,prompt_lookup", "gamma=2,3", "method=[speculative]"], 2),
    "a group as a value": (["gate={alpha1:0.6}", "gate.alpha1=0.1,0.2"], 1),
    "added and deleted keys": (["gamma=2,3", "~methods.via_sd", "+drafters.x={a:1}", "drafters.x.a=4,5"], 2),
}
"""By what is swept: the overrides, and how often Hydra composes."""


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each composition from here on."""
    calls: list[Any] = []
    compose = ConfigLoaderImpl.load_configuration

    def noting(*given: Any, **named: Any) -> DictConfig:
        calls.append((given, named))
        return compose(*given, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", noting)
    return calls


@pytest.mark.parametrize("name", list(SWEEPS))
@pytest.mark.usefixtures("conf")
def test_a_run_has_the_config_that_hydra_composes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, compositions = SWEEPS[name]
    hydra = GlobalHydra.instance().config_loader()
    master = hydra.load_configuration("config", overrides, RunMode.MULTIRUN)
    runs = runs_of(overrides)
    wanted = [hydra.load_sweep_config(master, run) for run in runs]
    calls = noted(monkeypatch)
    loader = SharingLoader(hydra.get_search_path())
    for run, config in zip(runs, wanted, strict=True):
        made = loader.load_sweep_config(master, run)
        assert made == config and list(made) == list(config)
        assert OmegaConf.to_container(made) == OmegaConf.to_container(config)
    assert len(runs) >= 2 and len(calls) == compositions


@pytest.mark.usefixtures("conf")
def test_what_cannot_be_put_in_is_refused_as_by_hydra() -> None:
    hydra = GlobalHydra.instance().config_loader()
    loader = SharingLoader(hydra.get_search_path())
    for run in (["model=toy", "gama=2"], ["gamma=many"], ["gate.alpha9=1"]):
        master = hydra.load_configuration("config", [], RunMode.MULTIRUN)
        said = []
        for one in (hydra, loader):
            with pytest.raises(ConfigCompositionException) as caught:
                one.load_sweep_config(master, run)
            said.append((str(caught.value), str(caught.value.__cause__)))
        assert said[0] == said[1]


def test_the_cells_of_a_sweep_over_values_are_composed_once_to_be_checked_and_once_to_run(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = noted(monkeypatch)
    small = ("task=web_questions", "tasks.web_questions.shots=0", "limit=1", "max_new_tokens=2", "fidelity=false")
    with shapes_unchecked():
        main(monkeypatch, "-m", *small, "method=speculative", "gamma=1,2,3,4", f"results_dir={tmp_path}")
    assert len(list((tmp_path / "runs").iterdir())) == 4
    assert len(calls) == 4, "Hydra composes twice before, to see whether this is a sweep, and for it as a whole"
