"""Tables and figure from a run folder: right numbers in right cells, whole files, readable errors."""

import csv
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from harness.errors import UserError
from harness.jobs.report import Target, report, write_reports
from harness.records import (
    SCHEMA,
    ArmRecord,
    BlockTrace,
    DataSource,
    Divergence,
    Generation,
    Route,
    RunRecord,
    SampleRecord,
    StopReason,
)
from harness.report import choice, figures, tables
from harness.report.drafters import compares_drafters, drafters_figure
from harness.report.frames import results_frame
from harness.report.lines import DASH, build
from harness.store import RunFolder
from tests.runs import files

DASH = DASH
SOURCE = DataSource("builtin", "rows.jsonl", "test", "main", None, "ab" * 32, 24)
SHOTS = DataSource("local", "train.jsonl", "train", None, None, "cd" * 32, 8)
RUN = RunRecord(
    run_id="20260131T091500Z-3f9a1c-quickstart",
    schema=SCHEMA,
    created="2026-01-31T09:15:00Z",
    model="toy-model",
    temperature=0.0,
    seed=7,
    arms=(
        ArmRecord("autoregressive", "autoregressive", None, None, True),
        ArmRecord("speculative", "speculative", "prompt_lookup", None, True),
        ArmRecord("via_sd", "via_sd", "prompt_lookup", "strictness", False),
    ),
    data={"qa": replace(SOURCE, shots=SHOTS), "translation": replace(SOURCE, kind="local", commit="c0ffee")},
    prompts_sha={"qa": "cd" * 32, "translation": "ef" * 32},
    task_metrics={"qa": ("f1", "exact_match"), "translation": ("bleu",)},
    git_commit="0123456789abcdef",
    git_dirty=True,
    env={"cpu": "Some CPU | 2 GHz", "cores": "2", "python": "3.11.9", "torch": "2.13.0"},
    status="finished",
)
SETTINGS = {"gamma": 4, "max_new_tokens": 64, "limit": 2}


def block(start: int, arm: str) -> BlockTrace:
    if arm == "autoregressive":
        return BlockTrace(start, 0, 0, (), 0, 1, 0, 0, 0, 1)
    if arm == "speculative":
        return BlockTrace(start, 2, 2, (Route.ESCALATE, Route.ESCALATE), 1, 2, 0, 0, 0, 1)
    return BlockTrace(start, 4, 4, (Route.ACCEPT, Route.REGENERATE), 1, 2, 0, 0, 1, 0)


def samples(run: RunRecord = RUN, prompts: int = 2) -> list[SampleRecord]:
    """8 tokens each; baseline 2 s, speculative 1 s, via_sd 4 s a prompt, so speedups are 2 and 0.5."""
    seconds = {"autoregressive": 2.0, "speculative": 1.0, "via_sd": 4.0}
    made = []
    for task in run.task_metrics:
        for index in range(prompts):
            for arm in (arm.arm for arm in run.arms):
                size = 1 if arm == "autoregressive" else 2
                blocks = tuple(block(start, arm) for start in range(0, 8, size))
                right = arm != "via_sd"
                text = "the old cat sat on the mat" if right else "the old dog sat on a mat"
                scores = {name: 100.0 if right else 50.0 for name in run.task_metrics[task]}
                made.append(
                    SampleRecord(
                        run_id=run.run_id,
                        arm=arm,
                        task=task,
                        example_id=f"{task}-{index}",
                        prompt_tokens=10,
                        input_cut=0,
                        prompt_sha=f"{task}{index}",
                        text=text,
                        prediction=text,
                        references=("the old cat sat on the mat",),
                        scores=scores,
                        prefill_s=0.5,
                        decode_s=seconds[arm],
                        peak_bytes=None,
                        generation=Generation(tuple(range(8)), blocks, StopReason.LENGTH),
                    )
                )
    return made


