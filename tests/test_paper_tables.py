"""The paper's tables with ours beside: each number in its place, no other run in it, and a reason for every dash."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from hydra import compose, initialize_config_dir

from harness import compare, sweeps
from harness.compare import BASELINE
from harness.config import checked_plain, register
from harness.errors import UserError
from harness.help import CONF
from harness.jobs.report import report
from harness.records import ArmRecord
from harness.report.lines import DASH
from harness.report.paper_numbers import read_numbers
from harness.report.paper_tables import markdown, paper_cells, shown, write_paper_tables
from harness.report.paper_tables_cells import Cell
from harness.report.paper_tables_spec import TABLES
from harness.store import RunFolder
from tests.rows import run_record, sample
from tests.runs import refused

COUNTS = {
    **{"table1": 48, "table3": 72, "table4": 12, "table5": 12},
    **{"table6": 12, "table7": 6, "table8": 378, "table9": 252},
}
LOSSY = ("via_sd", "cascade_token", "tiers_3", "strictness")
GEMMA = ("google/gemma-2-9b", "google/gemma-2-2b")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few resamples, and a hub's cache without a model."""
    monkeypatch.setattr(compare, "RESAMPLES", 20)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))


def run(
    results: Path,
    name: str = "table8",
    models: tuple[str, str | None] = GEMMA,
    speeds: dict[str, float] | None = None,
    tasks: tuple[str, ...] = ("web_questions",),
    metric: str = "exact_match",
    temperature: float = 1.0,
    gamma: int = 5,
    run_id: str = "20260101T000000Z-a-run",
    finished: bool = True,
    **settings: Any,
) -> str:
    """A run of two prompts a task, one answered rightly; its arms are so many times faster than the baseline."""
    speeds = {"speculative": 2.0, "via_sd_paper": 4.0} if speeds is None else speeds
    full, drafter = models
    arms = (BASELINE, *speeds)
    record = replace(
        run_record(arms, temperature),
        run_id=run_id,
        model=full.rpartition("/")[2],
        arms=tuple(ArmRecord(arm, arm, None, None, not arm.startswith(LOSSY)) for arm in arms),
        data={},
        prompts_sha={},
        task_metrics=dict.fromkeys(tasks, (metric,)),
        git_commit="c0ffee" * 6,
        git_dirty=True,
        seed=7,
        env={"device": "NVIDIA A100"},
        status="running",
    )
    config = {"name": name, "gamma": gamma, "model": {"full": full}, "drafter": {"path": drafter}} | settings
    folder = RunFolder.create(results, record, config)
    for task in tasks:
        for number in range(2):
            for arm in arms:
                seconds, said = 2 / speeds.get(arm, 1.0), "45"[number]
                scores: dict[str, float | None] = {metric: 100.0 - 100.0 * number}
                made = sample(
                    tokens=8, example=str(number), arm=arm, task=task, decode_s=seconds, scores=scores, prediction=said
                )
                folder.append(replace(made, run_id=run_id))
    if finished:
        folder.finish({})
    return run_id


def found(results: Path, name: str = "table8") -> list[Cell]:
    return paper_cells(results, name)[name]


def one(cells: list[Cell], models: str, method: str, column: str) -> Cell:
    (cell,) = (
        cell
        for cell in cells
        if (cell.block.label, cell.row.label) == (models, method)
        and f"{cell.column.group} {cell.column.label}".strip() == column
    )
    return cell


# The paper's numbers.


@pytest.mark.parametrize("name", TABLES)
def test_each_number_of_the_paper_stands_in_one_cell(tmp_path: Path, name: str) -> None:
    known = read_numbers()
    known = known[known["source"] == name]
    values = sorted(cell.paper for cell in found(tmp_path, name) if cell.paper is not None)
    assert len(values) == len(known) == COUNTS[name] and values == sorted(known["value"])


