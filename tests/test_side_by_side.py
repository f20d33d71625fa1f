"""Two runs side by side: what is joined, what differs, and when their times may be paired."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness import compare as statistics
from harness import sweeps
from harness.compare import BASELINE
from harness.errors import UserError
from harness.jobs.compare import compare
from harness.records import RunRecord, SampleRecord
from harness.report.load import load
from harness.side_by_side import Side, compared, differing, matched, pairing_of
from harness.store import RunFolder
from tests.rows import run_record, sample

REFERENCE = Path(__file__).resolve().parents[1] / "results" / "reference"


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 300)


def made(
    name: str, /, seconds: float = 1.0, prompts: int = 4, wrong: int = 0, **settings: Any
) -> tuple[RunRecord, list[SampleRecord], dict[str, Any]]:
    """A run whose method takes ``seconds`` for what the baseline does in 2, and is wrong on the first prompts."""
    samples = []
    for index in range(prompts):
        for arm, spent in ((BASELINE, 2.0), ("via_sd", seconds)):
            said = "5" if arm != BASELINE and index < wrong else "4"
            one = sample(arm=arm, example=str(index), tokens=10, decode_s=spent * (1 + index), prediction=said)
            samples.append(replace(one, run_id=name))
    config = {"name": "x", "results_dir": name, "gamma": 5, "gate": {"alpha1": 0.5}} | settings
    return replace(run_record(), run_id=name, env={"cpu": "a", "load_average": name}), samples, config


def side(*arguments: Any, **settings: Any) -> Side:
    return Side(*made(*arguments, **settings))


def written(folder: Path, *arguments: Any, **settings: Any) -> str:
    run, samples, config = made(*arguments, **settings)
    place = RunFolder.create(folder, run, config)
    for one in samples:
        place.append(one)
    place.finish({"samples": len(samples)})
    return run.run_id


def test_a_known_change_of_speed_and_quality_comes_out() -> None:
    found, notes = compared("", side("a", 1.0), side("b", 0.5, wrong=1))
    known = {(one.arm, one.name): one for one in found}
    speed = known["via_sd", "speedup_decode"]
    assert (speed.a.value, speed.b.value, speed.apart.value) == pytest.approx((2.0, 4.0, 2.0))
    assert speed.apart.low == pytest.approx(2.0) == speed.apart.high, "the same prompts are drawn for both"
    assert known["via_sd", "decode_tokens_per_s"].apart.value == pytest.approx(2.0)
    right = known["via_sd", "exact_match"]
    assert (right.a.value, right.b.value, right.apart.value) == pytest.approx((100.0, 75.0, -25.0))
    assert right.apart.low is not None and right.apart.low < -25 < 0 == right.apart.high
    assert known[BASELINE, "decode_tokens_per_s"].apart.value == pytest.approx(1.0) and notes == []


def test_times_of_two_machines_or_days_are_not_paired() -> None:
    a = side("a")
    assert pairing_of(a.run, a.run) == "paired"
    other = [
        replace(a.run, env={"cpu": "b"}),
        replace(a.run, created="2026-02-01T09:15:00Z"),
        replace(a.run, pairing="shared"),
    ]
    assert [pairing_of(a.run, one) for one in other] == ["unpaired across runs"] * 3
    far = replace(side("b"), run=replace(side("b").run, created="2026-02-01T09:15:00Z"))
    (speed,) = [one for one in compared("", a, far)[0] if (one.arm, one.name) == ("via_sd", "decode_tokens_per_s")]
    assert speed.pairing == "unpaired across runs"
    assert speed.apart.low is not None and speed.apart.high is not None
    assert speed.apart.low < 1 < speed.apart.high, "each run is drawn by itself"


def test_a_shared_baseline_is_drawn_by_itself() -> None:
    a, b = (replace(one, run=replace(one.run, pairing="shared")) for one in (side("a"), side("b")))
    (speed,) = [one for one in compared("", a, b)[0] if (one.arm, one.name) == ("via_sd", "speedup_decode")]
    assert speed.a.low is not None and speed.a.high is not None and speed.pairing == "unpaired across runs"
    assert speed.a.low < 2 < speed.a.high, "paired, all prompts have the same speedup"


def test_only_prompts_that_are_the_same_are_joined() -> None:
    b = side("b")
    changed = [replace(one, prompt_sha="other") if one.example_id == "3" else one for one in b.samples]
    found, notes = compared("", side("a"), replace(b, samples=changed))
    assert {one.n for one in found} == {3} and "1 prompts are not the same" in notes[0]
    lone = [replace(one, arm="swift") if one.arm == "via_sd" else one for one in b.samples]
    arms = tuple(replace(arm, arm="swift") if arm.arm == "via_sd" else arm for arm in b.run.arms)
    found, notes = compared("", side("a"), replace(b, samples=lone, run=replace(b.run, arms=arms)))
    assert {one.arm for one in found} == {BASELINE}
    assert notes == ["translation, via_sd: only in A", "translation, swift: only in B"]


def test_prediction_and_ceiling_stand_below_a_measured_speedup() -> None:
    """Those of the run's own report; a dash where nothing was predicted."""
    (folder,) = (REFERENCE / "quickstart" / "runs").iterdir()
    report = load(folder)
    own = Side(report.run, report.samples, report.settings)
    found, _ = compared("", own, own)
    names = [(one.task, one.arm, one.name) for one in found]
    for (task, arm), said in report.prediction.items():
        place = names.index((task, arm, "speedup_decode"))
        below = found[place + 1 : place + 3]
        assert [one.name for one in below] == ["speedup_decode_predicted", "speedup_decode_ceiling"]
        assert [one.a.value for one in below] == [said.predicted, said.ceiling] == [one.b.value for one in below]
        assert said.ceiling is not None and below[1].apart.value == 1.0 and below[1].a.low is None
    bare = {(one.arm, one.name): one for one in compared("", side("a"), side("b"))[0]}
    assert bare["via_sd", "speedup_decode_ceiling"].apart.value is None


