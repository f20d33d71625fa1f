"""Loggers copy a run; they never stop one, nor are they called while a clock runs."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder
from harness.errors import UserError
from harness.log import Logger, NullLogger
from harness.log import wandb as wandb_module
from harness.log.guard import Guard, bounded
from harness.log.tensorboard import TensorBoardLogger
from harness.log.wandb import WandbLogger, sweep_of, tags_of
from harness.metrics import rows
from harness.store import is_finished, read
from tests.rows import run_record, two_arms
from tests.runs import run_bench

RUN, SAMPLES = run_record(), two_arms()
ROWS = rows(RUN, SAMPLES)


class FakeWandb(SimpleNamespace):
    """The part of wandb that the logger touches; ``fail`` names the call that raises ``error``, or runs it."""

    def __init__(self, fail: str = "", error: BaseException | Callable[[], None] | None = None) -> None:
        def call(name: str) -> Callable[..., Any]:
            def record(*arguments: Any, **keywords: Any) -> Any:
                self.calls.append((name, arguments, keywords))
                if name == fail and error is not None:
                    if isinstance(error, BaseException):
                        raise error
                    error()
                return self.run

            return record

        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        methods = ("log", "finish", "log_artifact", "define_metric")
        self.run = SimpleNamespace(
            **{name: call(name) for name in methods}, summary=SimpleNamespace(update=call("update"))
        )
        super().__init__(
            init=call("init"),
            Settings=dict,
            Table=lambda columns, data, allow_mixed_types: (columns, data),
            Artifact=lambda name, kind, metadata: SimpleNamespace(add_file=call("add_file")),
            Image=call("image"),
        )

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, keywords) for called, arguments, keywords in self.calls if called == name]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeWandb:
    made = FakeWandb(*getattr(request, "param", ()))
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


@pytest.fixture(autouse=True)
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", "unused")  # else the logger sets it, for the rest of the process


def play(logger: Logger, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text("{}")
    (folder / "samples.jsonl").write_text("")
    logger.start(RUN, {"gamma": 4, "name": "mine"})
    for sample in SAMPLES:
        logger.sample(sample)
    logger.summary(ROWS)
    logger.files(folder, [])
    logger.close()
    logger.close()


def test_null_logger_takes_every_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(NullLogger(), tmp_path)
    assert capsys.readouterr() == ("", "")


def test_one_run_is_opened_and_ended_with_all_that_it_has(fake: FakeWandb, tmp_path: Path) -> None:
    logger = WandbLogger(project="p", entity="team", tags=["more"], live_s=0, dir=str(tmp_path))
    play(logger, tmp_path / "run")
    ((_, init),) = fake.of("init")
    assert (init["project"], init["entity"], init["mode"], init["id"]) == ("p", "team", "offline", "run")
    assert (init["group"], init["job_type"], init["reinit"]) == ("mine", "bench", "create_new")
    assert init["config"]["settings"] == {"gamma": 4, "name": "mine"} and init["config"]["run"]["model"] == "toy"
    assert init["tags"] == ["toy", "translation", "via_sd", "more"]
    assert init["settings"]["finish_timeout"] > 0 and init["settings"]["console"] == "off"
    assert fake.names()[-1] == "finish" and len(fake.of("finish")) == 1 and logger.ok()
    live = fake.of("log")[: len(SAMPLES)]
    assert [keywords["step"] for _, keywords in live] == [1, 2, 3, 4]
    assert live[-1][0][0]["live/translation/via_sd/decode_tokens_per_s"] == 8.0
    ((summary,), _) = fake.of("update")[0]
    assert summary["translation/via_sd/speedup_decode"] == summary["headline/speedup_decode"] == 2.0
    tables = fake.of("log")[len(SAMPLES)][0][0]
    assert len(tables["tables/samples"][1]) == len(SAMPLES) and len(tables["tables/metrics"][1]) == len(ROWS)
    assert {keywords["name"] for _, keywords in fake.of("add_file")} == {"run/run.json", "run/samples.jsonl"}


def test_texts_stay_at_home_when_they_are_asked_to(fake: FakeWandb, tmp_path: Path) -> None:
    play(WandbLogger(texts=False, dir=str(tmp_path)), tmp_path / "run")
    columns = fake.of("log")[0][0][0]["tables/samples"][0]
    assert "text" not in columns and "references" not in columns and "output_tokens" in columns
    assert {keywords["name"] for _, keywords in fake.of("add_file")} == {"run/run.json"}


def test_running_rates_are_sent_now_and_then(fake: FakeWandb, tmp_path: Path) -> None:
    play(WandbLogger(live_s=1000, dir=str(tmp_path)), tmp_path / "run")
    assert [keywords["step"] for _, keywords in fake.of("log")] == [len(SAMPLES)], "the tables alone"


def test_a_missing_or_broken_package_is_said_and_nothing_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger = WandbLogger(dir=str(tmp_path))
    play(logger, tmp_path / "run")
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "wandb stopped logging" in printed and not logger.ok()


def test_unknown_mode_is_refused(fake: FakeWandb) -> None:
    with pytest.raises(UserError, match="did you mean 'online'"):
        WandbLogger(mode="onlin")


def test_disabled_touches_nothing(fake: FakeWandb, tmp_path: Path) -> None:
    play(WandbLogger(mode="disabled", dir=str(tmp_path)), tmp_path / "run")
    assert fake.calls == []


@pytest.mark.parametrize("key", [True, False])
def test_online_without_a_key_is_offline(
    key: bool, fake: FakeWandb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_module, "has_key", lambda wandb: key)
    play(WandbLogger(mode="online", dir=str(tmp_path)), tmp_path / "run")
    assert fake.of("init")[0][1]["mode"] == ("online" if key else "offline")
    assert ("wandb sync" in capsys.readouterr().err) is not key


FAILURES = [OSError(28, "No space left on device"), KeyError("bug"), SystemExit(1), TimeoutError("slow")]


@pytest.mark.parametrize("call", ["init", "log", "update", "log_artifact", "finish"])
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_failure_of_any_kind_at_any_call_is_one_line(
    call: str, error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb(call, error)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = WandbLogger(live_s=0, dir=str(tmp_path))
    play(logger, tmp_path / "run")
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "job=relog run=run log=wandb" in printed and not logger.ok()
    assert len(fake.of(call)) == 1, "nothing is tried again"


@pytest.mark.parametrize("call", ["init", "log"])
def test_a_call_that_hangs_is_waited_for_once(
    call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb(call, lambda: time.sleep(30))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    begun = time.monotonic()
    play(WandbLogger(live_s=0, wait_s=0.05, dir=str(tmp_path)), tmp_path / "run")
    assert time.monotonic() - begun < 15
    assert "no answer in" in capsys.readouterr().err and fake.names()[-1] == call


def test_another_run_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeWandb("update", OSError("once"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = WandbLogger(dir=str(tmp_path))
    play(logger, tmp_path / "run")
    play(logger, tmp_path / "run")
    assert len(fake.of("init")) == 2


@pytest.mark.parametrize("call", ["log", "update", "finish"])
def test_a_run_of_the_bench_outlives_its_logger(
    call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(call, RuntimeError("gone")))
    folder = run_bench(
        tmp_path, {"autoregressive": partial(Autoregressive)}, log=WandbLogger(live_s=0, dir=str(tmp_path))
    )
    assert is_finished(folder) and len(read(folder).samples) == 2
    assert capsys.readouterr().err.count("wandb stopped logging (gone)") == 1


def test_nothing_is_called_while_a_prompt_is_decoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The logger's calls, and the threads that make them, are over before the next clock is read."""
    decoding: list[bool] = []
    seen: list[bool] = []
    fake = FakeWandb("log", lambda: seen.append(bool(decoding)))
    monkeypatch.setitem(sys.modules, "wandb", fake)

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Decoder, *arguments: Any) -> Any:
            decoding.append(True)
            try:
                return real(self, *arguments)
            finally:
                decoding.pop()

        return call

    for name in ("prefill", "decode"):
        monkeypatch.setattr(Decoder, name, watched(getattr(Decoder, name)))
    run_bench(tmp_path, {"autoregressive": partial(Autoregressive)}, log=WandbLogger(live_s=0, dir=str(tmp_path)))
    assert len(seen) == 3 and not any(seen)


