"""What dashboards are told of a run: typed, by names that runs share."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hydra import compose

from harness.compare import BASELINE
from harness.config import plain
from harness.log.content import (
    HEADLINE,
    OVERALL,
    Live,
    axes,
    called,
    flat,
    identifier,
    layers_of,
    mean,
    sample_columns,
    sample_row,
    skipped,
    summary,
)
from harness.metrics import RATIOS, rows
from harness.records import MetricRow, RunRecord
from tests.rows import run_record, sample, two_arms


@pytest.fixture
def quickstart(conf: None) -> dict[str, Any]:
    return plain(compose("config", ["+experiment=quickstart", "log=wandb", "gate.alpha1=0.6"]), resolve=True)


def known(run: RunRecord, **env: str) -> RunRecord:
    return replace(run, env={"slim_layers": "0 1 2", "layers": "4", "threads": "2", "device": "cpu"} | env)


def test_numbers_of_the_config_stay_numbers(quickstart: dict[str, Any]) -> None:
    found = axes(known(run_record((BASELINE, "speculative", "via_sd"))), quickstart)
    assert found["gate"] == {"name": "strictness", "alpha1": 0.6, "alpha2": 0.3, "allow_unreachable": False}
    assert (found["alpha1"], found["alpha2"], found["gamma"], found["skip_ratio"]) == (0.6, 0.3, 5, 0.25)
    assert {type(found[key]) for key in ("alpha1", "alpha2", "skip_ratio", "temperature")} == {float}
    assert {type(found[key]) for key in ("gamma", "limit", "seed", "threads", "max_new_tokens")} == {int}
    assert (found["drafter"], found["arm"], found["task"], found["length"]) == (
        *("small_lm", "via_sd", "translation", "fixed"),
    )
    assert found["experiment"] == "quickstart" and found["lossless"] is False


def test_a_ratio_that_the_config_names_goes_before_the_layers(quickstart: dict[str, Any]) -> None:
    quickstart["methods"]["via_sd"]["slim"] = {"_target_": "harness.decode.slim.even", "skip_ratio": 0.5}
    assert axes(known(run_record()), quickstart)["skip_ratio"] == 0.5


def test_an_arm_without_tiers_has_no_such_axes(quickstart: dict[str, Any]) -> None:
    found = axes(known(run_record((BASELINE,))), quickstart)
    assert not {"gate", "alpha1", "drafter", "slim", "skip_ratio"} & found.keys()


def test_each_arms_layers_are_its_own() -> None:
    assert layers_of("b", "a: 0 1; b: 0 2 3") == "0 2 3" and layers_of("any", "0 1") == "0 1"
    assert layers_of("c", "a: 0 1; b: 0 2 3") == ""
    assert skipped("0 1a 2m", "4") == 0.5 and skipped("0 1", None) is None and skipped("all 4 of x", "4") is None


@pytest.mark.parametrize(
    ("target", "name"), [("x.SmallLM", "small_lm"), ("x.PromptLookup", "prompt_lookup"), ("x.MTP", "mtp"), (None, None)]
)
def test_classes_are_named_as_their_configs(target: str | None, name: str | None) -> None:
    assert called({"_target_": target} if target else None) == name


def test_nested_settings_have_dotted_names() -> None:
    assert flat({"gate": {"alpha1": 0.5, "list": [1]}, "none": None, "on": True}) == {"gate.alpha1": 0.5, "on": True}


def test_a_cell_is_one_run_however_often_it_is_sent() -> None:
    run = run_record()
    cell = cast(RunRecord, SimpleNamespace(run_id="another start", cell="0123456789abcdef"))
    assert identifier(cell) == "0123456789abcdef" and identifier(run) == "run"
    long = replace(run, run_id="20260131T091500Z-3f9a1c-" + "x" * 80)
    assert identifier(long) == identifier(long) and len(identifier(long)) == 16


def row(task: str, metric: str, value: float | None, arm: str = "via_sd") -> MetricRow:
    return MetricRow("run", arm, "toy", task, metric, "x", True, value, None, None, 1, "ours")


def test_means_over_tasks_need_every_task() -> None:
    run = replace(run_record(), task_metrics={"a": ("f1", "em"), "b": ("bleu",)})
    numbers = [row("a", "speedup_decode", 1.0), row("b", "speedup_decode", 4.0)]
    numbers += [row("a", "reject_rate", 0.25), row("b", "reject_rate", None)]
    numbers += [row("a", "f1", 40.0), row("a", "em", 0.0), row("b", "bleu", 20.0)]
    numbers += [row("a", "f1_difference", -2.0), row("b", "bleu_difference", 0.0)]
    found = summary(run, numbers)
    assert found["all_tasks/via_sd/speedup_decode"] == found["headline/speedup_decode"] == 2.0, "geometric"
    assert found["headline/quality"] == 30.0 and found["headline/quality_difference"] == -1.0
    assert "headline/reject_rate" not in found and "b/via_sd/reject_rate" not in found
    assert found["a/via_sd/reject_rate"] == 0.25
    assert mean([1.0, 2.0]) == 1.5 and mean([]) is None and mean([0.0, 1.0], geometric=True) is None


def test_the_summary_of_a_real_run_has_every_number() -> None:
    run, numbers = run_record(), rows(run_record(), two_arms())
    found = summary(run, numbers)
    assert all(type(value) in (int, float) for value in found.values())
    single = {f"{one.task}/{one.arm}/{one.metric}": one.value for one in numbers if one.value is not None}
    assert single.items() <= found.items()
    assert {f"{HEADLINE}/{name}" for name in (*OVERALL, "quality", "quality_difference")} >= {
        key for key in found if key.startswith(HEADLINE)
    }
    assert found["headline/quality_difference"] == -100.0


def test_the_overall_metrics_exist() -> None:
    made = {one.metric for one in rows(run_record(), two_arms())}
    assert set(OVERALL) <= made and {"slim_rate", "reject_rate"} <= set(RATIOS)


def test_a_sample_is_a_row_of_numbers_and_texts() -> None:
    run, one = run_record(), two_arms()[1]
    columns = sample_columns(run, texts=True)
    found = dict(zip(columns, sample_row(one, columns), strict=True))
    assert found["score/exact_match"] == 0.0 and found["text"] == "5" and found["tokens_per_s"] == 8.0
    assert (found["examined"], found["accept"], found["regenerate"], found["escalate"]) == (7, 4, 1, 2)
    assert (found["drafted"], found["kept"], found["full_forwards"]) == (9, 5, 3)
    assert "text" not in sample_columns(run, texts=False)


def test_running_rates_are_of_all_samples_so_far() -> None:
    live = Live()
    for tokens, seconds in ((10, 1.0), (20, 4.0)):
        live.add(sample(tokens=tokens, decode_s=seconds))
    assert live.values() == {"live/samples": 2, "live/translation/via_sd/decode_tokens_per_s": 6.0}


def test_runs_are_grouped_by_their_sweep(conf: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARNESS_SWEEP", raising=False)
    alone = compose("config", ["log=wandb", "+experiment=quickstart"]).log.sweep
    assert alone.startswith("quickstart-20")
    groups = set()
    for launch in ("first", "again"):
        monkeypatch.setenv("HARNESS_SWEEP", f"/somewhere/sweeps/gamma-0123|{launch}")
        groups |= {compose("config", ["log=wandb", f"gamma={gamma}"]).log.sweep for gamma in (3, 4)}
    assert groups == {"gamma-0123"}
