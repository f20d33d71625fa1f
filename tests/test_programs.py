"""Coding tasks in a run: refused before anything is loaded unless allowed, scored by running, never under a clock."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness import measuring
from harness.compare import BASELINE
from harness.errors import UserError
from harness.execution import programs, sandbox
from harness.execution.programs import permit, score
from harness.execution.sandbox import Limits, run_candidate
from harness.model.load import Model
from harness.records import DataSource, Example, Shot
from harness.report.lines import RunReport, build
from harness.report.tables import markdown
from harness.store import read
from tests.rows import run_record, sample
from tests.runs import refused, run_bench

BODIES = {"good": "    return x + 1\n", "bad": "    return x\n", "slow": "    while True: pass\n"}
SMALL = Limits(cpu_s=1, wall_s=60, memory_bytes=2**28)


@dataclass(frozen=True)
class Coding:
    """Three rows whose program is written here, whatever the model says: one passes, one fails, one never ends."""

    metrics: tuple[str, ...] = ("pass@1",)
    template: str = "{input}"
    plain: str = "{input}{answer}"
    continues: bool = False
    stop: tuple[str, ...] = ()
    plain_stop: tuple[str, ...] = ()
    max_input_tokens: int = 64

    def load(self, limit: int, seed: int) -> tuple[list[Example], DataSource]:
        meta = {"setup": "START = 1", "tests": "assert f(START) == 2", "entry_point": "f"}
        rows = [Example(name, f"def f(x):  # {name}\n", (body,), meta) for name, body in BODIES.items()]
        return rows[:limit], DataSource("builtin", "here", "test", None, None, "0" * 64, len(rows))

    def calibration(self, limit: int, seed: int) -> tuple[list[Example], DataSource]:
        return self.load(limit, seed)

    def shown(self) -> tuple[Shot, ...]:
        return ()

    def prediction(self, text: str) -> str:
        raise AssertionError("a program is asked for")

    def program(self, example: Example, text: str) -> str:
        return example.input + example.references[0]


def unloaded(**arguments: Any) -> Model:
    raise AssertionError("nothing is loaded for this")


contained = pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="programs are contained on Linux only")


def test_a_coding_task_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^code: .* add allow_code_execution=true to .*, or leave the task out\.$"):
        run_bench(tmp_path, {}, {"code": Coding()}, model=unloaded)
    assert list(tmp_path.iterdir()) == []


def test_the_key_is_known_to_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    coding = f"+tasks.code={{_target_:{__name__}.Coding}}"
    said = refused(monkeypatch, capsys, coding, f"results_dir={tmp_path}")
    assert said.startswith("code: scoring runs the programs that the model writes: add allow_code_execution=true")


def test_where_containment_is_missing_it_is_refused_though_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox, "command", lambda *_: ["false"])
    with pytest.raises(UserError, match="cannot be contained here, so none is run"):
        run_bench(tmp_path, {}, {"code": Coding()}, model=unloaded, allow_code_execution=True)
    assert list(tmp_path.iterdir()) == []


def test_tasks_that_run_nothing_need_no_leave_and_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "check", lambda: pytest.fail("a sandbox for nothing"))
    permit({"qa": ("exact_match", "f1"), "sums": ("accuracy",)}, allowed=False)
    permit({"qa": ("exact_match", "f1")}, allowed=True)
    with pytest.raises(UserError, match=r"^code, more: "):
        permit({"code": ("pass@1",), "qa": ("f1",), "more": ("bleu", "timeout")}, allowed=False)


@contained
def test_each_program_is_run_once_between_its_setup_and_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(program: str, tests: str) -> Any:
        asked.append(program)
        return run_candidate(program, tests, SMALL)

    monkeypatch.setattr(programs, "run_candidate", counted)
    task = Coding()
    found = {
        example.id: score(("pass@1", "timeout"), task.program(example, ""), example) for example in task.load(3, 0)[0]
    }
    assert found == {
        "good": {"pass@1": 100, "timeout": 0},
        "bad": {"pass@1": 0, "timeout": 0},
        "slow": {"pass@1": 0, "timeout": 100},
    }
    assert len(asked) == 3 and asked[0] == "START = 1\ndef f(x):  # good\n    return x + 1\n"
    plain = Example("text", "", ("4",))
    assert score(("accuracy", "unparsed"), "four", plain) == {"accuracy": 0, "unparsed": 100} and len(asked) == 3


@contained
def test_a_run_scores_programs_outside_the_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clocked: list[bool] = []
    timed = measuring.timed

    def watched(*arguments: Any) -> Any:
        clocked.append(True)
        found = timed(*arguments)
        clocked.append(False)
        return found

    def run(program: str, tests: str) -> Any:
        assert clocked[-1] is False, "a program is run while a clock runs"
        return run_candidate(program, tests, SMALL)

    monkeypatch.setattr(measuring, "timed", watched)
    monkeypatch.setattr(programs, "run_candidate", run)
    folder = run_bench(tmp_path, {}, {"code": Coding()}, limit=3, allow_code_execution=True)
    data = read(folder)
    assert data.run.task_metrics == {"code": ("pass@1", "timeout")}
    assert [sample.scores["pass@1"] for sample in data.samples] == [100, 0, 0]
    assert data.samples[0].prediction == "def f(x):  # good\n    return x + 1\n"
    summary = json.loads((folder / "summary.json").read_text())
    values = {row["metric"]: row["value"] for row in summary["rows"] if row["arm"] == BASELINE}
    assert values["pass@1"] == values["timeout"] == pytest.approx(100 / 3)
    assert summary["scorers"]["code, pass@1"].startswith("unbiased estimator of the HumanEval paper")
    monkeypatch.setattr(programs, "run_candidate", partial(pytest.fail, "run again on reading"))
    assert "pass@1 33.3 [0.0, 100.0] %" in markdown([build(data.run, data.samples)], "coding")


def test_the_table_of_a_run_without_stored_scores_has_a_dash() -> None:
    run = replace(run_record(arms=(BASELINE,)), task_metrics={"translation": ("pass@1",)})
    assert "pass@1 – %" not in markdown([build(run, [sample(tokens=1, arm=BASELINE)])], "coding")  # noqa: RUF001


def seeded(seed: int, passed: tuple[bool, ...], **settings: Any) -> RunReport:
    """A run of its own seed whose programs pass or not, one a prompt."""
    run = replace(run_record(arms=(BASELINE,)), seed=seed, task_metrics={"translation": ("pass@1",)})
    made = [
        sample(tokens=1, arm=BASELINE, example=str(index), scores={"pass@1": 100.0 * right})
        for index, right in enumerate(passed)
    ]
    return build(run, made, {"seed": seed, "gamma": 5} | settings)


def test_pass_at_k_is_pooled_over_runs_that_differ_in_their_seed_alone() -> None:
    runs = [seeded(0, (True, False)), seeded(1, (True, True)), seeded(2, (False, False))]
    head, _, line = markdown(runs, "coding").split("## pass@k\n\n")[1].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in text.strip("|").split("|")] for text in (head, line)]
    # 2 of 3 and 1 of 3 pass: pass@1 2/3 and 1/3; pass@2 1 - C(1,2)/3 = 1 and 1 - C(2,2)/3 = 2/3
    assert dict(zip(*cells, strict=True)) == {
        **{"task": "translation", "arm": BASELINE, "runs": "3", "prompts": "2"},
        **{"pass@1": "50.0 ± 16.7 %", "pass@2": "83.3 ± 16.7 %"},
    }


@pytest.mark.parametrize(("seed", "passed", "gamma"), [(0, (True, True), 5), (1, (True, True), 3), (1, (), 5)])
def test_runs_of_one_seed_or_of_other_settings_are_not_pooled(seed: int, passed: tuple[bool, ...], gamma: int) -> None:
    runs = [seeded(0, (True, False)), seeded(seed, passed, gamma=gamma)]
    assert "## pass@k" not in markdown(runs, "coding")
