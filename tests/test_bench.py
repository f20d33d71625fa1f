"""The decoding job: what a run writes and records, which prompts it decodes, and that it can be had again."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from harness import compare
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder
from harness.decode.gate import Strictness
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Draft
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.self_skip import SelfSkip
from harness.help import CONF, options
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.model.tokenizer import ByteTokenizer
from harness.model.toy import toy_model
from harness.sampling import Chooser, Sampling
from harness.store import find_runs, read, read_config
from tasks.gsm8k import Gsm8k
from tasks.web_questions import WebQuestions
from tests.heads import write_shipped_for
from tests.runs import files, main, outcome, qa, run_bench, unreported
from tests.toys import shapes_unchecked

ROOT = CONF.parent
SWEPT = ("sweep/depth", "sweep/gamma", "sweep/thresholds", "sweep/tiers")
EXPERIMENTS = [name for name in options(CONF, "experiment") if name not in SWEPT and not name.startswith("paper/")]
"""Those of one greedy run; tests/test_paper.py and test_ready_sweeps.py have the others."""
SPECULATIVE: partial[Any] = partial(Speculative, gamma=3, drafter=SelfSkip)
ARMS: dict[str, partial[Any]] = {
    "speculative": SPECULATIVE,
    "via_sd": partial(ViaSD, gamma=4, drafter=SelfSkip, gate=Strictness()),
}


# Every experiment, through the command line.


@pytest.fixture(scope="module", params=EXPERIMENTS)
def experiment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A short run of each shipped experiment with the toy model: its name and its results folder."""
    folder = tmp_path_factory.mktemp(request.param.replace("/", "_")) / "out"
    write_shipped_for(toy_model(), folder.parent)
    with pytest.MonkeyPatch.context() as patched, shapes_unchecked():
        patched.chdir(folder.parent)
        patched.setattr(compare, "RESAMPLES", 200)
        main(patched, f"+experiment={request.param}", "limit=2", "max_new_tokens=8", f"results_dir={folder}")
    yield request.param, folder


def test_every_experiment_is_run_below() -> None:
    files_there = [path.relative_to(CONF / "experiment") for path in (CONF / "experiment").rglob("*") if path.is_file()]
    elsewhere = [path for path in files_there if path.parts[0] == "paper" or str(path.with_suffix("")) in SWEPT]
    assert len(EXPERIMENTS) == len(files_there) - len(elsewhere) >= 1 and len(elsewhere) > len(SWEPT)


def test_an_experiment_writes_its_run_tables_and_figure(experiment: tuple[str, Path]) -> None:
    _, folder = experiment
    (run_folder,) = find_runs(folder)
    run = read(run_folder).run
    name = read_config(run_folder)["name"]
    expected = {f"runs/{run.run_id}/{file}" for file in ("config.yaml", "run.json", "samples.jsonl", "summary.json")}
    differing = f"runs/{run.run_id}/divergences.jsonl"
    expected |= {differing, f"runs/{run.run_id}/fidelity.jsonl", "claims/.lock"}
    expected |= {f"tables/{name}{ending}" for ending in (".md", ".csv", "_positions.csv", "_predicted.csv")}
    expected |= {f"figures/{name}{ending}" for ending in (".png", ".pdf", "_predicted.png", "_predicted.pdf")}
    assert set(files(folder)) == expected
    assert {file for file in files(folder) if not (folder / file).stat().st_size} == {differing, "claims/.lock"}
    page = (folder / f"tables/{name}.md").read_text()
    assert all(arm.arm in page for arm in run.arms) and run.run_id in page and "builtin" in page