def differing(faults: int, ties: int = 1, prompts: int = 4) -> tuple[list[SampleRecord], list[Divergence]]:
    """``samples``, but speculative differs from greedy on the first prompts of qa, first by faults; all are judged."""
    made, judged = samples(prompts=prompts), []
    for index in range(faults + ties):
        (place,) = (i for i, s in enumerate(made) if (s.arm, s.example_id) == ("speculative", f"qa-{index}"))
        generation = replace(made[place].generation, token_ids=(0, 1, 2, 3, 9, 9, 9, 9))
        made[place] = replace(made[place], generation=generation)
        numbers = (0.25, 3.5, 20.0, 0.5, False) if index < faults else (0.25, 0.25, 20.0, 0.5, True)
        judged.append(Divergence(RUN.run_id, "qa", f"qa-{index}", "speculative", 4, 4, 9, *numbers))
    return made, judged


def markdown_rows(text: str, head: str) -> dict[tuple[str, str], dict[str, str]]:
    """Cells of the table under a heading, by task and arm."""
    lines = text.split(f"## {head}\n")[1].strip().split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]
    names = cells[0]
    assert all(len(row) == len(names) for row in cells[2:])
    return {(row[0], row[1]): dict(zip(names, row, strict=True)) for row in cells[2:]}


def test_markdown_has_the_numbers_in_the_right_cells() -> None:
    text = tables.markdown([build(RUN, samples(), SETTINGS)], "quickstart")
    results = markdown_rows(text, "Results")
    assert list(results) == [(task, arm.arm) for task in ("qa", "translation") for arm in RUN.arms]
    fast, lossy = results["qa", "speculative"], results["qa", "via_sd"]
    assert fast["speedup, decode"] == "2.00 [2.00, 2.00]" and fast["lossless"] == "yes"
    assert fast["speedup, end to end"] == "1.67 [1.67, 1.67]"
    assert lossy["speedup, decode"] == "0.50 [0.50, 0.50]" and lossy["lossless"] == "**lossy**"
    assert lossy["drafter"] == "prompt_lookup" and lossy["gate"] == "strictness" and fast["gate"] == DASH
    assert results["qa", "speculative"]["data"] == "builtin" and results["translation", "via_sd"]["data"] == "local"
    assert lossy["n"] == "2" and lossy["output tokens"] == lossy["baseline's output tokens"] == "8.0"
    assert fast["quality"].startswith("f1 100.0") and "exact_match" in fast["further quality"]
    assert results["translation", "speculative"]["quality"] == "bleu 100.0 [100.0, 100.0]"
    rates = markdown_rows(text, "Rates")
    assert rates["qa", "autoregressive"]["reject_rate"] == DASH
    assert rates["qa", "autoregressive"]["plain_steps"] == "1.000"
    assert rates["qa", "speculative"]["reject_rate"] == "0.500" and rates["qa", "via_sd"]["draft_waste"] == "0.750"
    assert rates["qa", "via_sd"]["full_rate"] == "0.000" and rates["qa", "via_sd"]["mean_accept_length"] == "2.000"
    places = markdown_rows(text, "Drafts kept, by place in the block")
    assert places["qa", "speculative"]["1"] == "1.000" and places["qa", "speculative"]["2"] == "0.000"
    assert places["qa", "speculative"]["3"] == DASH and ("qa", "autoregressive") not in places


def test_below_the_table_stands_what_was_run() -> None:
    text = tables.markdown([build(RUN, samples(), SETTINGS)], "quickstart")
    for fact in (RUN.run_id, "toy-model", "commit 0123456789ab (dirty)", "2 cores", "seed 7", "temperature 0.0"):
        assert fact in text
    for fact in (
        "gamma 4",
        "max_new_tokens 64",
        "version c0ffee",
        "sha256 abababababab",
        "8 shots from local, train.jsonl",
        "torch 2.13.0",
    ):
        assert fact in text
    for name in tables.DEFINED:
        assert f"- `{name}`: " in text


def test_near_ties_and_faults_stand_beside_the_agreement() -> None:
    made, judged = differing(faults=2)
    text = tables.markdown([build(RUN, made, divergences=judged)], "quickstart")
    results = markdown_rows(text, "Results")
    cells = {arm: (results["qa", arm]["near-ties"], results["qa", arm]["faults"]) for _, arm in list(results)[:3]}
    assert cells == {"autoregressive": ("0", "0"), "speculative": ("1", "**2**"), "via_sd": (DASH, DASH)}
    assert results["translation", "speculative"]["faults"] == "0"
    faults = text.split("## Faults\n\n")[1].split("\n\n")[0].splitlines()
    assert len(faults) == 2 and text.index("## Results") < text.index("## Faults") < text.index("## Rates")
    assert faults[0] == (
        "- qa, example qa-0, speculative: output token 5 is 9, greedy has 4; gap 0.25, distance 3.5, bound 0.5 logits"
    )
    ended = replace(judged[0], arm_token=None, gap=None, distance=None, largest_logit=None, bound=None)
    text = tables.markdown([build(RUN, made, divergences=[ended, *judged[1:]])], "quickstart")
    assert "- qa, example qa-0, speculative: output token 5 is none, greedy has 4\n" in text