def test_contended_timings_are_not_compared() -> None:
    b = side("b")
    disturbed = [
        replace(one, contended="x") if (one.arm, one.example_id) == ("via_sd", "1") else one for one in b.samples
    ]
    known = {(one.arm, one.name): one for one in compared("", side("a"), replace(b, samples=disturbed))[0]}
    assert known["via_sd", "speedup_decode"].apart.value is None is known["via_sd", "speedup_decode"].a.value
    assert known["via_sd", "exact_match"].apart.value == 0


def test_what_differs_is_said_and_nothing_else() -> None:
    assert side("a", a={"b": [1, 2]}, c=None).settings.items() >= {"a.b": "[1, 2]", "c": "None", "gamma": "5"}.items()
    a, b = side("a"), side("b", gate={"alpha1": 0.7})
    assert differing(a, b) == {"gate.alpha1": ("0.5", "0.7")}, "no name, no folder, no load"
    b = replace(b, run=replace(b.run, git_commit="1" * 40, env={"cpu": "b"}))
    assert differing(a, b).keys() == {"gate.alpha1", "commit", "machine: cpu"}


def test_a_setting_that_arms_have_copies_of_is_said_once() -> None:
    def arms(alpha1: float, bonus: str) -> dict[str, Any]:
        return {"gate": {"alpha1": alpha1}, "methods": {"via_sd": {"gate": {"alpha1": alpha1}, "bonus": bonus}}}

    a, b = side("a", **arms(0.5, "slim")), side("b", **arms(0.7, "full"))
    assert differing(a, b) == {"gate.alpha1": ("0.5", "0.7"), "methods.via_sd.bonus": ("slim", "full")}
    own = side("c", **{**arms(0.5, "slim"), "gate": {"alpha1": 0.7}})
    assert differing(a, own) == {"gate.alpha1": ("0.5", "0.7")}, "no arm has another"
    assert differing(own, b).keys() == {"methods.via_sd.gate.alpha1", "methods.via_sd.bonus"}, "the arm alone has"


def test_runs_of_two_sweeps_are_joined_by_what_varies_in_them() -> None:
    a = [side("a1", gamma=3), side("a2", gamma=5)]
    b = [side("b2", gamma=5, limit=9), side("b3", gamma=7, limit=9)]
    pairs, alone = matched(a, b)
    assert [(label, mine.run.run_id, theirs.run.run_id) for label, mine, theirs in pairs] == [("gamma=5", "a2", "b2")]
    assert alone == [("A", "gamma=3"), ("B", "gamma=7")]


def test_what_one_side_has_fixed_in_an_arm_keeps_no_run_from_its_like() -> None:
    def swept(name: str, gamma: int, of_arm: int) -> Side:
        return side(name, gamma=gamma, methods={"via_sd": {"gamma": of_arm}})

    a, b = [swept("a1", 3, 3), swept("a2", 5, 5)], [swept("b1", 3, 4), swept("b2", 5, 4)]
    pairs, alone = matched(a, b)
    assert [(label, mine.run.run_id, theirs.run.run_id) for label, mine, theirs in pairs] == [
        ("gamma=3", "a1", "b1"),
        ("gamma=5", "a2", "b2"),
    ]
    assert alone == [] and differing(*pairs[0][1:]) == {"methods.via_sd.gamma": ("3", "4")}


def test_a_run_is_joined_with_the_cell_of_a_sweep_that_is_like_it() -> None:
    (pair,), alone = matched([side("a", gamma=5)], [side("b1", gamma=3), side("b2", gamma=5)])
    assert (pair[0], pair[2].run.run_id) == ("gamma=5", "b2") and alone == [("B", "gamma=3")]


