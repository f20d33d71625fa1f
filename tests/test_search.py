"""The search job: the masks and costs it writes, what they are good for, and what it refuses."""

import csv
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import claims
from harness.dimr import calibration_text, evaluate
from harness.errors import UserError
from harness.help import CONF
from harness.jobs import search as search_module
from harness.jobs.search import search
from harness.model import toy
from harness.model.load import Model
from harness.model.slim import LayerMask, read_mask
from harness.model.toy import toy_model
from harness.proposals import Evaluation
from harness.records import DataSource, Example
from harness.store import find_runs, read
from tasks.web_questions import WebQuestions
from tests.runs import files, main, refused, unreported
from tests.toys import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

DEPTH = 6


class CalibrationOnly(WebQuestions):
    """A task whose test rows nobody may read."""

    def load(self, limit: int, seed: int) -> tuple[list[Example], DataSource]:
        raise AssertionError("a search reads no test row")


SETTINGS: dict[str, Any] = {
    **{"seed": 0, "skip_ratio": 0.3, "evaluations": 5, "prompts": 2, "new_tokens": 7, "block": 3},
    **{"alpha": 0.0, "beta": 1.0, "exchange": 0.5, "units": "layers", "cache": "shared"},
    **{"bayes_every": None, "patience": None},
}


def search_toy(folder: Path, **changed: Any) -> Path:
    tasks = {"qa": CalibrationOnly(source="builtin", shots=0)}
    return search(**{"model": toy_model, "tasks": tasks, "results_dir": str(folder), **SETTINGS, **changed})


def embedded_slug(**arguments: Any) -> Model:
    return replace(toy_model(**arguments), slug="embedded")


def kept(folder: Path) -> list[str]:
    """What a search has on disk but for its claim."""
    return [name for name in files(folder) if not name.startswith("claims/")]


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.with_suffix(".csv").read_text().splitlines()))


def test_the_job_writes_all_masks_and_the_best(tmp_path: Path) -> None:
    path = search_toy(tmp_path)
    assert kept(tmp_path) == ["masks/toy_skip30.csv", "masks/toy_skip30.json"]
    rows, best = rows_of(path), json.loads(path.read_text())
    assert list(rows[0]) == ["kept", "cost", "agreement", "positions", "seconds", "proposal"]
    assert len({row["kept"] for row in rows}) == len(rows) == best["evaluations"] == 5
    (cheapest,) = [row for row in rows if float(row["cost"]) == min(float(other["cost"]) for other in rows)]
    assert " ".join(map(str, best["kept_layers"])) == cheapest["kept"]
    assert (best["cost"], best["agreement"]) == (float(cheapest["cost"]), float(cheapest["agreement"]))
    assert len(rows) > sum(float(row["cost"]) == best["cost"] for row in rows), "the masks differ"
    assert {int(row["positions"]) for row in rows} == {best["positions"]} == {2 * 7}
    assert (best["model"], best["layers"], best["cache_mode"], best["dtype"]) == ("toy", 6, "shared", "float64")
    given = {key: value for key, value in SETTINGS.items() if key not in ("prompts", "cache", "evaluations")}
    assert {key: best[key] for key in given} == given
    assert best["search_s"] == pytest.approx(sum(float(row["seconds"]) for row in rows), abs=0.01)
    assert best["calibration_s"] > 0 and rows.index(cheapest) + 1 == best["best_at"]
    assert best["ended_by"] == "evaluations"
    assert best["kept_share"] == pytest.approx(len(best["kept_layers"]) / DEPTH)
    _, source = WebQuestions(source="builtin", shots=0).calibration(2, 0)
    assert best["calibration"]["qa"] == {
        "source": "builtin: tasks/builtin/web_questions_calibration.jsonl",
        "rows": 2,
        "sha256": source.sha256,
    }


def test_a_search_that_runs_out_of_patience_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = json.loads(search_toy(tmp_path, patience=1).read_text())
    assert best["evaluations"] < 5 and best["ended_by"] == "patience"
    said = capsys.readouterr().err
    assert f"best of {best['evaluations']} masks: " in said and "ended by patience; wrote " in said