@pytest.mark.parametrize(
    ("name", "models", "method", "column", "value"),
    [
        ("table1", "Gemma2 2B → 27B", "5-tier", "NaturalQA speed", 0.99),
        ("table1", "Gemma2 2B → 27B", "5-tier", "NaturalQA rejection", 0.51),
        ("table3", "T5 S → L", "Faster Cascades", "WMT14 En-De BLEU", 22.65),
        ("table4", "LLaMA2 7B → 70B", "DIMR", "minutes", 61),
        ("table5", "Gemma2 2B → 27B", "Independent 13B", "WebQ memory", 1.38),
        ("table6", "Gemma2 2B → 9B", "Random skip", "TriviaQA speed", 1.58),
        ("table7", "Gemma2 2B → 27B", "alpha1 0.6, alpha2 0.4, skip 55 %", "mean of sets speed", 2.27),
        ("table8", "Gemma2 2B → 9B", "VIA-SD", "TriviaQA accuracy", 0.53),
        ("table8", "Qwen 7B → 14B", "CLaSp", "NaturalQA rejection", 0.27),
        ("table9", "T5 S → L, temperature 0", "Faster Cascades", "WMT14 En-De BLEU", 27.5),
        ("table9", "T5 S → L, temperature 1", "Faster Cascades", "WMT14 En-De BLEU", 22.5),
    ],
)
def test_the_papers_numbers_are_in_the_right_rows_and_columns(
    tmp_path: Path, name: str, models: str, method: str, column: str, value: float
) -> None:
    cell = one(found(tmp_path, name), models, method, column)
    assert cell.paper == value and cell.ours.value is None and cell.why
    assert shown(cell).startswith(f"{DASH} / ")


# The specs.


@pytest.mark.parametrize("name", TABLES)
def test_a_spec_names_arms_tasks_and_models_of_its_experiment(name: str) -> None:
    table = TABLES[name]
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = checked_plain(compose("config", [f"+experiment=paper/{name}"]))[1]
    assert config["name"] == name and config["gamma"] == table.gamma
    for pair in table.pairs:
        model, beside = (yaml.safe_load((CONF / part / f"{pair.model}.yaml").read_text()) for part in ("model", "pair"))
        assert (model["full"], beside["small_lm"]) == (pair.full, pair.drafter)
    if name == "table4":
        assert config["job"]["skip_ratio"] == 0.45 and config["job"]["units"] == "layers"
        return
    arms = {arm for row in table.rows for arm in row.arms}
    assert arms - {"bild"} <= set(config["methods"]) and ("bild" not in arms or "bild" in config["not_run"])
    assert {task for column in table.columns for task in column.tasks} - {"mbpp"} == set(config["tasks"])


def test_the_skips_of_table_7_are_those_of_the_arms() -> None:
    for row in TABLES["table7"].rows:
        alpha1, alpha2, skip = (part for part in row.arms[0].removeprefix("strictness_").split("_"))
        assert f"alpha1=0.{alpha1[0]}_alpha2=0.{alpha2[0]}_skip={skip.removeprefix('skip')}" in str(row.method)


# Ours.


def test_a_run_of_the_papers_models_stands_beside_the_papers_numbers(tmp_path: Path) -> None:
    run(tmp_path)
    cells = found(tmp_path)
    speed = one(cells, "Gemma2 2B → 9B", "VIA-SD", "WebQ speed")
    assert (speed.ours.value, speed.paper, shown(speed)) == (4.0, 1.82, "4.00 / 1.82 (+2.18)")
    assert speed.ours.n == 2 and speed.ours.low is not None and speed.lossy
    assert shown(one(cells, "Gemma2 2B → 9B", "SD", "WebQ accuracy")) == "0.50 / 0.27 (+0.23)"
    assert not one(cells, "Gemma2 2B → 9B", "SD", "WebQ accuracy").lossy
    others = [cell for cell in cells if cell.block.label != "Gemma2 2B → 9B"]
    assert all(cell.ours.value is None for cell in others) and len({cell.block.label for cell in cells}) == 6


PLAIN = {"_target_": "harness.decode.autoregressive.Autoregressive"}


def test_prediction_and_ceiling_stand_behind_our_speedup(tmp_path: Path) -> None:
    """Arms that decode plainly are predicted by their seconds a block alone."""
    run(tmp_path, methods={arm: PLAIN for arm in (BASELINE, "speculative", "via_sd_paper")})
    cells = found(tmp_path)
    cell = one(cells, "Gemma2 2B → 9B", "VIA-SD", "WebQ speed")
    assert cell.predicted == pytest.approx(4.0) and cell.ceiling == pytest.approx(4.0)
    assert one(cells, "Gemma2 2B → 9B", "VIA-SD", "WebQ accuracy").predicted is None
    text = markdown(TABLES["table8"], cells)
    heads, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    columns = [name.strip() for name in heads.strip("|").split("|")]
    place = columns.index("WebQ speed: predicted (error); ceiling")
    assert columns[place - 1] == "WebQ speed" and sum("predicted" in name for name in columns) == 1
    shown_cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert next(row[place] for row in shown_cells if row[1].startswith("VIA-SD")) == "4.00 (+0 %); 4.00"
    assert "Predicted and ceiling are of ours." in text


