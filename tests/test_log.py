"""Loggers copy a run; they never stop one."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.errors import UserError
from harness.log import Logger, NullLogger, WandbLogger
from harness.records import (
    SCHEMA,
    ArmRecord,
    BlockTrace,
    Generation,
    MetricRow,
    RunRecord,
    SampleRecord,
    StopReason,
)

RUN = RunRecord(
    run_id="run",
    schema=SCHEMA,
    created="2026-01-31T09:15:00Z",
    model="toy",
    temperature=0.0,
    seed=0,
    arms=(ArmRecord("autoregressive", "autoregressive", None, None, True),),
    data={},
    prompts_sha={},
    task_metrics={"qa": ("f1",)},
    git_commit=None,
    git_dirty=None,
    env={},
    status="running",
)
SAMPLE = SampleRecord(
    run_id="run",
    arm="autoregressive",
    task="qa",
    example_id="1",
    prompt_tokens=4,
    input_cut=0,
    prompt_sha="s",
    text="private text",
    prediction="private text",
    references=("private reference",),
    scores={"f1": 50.0, "exact_match": None},
    prefill_s=0.1,
    decode_s=0.2,
    peak_bytes=None,
    generation=Generation((1,), (BlockTrace(0, 0, 0, (), 0, 1, 0, 0, 0, 1),), StopReason.EOS),
)
ROWS = [
    MetricRow("run", "autoregressive", "toy", "qa", "f1", "F1", True, 50.0, None, None, 1, "ours"),
    MetricRow("run", "autoregressive", "toy", "qa", "reject_rate", "share", False, None, None, None, 0, "ours"),
]


class FakeError(Exception):
    pass


class FakeWandb(SimpleNamespace):
    """The part of wandb that the logger touches; ``fail`` names the call that raises."""

    def __init__(self, fail: str = "", error: type[Exception] = FakeError) -> None:
        def call(name: str) -> Callable[..., Any]:
            def record(*arguments: Any, **keywords: Any) -> Any:
                if name == fail:
                    raise error(f"{name}\nrefused")
                self.calls.append((name, arguments, keywords))
                return self.run

            return record

        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.run = SimpleNamespace(
            log=call("log"), finish=call("finish"), summary=SimpleNamespace(update=call("update"))
        )
        super().__init__(
            errors=SimpleNamespace(Error=FakeError),
            init=call("init"),
            Settings=dict,
            Table=lambda columns, data: (columns, data),
        )


def play(logger: Logger) -> None:
    logger.start(RUN, {"gamma": 4})
    logger.sample(SAMPLE)
    logger.summary(ROWS)
    logger.close()
    logger.close()


def test_null_logger_takes_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    play(NullLogger())
    assert capsys.readouterr() == ("", "")


def test_wandb_gets_numbers_and_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    play(WandbLogger(project="p", group="g"))
    assert [name for name, _, _ in fake.calls] == ["init", "log", "log", "update", "finish"]
    _, _, init = fake.calls[0]
    assert (init["project"], init["group"], init["mode"], init["name"]) == ("p", "g", "offline", "run")
    assert init["config"]["gamma"] == 4 and init["config"]["run"]["model"] == "toy"
    assert fake.calls[1][1][0] == {
        "qa/autoregressive/prefill_s": 0.1,
        "qa/autoregressive/decode_s": 0.2,
        "qa/autoregressive/output_tokens": 1,
        "qa/autoregressive/f1": 50.0,
    }
    assert fake.calls[3][1][0] == {"qa/autoregressive/f1": 50.0}
    assert "private" not in str(fake.calls)


def test_missing_package_is_named_before_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[wandb\]'"):
        WandbLogger()


def test_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    with pytest.raises(UserError, match="did you mean 'online'"):
        WandbLogger(mode="onlin")


def test_a_refused_start_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fail="init"))
    with pytest.raises(UserError, match=r"init refused.*log=none") as caught:
        WandbLogger(mode="online").start(RUN, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fail", ["log", "update", "finish"])
@pytest.mark.parametrize("error", [FakeError, BrokenPipeError])
def test_a_later_failure_ends_the_logging_not_the_run(
    fail: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb(fail, error)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    play(WandbLogger())
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "wandb stopped logging" in printed


def test_a_bug_in_the_logger_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("log", KeyError))
    with pytest.raises(KeyError):
        play(WandbLogger())