def test_differences_that_were_not_judged_print_as_a_dash() -> None:
    made, judged = differing(faults=0)
    text = tables.markdown([build(RUN, made)], "quickstart")
    row = markdown_rows(text, "Results")["qa", "speculative"]
    assert (row["near-ties"], row["faults"]) == (DASH, DASH) and "## Faults" not in text
    row = markdown_rows(tables.markdown([build(RUN, made, divergences=judged)], "x"), "Results")["qa", "speculative"]
    assert (row["near-ties"], row["faults"]) == ("1", "0")


@pytest.mark.parametrize(("faults", "style"), [(0, "yellow"), (1, "bold red")])
def test_the_last_line_says_how_many_outputs_differ_from_greedy(
    faults: int, style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, judged = differing(faults)
    found = build(RUN, made, divergences=judged)
    line = tables.differences([found])
    assert line is not None and line.style == style
    assert line.plain == (
        f"{1 + faults} of 8 outputs of lossless arms differ from greedy: 1 near-ties, {faults} faults, "
        f"largest gap 0.25 logits; see runs/{RUN.run_id}/divergences.jsonl"
    )
    write_reports([found], Target(tmp_path / "t", tmp_path / "f", "run"))
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == line.plain and said.err == ""
    write_reports([build(RUN, samples())], Target(tmp_path / "t", tmp_path / "f", "run"))
    assert "differ from greedy" not in capsys.readouterr().out


def test_a_fault_is_red_in_the_printed_table() -> None:
    made, judged = differing(faults=1)
    out = io.StringIO()
    screen = Console(file=out, width=120, force_terminal=True, color_system="standard", legacy_windows=False)
    screen.print(tables.console([build(RUN, made, divergences=judged)])[0])
    assert "1/\x1b[1;31m1\x1b[0m" in out.getvalue() and out.getvalue().count("\x1b[1;31m") == 1


@pytest.mark.parametrize("old", [False, True])
def test_a_run_from_before_differences_were_judged_does_not_claim_that_there_are_none(
    old: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, judged = differing(faults=1)
    folder = RunFolder.create(tmp_path, RUN, SETTINGS)
    for sample in made:
        folder.append(sample)
    for divergence in judged:
        folder.append(divergence)
    folder.finish({})
    if old:
        (folder.path / "divergences.jsonl").unlink()
    text = report(str(tmp_path))[0].read_text()
    row = markdown_rows(text, "Results")["qa", "speculative"]
    assert (row["near-ties"], row["faults"]) == ((DASH, DASH) if old else ("1", "**1**"))
    assert ("## Faults" in text) == ("differ from greedy:" in capsys.readouterr().out) == (not old)


def test_a_pipe_in_a_name_does_not_break_the_table() -> None:
    run = replace(RUN, arms=(RUN.arms[0], replace(RUN.arms[1], drafter="a|b"), RUN.arms[2]))
    text = tables.markdown([build(run, samples())], "quickstart")
    assert markdown_rows(text, "Results")["qa", "speculative"]["drafter"] == r"a\|b"


def test_csv_is_tidy_in_full_precision_and_empty_where_undefined(tmp_path: Path) -> None:
    made = build(RUN, samples(), SETTINGS)
    tables.write_tables([made], tmp_path, "quickstart")
    with (tmp_path / "quickstart.csv").open(newline="") as file:
        found = {(row["task"], row["arm"], row["metric"]): row for row in csv.DictReader(file)}
    assert len(found) == len(made.rows) + 2 * len(made.predicted) == len(made.rows) + 8
    for row in made.rows:
        cell = found[row.task, row.arm, row.metric]["value"]
        assert cell == "" if row.value is None else float(cell) == row.value
    assert found["qa", "via_sd", "f1"]["lossless"] == "False" and found["qa", "via_sd", "f1"]["data"] == "builtin"
    positions = (tmp_path / "quickstart_positions.csv").read_text().splitlines()
    assert positions[0].startswith("run_id,arm,task,position,drafted,examined,kept")


def test_a_run_without_drafts_still_writes_readable_files(tmp_path: Path) -> None:
    run = replace(RUN, arms=RUN.arms[:1])
    made = build(run, [sample for sample in samples() if sample.arm == "autoregressive"])
    paths = tables.write_tables([made], tmp_path, "baseline")
    assert "by place in the block" not in paths[0].read_text()
    assert paths[2].read_text().count("\n") == 1


def test_console_fits_120_columns_with_nothing_cut() -> None:
    out = io.StringIO()
    screen = Console(file=out, width=120)
    for table in tables.console([build(RUN, samples())]):
        screen.print(table)
    text = out.getvalue()
    assert "…" not in text and max(len(line) for line in text.splitlines()) <= 120
    assert "2.00 [2.00, 2.00]" in text and "lossy" in text and "exact_match" in text


def test_two_runs_stay_apart() -> None:
    other = replace(RUN, run_id="other-run", seed=8)
    reports = [build(run, samples(run)) for run in (RUN, other)]
    frame = results_frame(reports)
    assert list(frame["run"].unique()) == [RUN.run_id, "other-run"] and len(frame) == 12
    labels = [text.get_text() for text in figures.speed_quality_figure(reports).legends[0].get_texts()]
    assert len(labels) == 7 and any("other-run" in label for label in labels)


def test_figure_has_a_panel_a_task_and_shows_losing_and_lossy_arms() -> None:
    figure = figures.speed_quality_figure([build(RUN, samples())])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["qa (n = 2, builtin data)", "translation (n = 2, local data)"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["autoregressive", "speculative", "via_sd (lossy)", "front: none is better in both"]
    for axes in figure.axes:
        points = [line for line in axes.lines if line.get_marker() in tuple("osD")]
        markers = {round(float(np.asarray(line.get_xdata())[0]), 6): line for line in points}
        assert sorted(markers) == [0.5, 1.0, 2.0]
        assert markers[0.5].get_markerfacecolor() == "white" and markers[2.0].get_markerfacecolor() != "white"


@pytest.mark.parametrize(("temperature", "prompts"), [(0.0, 2), (0.7, 1)])
def test_report_rebuilds_everything_from_the_run_folder(
    tmp_path: Path, temperature: float, prompts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(RUN, temperature=temperature)
    folder = RunFolder.create(tmp_path, run, SETTINGS)
    for sample in samples(run, prompts):
        folder.append(sample)
    folder.finish({})
    paths = report(str(tmp_path))
    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        "tables/run.md",
        "tables/run.csv",
        "tables/run_positions.csv",
        "figures/run.png",
        "figures/run.pdf",
        *(f"figures/run_{what}.{kind}" for what in ("rates", "routes") for kind in ("png", "pdf")),
    ]
    assert paths[3].read_bytes().startswith(b"\x89PNG") and paths[4].read_bytes().startswith(b"%PDF")
    assert "gamma 4" in paths[0].read_text() and "run.png" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.tmp"))
    # The bench writes the same pages from memory.
    again = write_reports([build(run, samples(run, prompts), SETTINGS)], Target(tmp_path / "t", tmp_path / "f", "run"))
    assert again[0].read_text() == paths[0].read_text() and again[1].read_text() == paths[1].read_text()


def test_a_run_that_did_not_finish_says_so(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, RUN, SETTINGS)
    for sample in samples()[:4]:  # one prompt by all three arms, the next by the baseline alone
        folder.append(sample)
    folder.fail()
    with pytest.raises(UserError, match="no finished run"):
        report(str(tmp_path))
    paths = report(str(tmp_path), RUN.run_id, "part")
    text = paths[0].read_text()
    assert "did not finish" in text and "1 samples are left out" in text
    assert set(markdown_rows(text, "Results")) == {("qa", arm.arm) for arm in RUN.arms}


@pytest.mark.parametrize("name", ["", "a/b", ".."])
def test_names_are_plain(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="plain file name"):
        write_reports([build(RUN, samples())], Target(tmp_path / "t", tmp_path / "f", name))
    assert list(tmp_path.iterdir()) == []


def test_empty_results_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python -m harness \+experiment=quickstart"):
        report(str(tmp_path))


def test_reporting_imports_no_torch() -> None:
    code = (
        "import harness.jobs.report, harness.log, sys; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_run_with_three_drafters_gets_a_figure_with_a_row_for_each(tmp_path: Path) -> None:
    drafters = ("prompt_lookup", "retrieval", "eagle(head)")
    arms = [RUN.arms[0]]
    for drafter in drafters:
        arms += [replace(arm, arm=f"{arm.method}_{drafter}", drafter=drafter) for arm in RUN.arms[1:]]
    run = replace(RUN, arms=tuple(arms))
    made = [replace(one, arm=arm.arm) for arm in arms for one in samples() if one.arm == arm.method]
    report_of_run = build(run, made)
    assert compares_drafters([report_of_run]) and not compares_drafters([build(RUN, samples())])
    figure = drafters_figure(report_of_run)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["qa\n(n = 2)", "translation\n(n = 2)"] * 2
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(drafters)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["speculative", "via_sd (lossy)"]
    for axes, values in zip(figure.axes[::2], ({2.0, 0.5}, None), strict=True):
        marks = [line for line in axes.lines if line.get_marker() not in ("None", "")]
        assert len(marks) == 6 and {round(float(np.asarray(line.get_ydata())[0])) for line in marks} == {0, 1, 2}
        assert values is None or {round(float(np.asarray(line.get_xdata())[0]), 6) for line in marks} == values
    paths = write_reports([report_of_run], Target(tmp_path / "t", tmp_path / "f", "run"))
    assert [path.name for path in paths[-2:]] == ["run.png", "run.pdf"]


def test_no_figure_is_drawn_of_more_runs_than_can_be_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "MOST_RUNS", 2)
    reports = [build(run, samples(run)) for run in (replace(RUN, run_id=f"run-{name}") for name in "abc")]
    tables_dir, figures_dir = tmp_path / "t", tmp_path / "f"
    assert [path.name for path in write_reports(reports[:2], Target(tables_dir, figures_dir, "run"))][3:] == [
        "run.png",
        "run.pdf",
    ]
    assert "no figure" not in capsys.readouterr().out
    paths = write_reports(reports, Target(tables_dir, figures_dir, "run"))
    assert [path.name for path in paths] == ["run.md", "run.csv", "run_positions.csv"]
    assert list(figures_dir.iterdir()) == [], "none of before stands beside other tables"
    assert "no figure of 3 runs: 2 can be told apart" in capsys.readouterr().out


def test_a_missing_main_figure_is_said_also_where_another_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "MOST_RUNS", 1)
    monkeypatch.setattr(choice, "predicted_figure", lambda found: figures.Figure((1, 1)))
    reports = [build(run, samples(run)) for run in (replace(RUN, run_id=f"run-{name}") for name in "ab")]
    paths = write_reports(reports, Target(tmp_path / "t", tmp_path / "f", "run"))
    assert [path.name for path in paths[-2:]] == ["run_predicted.png", "run_predicted.pdf"]
    assert "no figure of 2 runs: 1 can be told apart" in capsys.readouterr().out


def test_what_an_earlier_report_wrote_besides_does_not_stay(tmp_path: Path) -> None:
    """Neither figures that the later one has no numbers for, nor formats that it was not asked for."""
    others = ["tables/other.html", "tables/run_2.html", "figures/run_sweep.png", "figures/run_2.png"]
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("of another name")
    both = build(RUN, samples(), SETTINGS)
    earlier = write_reports([both], Target.below(tmp_path, "run", ["html", "latex"], further=True))
    assert {"run.html", "run.tex", "run_routes.png", "run_routes.pdf"} <= {path.name for path in earlier}
    alone = build(replace(RUN, arms=RUN.arms[:1]), [one for one in samples() if one.arm == "autoregressive"])
    later = write_reports([alone], Target.below(tmp_path, "run", further=True))
    assert files(tmp_path) == sorted([*others, *(path.relative_to(tmp_path).as_posix() for path in later)])