def test_what_was_not_predicted_has_no_column_and_a_reason(tmp_path: Path) -> None:
    run(tmp_path)
    text = markdown(TABLES["table8"], found(tmp_path))
    assert "predicted (error)" not in text and "Not predicted: speculative, via_sd_paper: " in text


@pytest.mark.parametrize(
    ("changed", "label"),
    [
        ({"gamma": 3}, "gemma-2-9b with gemma-2-2b, not at the paper's setting, gamma 3"),
        ({"temperature": 0.0}, "gemma-2-9b with gemma-2-2b, not at the paper's setting, temperature 0"),
        ({"models": (GEMMA[0], "org/other")}, "gemma-2-9b with other, in place of the paper's models"),
        ({"models": ("embedded", "results/a")}, "embedded with a, in place of the paper's models"),
        ({"models": ("Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-7B")}, "Qwen2.5-14B with Qwen2.5-7B, in place of Qwen 7B → 14B"),
    ],
)
def test_any_other_run_has_rows_of_its_own_and_no_difference(
    tmp_path: Path, changed: dict[str, Any], label: str
) -> None:
    run(tmp_path, **changed)
    cells = found(tmp_path)
    assert shown(one(cells, label, "VIA-SD", "WebQ speed")) == "4.00"
    paper = [cell for cell in cells if cell.block.paper is not None]
    assert len(paper) == COUNTS["table8"] and all(cell.ours.value is None for cell in paper)
    own = [cell for cell in cells if cell.block.paper is None]
    assert {cell.block.label for cell in own} == {label} and all(cell.difference is None for cell in own)


def test_a_folder_with_the_checkpoints_name_counts_as_it(tmp_path: Path) -> None:
    run(tmp_path, models=("/data/gemma-2-9b", "/data/gemma-2-2b@main"))
    assert one(found(tmp_path), "Gemma2 2B → 9B", "SD", "WebQ speed").ours.value == 2.0


def test_of_several_runs_the_newest_that_has_a_cell_fills_it_and_unfinished_ones_do_not(tmp_path: Path) -> None:
    run(tmp_path, tasks=("web_questions", "nq_open"))
    run(tmp_path, speeds={"speculative": 3.0}, run_id="20260102T000000Z-b-run")
    run(tmp_path, speeds={"speculative": 9.0}, run_id="20260103T000000Z-c-run", finished=False)
    cells = found(tmp_path)
    assert one(cells, "Gemma2 2B → 9B", "SD", "WebQ speed").ours.value == 3.0
    assert one(cells, "Gemma2 2B → 9B", "SD", "NaturalQA speed").ours.value == 2.0
    assert one(cells, "Gemma2 2B → 9B", "VIA-SD", "WebQ speed").ours.value == 4.0


def test_a_finished_run_without_a_sample_fills_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs" / run(tmp_path) / "samples.jsonl").write_text("")
    assert all(cell.ours.value is None for cell in found(tmp_path))


def test_columns_with_temperatures_of_their_own_take_the_run_at_theirs(tmp_path: Path) -> None:
    tasks = ("xsum", "cnn_dailymail")
    run(tmp_path, "table3", tasks=tasks, metric="rouge2")
    run(
        tmp_path, "table3", tasks=("wmt14_en_de",), metric="bleu", run_id="20260102T-b-run", speeds={"speculative": 3.0}
    )
    label = "gemma-2-9b with gemma-2-2b, in place of T5 S → L"
    cells = found(tmp_path, "table3")
    assert shown(one(cells, label, "SD", "XSum speed")) == "2.00"
    cold = one(cells, label, "SD", "WMT14 En-De speed")
    assert shown(cold) == DASH and cold.why == "no run at temperature 0"
    run(tmp_path, "table3", tasks=("wmt14_en_de",), metric="bleu", temperature=0.0, run_id="20260101T-c-run")
    assert shown(one(found(tmp_path, "table3"), label, "SD", "WMT14 En-De speed")) == "2.00"


def test_random_masks_are_averaged_and_need_all_three(tmp_path: Path) -> None:
    speeds = {f"via_sd_random_{seed}": float(1 + seed) for seed in range(3)}
    run(tmp_path, "table6", speeds=speeds)
    assert shown(one(found(tmp_path, "table6"), "Gemma2 2B → 9B", "Random skip", "WebQ speed")) == "2.00 / 1.32 (+0.68)"
    del speeds["via_sd_random_2"]
    run(tmp_path / "two", "table6", speeds=speeds)
    cell = one(found(tmp_path / "two", "table6"), "Gemma2 2B → 9B", "Random skip", "WebQ speed")
    assert cell.ours.value is None and cell.why.endswith("has no arm via_sd_random_2")