def test_an_experiment_decodes_the_same_prompts_with_every_arm(experiment: tuple[str, Path]) -> None:
    run_folder = find_runs(experiment[1])[0]
    data, config = read(run_folder), read_config(run_folder)
    arms = [arm.arm for arm in data.run.arms]
    assert (data.run.status, data.dropped, data.run.model) == ("finished", 0, "toy")
    assert set(arms) == {"autoregressive", *config["methods"]} and arms[0] == "autoregressive"
    assert list(data.run.task_metrics) == list(config["tasks"]) == list(data.run.data) == list(data.run.prompts_sha)
    ids = {
        (arm, task): [(s.example_id, s.prompt_sha) for s in data.samples if (s.arm, s.task) == (arm, task)]
        for arm in arms
        for task in data.run.task_metrics
    }
    for (_, task), found in ids.items():
        assert found == ids["autoregressive", task] and len(found) == 2
    for sample in data.samples:
        assert 1 <= len(sample.generation.token_ids) <= 8
        assert set(sample.scores) == set(data.run.task_metrics[sample.task])
    lossless = {arm.arm for arm in data.run.arms if arm.lossless}
    made = {(s.arm, s.example_id): s.generation.token_ids for s in data.samples}
    assert lossless > {"autoregressive"}
    assert all(tokens == made["autoregressive", example] for (arm, example), tokens in made.items() if arm in lossless)


def test_an_experiments_summary_is_what_its_samples_say(experiment: tuple[str, Path]) -> None:
    folder = find_runs(experiment[1])[0]
    summary, data = json.loads((folder / "summary.json").read_text()), read(folder)
    assert summary["samples"] == len(data.samples)
    rows = {(row["arm"], row["task"], row["metric"]): row for row in summary["rows"]}
    assert len(rows) == len(summary["rows"])
    for arm in data.run.arms:
        for task in data.run.task_metrics:
            cell = [sample for sample in data.samples if (sample.arm, sample.task) == (arm.arm, task)]
            tokens = sum(len(sample.generation.token_ids) for sample in cell)
            rate = tokens / sum(sample.decode_s for sample in cell)
            assert rows[arm.arm, task, "decode_tokens_per_s"]["value"] == pytest.approx(rate)
            assert rows[arm.arm, task, "speedup_decode"]["n"] == len(cell) == 2


