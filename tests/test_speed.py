"""The job that times: what it writes and says, all from counts and seconds; what it refuses, and keeps in a failure."""

import csv
import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hydra import compose

from harness import compare
from harness.compare import BASELINE
from harness.config import check
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Block
from harness.help import help_text
from harness.jobs.speed import LOOKUP, SMALL
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.report.lines import DASH
from harness.sampling import Chooser, Sampling
from harness.speed.figure import speed_figure
from harness.speed.numbers import rows
from harness.speed.records import SpeedRecord, SpeedRow
from harness.speed.stock import ASSISTANT, PLAIN, PROMPT_LOOKUP
from harness.speed.tables import console, markdown
from harness.store import find_runs, from_json
from tests.runs import files, main, refused
from tests.toys import shapes_unchecked

SMALL_RUN = (
    *("job=speed", "limit=3", "max_new_tokens=4", "job.repeats=6", "job.blocks=[1,3]", "job.contexts=[8,20,9000]"),
    *("job.draft_layers=2", "job.matrix_mib=1", "tasks.cnn_dailymail.max_input_tokens=40"),
)


@dataclass(frozen=True)
class Run:
    """A finished run, what it printed, and its record with the numbers stored beside it."""

    folder: Path
    out: str
    err: str
    record: SpeedRecord
    numbers: list[dict[str, Any]]

    @property
    def rows(self) -> list[SpeedRow]:
        return [from_json(SpeedRow, row) for row in self.numbers]


def read(folder: Path) -> tuple[SpeedRecord, list[dict[str, Any]]]:
    (path,) = (folder / "speed").glob("*.json")
    found = json.loads(path.read_text())
    numbers = found.pop("rows")
    return from_json(SpeedRecord, found), numbers


def run(folder: Path, *arguments: str) -> Run:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched, shapes_unchecked(), redirect_stdout(out), redirect_stderr(err):
        patched.setattr(compare, "RESAMPLES", 50)
        main(patched, f"results_dir={folder}", *arguments)
    return Run(folder, out.getvalue(), err.getvalue(), *read(folder))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("speed"), *SMALL_RUN)


def test_it_writes_one_record_tables_and_a_figure(toy: Run) -> None:
    run_id = toy.record.run.run_id
    written = ["figures/speed.pdf", "figures/speed.png", f"speed/{run_id}.json", "tables/speed.csv", "tables/speed.md"]
    assert files(toy.folder) == written
    assert (toy.folder / "figures" / "speed.png").read_bytes().startswith(b"\x89PNG")
    for name in written:
        assert f"wrote {toy.folder / name}" in toy.out + toy.err
    assert run_id.endswith("-speed") and toy.record.run.status == "finished"


def test_the_record_says_what_ran_on_what(toy: Run) -> None:
    run, settings = toy.record.run, toy.record.settings
    assert (run.model, run.env["dtype"], run.env["device"], run.env["threads"]) == ("toy", "float64", "cpu", "1")
    assert {"torch", "transformers", "cpu", "cores", "load_average"} <= set(run.env)
    assert {"prompts": 3, "limit": 3, "repeats": 6, "blocks": [1, 3], "gamma": 5}.items() <= settings.items()
    assert settings["model"]["_target_"] == "harness.model.toy.toy_model"
    assert list(run.data) == ["wmt14_de_en", "cnn_dailymail", "gsm8k"], "web_questions has no turn among three prompts"
    assert list(toy.record.tiers) == ["full", "slim", "draft", "self_skip"]


def test_every_tier_is_timed_at_every_shape_that_fits(toy: Run) -> None:
    shapes = [(one.tier, one.block, one.context) for one in toy.record.forwards]
    assert sorted(shapes) == sorted(
        (tier, block, context) for tier in toy.record.tiers for block in (1, 3) for context in (8, 20)
    )
    assert all(len(one.seconds) == 6 and min(one.seconds) > 0 for one in toy.record.forwards)
    reason = "context 9000: left out, the model has no room for it and the largest block"
    assert toy.record.notes == (reason,) and reason in toy.err


