"""The decoding job when something is wrong: refused before it costs anything, or ended with all that was measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Block
from harness.decode.gate import Strictness
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.metrics import complete_prompts
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.records import MetricRow, RunRecord, SampleRecord
from harness.sampling import Chooser, Sampling
from harness.store import read
from tests.runs import files, main, refused, run_bench, unreported
from tests.toys import write_checkpoint

ARMS: dict[str, partial[Any]] = {
    "speculative": partial(Speculative, gamma=3, drafter=SelfSkip),
    "via_sd": partial(ViaSD, gamma=4, drafter=SelfSkip, gate=Strictness()),
}


def unloaded(**arguments: Any) -> Model:
    raise AssertionError("no model is loaded for this")


@dataclass
class Recorder:
    """A logger that notes what it is told, and what is on disk at that time. ``broken`` is where it fails."""

    results: Path
    broken: str = ""
    calls: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[MetricRow] = ()

    def note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.broken:
            raise RuntimeError(f"the logger's {name} failed")

    def start(self, run: RunRecord, config: Mapping[str, Any]) -> None:
        self.config = config
        self.note("start")

    def sample(self, record: SampleRecord) -> None:
        (path,) = self.results.glob(f"runs/{record.run_id}/samples.jsonl")
        self.lines.append(len(path.read_text().splitlines()))
        self.note("sample")

    def summary(self, rows: Sequence[MetricRow]) -> None:
        self.rows = rows
        self.note("summary")

    def files(self, folder: Path, reports: Sequence[Path]) -> None:
        self.note("files")

    def close(self, failed: bool = False) -> None:
        self.note("close")

    def ok(self) -> bool:
        return not self.broken

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        raise AssertionError("a bench has no steps")


def test_the_log_hears_of_everything_once_it_is_on_disk(tmp_path: Path) -> None:
    log = Recorder(tmp_path)
    folder = run_bench(tmp_path, ARMS, log=log)
    assert log.calls == ["start", *["sample"] * 6, "summary", "files", "close"]
    assert log.lines == [1, 2, 3, 4, 5, 6]
    assert log.config == {"name": "run"}
    assert len(log.rows) == len(json.loads((folder / "summary.json").read_text())["rows"]) > 0


@pytest.mark.parametrize("broken", ["start", "sample", "summary"])
def test_a_log_that_fails_is_closed_and_the_run_is_marked(broken: str, tmp_path: Path) -> None:
    log = Recorder(tmp_path, broken)
    with pytest.raises(RuntimeError, match=f"the logger's {broken} failed"):
        run_bench(tmp_path, ARMS, log=log)
    assert log.calls[-2:] == [broken, "close"]
    (folder,) = (tmp_path / "runs").iterdir()
    data = read(folder)
    assert (data.run.status, len(data.samples)) == ("failed", {"start": 0, "sample": 1, "summary": 6}[broken])
    assert not (folder / "summary.json").exists()


FAILURES: dict[str, type[BaseException]] = {
    "mistake": UserError,
    "crash": RuntimeError,
    "interrupt": KeyboardInterrupt,
}


class Failing(Autoregressive):
    """Decodes one prompt and fails in the middle of the second."""

    name = "failing"

    def __init__(self, tiers: Tiers, sampling: Sampling, model: Model, how: str) -> None:
        super().__init__(tiers, sampling, model)
        self.how = how
        self.steps = 0

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        self.steps += 1
        if self.steps > 6:
            raise FAILURES[self.how]("this went wrong")
        return super().step(tokens, remaining, chooser)


@pytest.mark.parametrize(("how", "status"), {"mistake": 2, "interrupt": 130, "crash": None}.items())
def test_a_run_that_ends_in_the_middle_keeps_what_it_measured(
    how: str, status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arm = f"+methods.failing={{_target_:{__name__}.Failing,_partial_:true,how:{how}}}"
    with pytest.raises(RuntimeError if status is None else SystemExit) as caught, unreported():
        main(
            monkeypatch,
            "task=web_questions",
            "method=speculative",
            arm,
            "limit=3",
            "max_new_tokens=4",
            f"results_dir={tmp_path}",
        )
    if status is not None:
        assert isinstance(caught.value, SystemExit) and caught.value.code == status
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == ("harness: interrupted" if how == "interrupt" else "harness: error: this went wrong")
    (folder,) = (tmp_path / "runs").iterdir()
    kept = ["config.yaml", "divergences.jsonl", "fidelity.jsonl", "run.json", "samples.jsonl"]
    assert sorted(path.name for path in folder.iterdir()) == kept
    data = read(folder)
    assert (data.run.status, data.dropped) == ("failed", 0)
    assert {s.arm for s in data.samples if s.example_id.endswith("-0")} == {"autoregressive", "speculative", "failing"}
    assert not [s for s in data.samples if s.arm == "failing" and not s.example_id.endswith("-0")]
    assert len(complete_prompts(data.run, data.samples)) == 3


def test_a_run_without_a_task_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"^no task is chosen: write task=wmt14_de_en"):
        run_bench(tmp_path, ARMS, {}, model=unloaded)
    assert refused(monkeypatch, capsys, "task=[]", f"results_dir={tmp_path}").startswith("no task is chosen")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["", "runs", "tables", "figures"])
def test_an_unwritable_results_folder_is_refused_before_anything_is_loaded(place: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    if place:
        results.mkdir()
    (results / place).write_text("a file where a folder belongs")
    with pytest.raises(UserError, match=r"^cannot write in .*: choose another folder with results_dir=PATH\.$"):
        run_bench(results, ARMS, model=unloaded)
    assert files(tmp_path) == [f"results/{place}".rstrip("/")]


@pytest.mark.parametrize("name", ["a/b", "../up", ".", "two words"])
def test_a_name_that_no_file_can_have_is_refused_before_anything_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, capsys, f"name='{name}'", f"results_dir={tmp_path}").startswith("name=")
    assert files(tmp_path) == []


def test_a_missing_mask_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(
        monkeypatch,
        capsys,
        "task=web_questions",
        "drafter=self_skip",
        "drafter.mask=no/mask.json",
        f"results_dir={tmp_path}",
    )
    assert line.startswith("layer mask 'no/mask.json' does not exist; make one with job=search, or set drafter.mask")
    assert files(tmp_path) == []


def test_a_missing_mask_of_a_loaded_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, results = write_checkpoint(tmp_path / "model"), tmp_path / "results"
    line = refused(
        monkeypatch, capsys, "task=web_questions", "model=embedded", f"model.full={folder}",
        "model.slim_mask=no/mask.json", f"results_dir={results}",
    )  # fmt: skip
    assert line.startswith("layer mask 'no/mask.json' does not exist; make one with job=search, or set model.slim_mask")
    assert not results.exists()


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "short", "answers": ["a"]}, {"question": "long " * 1700, "answers": ["a"]}]
    (tmp_path / "web_questions_test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = refused(
        monkeypatch, capsys, "task=web_questions", "source=local", f"data_dir={tmp_path}",
        f"results_dir={tmp_path / 'results'}", "tasks.web_questions.max_input_tokens=9000", "limit=2",
    )  # fmt: skip
    assert line.startswith("web_questions, example web_questions-1: prompt and output need ")
    assert line.endswith("the model has 8192; lower tasks.web_questions.max_input_tokens or max_new_tokens or gamma.")
    assert files(tmp_path) == ["web_questions_test.jsonl"]
    line = refused(
        monkeypatch, capsys, "task=web_questions", "max_new_tokens=9000", f"results_dir={tmp_path / 'results'}"
    )
    assert "the model has 8192; lower tasks.web_questions.max_input_tokens or max_new_tokens or gamma." in line
    assert files(tmp_path) == ["web_questions_test.jsonl"]


@pytest.mark.parametrize(
    ("argument", "message"),
    {
        "model.slim_mask=5": "model.slim_mask is 5 (int): want ",
        "tasks.wmt14_de_en.stop=5": "tasks.wmt14_de_en.stop is 5 (int): want ",
        "seed=99999999999999999999": "seed=99999999999999999999: want 0 or more, below 2**63",
        "model.seed=99999999999999999999": "model.seed=99999999999999999999: want 0 or more, below 2**63",
        f"name={'n' * 260}": "name=",
        "gamma=100000": "wmt14_de_en, example builtin-wmt14_de_en-0: prompt and output need",
    }.items(),
)
def test_a_value_only_the_called_code_can_judge_is_one_line_too(
    argument: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, capsys, argument, "limit=1", f"results_dir={tmp_path}").startswith(message)
    assert files(tmp_path) == []


@pytest.mark.parametrize("value", ["[]", "5", "[5]"])
def test_runs_that_are_no_run_ids_are_refused(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(monkeypatch, capsys, "job=report", f"job.runs={value}", f"results_dir={tmp_path}")
    assert line.startswith("job.runs") and "null" in line


@pytest.mark.parametrize(
    "row", ['{"question": "\\ud800", "answers": ["a"]}', '{"question": ' + "1" * 5000 + "}", "[" * 100_000]
)
def test_rows_that_json_takes_and_nobody_can_use_name_their_line(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "web_questions_test.jsonl").write_text(row + "\n")
    settings = ("task=web_questions", "source=local", f"data_dir={tmp_path}", f"results_dir={tmp_path / 'results'}")
    line = refused(monkeypatch, capsys, *settings)
    assert "web_questions_test.jsonl, line 1, column 1: " in line
