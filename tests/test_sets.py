"""What each set makes of its rows: public excerpts, programs, rows without an answer, conversations, own rows."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.records import Example
from harness.scoring import METRICS
from harness.store import find_runs, read
from tasks import source
from tasks.base import Task
from tasks.cnn_dailymail import CnnDailyMail
from tasks.code import Coding
from tasks.gsm8k import Gsm8k
from tasks.humaneval import HumanEval
from tasks.jsonl import Jsonl
from tasks.mbpp import Mbpp
from tasks.nq_open import NqOpen
from tasks.spec_bench import SpecBench
from tasks.speed_bench import PARTS, SpeedBench
from tasks.squad_v2 import SquadV2
from tasks.trivia_qa import TriviaQa
from tasks.web_questions import WebQuestions
from tasks.wmt14 import Wmt14DeEn, Wmt14EnDe
from tasks.xsum import XSum
from tests.runs import main, unreported

ROOT = Path(__file__).parents[1]
EXCERPTS = ROOT.parent / "shared" / "data"
HAS_EXCERPTS = EXCERPTS.is_dir()
excerpts = pytest.mark.skipif(not HAS_EXCERPTS, reason=f"no excerpts of the public sets in {EXCERPTS}")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source.notice.cache_clear()


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="")
    return path


# The excerpts


@excerpts
@pytest.mark.parametrize(
    ("task", "rows"),
    [
        *((Wmt14DeEn, 200), (Wmt14EnDe, 200), (CnnDailyMail, 200), (Gsm8k, 200), (WebQuestions, 200), (NqOpen, 200)),
        *((TriviaQa, 200), (Mbpp, 200), (HumanEval, 164)),
    ],
)
def test_every_row_of_an_excerpt_is_an_example_with_its_text_untouched(task: type[Task], rows: int) -> None:
    built = task(source="local", data_dir=str(EXCERPTS), shots=0)
    examples, origin = built.load(10**6, 0)
    assert len(examples) == origin.rows == rows and origin.kind == "local"
    raw = Path(origin.location).read_bytes().decode().split("\n")[:-1]
    for example, line in zip(examples, raw, strict=True):
        strings = set(every_string(json.loads(line)))
        assert set(example.references) <= {
            part for text in strings for part in (text, text.rpartition("####")[2].strip())
        }
        assert example.input in strings or isinstance(built, Mbpp)


def every_string(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in every_string(one)]


@excerpts
def test_shots_of_the_excerpts_come_from_the_train_file() -> None:
    task = Gsm8k(source="local", data_dir=str(EXCERPTS))
    _, origin = task.load(2, 0)
    assert origin.shots is not None and (origin.shots.kind, origin.shots.split, origin.shots.rows) == (
        "local",
        "train",
        8,
    )
    assert all("<<" not in shot.answer and "\n#### " in shot.answer for shot in task.shown())


@excerpts
@pytest.mark.slow
@pytest.mark.parametrize(("task", "count"), [(Mbpp, 200), (HumanEval, 164)])
def test_reference_solutions_of_the_excerpts_pass_whole_and_as_a_continuation(task: type[Coding], count: int) -> None:
    """200 of 200 and 164 of 164, however an answer shows them. Trusted code, run in one process; about 20 s in all."""
    built = task(source="local", data_dir=str(EXCERPTS), shots=0)
    examples, _ = built.load(10**6, 0)
    programs = [(built.program(one, text), one) for one in examples for text in answers(built, one)]
    assert len(examples) == count and failing(programs) == []


def answers(task: Coding, example: Example) -> list[str]:
    """The reference solution as models show it: bare, in a fence with talk around, and going on behind its end."""
    solution = example.references[0]
    whole = example.input + solution if isinstance(task, HumanEval) else solution
    fenced = f"Sure!\n\n```python\n{whole}\n```\n\nFor example:\n\n```\nprint(1)\n```\n"
    return [solution, whole, fenced] + ([f"{solution}\n\nprint(undefined)\n"] if isinstance(task, HumanEval) else [])


def failing(programs: list[tuple[str, Example]]) -> list[str]:
    """Ids of the programs that fail their tests, run together in a process of their own."""
    script = (
        "import io, json, sys, contextlib\n"
        "for name, program, tests in json.load(sys.stdin):\n"
        "    try:\n"
        "        with contextlib.redirect_stdout(io.StringIO()):\n"
        "            exec(program + '\\n' + tests, {'__name__': 'candidate'})\n"
        "    except BaseException as error:\n"
        "        print(name, repr(error))\n"
    )
    work = json.dumps([(one.id, one.meta["setup"] + "\n" + program, one.meta["tests"]) for program, one in programs])
    done = subprocess.run([sys.executable, "-c", script], input=work, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@excerpts
def test_spec_bench_has_all_categories_in_turn_and_its_second_turns() -> None:
    task = SpecBench(source="local", data_dir=str(EXCERPTS))
    examples, origin = task.load(480, 0)
    assert (origin.rows, len(examples)) == (480, 560)
    counts = Counter(example.meta["category"] for example in examples)
    assert len(counts) == 13 and counts["rag"] == counts["qa"] == 80 and counts["writing"] == 20
    assert all(not one.references for one in examples if one.meta["category"] == "qa")
    first, _ = task.load(13, 0)
    assert len({example.meta["category"] for example in first}) == 13 and first == [
        one for one in examples if one in first
    ]
    by_id = {example.id: example for example in examples}
    seconds = [example for example in examples if "after" in example.meta]
    assert len(seconds) == 80
    for second in seconds:
        before = by_id[second.meta["after"]]
        assert second.id == f"{before.id}-turn2" and examples.index(before) == examples.index(second) - 1
    references = {len(one.references) for one in examples if one.meta["category"] == "extraction"}
    assert references == {0, 1}, "an empty reference is none"


# Programs


@pytest.mark.parametrize("task", [Mbpp, HumanEval])
def test_builtin_programs_pass_and_a_wrong_one_fails(task: type[Coding]) -> None:
    built = task(source="builtin")
    examples = built.load(100, 0)[0] + built.calibration(100, 0)[0]
    assert failing([(built.program(one, text), one) for one in examples for text in answers(built, one)]) == []
    wrong = [(built.program(one, f"def {one.meta['entry_point']}(*a): return 'wrong'"), one) for one in examples]
    assert len(failing(wrong)) == len(examples)


def test_a_program_keeps_what_the_prompt_defines_and_ends_with_its_function() -> None:
    prompt = 'def helper(x):\n    return 2 * x\n\ndef twice(x):\n    """Two times."""\n'
    example = Example("1", prompt, ("    return helper(x)\n",), {"entry_point": "twice", "tests": "", "setup": ""})
    task = HumanEval(source="builtin")
    assert task.program(example, "    return helper(x)\n\nprint(9)") == f"{prompt}    return helper(x)\n"
    assert task.program(example, " return helper(x)\n```\nbye") == f"{prompt} return helper(x)"
    answer = "I use `helper`.\n```py\nx = 1\n```\n```python\ndef twice(x):\n    return helper(x)\n```\nDone."
    assert task.program(example, answer) == f"{prompt}\ndef twice(x):\n    return helper(x)\n"
    assert task.program(example, "```python\ndef twice(x):\n    return 2") == f"{prompt}\ndef twice(x):\n    return 2"
    assert task.program(example, "") == prompt


def test_mbpp_finds_the_function_that_its_tests_call(tmp_path: Path) -> None:
    row = {
        "text": "Do it.", "code": "def part(x):\r\n    return x\r\ndef whole(x):\r\n\treturn part(x)",
        "test_list": ["assert set(whole([1])) == {1}"], "test_setup_code": "import math",
    }  # fmt: skip
    write(tmp_path / "mbpp_full_test.jsonl", row)
    task = Mbpp(source="local", data_dir=str(tmp_path), shots=0)
    (example,), _ = task.load(1, 0)
    assert example.meta == {"tests": row["test_list"][0], "entry_point": "whole", "setup": "import math"}
    assert example.references == (row["code"],) and "\r" not in task.answer(row)
    answer = "```\npip install x\n```\n```python\ndef whole(x): return x\n```"
    assert task.program(example, answer) == "def whole(x): return x\n"


# No answer


def test_squad_rows_without_an_answer_score_by_the_official_rule(tmp_path: Path) -> None:
    answered = {
        "question": " Who?",
        "context": "Ada.",
        "answers": {"text": ["Ada", "Ada", "Ada."], "answer_start": [0]},
    }
    open_one = {"question": "When?", "context": "Ada.", "answers": {"text": [], "answer_start": []}}
    write(tmp_path / "squad_v2_validation.jsonl", answered, open_one)
    task = SquadV2(source="local", data_dir=str(tmp_path))
    examples, origin = task.load(2, 0)
    assert [one.references for one in examples] == [("Ada", "Ada."), ("",)] and origin.rows == 2
    assert examples[0].input == "Who?\n\nPassage: Ada."
    for name in task.metrics:
        scores = {
            text: [METRICS[name].sample(task.prediction(text), one.references) for one in examples]
            for text in ("Ada", "Unanswerable.\nThe passage is short.", "", "in 1815")
        }
        none = [0.0, 100.0]
        assert scores == {
            "Ada": [100.0, 0.0],
            "Unanswerable.\nThe passage is short.": none,
            "": none,
            "in 1815": [0.0] * 2,
        }
    assert [task.answer(row) for row in (answered, open_one)] == ["Ada", "unanswerable"]


# Mixed sets


def test_a_conversation_is_an_example_a_turn_and_a_row_without_text_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"category": "a", "turns": ["one\u00a0", "two", "three"], "reference": ["x", ""]},
        {"category": "a", "turns": ["later"], "reference": [["p", "q"], "r"]},
        {"category": "b", "turns": [" "]},
        {"category": "c", "turns": ["c"]},
    ]
    write(tmp_path / "spec_bench" / "question.jsonl", *rows)
    examples, origin = SpecBench(source="local", data_dir=str(tmp_path)).load(4, 0)
    assert [(one.id, one.input, one.references, one.meta.get("after")) for one in examples] == [
        ("spec_bench-a-0", "one\u00a0", ("x",), None),
        ("spec_bench-a-0-turn2", "two", (), "spec_bench-a-0"),
        ("spec_bench-a-0-turn3", "three", (), "spec_bench-a-0-turn2"),
        ("spec_bench-c-3", "c", (), None),
        ("spec_bench-a-1", "later", ("p", "q", "r"), None),
    ]
    assert origin.rows == 3 and "left out 1 rows" in capsys.readouterr().err
    chosen, _ = SpecBench(source="local", data_dir=str(tmp_path), categories=["c"]).load(4, 0)
    assert [one.id for one in chosen] == ["spec_bench-c-3"], "the same id whatever else is chosen"
    with pytest.raises(UserError, match="unknown spec_bench category 'd'"):
        SpecBench(source="local", data_dir=str(tmp_path), categories=["d"]).load(4, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": ["a"]}, "line 1: no column 'category'"),
        ({"category": "a", "turns": "b"}, "line 1: column 'turns' holds str, want list"),
        ({"category": "a", "turns": []}, "line 1: column 'turns' is empty"),
        ({"category": "a", "turns": ["b"], "reference": "c"}, "line 1: column 'reference' holds str, want list"),
        ({"category": "a", "turns": ["b"], "reference": [1]}, "line 1: column 'reference' holds something other"),
    ],
)
def test_a_bad_row_of_a_mixed_set_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "spec_bench" / "question.jsonl", row)
    with pytest.raises(UserError, match=message):
        SpecBench(source="local", data_dir=str(tmp_path)).load(1, 0)


def test_rows_of_speed_bench_that_only_have_a_mark_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = {"category": "qa", "turns": [SpeedBench.hidden]}
    path = write(tmp_path / "speed_bench_throughput_2k_test.jsonl", mark, {"category": "qa", "turns": ["public"]})
    task = SpeedBench(part="throughput_2k", source="local", data_dir=str(tmp_path))
    examples, origin = task.load(5, 0)
    assert [one.id for one in examples] == ["speed_bench-throughput_2k-qa-1"] and origin.rows == 1
    assert "left out 1 rows" in capsys.readouterr().err
    write(path, mark)
    with pytest.raises(UserError, match=r"no row whose text is public: fill it in with NVIDIA's prepare_data\.py"):
        task.load(5, 0)
    with pytest.raises(UserError, match="unknown part of speed_bench 'throughput_3k'"):
        SpeedBench(part="throughput_3k")
    with pytest.raises(UserError, match="shots 1: a conversation has none"):
        SpeedBench(shots=1)
    names = [(one.dataset.path, one.dataset.config) for one in map(lambda part: SpeedBench(part=part), PARTS)]
    assert len(PARTS) == 6 and names == [("nvidia/SPEED-Bench", part) for part in PARTS]


def test_a_set_that_is_on_no_hub_says_which_file_it_needs() -> None:
    with pytest.raises(UserError, match=r"spec_bench is not on the Hugging Face hub: .*spec_bench/question\.jsonl"):
        SpecBench(source="hub").load(1, 0)
    assert SpecBench().load(1, 0)[1].kind == "builtin"


# Own rows


def test_own_rows_need_no_python(tmp_path: Path) -> None:
    rows = [{"ask": {"text": "Quelle heure?\u2028"}, "right": ["midi", ""]}, {"ask": {"text": "Où?"}, "right": "ici"}]
    path = write(tmp_path / "mine.jsonl", *rows)
    task = Jsonl(
        path=str(path), input="ask.text", reference="right", metric=["exact_match", "f1"], template="Q: {input}"
    )
    examples, origin = task.load(2, 0)
    assert [(one.id, one.input, one.references) for one in examples] == [
        ("mine-0", "Quelle heure?\u2028", ("midi",)),
        ("mine-1", "Où?", ("ici",)),
    ]
    assert task.metrics == ("exact_match", "f1") and (origin.kind, origin.location) == ("local", str(path))
    assert task.prediction(" a\nb ") == "a\nb" and Jsonl(path="x", first_line=True).prediction(" a\nb ") == "a"
    with pytest.raises(UserError, match="shots and calibration need other rows: set train_path=FILE"):
        task.calibration(1, 0)
    train = write(tmp_path / "train.jsonl", {"ask": {"text": "Qui?"}, "right": "moi"})
    with_shot = Jsonl(path=str(path), train_path=str(train), input="ask.text", reference="right", shots=1)
    assert [(shot.input, shot.answer) for shot in with_shot.shown()] == [("Qui?", "moi")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metric": "f2"}, "unknown metric 'f2': did you mean 'f1'"),
        ({"metric": []}, r"metric \[\]: want at least one of accuracy"),
        ({"metric": "pass@1"}, "metric pass@1: it runs programs"),
        ({"path": "nowhere.jsonl"}, r"nowhere\.jsonl cannot be read"),
        ({"input": "askk"}, r"line 1: no column 'askk': jsonl needs askk, right"),
        ({"reference": "ask"}, r"line 1: column 'ask' holds int, want str \| list"),
    ],
)
def test_a_mistake_in_own_rows_is_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", {"text": "a", "right": "b", "ask": 1})
    with pytest.raises(UserError, match=message):
        Jsonl(**{"path": str(path), "input": "text", "reference": "right"} | settings).load(1, 0)


OWN = """\
# @package tasks.capitals
# Capitals of countries.
_target_: tasks.jsonl.Jsonl
path: capitals.jsonl
input: country
reference: capital
metric: [exact_match, f1]
template: "What is the capital of {input}?"
first_line: true
"""


@pytest.mark.parametrize("own_yaml", [True, False])
def test_a_set_of_ones_own_runs_from_a_yaml_or_from_the_command_line(
    own_yaml: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "capitals.jsonl", {"country": "France", "capital": ["Paris"]})
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "capitals.yaml").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    ways = {
        True: ("--config-dir", "conf", "task=capitals"),
        False: ("task=jsonl", "tasks.jsonl.path=capitals.jsonl", "tasks.jsonl.input=country",
                "tasks.jsonl.reference=capital", "tasks.jsonl.metric=[exact_match,f1]"),
    }  # fmt: skip
    with unreported():
        main(monkeypatch, *ways[own_yaml], "method=speculative", "limit=1", "max_new_tokens=2")
    (folder,) = find_runs(tmp_path / "results")
    run, samples, *_ = read(folder)
    name = "capitals" if own_yaml else "jsonl"
    assert run.task_metrics == {name: ("exact_match", "f1")} and run.data[name].location == "capitals.jsonl"
    asked = "What is the capital of France?" if own_yaml else "France"
    assert {one.prompt_tokens for one in samples} == {len(asked)} and len(samples) == 2


# Texts that loaders must survive

PIECES = [
    "\r\n",
    "\u00a0",
    '""',
    "“ja”",
    "\u2028",
    "\t",
    "  ",
    "日本語",
    "Ω🐘",
    "\u0301",
    "{input}",
    "{answer}",
    "```",
    "####",
    "\\n",
    "x",
]


@pytest.mark.parametrize("seed", range(5))
def test_any_text_reaches_the_example_as_it_was(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)

    def text() -> str:
        return "w" + "".join(draw.choices(PIECES, k=draw.choice([1, 8, 1500]))) + "w"

    texts = [(text(), text()) for _ in range(6)]
    made: list[tuple[Task, str, list[Any]]] = [
        (XSum(shots=0), "xsum_test", [{"document": a, "summary": b} for a, b in texts]),
        (NqOpen(shots=0), "nq_open_validation", [{"question": a, "answer": ["", b]} for a, b in texts]),
        (Wmt14EnDe(shots=0), "wmt14_de-en_test", [{"translation": {"en": a, "de": b}} for a, b in texts]),
        (
            TriviaQa(shots=0),
            "trivia_qa_rc.nocontext_validation",
            [{"question": a, "answer": {"value": b, "aliases": [b, " "]}} for a, b in texts],
        ),
    ]
    for task, name, rows in made:
        write(tmp_path / f"{name}.jsonl", *rows)
        task.source, task.data_dir = "local", str(tmp_path)
        examples, _ = task.load(6, 0)
        assert [(one.input, one.references) for one in examples] == [(a, (b,)) for a, b in texts]
        for one in examples:  # scorers bear them too, an empty output as well
            for metric in task.metrics:
                assert METRICS[metric].sample(task.prediction(""), one.references) == 0.0
                assert METRICS[metric].sample(task.prediction(one.references[0]), one.references) is not None


def test_a_malformed_line_names_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "nq_open_validation.jsonl"
    path.write_bytes(b'{"question": "a", "answer": ["b"]}\r\n\r\n{"question": "a", "answer": ["b"}\r\n')
    with pytest.raises(UserError, match=r"nq_open_validation\.jsonl, line 3, column 33: not valid JSON"):
        NqOpen(source="local", data_dir=str(tmp_path), shots=0).load(3, 0)