def test_each_prompt_is_decoded_by_each_arm_that_has_it(toy: Run) -> None:
    found: dict[tuple[str, bool], list[tuple[str, str]]] = {}
    for one in toy.record.decodes:
        found.setdefault((one.arm, one.sampled), []).append((one.task, one.example_id))
    tasks = {arm: [task for task, _ in prompts] for arm, prompts in found.items()}
    arms = ("autoregressive", "speculative", "via_sd")
    assert {arm: sorted(on) for arm, on in tasks.items()} == (
        {(arm, False): ["cnn_dailymail", "gsm8k", "wmt14_de_en"] for arm in arms}
        | {(arm, True): ["gsm8k", "wmt14_de_en"] for arm in arms}
        | {(LOOKUP, False): ["cnn_dailymail"] * 3}
    )
    assert all(len(set(prompts)) == len(prompts) for prompts in found.values())
    assert all(1 <= len(one.token_ids) <= 4 for one in toy.record.decodes)


def test_all_numbers_come_from_counts_and_seconds(toy: Run) -> None:
    with patch.object(compare, "RESAMPLES", 50):
        assert toy.rows == rows(toy.record)
    baseline = [one for one in toy.record.decodes if one.arm == BASELINE and not one.sampled]
    tokens = sum(len(one.token_ids) - 1 for one in baseline)
    (rate,) = [row for row in toy.rows if (row.name, row.metric) == (BASELINE, "tokens_per_s")]
    assert rate.value == pytest.approx(tokens / sum(one.rest_s for one in baseline))
    assert all(one.first_tokens == 1 for one in baseline)


def test_without_a_checkpoint_the_comparison_is_dashes_with_a_reason(toy: Run) -> None:
    reason = "toy has no checkpoint folder that transformers could read"
    assert [(pair.ours, pair.theirs, pair.reason) for pair in toy.record.comparisons] == [
        (BASELINE, PLAIN, reason),
        (LOOKUP, PROMPT_LOOKUP, reason),
        (SMALL, ASSISTANT, reason),
    ]
    assert {row.value for row in toy.rows if row.table == "comparison"} == {None}
    page = (toy.folder / "tables" / "speed.md").read_text()
    assert f"autoregressive, prompt look-up, small_lm: not measured ({reason})." in page
    (line,) = [line for line in page.splitlines() if line.startswith("| prompt look-up")]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["0", *[DASH] * 7]


def test_the_tables_hold_the_numbers(toy: Run) -> None:
    page = (toy.folder / "tables" / "speed.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    (slim,) = [
        row for row in toy.rows if (row.name, row.metric, row.block, row.context) == ("slim", "forward_ms", 3, 8)
    ]
    cells = next(line for line in lines if line[:2] == ["slim", "8"])
    assert cells[3] == f"{slim.value:.2f} [{slim.low:.2f}, {slim.high:.2f}]"
    written = list(csv.DictReader((toy.folder / "tables" / "speed.csv").read_text().splitlines()))
    assert [row["metric"] for row in written] == [row.metric for row in toy.rows]
    assert [row["value"] for row in written] == ["" if row.value is None else repr(row.value) for row in toy.rows]
    assert {(row["run_id"], row["dtype"], row["threads"]) for row in written} == {
        (toy.record.run.run_id, "float64", "1")
    }
    for title in ("Memory bandwidth", "Milliseconds a forward", "Beside transformers", "Outside forwards, and memory"):
        assert title in toy.out and f"## {title}" in page
    assert "bytes that must be read / median seconds / bandwidth" in " ".join(page.split())
    assert max(map(len, toy.out.splitlines())) <= 120 or "wrote" in max(toy.out.splitlines(), key=len)


def test_memory_is_counted_for_each_arm_and_a_third_tier_costs_little(toy: Run) -> None:
    held = {use.arm: use.held_bytes for use in toy.record.memory}
    assert list(held) == ["autoregressive", "speculative", "via_sd", LOOKUP]
    assert held["via_sd"] < 1.1 * held["speculative"]


def test_a_speed_run_is_no_run_to_report(toy: Run) -> None:
    with pytest.raises(Exception, match="no finished run with samples"):
        find_runs(toy.folder)


def test_the_figure_has_a_panel_for_each_context_and_names_what_was_not_measured(toy: Run) -> None:
    figure = speed_figure(toy.record, toy.rows)
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles[:2] == ["8 cached tokens", "20 cached tokens"] and len(titles) == 5
    legend = figure.axes[0].get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == list(toy.record.tiers)
    assert [text.get_text() for text in figure.axes[-1].texts] == ["not measured"] * 3


