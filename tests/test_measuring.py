"""The measuring loop under each pairing: who decodes when, what is reused, skipped and learnt, who is contended."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from harness import baselines, measuring
from harness.compare import BASELINE
from harness.config import RunSettings
from harness.decode.speculative import Speculative
from harness.drafters.retrieval import Retrieval
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.jobs.bench import build_arms
from harness.measuring import measure, weights_sha
from harness.model.toy import toy_model
from harness.occupancy import Place, locked, shared_folder, usable_cores
from harness.pairing import key_of, visits
from harness.prompts import make_prompts
from harness.records import SampleRecord
from harness.store import read
from tests.runs import outcome, qa, run_bench

ARMS: dict[str, partial[Any]] = {
    "one": partial(Speculative, gamma=3, drafter=SelfSkip),
    "two": partial(Speculative, gamma=2, drafter=SelfSkip),
}
NAMES = (BASELINE, *ARMS)


@pytest.mark.parametrize("pairing", ["once", "abba1", "abba3"])
def test_visits_are_made_in_the_order_of_the_pairing(pairing: str, tmp_path: Path) -> None:
    samples = read(run_bench(tmp_path, ARMS, pairing=pairing)).samples
    wanted = [visit for index in range(2) for visit in visits(pairing, NAMES, index)]
    assert [(one.arm, one.repeat, one.paired_with) for one in samples] == [
        (visit.arm, visit.repeat, visit.paired_with) for visit in wanted
    ]
    assert len({(one.arm, one.example_id, one.generation.token_ids) for one in samples}) == 6, "visits write the same"


def test_outputs_are_scored_again_once(tmp_path: Path) -> None:
    data = read(run_bench(tmp_path, ARMS, pairing="abba1"))
    assert (data.run.pairing, len(data.samples), len(data.fidelity)) == ("abba1", 16, 6)


def test_a_second_visit_knows_nothing_of_the_first(tmp_path: Path) -> None:
    """A drafter that remembers finished prompts would find the very output that it is asked to draft."""
    arms = {"lookup": partial(Speculative, gamma=3, drafter=partial(Retrieval, own_output="run"))}
    data = read(run_bench(tmp_path / "abba", arms, pairing="abba1", max_new_tokens=12))
    visited = [[one for one in data.samples if (one.arm, one.repeat) == ("lookup", repeat)] for repeat in (0, 1)]
    assert [one.generation.blocks for one in visited[0]] == [one.generation.blocks for one in visited[1]]
    once = outcome(run_bench(tmp_path / "once", arms, max_new_tokens=12))
    assert {one.example_id: one.generation.blocks for one in visited[0]} == {
        example: made[1] for (arm, _, example), made in once.items() if arm == "lookup"
    }


def test_a_shared_baseline_is_measured_once_and_reused(tmp_path: Path) -> None:
    first = read(run_bench(tmp_path, {"one": ARMS["one"]}, pairing="shared"))
    second = read(run_bench(tmp_path, {"two": ARMS["two"]}, pairing="shared"))
    bases = [[one for one in data.samples if one.arm == BASELINE] for data in (first, second)]
    assert [one.measured_in for one in bases[0]] == [None, None]
    assert [one.measured_in for one in bases[1]] == [first.run.run_id] * 2
    assert [replace(one, run_id="", measured_in=None) for one in bases[0]] == [
        replace(one, run_id="", measured_in=None) for one in bases[1]
    ]
    assert len(list((tmp_path / "baselines").glob("*.jsonl"))) == 1
    longer = read(run_bench(tmp_path, {"two": ARMS["two"]}, pairing="shared", max_new_tokens=5))
    other = read(run_bench(tmp_path, {}, pairing="shared", model=partial(toy_model, seed=1)))
    assert all(one.measured_in is None for data in (longer, other) for one in data.samples)
    assert weights_sha(toy_model(seed=0).transformer) != weights_sha(toy_model(seed=1).transformer)


def test_a_baseline_that_cannot_be_stored_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where a folder belongs")
    with pytest.raises(UserError, match=r"cannot write .*what was measured is kept"):
        baselines.store(tmp_path / "file" / "qa.jsonl", [])


def test_what_is_done_is_not_decoded_again(tmp_path: Path) -> None:
    settings = RunSettings(results_dir=str(tmp_path), limit=2, max_new_tokens=4)
    model = toy_model()
    task = qa()
    prompts = make_prompts(model, "qa", task, task.load(2, 0)[0])
    decoders = build_arms(settings, model, ARMS, prompts)

    def run(done: list[SampleRecord]) -> list[SampleRecord]:
        screen = Console(quiet=True)
        found = measure(settings, model, decoders, list(prompts), "run", screen, {key_of(one): one for one in done})
        return [one for one in found if isinstance(one, SampleRecord)]

    whole = run([])
    rest = run(whole[:5])
    assert [key_of(one) for one in rest] == [key_of(one) for one in whole[5:]]
    assert run(whole) == []


def test_a_timing_with_company_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody comes while the third sample is timed, and stays for the fourth."""
    timed: Callable[..., Any] = measuring.timed
    places: list[Place] = []
    count = 0

    def disturbed(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            folder = shared_folder()
            places.append(Place(folder, usable_cores()))
            with locked(folder):
                places[0].announce()
        found = timed(*arguments)
        if count == 4:
            places[0].leave()
        return found

    monkeypatch.setattr(measuring, "timed", disturbed)
    samples = read(run_bench(tmp_path, ARMS)).samples
    assert [one.contended is not None for one in samples] == [False, False, True, True, False, False]


def test_pinned_cores_bring_as_many_threads(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    try:
        before = usable_cores()
        folder = run_bench(tmp_path, {}, cores=[before[0]], limit=1)
        assert (usable_cores(), torch.get_num_threads()) == (before, 2)
    finally:
        torch.set_num_threads(1)
    assert read(folder).run.env["cores"] == "1" == read(folder).run.env["threads"]
    assert json.loads((folder / "run.json").read_text())["pairing"] == "once"