def test_an_experiment_run_again_gives_the_same_tokens_and_scores(
    experiment: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one prompt a task instead of two: the limit says how many prompts there are, not which."""
    name, folder = experiment
    monkeypatch.chdir(folder.parent)
    with unreported():
        main(monkeypatch, f"+experiment={name}", "limit=1", "max_new_tokens=8", f"results_dir={tmp_path}")
    (first,), (again,) = find_runs(folder), find_runs(tmp_path)
    assert again.name != first.name and read(again).run.arms == read(first).run.arms
    before, after = outcome(first), outcome(again)
    assert after == {key: before[key] for key in after} and 2 * len(after) == len(before)


def test_the_command_line_runs_from_anywhere_without_a_terminal(tmp_path: Path) -> None:
    arguments = [
        "model=toy",
        "source=builtin",
        "task=web_questions",
        "method=speculative",
        "limit=1",
        "max_new_tokens=2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (run_folder,) = find_runs(tmp_path / "results")
    assert all(file.startswith("results/") for file in files(tmp_path)) and len(files(tmp_path)) == 6 + 3 + 3
    assert f"run folder {run_folder.relative_to(tmp_path)}" in done.stderr
    assert "speculative" in done.stdout and "wrote results/tables/run.md" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr and "Traceback" not in done.stderr


# Arms.


def test_the_baseline_is_added_and_comes_first(tmp_path: Path) -> None:
    run = read(run_bench(tmp_path / "a", ARMS)).run
    assert [arm.arm for arm in run.arms] == ["autoregressive", "speculative", "via_sd"]
    listed = {"speculative": SPECULATIVE, "autoregressive": partial(Autoregressive)}
    run = read(run_bench(tmp_path / "b", listed)).run
    assert [arm.arm for arm in run.arms] == ["autoregressive", "speculative"]
    assert [arm.arm for arm in read(run_bench(tmp_path / "c", {})).run.arms] == ["autoregressive"]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_arms_take_turns_at_going_first(count: int, tmp_path: Path) -> None:
    names = ["autoregressive", *(f"arm{index}" for index in range(1, count))]
    arms = {name: partial(Autoregressive) for name in names}
    samples = read(run_bench(tmp_path, arms, limit=2 * count, max_new_tokens=1)).samples
    turns = [samples[begin : begin + count] for begin in range(0, len(samples), count)]
    assert len(turns) == 2 * count
    for turn in turns:
        assert len({sample.example_id for sample in turn}) == 1, "all arms decode a prompt before the next one"
        assert {sample.arm for sample in turn} == set(names)
    for place in (0, -1):
        here = [turn[place].arm for turn in turns]
        assert {name: here.count(name) for name in names} == dict.fromkeys(names, 2)


def test_what_an_arm_writes_does_not_depend_on_the_others(tmp_path: Path) -> None:
    together = outcome(run_bench(tmp_path / "together", ARMS | {"lookup": partial(SPECULATIVE, drafter=PromptLookup)}))
    for name, method in ARMS.items():
        alone = outcome(run_bench(tmp_path / name, {name: method}))
        assert alone == {key: value for key, value in together.items() if key[0] in ("autoregressive", name)}


# Sampling.

HOT: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 10}


def test_a_seed_fixes_every_draw(tmp_path: Path) -> None:
    one, same, other = (
        outcome(run_bench(tmp_path / name, ARMS, **HOT, seed=seed)) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert one == same
    assert set(one) == set(other)
    assert all(one[key][0] != other[key][0] for key in one), "ten hot tokens all alike"


class Turned(WebQuestions):
    """The same examples in another order."""

    def load(self, limit: int, seed: int) -> Any:
        examples, source = super().load(limit, seed)
        return examples[::-1], source


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_output_does_not_depend_on_the_order_of_prompts(temperature: float, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 6, "limit": 4}
    forth = run_bench(tmp_path / "forth", ARMS, **settings)
    back = run_bench(tmp_path / "back", ARMS, {"qa": Turned(source="builtin", shots=0)}, **settings)
    assert [s.example_id for s in read(forth).samples] != [s.example_id for s in read(back).samples]
    assert outcome(forth) == outcome(back)


# The record.


def test_a_run_records_what_it_ran_on_and_with(tmp_path: Path) -> None:
    folder = run_bench(
        tmp_path, ARMS, {"qa": qa(), "reasoning": Gsm8k(source="builtin", shots=0)},
        model=partial(toy_model, "float32"), seed=5, run_name="my run",
    )  # fmt: skip
    run, samples, *_ = read(folder)
    assert run.run_id == folder.name and folder.name.endswith("-my-run")
    assert (run.model, run.seed, run.temperature, run.status) == ("toy", 5, 0.0, "finished")
    facts = {"device": "cpu", "dtype": "float32", "threads": str(torch.get_num_threads()), "slim_cache": "shared"}
    assert {key: run.env[key] for key in facts} == facts
    assert run.env["slim_mask"] == "evenly spaced, skip 0.3" and run.env["torch"] == torch.__version__
    arms = {arm.arm: (arm.method, arm.drafter, arm.gate, arm.lossless) for arm in run.arms}
    assert arms == {
        "autoregressive": ("autoregressive", None, None, True),
        "speculative": ("speculative", "self_skip(0.67)", None, True),
        "via_sd": ("via_sd", "self_skip(0.67)", "strictness(0.5, 0.3)", False),
    }
    assert run.data["qa"] == qa().load(2, 5)[1] and run.data["reasoning"].location == "tasks/builtin/gsm8k.jsonl"
    for name, task in (("qa", qa()), ("reasoning", Gsm8k(source="builtin", shots=0))):
        hashes = []
        for example in task.load(2, 5)[0]:
            ids = ByteTokenizer().encode(task.template.replace("{input}", example.input))
            hashes.append(hashlib.sha256(json.dumps(ids).encode()).hexdigest())
            assert {s.prompt_sha for s in samples if s.example_id == example.id} == {hashes[-1]}
            assert {s.prompt_tokens for s in samples if s.example_id == example.id} == {len(ids)}
        assert run.prompts_sha[name] == hashlib.sha256("".join(hashes).encode()).hexdigest()
    assert all((s.input_cut, s.peak_bytes) == (0, None) and s.prefill_s > 0 < s.decode_s for s in samples)


def test_a_run_records_the_commit_it_came_from(tmp_path: Path) -> None:
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    run = read(run_bench(tmp_path, {})).run
    assert run.git_commit == (git.stdout.strip() if git.returncode == 0 else None)
    assert (run.git_dirty is None) == (run.git_commit is None)


def test_the_config_of_a_run_has_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with unreported():
        main(
            monkeypatch,
            "task=web_questions",
            "method=via_sd",
            "limit=1",
            "max_new_tokens=3",
            "gate.alpha1=0.7",
            f"results_dir={tmp_path}",
        )
    (folder,) = find_runs(tmp_path)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["limit"], config["max_new_tokens"], config["gamma"]) == (1, 3, 5)
    assert (
        config["methods"]["via_sd"]["gate"]["alpha1"] == 0.7 and config["tasks"]["web_questions"]["source"] == "builtin"
    )
    assert read(folder).run.arms[1].gate == "strictness(0.7, 0.3)"


# Prompts.


def prompts_of(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The distinct prompts that a run decodes, as text, in order."""
    seen: list[str] = []
    prefill = Decoder.prefill

    def noted(decoder: Decoder, prompt: Sequence[int]) -> None:
        seen.append(bytes(prompt).decode())
        prefill(decoder, prompt)

    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "prefill", noted)
        run()
    return list(dict.fromkeys(seen))