def test_the_job_gives_the_same_masks_again_and_others_for_another_seed(tmp_path: Path) -> None:
    def masks(name: str, seed: int) -> list[dict[str, str]]:
        return [{**row, "seconds": ""} for row in rows_of(search_toy(tmp_path, mask_name=name, seed=seed))]

    assert masks("one", 0) == masks("two", 0)
    assert masks("three", 1) != masks("four", 0)


def test_a_mask_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = search_toy(tmp_path, mask_name="one")
    before = path.read_bytes(), path.with_suffix(".csv").read_bytes()
    with pytest.raises(UserError, match=r"one\.json exists: choose another job\.mask_name=NAME, or replace it"):
        search_toy(tmp_path, mask_name="one", seed=1)
    assert before == (path.read_bytes(), path.with_suffix(".csv").read_bytes())
    assert search_toy(tmp_path, mask_name="one", seed=1, overwrite=True).read_bytes() != before[0]


def test_the_jobs_cost_is_that_of_its_calibration_rows(tmp_path: Path) -> None:
    """The same prompts, built here from the rows and the template."""
    best = json.loads(search_toy(tmp_path, alpha=0.3, beta=0.8).read_text())
    task, model = WebQuestions(source="builtin", shots=0), toy_model()
    texts = []
    for example in task.calibration(2, 0)[0]:
        prompt = model.tokenizer.encode(task.template.replace("{input}", example.input))
        texts.append(calibration_text(model.transformer, prompt, 7, model.tokenizer.eos_ids))
    found = evaluate(LayerMask.of(best["kept_layers"], DEPTH), texts, 3, 0.3, 0.8)
    assert (best["cost"], best["agreement"], best["positions"]) == (found.cost, found.agreement, found.positions)


class Killed(BaseException):
    """As a signal ends a process, at a place of the test's choosing."""