@pytest.mark.parametrize(("left_out", "want"), [("mbpp", "4.00 / 2.08 (+1.92)"), ("gsm8k", f"{DASH} / 2.08")])
def test_the_mean_over_sets_may_lack_the_one_that_runs_programs(tmp_path: Path, left_out: str, want: str) -> None:
    sets = [task for task in TABLES["table7"].columns[0].tasks if task not in ("mbpp", left_out)]
    run(tmp_path, "table7", speeds={"strictness_50_30_skip45": 4.0}, tasks=tuple(sets))
    row = "alpha1 0.5, alpha2 0.3, skip 45 %"
    assert shown(one(found(tmp_path, "table7"), "Gemma2 2B → 9B", row, "mean of sets speed")) == want


def test_search_times_are_those_of_masks_of_the_papers_ratio(tmp_path: Path) -> None:
    masks = tmp_path / "paper" / "table4" / "masks"
    masks.mkdir(parents=True)
    card: dict[str, Any] = {
        "model": "google/gemma-2-9b",
        "skip_ratio": 0.45,
        "units": "layers",
        "cache_mode": "shared",
        "seed": 3,
    }
    card |= {"search_s": 600.0, "evaluations": 60, "git_commit": None, "git_dirty": None}
    (masks / "a.json").write_text(json.dumps(card))
    others: dict[str, dict[str, Any]] = {
        "b": {"skip_ratio": 0.3},
        "c": {"cache_mode": "own"},
        "d": {"model": "embedded"},
    }
    for name, other in others.items():
        (masks / f"{name}.json").write_text(json.dumps(card | {"search_s": 60.0} | other))
    cells = found(tmp_path, "table4")
    assert shown(one(cells, "Gemma2 2B → 9B", "DIMR", "minutes")) == "10.0 / 18.0 (-8.0)"
    assert shown(one(cells, "embedded, in place of the paper's models", "DIMR", "minutes")) == "1.0"
    assert shown(one(cells, "Gemma2 2B → 9B", "DIMR", "GPU hours")) == f"{DASH} / 0.30"
    (masks / "e.json").write_text("{")
    with pytest.raises(UserError, match=r"e\.json: no readable card"):
        found(tmp_path, "table4")


# Reasons.


def test_every_dash_has_a_reason_and_no_number_has_one(tmp_path: Path) -> None:
    run(tmp_path, not_run={"bild": "greedy alone"})
    for name in TABLES:
        for cell in found(tmp_path, name):
            assert (cell.ours.value is None) == bool(cell.why)


def test_the_reasons_are_those_of_the_machine_the_experiment_and_the_run(tmp_path: Path) -> None:
    run(tmp_path, speeds={"speculative": 2.0}, not_run={"bild": "greedy alone"})
    cells = found(tmp_path)
    assert one(cells, "Gemma2 2B → 9B", "BiLD", "WebQ speed").why == "greedy alone"
    assert one(cells, "Gemma2 2B → 9B", "VIA-SD", "WebQ speed").why == "the run has no such arm"
    assert one(cells, "Gemma2 2B → 9B", "SD", "NaturalQA speed").why == "the run is not of this set"
    assert one(cells, "Gemma2 2B → 9B", "SD", "WebQ rejection").why.startswith("undefined (0/0)")
    away = one(cells, "Gemma2 2B → 27B", "SD", "WebQ speed").why
    assert "the weights of google/gemma-2-27b and google/gemma-2-2b" in away
    assert "`python -m harness +experiment=paper/table8 model=gemma2_27b`" in away
    (tmp_path / "cache" / "models--google--gemma-2-2b" / "snapshots").mkdir(parents=True)
    away = one(found(tmp_path), "Gemma2 2B → 27B", "SD", "WebQ speed").why
    assert "the weights of google/gemma-2-27b" in away and "gemma-2-2b" not in away
    assert "first-generation Qwen is not supported" in one(cells, "Qwen 7B → 72B", "SD", "WebQ speed").why
    table5 = found(tmp_path, "table5")
    assert "Gemma2 has no model of 13B" in one(table5, "Gemma2 2B → 27B", "Independent 13B", "WebQ speed").why


def test_a_stand_in_that_was_run_is_not_called_missing(tmp_path: Path) -> None:
    run(tmp_path, models=("Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-7B"))
    cells = found(tmp_path)
    assert "lacks" not in one(cells, "Qwen 7B → 14B", "SD", "WebQ speed").why
    assert "lacks" in one(cells, "Qwen 7B → 72B", "SD", "WebQ speed").why


