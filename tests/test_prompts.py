"""Prompts: shots, the two forms, cuts, and further turns of a conversation. A chat tokenizer of bytes stands in."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from harness.errors import UserError
from harness.model.load import Model
from harness.model.tokenizer import ByteTokenizer
from harness.prompts import gone_on, make_prompt, make_prompts, series, shortened
from harness.records import Example, Shot
from harness.store import read
from tasks import base, source
from tasks.gsm8k import Gsm8k
from tasks.humaneval import HumanEval
from tasks.mbpp import Mbpp
from tasks.spec_bench import SpecBench
from tasks.squad_v2 import SquadV2
from tasks.web_questions import WebQuestions
from tests.runs import Slip, run_bench
from tests.test_sets import write


class ChatTokenizer(ByteTokenizer):
    """Marks whose turn it is: ``<u>`` and ``<a>``."""

    def __init__(self) -> None:
        super().__init__()
        self.has_chat = True

    def chat(self, user: str, earlier: Sequence[tuple[str, str]] = ()) -> list[int]:
        return self.encode("".join(f"<u>{said}<a>{answer}" for said, answer in earlier) + f"<u>{user}<a>")


class Speaking:
    """As much of a model as a prompt needs."""

    def __init__(self, chat: bool) -> None:
        self.tokenizer = ChatTokenizer() if chat else ByteTokenizer()


CHAT, BASE = cast(Model, Speaking(True)), cast(Model, Speaking(False))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source.notice.cache_clear()


def text_of(model: Model, task: Any, example: Example, **more: Any) -> str:
    return model.tokenizer.decode(make_prompt(model, "task", task, example, **more).ids)


def train_rows(folder: Path, count: int) -> Path:
    rows = [{"question": f"q{i}?", "answers": ["", f"a{i}"], "url": ""} for i in range(count)]
    write(folder / "web_questions_test.jsonl", {"question": "test?", "answers": ["yes"]})
    return write(folder / "web_questions_train.jsonl", *rows)


# Shots


def test_shots_are_drawn_from_the_train_rows_by_their_seed_alone(tmp_path: Path) -> None:
    path = train_rows(tmp_path, 30)
    make = lambda **more: WebQuestions(source="local", data_dir=str(tmp_path), **{"shots": 4} | more)  # noqa: E731
    first = make()
    for run_seed in (0, 9):
        _, origin = first.load(1, run_seed)
        assert origin.shots is not None and (origin.shots.location, origin.shots.rows) == (str(path), 4)
    assert first.shown() == make(max_input_tokens=7, template="{input}").shown()
    assert first.shown() != make(shots_seed=1).shown()
    assert len(set(first.shown())) == 4 and all(shot.answer == "a" + shot.input[1:-1] for shot in first.shown())
    assert {shot.input for shot in first.shown()} != {f"q{i}?" for i in range(4)}, "not merely the first rows"


def test_a_calibration_row_is_none_of_the_shots(tmp_path: Path) -> None:
    train_rows(tmp_path, 6)
    task = WebQuestions(source="local", data_dir=str(tmp_path), shots=2)
    examples, _ = task.calibration(4, 0)
    assert len(examples) == 4 and not {one.input for one in examples} & {shot.input for shot in task.shown()}


def test_never_fewer_shots_than_asked(tmp_path: Path) -> None:
    train_rows(tmp_path, 3)
    with pytest.raises(UserError, match=r"web_questions_train\.jsonl has 3 rows for 4 shots: lower tasks"):
        WebQuestions(source="local", data_dir=str(tmp_path), shots=4).load(1, 0)
    assert len(WebQuestions(source="local", data_dir=str(tmp_path), shots=3).load(1, 0)[0]) == 1
    with pytest.raises(UserError, match="shots -1: want 0 or more"):
        WebQuestions(shots=-1)


def test_without_a_train_split_shots_are_builtin_and_the_record_says_so(tmp_path: Path) -> None:
    row = {"prompt": "def f():\n", "canonical_solution": "    pass\n", "test": "", "entry_point": "f"}
    write(tmp_path / "openai_humaneval_test.jsonl", row)
    _, origin = HumanEval(source="local", data_dir=str(tmp_path), shots=2).load(1, 0)
    assert origin.kind == "local" and origin.shots is not None
    assert (origin.shots.kind, origin.shots.location) == ("builtin", "tasks/builtin/humaneval_calibration.jsonl")
    with pytest.raises(UserError, match="has 4 rows for 5 shots"):
        HumanEval(source="local", data_dir=str(tmp_path), shots=5).load(1, 0)


def test_only_the_beginning_of_a_train_split_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_rows(tmp_path, 30)
    monkeypatch.setattr(base, "POOL", 5)
    shown = WebQuestions(source="local", data_dir=str(tmp_path), shots=5).shown()
    assert {shot.input for shot in shown} == {f"q{i}?" for i in range(5)}


# The two forms


def test_a_chat_has_a_turn_for_each_shot_and_a_base_model_a_series() -> None:
    task = WebQuestions(source="builtin", shots=0, template="Say it.\n\n{input}")
    example = Example("1", "c?", ("d",))
    assert text_of(CHAT, task, example) == "<u>Say it.\n\nc?<a>"
    assert text_of(BASE, task, example) == "Say it.\n\nc?"
    task._shots = ((Shot("a?", "b"), Shot("{input}?", "{answer}")), None)
    assert text_of(CHAT, task, example) == ("<u>Say it.\n\na?<a>b<u>Say it.\n\n{input}?<a>{answer}<u>Say it.\n\nc?<a>")
    plain = "Question: a?\nAnswer: b\n\nQuestion: {input}?\nAnswer: {answer}\n\nQuestion: c?\nAnswer:"
    assert text_of(BASE, task, example) == plain
    assert make_prompt(BASE, "task", task, example).stop == ("\nQuestion:",)
    assert make_prompt(CHAT, "task", task, example).stop == ()


def test_what_ends_an_answer_in_plain_form() -> None:
    assert Mbpp(source="builtin").plain_stop == ("[DONE]",)
    assert "\ndef " in HumanEval(source="builtin").plain_stop
    assert SquadV2(source="builtin", stop="!").plain_stop == ("!", "\nQuestion:")
    assert WebQuestions(plain="{input} = {answer}").plain_stop == ("\n\n",)
    for plain in ("{answer}{input}", "{input}", "none"):
        with pytest.raises(UserError, match=r"plain .*: want \{input\} and, behind it, \{answer\}"):
            WebQuestions(plain=plain)


def test_a_base_model_goes_on_from_a_function_and_a_chat_is_asked_for_it() -> None:
    task = HumanEval(source="builtin")
    example = task.load(1, 0)[0][0]
    assert text_of(BASE, task, example) == example.input
    assert text_of(CHAT, task, example) == f"<u>{task.template.replace('{input}', example.input)}<a>"


def test_a_worked_answer_of_gsm8k_leads_to_its_number() -> None:
    task = Gsm8k(source="builtin")
    text = text_of(BASE, task, task.load(1, 0)[0][0])
    assert text.count("\n#### ") == 8 == len(task.shown()) and text.endswith("\nAnswer:") and "<<" not in text


def test_a_series_keeps_braces_of_texts() -> None:
    assert series("{input}->{answer};", [("{answer}", "{input}")], "{x}") == "{answer}->{input};\n\n{x}->"


# Cuts


@pytest.mark.parametrize("model", [CHAT, BASE])
def test_only_the_input_is_cut_and_the_cut_is_counted(model: Model) -> None:
    task = WebQuestions(source="builtin", shots=2, max_input_tokens=5, template="Instruction of many words: {input}")
    whole = make_prompt(model, "task", task, Example("1", "12345", ("x",)))
    cut = make_prompt(model, "task", task, Example("1", "1234567", ("x",)))
    assert cut.ids == whole.ids and (whole.input_cut, cut.input_cut) == (0, 2)
    assert all(shot.input in model.tokenizer.decode(cut.ids) for shot in task.shown())


def test_a_cut_of_a_passage_leaves_its_question() -> None:
    task = SquadV2(source="builtin", max_input_tokens=40)
    example = task.load(1, 0)[0][0]
    question = example.input.partition("\n")[0]
    assert question in text_of(CHAT, task, example) and make_prompt(CHAT, "task", task, example).input_cut > 0


def test_a_shortened_text_is_no_longer_than_asked_and_whole_characters() -> None:
    for most in range(1, 9):
        text, cut = shortened(ByteTokenizer(), "ä日x", most)
        assert "ä日x".startswith(text) and len(text.encode()) <= most and len(text.encode()) + cut == 6


# Conversations

TURNS = [
    Example("1", "one", ()),
    Example("1-turn2", "two", (), {"after": "1"}),
    Example("1-turn3", "three", (), {"after": "1-turn2"}),
]


def test_a_further_turn_goes_on_from_the_answers_before_it() -> None:
    task = SpecBench(source="builtin")
    prompts = make_prompts(CHAT, "talk", task, TURNS)
    assert [prompt.waits for prompt in prompts] == [0, 1, 2]
    assert CHAT.tokenizer.decode(prompts[2].ids) == "<u>one<a><u>two<a><u>three<a>"
    answers = {("talk", "1"): (prompts[0], "first")}
    assert gone_on(CHAT, prompts[0], answers, 9) is prompts[0], "the first turn waits for nothing"
    second = gone_on(CHAT, prompts[1], answers, 9)
    assert CHAT.tokenizer.decode(second.ids) == "<u>one<a>first<u>two<a>" and second.waits == 0
    answers["talk", "1-turn2"] = (second, "second")
    third = gone_on(CHAT, prompts[2], answers, 3)
    assert CHAT.tokenizer.decode(third.ids) == "<u>one<a>first<u>two<a>sec<u>three<a>"
    assert len(third.ids) <= len(prompts[2].ids) + 2 * 9, "as many positions as were kept"
    assert second.sha != prompts[1].sha and gone_on(CHAT, replace(prompts[1], name="other"), answers, 9).waits == 1


def test_a_conversation_in_plain_form() -> None:
    task = SpecBench(source="builtin")
    text = text_of(BASE, task, TURNS[1], turns=(("one", "first"),))
    assert text == "User: one\n\nAssistant: first\n\nUser: two\n\nAssistant:"


def test_all_arms_are_asked_the_second_turn_with_the_baselines_answer(tmp_path: Path) -> None:
    write(tmp_path / "spec_bench" / "question.jsonl", {"category": "x", "turns": ["Say b.", "Again."]})
    task = SpecBench(source="local", data_dir=str(tmp_path))
    arms = {"slip": partial(Slip, last=38)}
    samples = read(run_bench(tmp_path / "results", arms, {"spec_bench": task}, max_new_tokens=40)).samples
    by_turn = {(one.example_id, one.arm): one for one in samples}
    first, second = "spec_bench-x-0", "spec_bench-x-0-turn2"
    assert set(by_turn) == {(turn, arm) for turn in (first, second) for arm in ("autoregressive", "slip")}
    answer, other = (shortened(ByteTokenizer(), by_turn[first, arm].text, 40)[0] for arm in ("autoregressive", "slip"))
    assert other != answer != "", "or the test could not fail"
    asked = make_prompt(BASE, "spec_bench", task, task.load(1, 0)[0][1], (("Say b.", answer),))
    assert {one.prompt_sha for one in samples if one.example_id == second} == {asked.sha}
    assert all(one.scores == {"rougeLsum": None} and one.references == () for one in samples)