def test_cells_that_agree_in_no_setting_are_joined_by_their_overrides() -> None:
    def cell(name: str, mask: str, overrides: str = "") -> Side:
        return replace(side(name, slim={"mask": mask}), overrides=overrides)

    a = [cell("a1", "a20.json", "slim.skip_ratio=0.2"), cell("a2", "a45.json", "slim.skip_ratio=0.45")]
    b = [cell("b1", "b45.json", "slim.skip_ratio=0.45"), cell("b2", "b30.json", "slim.skip_ratio=0.3")]
    pairs, alone = matched(a, b)
    assert [(label, mine.run.run_id, theirs.run.run_id) for label, mine, theirs in pairs] == [
        ("slim.skip_ratio=0.45", "a2", "b1")
    ]
    assert alone == [("A", "slim.mask=a20.json"), ("B", "slim.mask=b30.json")]
    pairs, alone = matched(*([replace(one, overrides="") for one in sides] for sides in (a, b)))
    assert pairs == [] and len(alone) == 4


def test_the_job_writes_a_page_and_a_tidy_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seconds in (("20260101T000000Z-a", 1.0), ("20260102T000000Z-b", 0.5)):
        written(tmp_path, name, seconds)
    page, table = compare(str(tmp_path))
    assert page.name == "compare_20260101T000000Z-a_20260102T000000Z-b.md", "the two newest, the older one first"
    text = page.read_text()
    assert "x 2.00 [2.00, 2.00]" in text and "speedup_decode" in text
    frame = pd.read_csv(table)
    found = {(one["arm"], one["name"]): one for one in frame.to_dict("records")}
    line = found["via_sd", "speedup_decode"]
    assert (line["a_value"], line["b_value"], line["apart_value"]) == pytest.approx((2.0, 4.0, 2.0))
    assert "speedup_decode" in capsys.readouterr().out
    other = tmp_path / "sweep"
    for index, gamma in enumerate((3, 5)):
        written(other, f"2026010{index}T000000Z-s", 1.0, gamma=gamma)
    page, _ = compare(str(tmp_path), str(other), str(other))
    assert "gamma=3" in page.read_text() and "gamma=5" in page.read_text()


def test_what_cannot_be_compared_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="0 finished runs, two are wanted"):
        compare(str(tmp_path))
    name = written(tmp_path, "a")
    with pytest.raises(UserError, match="wants both run=A and other=B"):
        compare(str(tmp_path), run=name)
    with pytest.raises(UserError, match=r"unknown run or sweep 'b': .*Available: a, x"):
        compare(str(tmp_path), run=name, other="b")
    with pytest.raises(UserError, match="no run and no sweep in"):
        compare(str(tmp_path / "none"), run="a", other="b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no finished run"):
        compare(str(tmp_path), run=name, other=str(tmp_path / "empty"))
    assert json.loads((tmp_path / "runs" / name / "run.json").read_text())["pairing"] == "once"


def swept(folder: Path, name: str, seconds: float, gammas: Sequence[int], unfinished: int | None = None) -> str:
    """A sweep over gammas with its record and its cells; its id."""
    configs = [{"name": name, "results_dir": str(folder), "gamma": gamma} for gamma in gammas]
    given = [["task=qa", f"gamma={gamma}"] for gamma in gammas]
    place = sweeps.begun(configs, given, folder / sweeps.FOLDER)
    for index, gamma in enumerate(gammas):
        run = written(folder, f"20260101T00000{index}Z-{name}", seconds, name=name, gamma=gamma)
        with sweeps.cell_at(place, "launch", index, " ".join(given[index])) as cell:
            cell.note("finished", run_id=run)
        if gamma == unfinished:
            (folder / "runs" / run / "summary.json").unlink()
    return place.name


def test_sweeps_are_named_by_their_experiment_or_their_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept(tmp_path, "before", 1.0, (2, 3, 5))
    own = swept(tmp_path, "after", 0.5, (3, 5, 7, 9), unfinished=5)
    page, table = compare(str(tmp_path), "before", own)
    assert page.name == f"compare_before_{own}.md"
    found = {
        (one["cell"], one["arm"], one["name"]): one["apart_value"] for one in pd.read_csv(table).to_dict("records")
    }
    assert {cell for cell, *_ in found} == {"gamma=3"}
    assert found["gamma=3", "via_sd", "speedup_decode"] == pytest.approx(2.0)
    said = {*capsys.readouterr().out.splitlines()}
    assert said >= {f"only in {side}: gamma={gamma}" for side, gamma in (("A", 2), ("A", 5), ("B", 7), ("B", 9))}
    assert "B: 1 of 4 cells did not finish and are left out" in said
    single = "20260101T000002Z-before"
    with pytest.raises(UserError, match=r"no run of .* goes with one of .* \(only in A: gamma=5; only in B: gamma=3"):
        compare(str(tmp_path), single, "after")
    swept(tmp_path / "elsewhere", "none", 1.0, (2,), unfinished=2)
    with pytest.raises(UserError, match="'none' has no finished run: name a run, a sweep, or a folder that has one"):
        compare(str(tmp_path / "elsewhere"), "none", "none")