def test_a_failed_cell_of_the_sweep_says_why(tmp_path: Path) -> None:
    config = {"name": "table8", "results_dir": str(tmp_path)}
    lines = [["+experiment=paper/table8", f"model={model}"] for model in ("gemma2_9b", "llama2_13b")]
    folder = sweeps.begun([config, config], lines, tmp_path / "sweeps")
    with sweeps.cell_at(folder, "launch", 1, " ".join(lines[1])) as cell:
        cell.note("failed", error="out of memory", mendable=True)
    cells = found(tmp_path)
    assert "it failed: out of memory" in one(cells, "LLaMA2 7B → 13B", "SD", "WebQ speed").why
    assert "it failed" not in one(cells, "Gemma2 2B → 9B", "SD", "WebQ speed").why


# Files.


@pytest.mark.parametrize("with_run", [False, True])
def test_each_table_is_written_in_four_formats(tmp_path: Path, with_run: bool) -> None:
    if with_run:
        run(tmp_path)
    paths = write_paper_tables(tmp_path)
    assert [path.name for path in paths] == [
        f"paper_{name}.{suffix}" for name in TABLES for suffix in ("md", "csv", "tex", "html")
    ]
    for name, table in TABLES.items():
        text = (tmp_path / "tables" / f"paper_{name}.md").read_text()
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert {line.replace(r"\|", "").count("|") for line in rows} == {len(table.columns) + 3}
        assert "**lossy**" in text and "## Not run" in text
        page = (tmp_path / "tables" / f"paper_{name}.html").read_text()
        assert page.startswith("<!DOCTYPE html>") and page.count("<tr>") == len(rows) and "http" not in page


def test_under_the_table_stand_examples_seed_device_and_commit(tmp_path: Path) -> None:
    text = markdown(TABLES["table8"], found(tmp_path))
    assert "no run: number of examples, seed, device and commit" in text
    run(tmp_path, note="Faster Cascades is a reading.")
    text = markdown(TABLES["table8"], found(tmp_path))
    for fact in ("examples: web_questions 2", "seed 7", "device NVIDIA A100", "commit c0ffeec0ffee (dirty)", "gamma 5"):
        assert fact in text
    assert "- Faster Cascades is a reading." in text and "VIA-SD, **lossy**" in text and "SWIFT, **lossy**" not in text
    assert "- Gemma2 2B → 9B, BiLD, Cascade SD, Faster Cascades, SWIFT, CLaSp: the run has no such arm" in text
    assert "- Gemma2 2B → 9B, SD, VIA-SD, NaturalQA, TriviaQA: the run is not of this set" in text
    assert "- Gemma2 2B → 9B, SD, VIA-SD, WebQ rejection: undefined (0/0)" in text


def test_the_csv_has_a_cell_a_line_in_full_precision(tmp_path: Path) -> None:
    run(tmp_path, speeds={"speculative": 3.0}, gamma=5)
    write_paper_tables(tmp_path, "table8")
    with (tmp_path / "tables" / "paper_table8.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == COUNTS["table8"]
    (line,) = (
        line
        for line in lines
        if (line["models"], line["method"], line["task"], line["metric"]) == ("Gemma2 2B → 9B", "SD", "WebQ", "speedup")
    )
    assert float(line["ours"]) == 3.0 and float(line["paper"]) == 1.5 and float(line["difference"]) == 1.5
    assert (line["n"], line["seed"], line["commit"], line["why_not"]) == ("2", "7", "c0ffeec0ffee (dirty)", "")


def test_one_page_holds_all_tables_that_were_asked_for(tmp_path: Path) -> None:
    paths = report(str(tmp_path), paper=["table1", "table7"], format="html")
    assert paths[-1].name == "paper_tables.html" and len(paths) == 9
    assert paths[-1].read_text().count("<table>") == 2


@pytest.mark.parametrize("name", ["table2", "[table8,table88]", "[]"])
def test_an_unknown_table_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    line = refused(monkeypatch, capsys, "job=report", f"paper={name}", f"results_dir={tmp_path}")
    assert "table8" in line and not (tmp_path / "tables").exists()


def test_a_run_and_a_table_of_the_paper_are_not_both_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run=x and paper=all both choose runs"):
        report(str(tmp_path), "x", paper="all")


def test_numbers_that_are_gone_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"numbers\.csv is not there"):
        read_numbers(tmp_path)
    assert isinstance(read_numbers(), pd.DataFrame)
