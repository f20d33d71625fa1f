"""What W&B itself wrote offline, read back. No network: the mode is offline throughout."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra import compose

from harness.config import plain
from harness.decode.autoregressive import Autoregressive
from harness.decode.speculative import Speculative
from harness.jobs.relog import relog
from harness.log.content import summary
from harness.log.wandb import WandbLogger, has_key
from harness.metrics import rows
from harness.records import RunRecord
from harness.store import read
from tests.configs import composing
from tests.offline import Sent, offline_runs
from tests.rows import run_record, two_arms
from tests.runs import ORACLE, run_bench

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")  # wandb's own

ENV = {"slim_layers": "0 1 2", "layers": "4", "threads": "2"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cell that is killed after one sample and measured on, then a run of the bench, which is sent again twice."""
    folder = tmp_path_factory.mktemp("results")
    with composing():
        config = plain(compose("config", ["+experiment=quickstart"]), resolve=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DATA_DIR", str(folder / "wandb"))
        patch.setenv("WANDB_CACHE_DIR", str(folder / "cache"))
        for samples in (1, 4):
            send(folder, run_record(), config, samples)
        logger = WandbLogger(dir=str(folder), sweep="mine", live_s=0)
        methods: dict[str, partial[Any]] = {
            "autoregressive": partial(Autoregressive),
            "speculative": partial(Speculative, gamma=3, drafter=ORACLE),
        }
        run_bench(folder, methods, log=logger)
        for _ in range(2):
            relog(str(folder), WandbLogger(dir=str(folder)), "all")
    return folder


def send(folder: Path, run: RunRecord, config: dict[str, Any], samples: int) -> None:
    """As the bench does; with fewer than all samples, as far as a killed one gets."""
    run, found = replace(run, run_id="cell0123456789ab", env=ENV), two_arms()
    found = [replace(sample, run_id=run.run_id) for sample in found]
    logger = WandbLogger(dir=str(folder), project="tiers", live_s=0)
    logger.start(run, config | {"log": {"sweep": "quickstart-20260131T091500Z"}})
    for sample in found[:samples]:
        logger.sample(sample)
    if samples == len(found):
        (folder / "one").mkdir()
        for name in ("run.json", "samples.jsonl"):
            (folder / "one" / name).write_text("{}")
        (folder / "tables").mkdir()
        (folder / "tables" / "mine.md").write_text("# mine")
        logger.summary(rows(run, found))
        logger.files(folder / "one", [folder / "tables" / "mine.md"])
    logger.close(failed=samples < len(found))
    assert logger.ok()


@pytest.fixture(scope="module")
def runs(results: Path) -> list[Sent]:
    return offline_runs(results)


def test_a_resumed_cell_is_the_same_run(runs: list[Sent]) -> None:
    killed, resumed = runs[:2]
    assert killed.id == resumed.id == "cell0123456789ab"
    assert (killed.exit_code, resumed.exit_code) == (1, 0)
    assert [line["live/samples"] for line in killed.history] == [1]
    assert [line["live/samples"] for line in resumed.history][:4] == [1, 2, 3, 4], "it sends all from the beginning"


def test_what_is_sent_again_is_the_same_run(results: Path, runs: list[Sent]) -> None:
    (folder,) = (results / "runs").iterdir()
    again = runs[2:]  # two that start in one second share W&B's folder, and the later one stands there
    assert len(again) >= 2 and {run.id for run in again} == {read(folder).run.cell}
    assert {run.summary["headline/mean_accept_length"] for run in again} == {4.0}
    assert {run.group for run in again} == {"run"}, "config.yaml names no sweep, so the experiment's name is it"


def test_who_a_run_is(runs: list[Sent]) -> None:
    run = runs[1]
    assert (run.project, run.group, run.job_type) == ("tiers", "quickstart-20260131T091500Z", "bench")
    assert set(run.tags) == {"toy", "translation", "via_sd"}


def test_config_is_typed(runs: list[Sent]) -> None:
    config = runs[1].config
    assert config["gate"]["alpha1"] == config["alpha1"] == 0.5 and config["gate"]["alpha2"] == config["alpha2"] == 0.3
    assert config["gamma"] == 5 and type(config["gamma"]) is int and config["skip_ratio"] == 0.25
    assert config["drafter"] == "small_lm" and config["task"] == "translation"
    assert config["settings"]["methods"]["via_sd"]["gate"]["alpha1"] == 0.5
    assert config["run"]["task_metrics"] == {"translation": ["exact_match"]}


def test_summary_has_each_number_by_task_arm_and_metric(runs: list[Sent]) -> None:
    wanted = summary(run_record(), rows(run_record(), two_arms()))
    found = {key: runs[1].summary.get(key) for key in wanted}
    assert found == pytest.approx(wanted) and len(wanted) > 60
    assert not any(key.startswith("live/") for key in runs[1].summary), "running numbers are no results"


def test_tables_and_artifacts_are_there(results: Path, runs: list[Sent]) -> None:
    tables = [line for line in runs[1].history if "tables/samples" in line]
    assert len(tables) == 1
    assert tables[0]["tables/samples"]["_type"] == tables[0]["tables/metrics"]["_type"] == "table-file"
    assert tables[0]["tables/samples"]["nrows"] == 4
    assert runs[1].artifacts["results"] == {"run/run.json", "run/samples.jsonl", "tables/mine.md"}
    (folder,) = (results / "runs").iterdir()
    sent = {f"run/{path.name}" for path in folder.iterdir()}
    made = {"tables/run.md", "tables/run.csv", "tables/run_positions.csv", "figures/run.png", "figures/run.pdf"}
    assert sent | made == runs[-1].artifacts["results"]
    assert any("figures/run" in line for line in runs[-1].history)


def test_a_run_of_the_bench_is_one_run(results: Path, runs: list[Sent]) -> None:
    (folder,) = (results / "runs").iterdir()
    samples = read(folder).samples
    (table,) = [line["tables/samples"] for line in runs[2].history if "tables/samples" in line]
    assert table["nrows"] == len(samples) == 4
    assert len({run.id for run in runs}) == 2


def test_no_key_is_found_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wandb

    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert not has_key(wandb)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert has_key(wandb)