def test_a_run_that_fails_ends_as_failed(fake: FakeWandb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(self: Decoder, *arguments: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(Decoder, "decode", broken)
    with pytest.raises(RuntimeError, match="broken"):
        run_bench(tmp_path, {"autoregressive": partial(Autoregressive)}, log=WandbLogger(dir=str(tmp_path)))
    assert fake.of("finish") == [((), {"exit_code": 1})]


def test_waiting_is_bounded_and_failures_are_passed_on() -> None:
    assert bounded(lambda: 3, 5) == 3
    with pytest.raises(TimeoutError, match=r"no answer in 0\.01 s"):
        bounded(lambda: time.sleep(20), 0.01)
    with pytest.raises(KeyError):
        bounded(lambda: dict[str, int]()["no"], 5)


def test_a_guard_does_not_swallow_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(action: Any, seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.log.guard.bounded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Guard("wandb", lambda: "")(lambda: None, 1)


def test_a_run_is_grouped_by_its_sweep() -> None:
    assert sweep_of({"name": "quick", "log": {"sweep": "quick-20260131T091500Z"}}) == "quick-20260131T091500Z"
    assert sweep_of({"name": "quick", "log": {"_target_": "harness.log.NullLogger"}}) == "quick"
    assert sweep_of({}) is None


def test_a_cell_that_was_not_logged_is_sent_to_the_group_of_its_sweep(fake: FakeWandb, tmp_path: Path) -> None:
    unlogged = {"name": "quick", "log": {"_target_": "harness.log.NullLogger"}}
    for group in (None, "mine"):
        logger = WandbLogger(dir=str(tmp_path), group=group, sweep="relog-20260131T091500Z")
        logger.start(replace(RUN, sweep="quick-0123456789ab"), unlogged)
        logger.close()
    assert [keywords["group"] for _, keywords in fake.of("init")] == ["quick-0123456789ab", "mine"]


def test_tags_are_as_long_as_they_may_be() -> None:
    assert max(map(len, tags_of(run_record(), ["x" * 100]))) == 64


def test_tensorboard_outlives_its_failures_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    logger = TensorBoardLogger(dir=str(tmp_path / "file"))  # no folder can be made in a file
    play(logger, tmp_path / "run")
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "tensorboard stopped logging" in printed and not logger.ok()
