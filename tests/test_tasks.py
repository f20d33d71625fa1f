"""Tasks: rows from every source, what is refused, and the built-in rows. No network: the hub is a closed port."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from harness.errors import UserError
from harness.scoring import METRICS
from tasks import hub, source
from tasks.base import Task
from tasks.cnn_dailymail import CnnDailyMail
from tasks.gsm8k import Gsm8k
from tasks.humaneval import HumanEval
from tasks.mbpp import Mbpp
from tasks.nq_open import NqOpen
from tasks.spec_bench import SpecBench
from tasks.speed_bench import SpeedBench
from tasks.squad_v2 import SquadV2
from tasks.trivia_qa import TriviaQa
from tasks.web_questions import WebQuestions
from tasks.wmt14 import Wmt14DeEn, Wmt14EnDe
from tasks.xsum import XSum

ROOT = Path(__file__).parents[1]
QUICK_FOUR: list[type[Task]] = [Wmt14DeEn, CnnDailyMail, Gsm8k, WebQuestions]
TASKS: list[type[Task]] = [
    *QUICK_FOUR,
    *(Wmt14EnDe, XSum, NqOpen, TriviaQa, SquadV2, Mbpp, HumanEval, SpecBench, SpeedBench),
]
COLUMNS = {
    "wmt14_de_en": {"translation"},
    "cnn_dailymail": {"article", "highlights", "id"},
    "gsm8k": {"question", "answer"},
    "web_questions": {"url", "question", "answers"},
    "wmt14_en_de": {"translation"},
    "xsum": {"document", "summary", "id"},
    "nq_open": {"question", "answer"},
    "trivia_qa": {"question", "question_id", "question_source", "entity_pages", "search_results", "answer"},
    "squad_v2": {"id", "title", "context", "question", "answers"},
    "mbpp": {"task_id", "text", "code", "test_list", "test_setup_code", "challenge_test_list"},
    "humaneval": {"task_id", "prompt", "canonical_solution", "test", "entry_point"},
    "spec_bench": {"question_id", "category", "turns", "reference"},
    "speed_bench": {
        *("question_id", "category", "sub_category", "turns", "source", "src_id", "difficulty", "multiturn"),
    },
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"

every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


@pytest.fixture(autouse=True)
def closed_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that refuses connections, empty caches, and no memory of earlier notices."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("harness.hub._failed", {})
    source.notice.cache_clear()
    hub.probe.cache_clear()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def qa_rows(count: int) -> list[dict[str, Any]]:
    return [{"url": f"u{i}", "question": f"who is {i}?", "answers": [f"person {i}"]} for i in range(count)]


def qa_folder(tmp_path: Path, count: int = 5) -> str:
    write(tmp_path / "web_questions_test.jsonl", qa_rows(count))
    return str(tmp_path)


def files_of(task: type[Task]) -> str:
    """How the names of its built-in files begin."""
    return task(source="builtin").dataset.builtin


# The built-in rows


@every_task
def test_builtin_rows_are_enough_and_have_the_columns(task: type[Task]) -> None:
    test, calibration = (
        [json.loads(line) for line in (source.BUILTIN / f"{files_of(task)}{end}.jsonl").read_text("utf-8").splitlines()]
        for end in ("", "_calibration")
    )
    enough = (24, 8) if task in QUICK_FOUR else (10, 4)
    assert len(test) >= enough[0] and len(calibration) >= max(enough[1], task.shots)
    optional = {"reference"} if task is SpecBench else set()
    assert all(COLUMNS[task.name] - optional <= set(row) <= COLUMNS[task.name] for row in test + calibration)
    if task is CnnDailyMail:
        assert all(150 <= len(row["article"].split()) <= 600 for row in test + calibration)


@every_task
def test_builtin_rows_load_whole_and_calibration_shares_none(task: type[Task]) -> None:
    built = task(source="builtin", shots=0)
    test, test_source = built.load(1000, 0)
    calibration, calibration_source = built.calibration(1000, 0)
    inputs = [" ".join(example.input.lower().split()) for example in test + calibration]
    assert len(set(inputs)) == len(inputs)
    assert len({example.id for example in test + calibration}) == len(inputs)
    assert {test_source.kind, calibration_source.kind} == {"builtin"}
    assert (test_source.split, test_source.revision, test_source.commit) == ("test", None, None)
    assert test_source.rows == len([one for one in test if "after" not in one.meta])
    assert calibration_source.split == "calibration" and calibration_source.sha256 != test_source.sha256
    name = files_of(task)
    assert test[0].id.startswith(f"builtin-{name}-") and test[0].id.endswith("-0")
    assert test_source.location == f"tasks/builtin/{name}.jsonl"


@every_task
def test_reference_as_prediction_scores_100(task: type[Task]) -> None:
    """Programs are scored by running them: see test_sets.py."""
    built = task(source="builtin", shots=0)
    examples = [row for row in built.load(1000, 0)[0] if row.references]
    for name in set(built.metrics) - {"pass@1"}:
        values = [METRICS[name].sample(built.prediction(row.references[0]), row.references) for row in examples]
        assert values == pytest.approx([100.0] * len(examples))


# Which rows


@every_task
def test_the_first_rows_whatever_the_seed_and_the_digest_follows_them(task: type[Task]) -> None:
    built = task(source="builtin")
    five, five_source = built.load(5, 0)
    eight, eight_source = built.load(8, 99)
    assert eight[: len(five)] == five and built.load(5, 7) == (five, five_source)
    assert five_source.sha256 != eight_source.sha256 and len(five_source.sha256) == 64


def test_digest_does_not_depend_on_where_rows_lie(tmp_path: Path) -> None:
    folder = qa_folder(tmp_path)
    _, first = WebQuestions(data_dir=folder, shots=0).load(5, 0)
    other = tmp_path / "other"
    other.mkdir()
    write(other / "web_questions_test.jsonl", [dict(reversed(row.items())) | {"extra": 1} for row in qa_rows(5)])
    _, second = WebQuestions(data_dir=str(other), shots=0).load(5, 0)
    assert first.sha256 == second.sha256 and first.location != second.location


def test_more_than_there_is_takes_all_and_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = WebQuestions(data_dir=qa_folder(tmp_path), shots=0)
    for _ in range(2):
        examples, origin = task.load(9, 0)
    assert [example.id for example in examples] == [f"web_questions-{i}" for i in range(5)] and origin.rows == 5
    assert capsys.readouterr().err.splitlines() == [
        f"web_questions: {origin.location} has 5 test rows, 9 asked: using all"
    ]
    task.load(5, 0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_1_is_refused(limit: int) -> None:
    with pytest.raises(UserError, match=rf"limit {limit}: want at least 1"):
        WebQuestions(source="builtin").load(limit, 0)


# Local files


def test_local_files_keep_every_character(tmp_path: Path) -> None:
    text = '\u00a0Er sagte: ""Ja""\u2028\tGut \r\n \u00e4\U0001f600 '
    lines = [{"translation": {"de": text, "en": ' ""Yes""\u00a0'}}, {"translation": {"de": "b", "en": "c"}}]
    raw = "\ufeff" + json.dumps(lines[0], ensure_ascii=False) + "\r\n\r\n" + json.dumps(lines[1])
    (tmp_path / "wmt14_de-en_test.jsonl").write_bytes(raw.encode())
    examples, origin = Wmt14DeEn(data_dir=str(tmp_path)).load(2, 0)
    assert [(e.id, e.input, e.references) for e in examples] == [
        ("wmt14-0", text, (' ""Yes""\u00a0',)),
        ("wmt14-1", "b", ("c",)),
    ]
    assert (origin.kind, origin.location, origin.split) == ("local", str(tmp_path / "wmt14_de-en_test.jsonl"), "test")
    assert origin.revision is None and origin.commit is None


def test_gsm8k_reference_is_the_final_answer(tmp_path: Path) -> None:
    answers = ["2000 + 125 = <<2000+125=2125>>2,125\n#### 2,125", "no marks\n####  -3.5 "]
    write(tmp_path / "gsm8k_main_test.jsonl", [{"question": "q\u00a0?", "answer": answer} for answer in answers])
    examples, _ = Gsm8k(data_dir=str(tmp_path), shots=0).load(2, 0)
    assert [example.references for example in examples] == [("2,125",), ("-3.5",)]
    assert METRICS["accuracy"].sample("#### 2125.0", examples[0].references) == 100


def test_rows_without_an_answer_are_left_out_said_and_leave_ids_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = qa_rows(4)
    rows[1]["answers"] = []
    rows[2]["answers"] = ["", "x", " "]
    rows[3]["question"] = " "
    write(tmp_path / "web_questions_test.jsonl", rows)
    examples, origin = WebQuestions(data_dir=str(tmp_path), shots=0).load(4, 0)
    assert [(example.id, example.references) for example in examples] == [
        ("web_questions-0", ("person 0",)),
        ("web_questions-2", ("x",)),
    ]
    assert origin.rows == 2 and "left out 2 rows" in capsys.readouterr().err


def test_calibration_from_a_local_train_file_else_builtin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = qa_folder(tmp_path)
    task = WebQuestions(source="local", data_dir=folder, shots=0)
    examples, origin = task.calibration(3, 0)
    assert origin.kind == "builtin" and examples[0].id == "builtin-web_questions-calibration-0"
    assert "no web_questions_train.jsonl" in capsys.readouterr().err
    write(tmp_path / "web_questions_train.jsonl", qa_rows(3))
    examples, origin = task.calibration(3, 0)
    assert (origin.kind, origin.split, examples[0].id) == ("local", "train", "web_questions-train-0")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"question": "a", "answers": ["b"]}\n{"question": "a" "answers"}\n', r"line 2, column 18: not valid JSON"),
        (b'{"question": "a", "answers": ["b"]}\n\n["a"]\n', r"line 3, column 1: holds a list, want one JSON object"),
        (b'{"question": "\xff"}\n', r"line 1, column 15: not UTF-8"),
        (b'{"question": "a"}\n', r"line 1: no column 'answers': web_questions needs question, answers"),
        (b'{"question": "a", "answers": "b"}\n', r"line 1: column 'answers' holds str, want list"),
        (b'{"question": "a", "answers": [1]}\n', r"line 1: column 'answers' holds something other than texts"),
        (b'{"question": null, "answers": ["b"]}\n', r"line 1: column 'question' holds NoneType, want str"),
        (b"\n", r"holds no row with a text and an answer"),
    ],
)
def test_bad_file_names_file_line_and_column_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "web_questions_test.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        WebQuestions(data_dir=str(tmp_path), shots=0).load(4, 0)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_nested_column_and_missing_final_answer_are_named(tmp_path: Path) -> None:
    write(tmp_path / "wmt14_de-en_test.jsonl", [{"translation": {"de": "a"}}])
    with pytest.raises(UserError, match=r"line 1: no column 'translation\.en'"):
        Wmt14DeEn(data_dir=str(tmp_path)).load(1, 0)
    write(tmp_path / "gsm8k_main_test.jsonl", [{"question": "a", "answer": "12"}])
    with pytest.raises(UserError, match=r"line 1: column 'answer' does not end in ####"):
        Gsm8k(data_dir=str(tmp_path), shots=0).load(1, 0)


def test_data_dir_must_exist_and_local_must_have_the_file(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    for kind in ("auto", "local"):
        with pytest.raises(UserError, match=r"nowhere' is not a folder"):
            Wmt14DeEn(source=kind, data_dir=missing).load(1, 0)
    with pytest.raises(UserError, match=r"no wmt14_de-en_test\.jsonl in"):
        Wmt14DeEn(source="local", data_dir=str(tmp_path)).load(1, 0)
    with pytest.raises(UserError, match="needs data_dir"):
        Wmt14DeEn(source="local").load(1, 0)


# The hub


def test_closed_hub_falls_through_to_builtin_rows_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    for task in QUICK_FOUR:
        _, origin = task().load(2, 0)
        assert origin.kind == "builtin"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "hub not used (127.0.0.1:9:" in lines[0] and "built-in rows" in lines[0]


def test_the_hub_is_probed_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def refuse(address: Any, timeout: float) -> None:
        calls.append(address)
        raise OSError("refused")

    monkeypatch.setattr("socket.create_connection", refuse)
    for task in QUICK_FOUR:
        task().load(1, 0)
        task().calibration(1, 0)
    assert calls == [("127.0.0.1", 9)]


def test_offline_mode_makes_no_probe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: pytest.fail("connected"))
    _, origin = Wmt14DeEn().load(1, 0)
    assert origin.kind == "builtin" and "HF_HUB_OFFLINE is set" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["not a url", "http://[", "http://host:port"])
def test_a_malformed_endpoint_is_a_hub_that_does_not_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(UserError, match="is not a URL"):
        Wmt14DeEn(source="hub").load(1, 0)


def test_source_hub_insists() -> None:
    with pytest.raises(
        UserError, match=r"web_questions: stanfordnlp/web_questions cannot be had .*127\.0\.0\.1:9"
    ) as caught:
        WebQuestions(source="hub", shots=0).load(1, 0)
    assert "\n" not in str(caught.value)


def test_rows_of_the_hub_are_recorded_with_the_commit_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def stream(*request: Any) -> hub.HubRows:
        asked.append(request)
        return hub.HubRows(qa_rows(request[3]), COMMIT, None)

    monkeypatch.setattr(hub, "problem", lambda: None)
    monkeypatch.setattr(hub, "_stream", stream)
    task = WebQuestions(revision="v1", shots=0)
    examples, origin = task.load(3, 0)
    calibration, _ = task.calibration(2, 0)
    assert asked == [
        ("stanfordnlp/web_questions", "default", "test", 3, "v1"),
        ("stanfordnlp/web_questions", "default", "train", 2, "v1"),
    ]
    assert (examples[2].id, calibration[1].id) == ("web_questions-2", "web_questions-train-1")
    assert (origin.kind, origin.location) == ("hub", "stanfordnlp/web_questions default")
    assert (origin.split, origin.revision, origin.commit, origin.rows) == ("test", "v1", COMMIT, 3)


def test_a_bad_row_of_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch", lambda *_: hub.HubRows([*qa_rows(1), {"question": "a"}], None, None))
    with pytest.raises(UserError, match=r"web_questions default, test row 1: no column 'answers'"):
        WebQuestions(shots=0).load(2, 0)


def test_files_of_the_hub_cache_are_read_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    root = tmp_path / "hub" / "datasets--stanfordnlp--web_questions"
    files = root / "snapshots" / COMMIT / "data"
    files.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    for part, rows in enumerate((qa_rows(4)[:3], qa_rows(4)[3:])):
        write_table(pyarrow.Table.from_pylist(rows), files / f"test-0000{part}-of-00002.parquet")
    examples, origin = WebQuestions(source="hub", shots=0).load(4, 0)
    assert [example.input for example in examples] == [row["question"] for row in qa_rows(4)]
    assert (origin.kind, origin.commit, origin.revision) == ("hub", COMMIT, "main")
    assert origin.location.endswith("(local cache)") and "local cache" in capsys.readouterr().err
    with pytest.raises(UserError, match="not in its local cache"):
        WebQuestions(source="hub", shots=0, revision="another").load(1, 0)
    (files / "test-00000-of-00002.parquet").write_bytes(b"damaged")
    with pytest.raises(UserError, match="local cache of stanfordnlp/web_questions is damaged"):
        WebQuestions(source="hub", shots=0).load(1, 0)


def test_what_load_dataset_left_is_read_offline(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetInfo, SplitDict, SplitInfo
    from datasets.arrow_writer import ArrowWriter

    folder = tmp_path / "datasets" / "stanfordnlp___web_questions" / "default" / "0.0.0" / COMMIT
    folder.mkdir(parents=True)
    rows = Dataset.from_list(qa_rows(3))
    with ArrowWriter(path=str(folder / "web_questions-test.arrow"), features=rows.features) as writer:
        writer.write_table(rows.data.table)
    split = SplitInfo("test", num_examples=3, dataset_name="web_questions")
    splits = SplitDict({"test": split}, dataset_name="web_questions")
    info = DatasetInfo(features=rows.features, splits=splits, config_name="default", dataset_name="web_questions")
    info.write_to_directory(str(folder))
    examples, origin = WebQuestions(source="hub", shots=0).load(2, 0)
    assert [example.input for example in examples] == ["who is 0?", "who is 1?"]
    assert (origin.kind, origin.commit) == ("hub", COMMIT)
    with pytest.raises(UserError, match="not in its local cache"):  # a split that is not there
        WebQuestions(source="hub", shots=0).calibration(1, 0)


# Settings


def test_settings_are_checked_and_one_stop_string_is_a_list_of_one() -> None:
    assert Wmt14DeEn(stop="\n\n").stop == ("\n\n",)
    assert Wmt14DeEn(stop=["a", "b"]).stop == ("a", "b") and Wmt14DeEn().stop == ()
    with pytest.raises(UserError, match="did you mean 'local'"):
        Wmt14DeEn(source="locale")
    with pytest.raises(UserError, match="max_input_tokens 0"):
        Wmt14DeEn(max_input_tokens=0)
    with pytest.raises(UserError, match=r"lacks \{input\}"):
        Wmt14DeEn(template="Translate.")
    with pytest.raises(UserError, match="stop"):
        Wmt14DeEn(stop=[""])


def test_predictions() -> None:
    assert Wmt14DeEn().prediction(" One\nline \n") == "One line"
    assert CnnDailyMail().prediction(" One.\nTwo. \n") == "One.\nTwo."
    assert Gsm8k().prediction("3 * 6\n#### $1,018.") == "1018" and Gsm8k().prediction("none") == ""
    assert WebQuestions().prediction("\n Paris \nIt is big.") == "Paris"


def selected(*overrides: str) -> Any:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(overrides=["+source=builtin", "+data_dir=null", *overrides])


def test_yaml_shows_the_settings_of_the_class_and_any_selection_composes() -> None:
    every = selected("+task=all").tasks
    two = selected("+task=[web_questions,wmt14_de_en]")
    assert set(two) == {"tasks", "source", "data_dir"} and list(two.tasks) == ["web_questions", "wmt14_de_en"]
    assert set(every) == {task.name for task in TASKS}, "a set is in a group, and every group in all"
    for task in TASKS:
        built, plain = instantiate(every[task.name]), task(source="builtin")
        assert type(built) is task and vars(built) == vars(plain)
        settings = OmegaConf.to_container(every[task.name])
        assert isinstance(settings, dict) and set(settings) == {*vars(plain), "_target_"} - {"dataset"}
        assert set(built.metrics) <= set(METRICS)


def test_groups_have_the_sets_that_name_them() -> None:
    for group in ("translation", "summarization", "reasoning", "qa", "coding"):
        assert list(selected(f"+task={group}").tasks) == [
            name for name in selected("+task=all").tasks if next(t for t in TASKS if t.name == name).group == group
        ]
    four = [name for group in ("translation", "summarization", "reasoning", "qa") for name in members(group)]
    assert list(selected("+task=paper_four").tasks) == four


def members(group: str) -> list[str]:
    return [str(name) for name in selected(f"+task={group}").tasks]


def test_quick_four_has_no_shots_and_the_sets_have_the_papers() -> None:
    quick = selected("+task=quick_four").tasks
    assert list(quick) == [task.name for task in QUICK_FOUR] and {one.shots for one in quick.values()} == {0}
    assert selected("+task=quick_four", "tasks.gsm8k.shots=3").tasks.gsm8k.shots == 3
    shots = {name: node.shots for name, node in selected("+task=all").tasks.items() if node.shots}
    assert shots == {"gsm8k": 8, "mbpp": 3, "web_questions": 1, "nq_open": 1}


def test_every_yaml_opens_with_its_package_then_says_what_it_is() -> None:
    files = sorted((ROOT / "conf" / "task").glob("*.yaml"))
    assert len(files) >= 5
    for file in files:
        package, about = file.read_text().splitlines()[:2]
        assert package.startswith("# @package ") and about.startswith("# ") and about.endswith(".")


def test_tasks_import_neither_torch_nor_datasets() -> None:
    code = (
        "import sys, tasks.web_questions, tasks.gsm8k, tasks.mbpp, tasks.spec_bench, tasks.jsonl, harness.scoring\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'sacrebleu') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