def test_a_long_input_is_cut_from_its_end_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "Answer this.\n\n{input}\n\nIn a few words:"
    task = qa(max_input_tokens=12, template=template)
    folders: list[Path] = []
    seen = prompts_of(lambda: folders.append(run_bench(tmp_path, ARMS, {"qa": task})), monkeypatch)
    examples = task.load(2, 0)[0]
    assert seen == [template.replace("{input}", example.input[:12]) for example in examples]
    for sample in read(folders[0]).samples:
        (example,) = [one for one in examples if one.id == sample.example_id]
        assert sample.input_cut == len(example.input) - 12 > 0
        assert sample.prompt_tokens == len(template) - len("{input}") + 12


def test_a_cut_does_not_leave_half_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": "Müßte ö?", "answers": ["ja"]}]
    (tmp_path / "web_questions_test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = qa(source="local", data_dir=str(tmp_path), max_input_tokens=2, template="{input}!")
    (prompt,) = prompts_of(lambda: run_bench(tmp_path / "results", {}, {"qa": task}), monkeypatch)
    assert "\ufffd" not in prompt and len(prompt.encode()) <= len("!") + 2


def test_two_tasks_of_one_kind_are_two_tasks(tmp_path: Path) -> None:
    """A second copy of a task under a name of its own, as ``+task@tasks.brief=qa`` makes it."""
    data = read(run_bench(tmp_path, ARMS, {"qa": qa(), "brief": qa(template="{input}")}))
    assert {(s.task, s.example_id) for s in data.samples} == {
        (name, example.id) for name in ("qa", "brief") for example in qa().load(2, 0)[0]
    }
    assert len(set(data.run.prompts_sha.values())) == 2


# What a run says when it is over.


class NeverRight(SelfSkip):
    """Drafts the tokens that the full verifier likes least."""

    def __init__(self, tiers: Tiers, sampling: Sampling, model: Model) -> None:
        super().__init__(tiers, sampling, model)
        self.model = model.transformer

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        layers = range(self.model.spec.layers)
        logits = self.model.forward(torch.tensor(tokens), self.model.new_cache(len(tokens)), layers, rows=1)
        return Draft(logits.argmin(-1).expand(count).clone())


DRAFTED = [(NeverRight, 40, True), (NeverRight, 10, False), (SelfSkip, 40, False)]


@pytest.mark.parametrize(("drafter", "new_tokens", "warned"), DRAFTED)
def test_a_drafter_of_which_nothing_is_kept_is_warned_of(
    drafter: type, new_tokens: int, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {"speculative": partial(Speculative, gamma=3, drafter=drafter)}
    run_bench(tmp_path, methods=arms, limit=2, max_new_tokens=new_tokens)
    said = " ".join(capsys.readouterr().err.split())
    assert ("speculative: mean_accept_length is 1.0 over" in said) == warned
    assert ("is broken or made for another model" in said) == warned
