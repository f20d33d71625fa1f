"""Runs of the bench, and of the command line in this process, that several tests share."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from harness import __main__ as command
from harness import compare
from harness.config import RunSettings
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Block
from harness.drafters.self_skip import SelfSkip
from harness.jobs import bench as bench_module
from harness.jobs.bench import bench
from harness.log import Logger, NullLogger
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.model.toy import toy_model
from harness.records import SampleRecord
from harness.sampling import Chooser, Sampling
from harness.store import read
from tasks.web_questions import WebQuestions
from tests.toys import shapes_unchecked

ORACLE = partial(SelfSkip, mask=[0, 1, 2, 3, 4, 5])
"""All six layers of the toy model: at temperature 0 every draft is what the full verifier would write."""


class Slip(Autoregressive):
    """Greedy, but writes the second-best token where ``last`` tokens are left to write. Says what it is told to say."""

    def __init__(self, tiers: Tiers, sampling: Sampling, model: Model, last: int = 2, lossless: bool = True) -> None:
        super().__init__(tiers, sampling)
        self.name, self.last, self.lossless = "slip", last, lossless

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        logits = self.tiers.full.forward(tokens, rows=1)[0].clone()
        if remaining == self.last:
            logits[logits.argmax()] = float("-inf")
        return Block(tokens=(int(logits.argmax()),))


FEW: dict[str, Any] = {"limit": 2, "max_new_tokens": 4, "pairing": "once"}


def qa(**settings: Any) -> WebQuestions:
    """Short prompts of different lengths."""
    short: dict[str, Any] = {"source": "builtin", "shots": 0}
    return WebQuestions(**short | settings)


@contextmanager
def unreported() -> Iterator[None]:
    """Few resamples, no report, unchecked shapes inside: for runs whose records are what is looked at."""
    with (
        patch.object(compare, "RESAMPLES", 50),
        patch.object(bench_module, "write_reports", lambda *arguments: []),
        shapes_unchecked(),
    ):
        yield


def run_bench(
    folder: Path,
    methods: Mapping[str, partial[Any]],
    tasks: Mapping[str, Any] | None = None,
    log: Logger | None = None,
    model: Callable[..., Model] = toy_model,
    **settings: Any,
) -> Path:
    """A run of two short prompts unless told otherwise; its folder."""
    chosen = RunSettings(results_dir=str(folder), **FEW | settings)
    asked: Mapping[str, Any] = {"qa": qa()} if tasks is None else tasks
    with unreported():
        return bench(chosen, model, methods, asked, log or NullLogger(), "name: run\n")


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """``python -m harness`` with the toy model and the built-in rows; of two values for a key the later counts."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it; this puts it back afterwards
    given = ("model=toy", "source=builtin", "pairing=once", *arguments)
    monkeypatch.setattr(sys, "argv", ["harness", *{key_of(item): item for item in given}.values()])
    command.main()


def key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def outcome(folder: Path) -> dict[tuple[str, str, str], tuple[Any, ...]]:
    """What a run wrote for each arm, task and example, seconds and ids of runs left out."""
    return {(one.arm, one.task, one.example_id): untimed(one) for one in read(folder).samples}


def untimed(sample: SampleRecord) -> tuple[Any, ...]:
    made = sample.generation
    return (
        *(made.token_ids, made.blocks, made.stop_reason, sample.text, sample.prediction, sample.scores),
        *(sample.references, sample.prompt_sha, sample.prompt_tokens, sample.input_cut),
    )


def files(folder: Path) -> list[str]:
    """Every file below ``folder``, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command is refused with, exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(monkeypatch, *arguments)
    said = capsys.readouterr()
    assert (caught.value.code, said.out) == (2, "")
    (line,) = [line for line in said.err.splitlines() if line.startswith("harness: error: ")]
    assert line == said.err.splitlines()[-1] and "Traceback" not in said.err
    return line.removeprefix("harness: error: ")
