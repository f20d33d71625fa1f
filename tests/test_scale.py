"""Pairs that do not fit here: a trace by hand under constants by hand, the job, and its refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from harness.compare import BASELINE
from harness.config import plain, register
from harness.errors import UserError
from harness.jobs.scale import report_scale, timed_forwards
from harness.pairing import merged
from harness.report.paper_numbers import read_shapes
from harness.report.scale import ScaledPair, Traced, devices_for, scaled, skipped, traced
from harness.report.scale_figure import scale_figure, validation_figure
from harness.roofline import Load, Machine, Timed
from harness.store import read, read_config
from tests.rows import run_record, sample

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "reference"
SPEED = REFERENCE / "speed" / "speed"
PROMPT_LOOKUP = {"_target_": "harness.drafters.prompt_lookup.PromptLookup"}
MACHINES = {"one": {"bandwidth": 1e12, "compute": 1e15, "memory_bytes": 8e10, "source": "made up"}}
PAIRS = {"llama3_8b_70b": {"drafter": "llama3_8b", "full": "llama3_70b"}}


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # mask files of stored runs are named from there


def run_of(name: str) -> Path:
    (folder,) = (REFERENCE / name / "runs").iterdir()
    return folder


def made(tmp_path: Path, **settings: Any) -> list[Path]:
    given: dict[str, Any] = {
        **{"machines": MACHINES, "pairs": PAIRS, "contexts": [1024, 131072]},
        **{"reference": str(REFERENCE / "quickstart"), "speed": str(SPEED)},
    }
    return report_scale(str(tmp_path), **given | settings)


PAIR = ScaledPair("p", Load(1e9, 0.0, 5e8, 10), {0.0: Load(1e10, 0.0, 5e9, 100), 0.5: Load(5e9, 0.0, 2.5e9, 50)})
MACHINE = Machine(1e12, 1e30, 0.0)


def arm(shapes: dict[tuple[str, int, int], int], **settings: Any) -> Traced:
    known: dict[str, Any] = {
        **{"run_id": "r", "arm": "a", "lossless": False, "drafter": "own", "draft_skip": None, "slim_skip": 0.5},
        **{"tokens": 10, "shapes": shapes, "plain": {("full", 1, 0): 10}},
    }
    return Traced(**known | settings)


def test_a_trace_by_hand() -> None:
    """Ten drafts at 1 ms, two slim forwards at 5 ms and one full at 10 for ten tokens that take 100 ms alone."""
    row = scaled("m", MACHINE, 1, PAIR, 0, 1, arm({("draft", 1, 0): 10, ("slim", 5, 0): 2, ("full", 8, 0): 1}))
    assert row.plain_ms == pytest.approx(10.0)
    assert row.ms == pytest.approx((10 + 2 * 5 + 10) / 10)
    assert row.speedup == pytest.approx(100 / 30)
    assert [row.draft_cost, row.slim_cost] == pytest.approx([0.1, 0.5])
    assert row.compute_bound == 0


def test_products_are_counted_where_they_take_longer() -> None:
    slow = Machine(1e12, 2 * 5e9 / 10e-3, 0.0)  # a full forward of one row takes as long either way
    row = scaled("m", slow, 1, PAIR, 0, 1, arm({("full", 1, 0): 1, ("full", 3, 0): 1}))
    assert row.compute_bound == pytest.approx(0.75)


def test_a_drafter_of_the_verifiers_layers_costs_its_share_of_them() -> None:
    row = scaled("m", MACHINE, 1, PAIR, 0, 1, arm({("draft", 1, 0): 10}, draft_skip=0.5))
    assert row.draft_cost == pytest.approx(0.5)


@pytest.mark.parametrize(("memory", "devices"), [(None, 1), (2e10, 1), (1e10, 2), (2.5e9, 8)])
def test_devices_are_a_power_of_two_that_holds_both_models(memory: float | None, devices: int) -> None:
    assert devices_for(PAIR, memory, 1000, 1) == devices


def test_a_stored_run_gives_its_traces() -> None:
    folder = run_of("quickstart")
    data, settings = read(folder), read_config(folder)
    found, reasons = traced(data.run, data.samples, settings, 0.45)
    assert reasons == {} and [one.arm for one in found] == ["speculative", "via_sd"]
    for one in found:
        mine = [made for made in merged(data.samples) if made.arm == one.arm]
        passes = sum(block.full_forwards for made in mine for block in made.generation.blocks)
        assert sum(count for (tier, _, _), count in one.shapes.items() if tier == "full") == passes
        assert sum(one.plain.values()) == one.tokens
        assert one.draft_skip is None
    assert found[1].slim_skip == pytest.approx(0.3), "of its mask file"


def test_arms_whose_drafter_has_no_size_elsewhere_say_so() -> None:
    folder = run_of("drafters")
    data, settings = read(folder), read_config(folder)
    found, reasons = traced(data.run, data.samples, settings, 0.45)
    assert {"speculative_eagle", "via_sd_medusa"} <= set(reasons)
    skips = {one.arm: one.draft_skip for one in found}
    assert [skips[f"speculative_{name}"] for name in ("self_skip", "early_exit")] == pytest.approx([0.6, 0.6])


def test_a_share_that_nobody_says_is_none() -> None:
    assert skipped({"mask": [0, 1]}, {}) is None
    assert skipped({"mask": "nowhere.json"}, {}) is None
    assert skipped({"skip_ratio": 0.2}, {}) == 0.2


@pytest.mark.parametrize(
    ("slim", "why"),
    [({"masks": ["a.json", "b.json"]}, "different shares"), ({"path": "somewhere"}, "a model of its own")],
)
def test_slim_verifiers_whose_size_elsewhere_nobody_says_are_left_out(slim: dict[str, Any], why: str) -> None:
    folder = run_of("quickstart")
    data, settings = read(folder), read_config(folder)
    settings["methods"]["via_sd"]["slim"] = slim | {"cache": "shared"}
    found, reasons = traced(data.run, data.samples, settings, 0.45)
    assert [one.arm for one in found] == ["speculative"] and why in reasons["via_sd"]


def test_plain_steps_are_what_decoding_alone_takes() -> None:
    node = {"_target_": "harness.decode.speculative.Speculative", "drafter": PROMPT_LOOKUP}
    run = run_record((BASELINE, "speculative"))
    (one,), _ = traced(run, [sample(tokens=8, arm="speculative")], {"methods": {"speculative": node}}, 0.45)
    assert one.shapes == one.plain == {("full", 1, place): 1 for place in range(8)}


def test_the_job_predicts_and_is_held_against_measured_forwards(tmp_path: Path) -> None:
    paths = made(tmp_path)
    assert {path.name for path in paths} == {
        *("scale.md", "scale.csv", "scale.png", "scale.pdf"),
        *("scale_validation.csv", "scale_validation.png", "scale_validation.pdf"),
    }
    table = pd.read_csv(tmp_path / "tables" / "scale.csv")
    assert len(table) == 2 * 2
    assert (table["devices"] == 4).all()
    checks = pd.read_csv(tmp_path / "tables" / "scale_validation.csv")
    assert set(checks["tier"]) == {"full", "slim", "draft", "self_skip"}
    text = (tmp_path / "tables" / "scale.md").read_text()
    for said in ("Predicted, never measured", "made up", "full (fitted on it)", "oumi", "median absolute error"):
        assert said in text


def test_without_a_record_nothing_is_validated(tmp_path: Path) -> None:
    made(tmp_path, speed=None)
    assert "No measured forwards" in (tmp_path / "tables" / "scale.md").read_text()


def test_a_records_tiers_have_the_layers_that_it_says() -> None:
    shapes, _ = read_shapes(ROOT / "results" / "paper")
    (path,) = SPEED.iterdir()
    layers = {one.tier: one.load.layers for one in timed_forwards(path, shapes["smollm2_135m"])}
    assert layers == {"full": 30, "slim": 21, "draft": 6, "self_skip": 12}


def test_a_record_says_how_many_bytes_a_number_has(tmp_path: Path) -> None:
    shapes, _ = read_shapes(ROOT / "results" / "paper")
    (path,) = SPEED.iterdir()
    record = json.loads(path.read_text())
    record["run"]["env"]["dtype"] = "float32"
    record["forwards"] = [one | {"read_bytes": 2 * one["read_bytes"]} for one in record["forwards"]]
    (tmp_path / "wide.json").write_text(json.dumps(record))
    stored, wide = (timed_forwards(one, shapes["smollm2_135m"]) for one in (path, tmp_path / "wide.json"))
    for one, other in zip(stored, wide, strict=True):
        assert (other.load.layers, other.load.weights) == (one.load.layers, one.load.weights)
        assert other.load.weight_bytes == 2 * one.load.weight_bytes


def test_a_record_of_one_context_is_refused(tmp_path: Path) -> None:
    (path,) = SPEED.iterdir()
    record = json.loads(path.read_text())
    first = record["forwards"][0]["context"]
    record["forwards"] = [one for one in record["forwards"] if one["context"] == first]
    (tmp_path / "short.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="at one context, want two"):
        made(tmp_path, speed=str(tmp_path / "short.json"))


def test_the_shipped_settings_are_those_of_the_job(tmp_path: Path) -> None:
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        job = plain(compose("config", ["job=scale"]), resolve=True)["job"]
    assert job.pop("_target_") == "harness.jobs.scale.report_scale"
    paths = report_scale(**job | {"results_dir": str(tmp_path), "contexts": [1024]})
    table = pd.read_csv(paths[1])
    assert set(table["machine"]) == {"a100", "h100", "h200"}
    assert set(table["pair"]) == set(job["pairs"])


def test_every_prediction_is_in_the_figure() -> None:
    rows = [scaled("m", MACHINE, 1, PAIR, context, 1, arm({("draft", 1, 0): 10})) for context in (1024, 4096)]
    rows += [replace(row, pair="q") for row in rows]
    panels = [axes for axes in scale_figure(rows).axes if axes.lines]
    assert [len(axes.lines[0].get_xdata()) for axes in panels] == [2, 2]  # type: ignore[arg-type]
    timed = [Timed("full", Load(1e9, 1.0, 5e8, 2), 1, 64, 0.01), Timed("slim", Load(5e8, 1.0, 2e8, 1), 1, 64, 0.01)]
    (panel,) = validation_figure([("m", MACHINE, timed)]).axes
    assert len([line for line in panel.lines if line.get_linestyle() == "None"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"machines": {"one": {"bandwidth": -1.0, "compute": 1.0}}}, "bandwidth=-1.0"),
        ({"machines": {"one": {"bandwidth": "fast", "compute": 1.0}}}, "bandwidth='fast'"),
        ({"machines": {"one": {"bandwidth": 1.0}}}, "job.machines.one lacks compute"),
        ({"machines": {"one": {"bandwith": 1.0, "compute": 1.0}}}, "did you mean 'bandwidth'"),
        ({"machines": {}}, "job.machines is empty"),
        ({"machines": {"one": MACHINES["one"] | {"memory_bytes": -1.0}}}, "memory_bytes=-1"),
        ({"pairs": {"p": {"drafter": "llama3_8", "full": "llama3_70b"}}}, "did you mean 'llama3_8b'"),
        ({"pairs": {"p": {"drafter": "llama3_8b"}}}, "job.pairs.p lacks full"),
        ({"pairs": {"p": 3}}, "job.pairs.p=3"),
        ({"contexts": []}, "job.contexts"),
        ({"contexts": [0]}, "job.contexts"),
        ({"contexts": 1024}, "job.contexts=1024"),
        ({"batch": 0}, "job.batch=0"),
        ({"batch": "two"}, "job.batch='two'"),
        ({"weight_bytes": 0.0}, "weight_bytes=0"),
        ({"skip_ratio": 1.0}, "skip_ratio=1.0"),
        ({"speed": "nowhere"}, "job.speed=nowhere"),
        ({"speed_model": "gpt"}, "job.speed_model"),
        ({"speed_machine": "two"}, "job.speed_machine"),
        ({"speed_machine": "one"}, "job.machines is empty"),
        ({"runs": "nothing"}, "nothing"),
        ({"runs": 3}, "job.runs=3"),
        ({"reference": None}, "no run has a method): run +experiment=quickstart"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        made(tmp_path, **settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)