def test_tables_and_figure_of_a_measurement_that_has_only_begun(toy: Run) -> None:
    begun = replace(toy.record, products=(), forwards=(), decodes=(), memory=())
    found = rows(begun)
    assert speed_figure(begun, found).axes
    assert [str(table.title) for table in console(begun, found)] == ["Beside transformers"]
    assert "## Memory bandwidth" not in markdown(begun, found, "speed")


def test_prompt_lookup_runs_on_the_mix_where_its_task_was_not_chosen_and_a_tier_too_deep_is_left_out(
    tmp_path: Path,
) -> None:
    found = run(
        tmp_path,
        *(
            *SMALL_RUN[:-1],
            "task=web_questions",
            "limit=2",
            "job.draft_layers=6",
            "job.self_skip=null",
            "job.transformers=false",
        ),
    )
    assert {one.task for one in found.record.decodes if one.arm == LOOKUP} == {"web_questions"}
    assert list(found.record.tiers) == ["full", "slim"]
    assert found.record.notes[1:] == (
        "tier draft: left out, the model has no more than job.draft_layers=6 layers",
        "prompt look-up on the mix: cnn_dailymail is not among the tasks",
    )
    assert {pair.reason for pair in found.record.comparisons} == {"job.transformers=false"}
    assert {row.name for row in found.rows if row.metric == "time_ratio"} == {"c'"}


@pytest.mark.parametrize(
    ("argument", "message"),
    {
        "job.prompts=0": "job.prompts=0: want at least 1.",
        "job.repeats=0": "job.repeats=0: want at least 1.",
        "job.draft_layers=0": "job.draft_layers=0: want at least 1.",
        "job.matrix_mib=0": "job.matrix_mib=0: want at least 1.",
        "job.blocks=[]": "job.blocks=[]: want a list of whole numbers of at least 1, as in job.blocks=[1,6].",
        "job.blocks=[0,1]": "job.blocks=[0, 1]: want a list of whole numbers",
        "job.contexts=[1.5]": "job.contexts=[1.5]: want a list of whole numbers",
        "job.contexts=64": "job.contexts is 64 (int): want Sequence.",
        "job.self_skip=1.5": "skip_ratio=1.5 leaves no layer of 6",
        "temperature=0": "temperature=0: want more than 0; it is for the arms that sample, each also runs greedily.",
        "slim.skip_ratio=0.4": "slim.skip_ratio=0.4 with slim.cache=shared wants results/masks/toy_skip40.json",
        "job.promts=3": "unknown job key 'promts': did you mean 'prompts'?",
    }.items(),
)
def test_what_makes_no_sense_is_refused_in_one_line(
    argument: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, "job=speed", f"results_dir={tmp_path}", argument)
    assert said.startswith(message)
    assert files(tmp_path) == []


def test_any_slim_verifier_is_timed_and_the_arms_have_the_same(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        *(*SMALL_RUN[:-1], "task=web_questions", "limit=1", "job.draft_layers=6", "job.self_skip=null"),
        *("slim=sublayers", "slim.cache=own", "job.transformers=false"),
    )
    assert found.record.tiers["slim"].startswith("random sublayers, skip 0.3, seed 0, over a cache of its own: 0 ")
    assert found.record.run.env["slim_cache"] == "own"
    read_bytes = {one.tier: one.read_bytes for one in found.record.forwards if (one.block, one.context) == (1, 8)}
    assert 0.6 < read_bytes["slim"] / read_bytes["full"] < 0.9


def test_an_arm_with_another_slim_verifier_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ("+slim@slims.other=even", "slims.other.skip_ratio=0.5", "methods.via_sd.slim=${slims.other}")
    said = refused(monkeypatch, capsys, "job=speed", f"results_dir={tmp_path}", *other)
    assert said.startswith(
        "job=speed times the slim verifier that slim= names; via_sd has another (evenly spaced, skip"
    )
    assert files(tmp_path) == []


class Failing(Autoregressive):
    """Fails in the second prompt, its warm-up past."""

    name = "failing"

    def __init__(self, tiers: Tiers, sampling: Sampling, model: Model) -> None:
        super().__init__(tiers, sampling, model)
        self.steps = 0

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        self.steps += 1
        if self.steps > 4:
            raise RuntimeError("this went wrong")
        return super().step(tokens, remaining, chooser)