def killed_after(masks: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """A search that scores so many masks and is killed while it scores another."""
    left = iter(range(masks))

    def dying(*arguments: Any) -> Evaluation:
        if next(left, None) is None:
            raise Killed
        return evaluate(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(search_module, "evaluate", dying)
        with pytest.raises(Killed):
            search_toy(**settings)


def untimed(path: Path) -> tuple[Any, list[dict[str, str]]]:
    """What a search wrote, without what the clock said."""
    best = {key: value for key, value in json.loads(path.read_text()).items() if not key.endswith("_s")}
    return best, [{**row, "seconds": ""} for row in rows_of(path)]


DIMR: dict[str, Any] = {"bayes_every": 3, "patience": 5, "skip_ratio": 0.3, "evaluations": 8, "new_tokens": 4}


@pytest.mark.parametrize(("units", "cache"), [("layers", "shared"), ("sublayers", "own")])
def test_a_killed_search_goes_on_to_the_same_masks(
    units: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DIMR | {"units": units, "cache": cache}
    killed_after(4, monkeypatch, folder=tmp_path / "killed", **settings)
    named = "toy_skip30" if units == "layers" else "toy_skip30_sublayers_own"
    assert kept(tmp_path / "killed") == [f"masks/{named}.csv", f"masks/{named}.search.json"]
    seconds = [row["seconds"] for row in rows_of(tmp_path / "killed" / "masks" / named)]
    assert len(seconds) == 4
    path, whole = search_toy(tmp_path / "killed", **settings), search_toy(tmp_path / "whole", **settings)
    assert untimed(path) == untimed(whole) and path.stem == named
    assert [row["seconds"] for row in rows_of(path)][:4] == seconds, "the seconds are those of the first scoring"
    assert kept(tmp_path / "killed") == [f"masks/{named}.csv", f"masks/{named}.json"]
    best = json.loads(path.read_text())
    assert best["bayes_evaluations"] == sum(row["proposal"] == "bayes" for row in rows_of(path))
    assert read_mask(path, DEPTH).text == min(rows_of(path), key=lambda row: float(row["cost"]))["kept"]
    assert (best["units"], best["cache_mode"]) == (units, cache)


def test_a_search_that_a_signal_ends_in_the_middle_of_a_write_goes_on(tmp_path: Path) -> None:
    """SIGKILL, when the third mask's table is on disk under its temporary name."""
    pid = os.fork()
    if pid == 0:
        try:
            count, sync = iter(range(100)), os.fsync

            def dying(fd: Any) -> None:
                sync(fd)
                if next(count) == 4:  # one of the claim, one of the identity, then one a mask
                    os.kill(os.getpid(), signal.SIGKILL)

            os.fsync = dying
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            search_toy(tmp_path / "killed")
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    named = "masks/toy_skip30"
    left, *others = kept(tmp_path / "killed")
    assert left.startswith("masks/.toy_skip30.csv.") and others == [f"{named}.csv", f"{named}.search.json"]
    assert len(rows_of(tmp_path / "killed" / named)) == 2
    assert untimed(search_toy(tmp_path / "killed")) == untimed(search_toy(tmp_path / "whole"))
    assert kept(tmp_path / "killed") == [f"{named}.csv", f"{named}.json"], "what the write left is gone"


def test_a_mask_is_searched_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_after(2, monkeypatch, folder=tmp_path, mask_name="one")
    before = {name: (tmp_path / name).read_bytes() for name in kept(tmp_path)}
    with claims.claimed(tmp_path, "search-one"):
        for asked in ({}, {"overwrite": True}):
            with pytest.raises(claims.Busy, match=r"masks/one\.json is being searched by process \d+ on .*: leave it"):
                search_toy(tmp_path, mask_name="one", **asked)
        assert before == {name: (tmp_path / name).read_bytes() for name in kept(tmp_path)}
        assert search_toy(tmp_path, mask_name="two").is_file()
        said = refused(monkeypatch, capsys, "job=search", f"results_dir={tmp_path}", "job.mask_name=one")
        assert "is being searched by process" in said
    assert search_toy(tmp_path, mask_name="one").is_file()


def test_a_killed_search_goes_on_with_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(1, monkeypatch, folder=tmp_path, mask_name="one")
    with pytest.raises(
        UserError, match=r"one\.search\.json is of a search with another alpha, (calibration, )?seed: choose another"
    ):
        search_toy(tmp_path, mask_name="one", seed=1, alpha=0.2)
    assert search_toy(tmp_path, mask_name="one", seed=1, overwrite=True).is_file()
    assert kept(tmp_path) == ["masks/one.csv", "masks/one.json"]


def test_a_search_that_replaces_a_mask_keeps_it_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = search_toy(tmp_path, mask_name="one").read_bytes()
    killed_after(2, monkeypatch, folder=tmp_path, mask_name="one", seed=1, overwrite=True)
    assert (tmp_path / "masks" / "one.json").read_bytes() == before
    path = search_toy(tmp_path, mask_name="one", seed=1)
    assert json.loads(path.read_text())["seed"] == 1
    assert untimed(path) == untimed(search_toy(tmp_path / "fresh", mask_name="one", seed=1))


def test_calibration_rows_are_never_test_rows() -> None:
    task = WebQuestions(source="builtin", shots=0)
    (test, _), (calibration, _) = task.load(10**6, 0), task.calibration(10**6, 0)
    assert not {example.id for example in test} & {example.id for example in calibration}
    assert not {example.input for example in test} & {example.input for example in calibration}


@pytest.mark.parametrize("name", ["/models/llama", "../models/llama", "models/my model (v2)"])
def test_masks_land_in_their_folder_whatever_the_model_is_called(tmp_path: Path, name: str) -> None:
    path = search_toy(
        tmp_path, model=lambda **given: replace(toy_model(**given), name=name), evaluations=1, prompts=1, new_tokens=1
    )
    assert path.parent == tmp_path / "masks" and path.is_file() and path.with_suffix(".csv").is_file()
    assert json.loads(path.read_text())["model"] == name


SHORT = ("job=search_short", "task=web_questions", "job.evaluations=2", "job.prompts=1", "job.new_tokens=3")


def test_a_searched_list_of_layers_serves_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(monkeypatch, *SHORT, "job.skip_ratio=0.5", "job.mask_name=mine", f"results_dir={tmp_path}")
    path = tmp_path / "masks" / "mine.json"
    mask = read_mask(path, DEPTH)
    assert list(mask.layers) == json.loads(path.read_text())["kept_layers"] and len(mask.layers) == 3
    with pytest.raises(UserError, match="mask over 6 layers, the model has 30; search one for this model"):
        read_mask(path, 30)
    env = env_of_run(monkeypatch, tmp_path, f"++model.slim_mask={list(mask.layers)}")
    assert env["slim_mask"] == str(list(mask.layers))


def test_a_searched_file_serves_a_run_of_a_model_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=6, max_position_embeddings=2048)
    model = ("model=embedded", f"model.full={folder}")
    main(monkeypatch, *SHORT, *model, f"results_dir={tmp_path}")
    (path,) = (tmp_path / "masks").glob("*.json")
    assert json.loads(path.read_text())["dtype"] == "bfloat16"
    env = env_of_run(monkeypatch, tmp_path, *model, f"model.slim_mask={path}")
    assert (env["slim_mask"], env["dtype"]) == (str(path), "bfloat16")


def env_of_run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> Mapping[str, str]:
    """A short run of the slim verifier; what its record says of the machine."""
    few = ("task=web_questions", "method=via_sd", "limit=1", "max_new_tokens=3", f"results_dir={folder}")
    with unreported():
        main(monkeypatch, *few, *arguments)
    (run_folder,) = find_runs(folder)
    run = read(run_folder).run
    assert run.status == "finished" and [arm.method for arm in run.arms] == ["autoregressive", "via_sd"]
    return run.env


def test_a_plain_search_writes_the_mask_that_a_plain_run_reads(tmp_path: Path) -> None:
    """``job=search`` is what the error about the missing mask says to run."""
    path = search_toy(tmp_path, model=embedded_slug)
    wanted = yaml.safe_load((CONF / "model" / "embedded.yaml").read_text())["slim_mask"]
    assert path == tmp_path / Path(wanted).relative_to("results")


@pytest.mark.parametrize(
    ("argument", "message"),
    {
        "job.skip_ratio=1.0": "skip_ratio=1.0 leaves no layer of 6",
        "job.skip_ratio=0.9": "skip_ratio=0.9 leaves 1 of 6 layers; first and last always stay.",
        "job.alpha=1.0": "job.alpha=1.0, job.beta=1.0: want",
        "job.beta=0.5": "job.alpha=0.0, job.beta=0.5: want",
        "job.evaluations=0": "job.evaluations=0: want at least 1.",
        "job.exchange=2.0": "job.exchange=2.0: want a probability.",
        "job.prompts=0": "job.prompts=0: want at least 1.",
        "job.new_tokens=0": "job.new_tokens=0: want at least 1.",
        "job.block=0": "job.block=0: want at least 1.",
        "job.evaluation=3": "unknown job key 'evaluation': did you mean 'evaluations'",
        "job.bayes_every=0": "job.bayes_every=0: want at least 1 step, or null for none.",
        "job.patience=0": "job.patience=0: want at least 1 step, or null for none.",
        "job.units=heads": "unknown job.units 'heads': ",
        "job.cache=mine": "unknown job.cache 'mine': ",
    }.items(),
)
def test_a_bad_setting_is_one_line_and_leaves_no_mask(
    argument: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, capsys, *SHORT, argument, f"results_dir={tmp_path}").startswith(message)
    assert files(tmp_path) == []


def test_a_search_without_a_task_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(monkeypatch, capsys, *SHORT, "task=[]", f"results_dir={tmp_path}")
    assert line.startswith("no task is chosen") and files(tmp_path) == []


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy_spec = toy.toy_spec
    monkeypatch.setattr(toy, "toy_spec", lambda **sizes: toy_spec(**sizes | {"max_positions": 64}))
    line = refused(monkeypatch, capsys, *SHORT, f"results_dir={tmp_path}")
    assert "example builtin-web_questions-calibration-0: " in line and "the model has 64" in line
    assert files(tmp_path) == []


def test_an_unwritable_folder_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").write_text("a file")
    line = refused(monkeypatch, capsys, *SHORT, f"results_dir={tmp_path / 'results'}")
    assert line.startswith("cannot write in ") and line.endswith("choose another folder with results_dir=PATH.")