def test_a_run_that_fails_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = f"+methods.failing={{_target_:{__name__}.Failing,_partial_:true}}"
    with pytest.raises(RuntimeError, match="this went wrong"), shapes_unchecked():
        main(monkeypatch, f"results_dir={tmp_path}", *SMALL_RUN, arm)
    record, numbers = read(tmp_path)
    assert record.run.status == "failed" and numbers == []
    assert len(record.products) == 2 and len(record.forwards) == 16
    assert {one.task for one in record.decodes} == {"wmt14_de_en"}, "the first prompt, with all its arms"


def test_its_defaults_are_its_own_and_the_command_line_beats_them(conf: None) -> None:
    cfg = compose("config", ["job=speed"])
    check(cfg)
    assert (cfg.job.prompts, cfg.limit, cfg.max_new_tokens, cfg.temperature, cfg.name) == (6, 6, 48, 1.0, "speed")
    assert list(cfg.tasks) == ["wmt14_de_en", "cnn_dailymail", "gsm8k", "web_questions"]
    assert list(cfg.job.contexts) == [64, 256, 1024, 2048] and list(cfg.job.blocks) == [1, 2, 4, 6, 8, 16, 32]
    assert compose("config", ["job=speed", "job.prompts=20"]).job.prompts == 20
    assert compose("config", ["job=speed", "limit=20"]).job.prompts == 20
    other = compose("config", ["max_new_tokens=8", "task=web_questions", "job=speed"])
    assert (other.max_new_tokens, list(other.tasks)) == (8, ["web_questions"])


def test_another_job_keeps_the_plain_defaults(conf: None) -> None:
    cfg = compose("config", ["job=search"])
    assert (cfg.limit, cfg.max_new_tokens, cfg.name, list(cfg.tasks)) == (8, 64, "run", ["wmt14_de_en"])


def test_help_says_how_to_get_narrow_intervals() -> None:
    (line,) = [line for line in help_text().splitlines() if line.startswith("  speed ")]
    assert "job.prompts=20" in line and "transformers" in line


@pytest.mark.slow
def test_the_embedded_model_beside_transformers(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        *("model=embedded", "job=speed", "limit=1", "max_new_tokens=8", "job.repeats=1", "job.blocks=[1,6]"),
        *("job.contexts=[64]", "job.matrix_mib=64", "tasks.cnn_dailymail.max_input_tokens=200"),
    )
    record = found.record
    assert record.notes == () and [pair.reason for pair in record.comparisons] == [None] * 3
    assert record.tiers["draft"] == "the first 6 layers with a cache of their own, as a checkpoint of its own"
    decodes = {(one.arm, one.sampled): one for one in record.decodes}
    for pair in record.comparisons:
        ours, theirs = decodes[pair.ours, False], decodes[pair.theirs, False]
        assert ours.prompt_tokens == theirs.prompt_tokens and len(ours.token_ids) <= 8
        assert (theirs.decode_s, theirs.tier_s, theirs.read_bytes) == (None, None, None)
        numbers = {row.metric: row for row in found.rows if (row.table, row.name) == ("comparison", pair.name)}
        for side, one in (("ours", ours), ("theirs", theirs)):
            rest = len(one.token_ids) - one.first_tokens
            rate = numbers[f"{side}_tokens_per_s"].value
            assert rate is None if not rest and not one.rest_s else rate == pytest.approx(rest / one.rest_s)
        assert numbers["speedup_decode"].n == 1 and numbers["speedup_decode"].low is None
        same = sum(a == b for a, b in zip(ours.token_ids, theirs.token_ids, strict=False))
        assert numbers["token_agreement"].value == same / max(len(ours.token_ids), len(theirs.token_ids))
    small = next(row for row in found.rows if (row.name, row.metric) == (SMALL, "held_over_speculative"))
    assert small.value is not None and small.value > 1.2, "weights of its own"
    page = (tmp_path / "tables" / "speed.md").read_text()
    assert "autoregressive, small_lm: 1 of wmt14_de_en; prompt look-up: 1 of cnn_dailymail." in page
    assert f"transformers {record.run.env['transformers']}" in page
