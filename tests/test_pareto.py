"""The search for speed and quality at once: what it asks, how it scores, what it keeps, and what a killed one does."""

import csv
import json
import math
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose

from harness.config import RunSettings, config_text
from harness.errors import UserError
from harness.jobs import pareto as job
from harness.jobs.pareto import pareto
from harness.model.toy import toy_model
from harness.occupancy import Place
from harness.pareto.score import Score, Value, score_of
from harness.pareto.space import Point, Space, arms_at, front_arms
from harness.pareto.tables import Found
from harness.records import MetricRow
from harness.store import find_runs, read, read_config
from tests.configs import composing
from tests.rows import run_record
from tests.runs import main, qa, refused, unreported

FAST: dict[str, Any] = {"max_new_tokens": 4, "limit": 2}


@pytest.fixture(scope="module")
def config() -> str:
    """The composed config of the job for the toy model."""
    with composing():
        return config_text(_root_=compose("config", ["job=pareto", "model=toy", "slim=even", "source=builtin"]))


def searched(folder: Path, config: str, **changed: Any) -> list[Path]:
    keys = (
        "trials",
        "sampler",
        "loss",
        "prompts",
        "arm",
        "alpha1",
        "alpha2_share",
        "skip_ratios",
        "gammas",
        "test_points",
    )
    own = {key: value for key, value in yaml.safe_load(config)["job"].items() if key in keys}
    asked = own | {"trials": 3, "prompts": 2, "test_points": 2} | changed
    settings = RunSettings(name="pareto", results_dir=str(folder), **FAST)
    with unreported():
        return pareto(settings, toy_model, {"qa": qa()}, config, **asked)


def trials_of(folder: Path) -> list[tuple[Any, ...]]:
    """What each trial run chose, in the order of measuring."""
    found = []
    for path in sorted((folder / "pareto" / "pareto" / "runs").iterdir()):
        node = read_config(path)["methods"]["via_sd"]
        found.append((node["gate"]["alpha1"], node["gate"]["alpha2"], node["slim"]["skip_ratio"], node["gamma"]))
    return found


# The space.


class Fixed:
    """Answers each question with the lower or the upper bound."""

    def __init__(self, end: int) -> None:
        self.end = end

    def suggest_float(self, name: str, low: float, high: float) -> float:
        return (low, high)[self.end]

    def suggest_int(self, name: str, low: int, high: int) -> int:
        return (low, high)[self.end]

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return choices[-self.end]


SPACE = Space((0.4, 0.8), (0.25, 0.75), (0.2, 0.5), (1, 6))


def test_alpha2_stays_below_alpha1() -> None:
    assert astuple(SPACE.ask(Fixed(0))) == pytest.approx((0.4, 0.1, 0.2, 1))
    assert astuple(SPACE.ask(Fixed(1))) == pytest.approx((0.8, 0.6, 0.5, 6))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"alpha1": (0.5, 1.0)}, r"job\.alpha1=\[0\.5, 1\.0\]: want \[FROM, TO\], between 0 and 1"),
        ({"alpha2_share": (0.9, 0.1)}, "the smaller one first"),
        ({"gammas": (0, 3)}, "whole numbers from 1"),
        ({"gammas": (1, 2.5)}, "whole numbers from 1"),
        ({"gammas": (1,)}, r"want \[FROM, TO\]"),
        ({"skip_ratios": ()}, r"job\.skip_ratios=\[\]: want one share"),
        ({"skip_ratios": (0.2, 1.0)}, "between 0 and 1"),
    ],
)
def test_bounds_are_held(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(SPACE, **changed)


def test_a_point_sets_the_arm_and_gives_the_others_its_gamma(config: str) -> None:
    methods = yaml.safe_load(config)["methods"]
    made = arms_at(methods, "via_sd", Point(0.8, 0.2, 0.45, 3))
    assert made["speculative"] == methods["speculative"] | {"gamma": 3}
    assert made["autoregressive"] == methods["autoregressive"]
    node = made["via_sd"]
    assert (node["gate"]["alpha1"], node["gate"]["alpha2"], node["slim"]["skip_ratio"], node["gamma"]) == (
        0.8,
        0.2,
        0.45,
        3,
    )
    assert methods["via_sd"]["gate"]["alpha1"] == 0.5, "what was given is not changed"
    front = front_arms(methods, "via_sd", {"via_sd_4": Point(0.8, 0.2, 0.45, 3), "via_sd_7": Point(0.6, 0.2, 0.2, 7)})
    assert list(front) == ["autoregressive", "speculative", "via_sd_4", "via_sd_7"]
    assert front["speculative"] == methods["speculative"] and front["via_sd_7"]["gamma"] == 7
    assert front["via_sd_4"] == node


# The objectives.


def metric(task: str, name: str, value: float | None, low: float | None = None, high: float | None = None) -> MetricRow:
    return MetricRow("run", "via_sd", "toy", task, name, "", True, value, low, high, 2, "ours")


def rows_of(speeds: Any, shares: Any, agreements: Any, points: Any) -> list[MetricRow]:
    named = {"speedup_decode": speeds, "greedy_share": shares, "token_agreement": agreements}
    found = [
        metric(task, name, *values) for name, given in named.items() for task, values in zip("ab", given, strict=True)
    ]
    return found + [metric(task, "exact_match_difference", *values) for task, values in zip("ab", points, strict=True)]


RUN = replace(run_record(), task_metrics={"a": ("exact_match",), "b": ("exact_match", "f1")})


def test_speed_is_the_geometric_mean_of_the_tasks_and_a_loss_their_mean() -> None:
    rows = rows_of(
        [(0.5, 0.4, 0.625), (2.0, 1.6, 2.5)],
        [(1.0, 1.0, 1.0), (0.8, 0.6, 0.9)],
        [(0.5,), (0.7,)],
        [(-30.0, -50, -10), (10.0, 4, 16)],
    )
    found = score_of(RUN, rows, "via_sd")
    assert found.speedup.value == pytest.approx(1.0)
    # Both tasks' intervals are x / 1.25 to x * 1.25: of the mean of two it is 1 / sqrt(2) as wide on the log scale.
    assert found.speedup.high == pytest.approx(math.exp(math.log(1.25) / math.sqrt(2)))
    assert found.speedup.low == pytest.approx(1 / math.exp(math.log(1.25) / math.sqrt(2)))
    greedy = found.losses["greedy_share"]
    assert astuple(greedy) == pytest.approx((0.1, 0.1 - 0.075, 0.1 + 0.075))
    agreement = found.losses["agreement"]
    assert agreement.value == pytest.approx(0.4) and agreement.low is None, "the tasks have no interval"
    quality = found.losses["quality"]
    half = math.hypot(20, 6) / 2 / 100
    assert (quality.value, quality.low, quality.high) == pytest.approx((0.1, 0.1 - half, 0.1 + half))


def test_a_loss_that_some_task_lacks_is_left_out_and_a_missing_speed_refused() -> None:
    rows = rows_of([(0.5,), (2.0,)], [(1.0,), (None,)], [(0.5,), (0.7,)], [(0.0,), (0.0,)])
    found = score_of(RUN, rows, "via_sd")
    assert sorted(found.losses) == ["agreement", "quality"] and found.speedup.value == pytest.approx(1.0)
    rows = rows_of([(0.5,), (None,)], [(1.0,), (1.0,)], [(0.5,), (0.7,)], [(0.0,), (0.0,)])
    with pytest.raises(UserError, match="run run: via_sd has no speedup on some task"):
        score_of(RUN, rows, "via_sd")


def test_points_for_the_test_rows_are_spread_over_the_front() -> None:
    front = [
        Found(
            number,
            Point(0.5, 0.2, 0.3, 5),
            {"via_sd": Score(Value(1.0), {"quality": Value(loss)})},
            "run",
            True,
            "via_sd",
        )
        for number, loss in enumerate((0.3, 0.1, 0.5, 0.2, 0.4))
    ]
    assert [one.number for one in job.spread(front, "quality", 5)] == [1, 3, 0, 4, 2]
    assert [one.number for one in job.spread(front, "quality", 3)] == [1, 0, 2]
    assert [one.number for one in job.spread(front, "quality", 1)] == [1]
    assert job.spread(front, "quality", 0) == job.spread([], "quality", 3) == []


# The job.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, config: str) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    searched(folder, config)
    return folder


def test_trials_are_measured_on_calibration_rows_beside_the_baseline_and_the_front_on_test_rows(whole: Path) -> None:
    calibration = [example.id for example in qa().calibration(2, 0)[0]]
    test = [example.id for example in qa().load(2, 0)[0]]
    assert not set(calibration) & set(test)
    runs = [read(path) for path in sorted((whole / "pareto" / "pareto" / "runs").iterdir())]
    assert len(runs) == 3
    for data in runs:
        assert [arm.arm for arm in data.run.arms] == ["autoregressive", "speculative", "via_sd"]
        assert sorted({one.example_id for one in data.samples}) == sorted(calibration)
        assert data.run.data["qa"].location.endswith("_calibration.jsonl")
    (path,) = find_runs(whole)
    data = read(path)
    assert sorted({one.example_id for one in data.samples}) == sorted(test)
    front = [row for row in lines(whole) if row["front"] == "True"]
    assert {arm.arm for arm in data.run.arms} - {"autoregressive", "speculative"} <= {
        f"via_sd_{row['trial']}" for row in front
    }
    assert path.name.endswith("-pareto_test") and 3 <= len(data.run.arms) <= 4


def lines(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "tables" / "pareto.csv").read_text().splitlines()))


def test_the_front_is_what_no_other_trial_beats(whole: Path) -> None:
    mine = [row for row in lines(whole) if row["arm"] == "via_sd"]
    assert len(mine) == 3

    def beaten(row: dict[str, str]) -> bool:
        speed, loss = float(row["speedup"]), float(row["loss_greedy_share"])
        return any(
            float(other["speedup"]) >= speed
            and float(other["loss_greedy_share"]) <= loss
            and (float(other["speedup"]), float(other["loss_greedy_share"])) != (speed, loss)
            for other in mine
        )

    assert [row["front"] == "True" for row in mine] == [not beaten(row) for row in mine]
    tested = [row for row in mine if row["test_speedup"]]
    assert 1 <= len(tested) <= 2 and all(row["front"] == "True" for row in tested)
    text = (whole / "tables" / "pareto.md").read_text()
    assert text.count("**lossy**") == sum(row["front"] == "True" for row in mine)
    assert "3 trials of tpe" in text and "2 calibration prompts a task, never test rows" in text
    assert (whole / "figures" / "pareto.png").is_file() and (whole / "figures" / "pareto.pdf").is_file()


def test_the_same_command_again_measures_nothing(whole: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lines(whole)

    def forbidden(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(job, "bench", forbidden)
    searched(whole, config)
    assert lines(whole) == before


class Killed(BaseException):
    """As a signal ends a process, in the middle of a trial."""


def unclocked(run: Any, rows: Any, arm: str) -> Score:
    """Scores that no clock decides, for proposals that depend on none."""
    return Score(Value(1.0 + len(arm)), {"greedy_share": Value(0.1)})


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_killed_search_goes_on_to_the_same_trials(
    sampler: str, tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "score_of", unclocked)
    monkeypatch.setattr(job, "write_pareto", lambda *given: [])
    real, left = job.bench, iter(range(2))

    def dying(*arguments: Any, **keywords: Any) -> Path:
        if next(left, None) is None:
            raise Killed
        return real(*arguments, **keywords)

    settings = {"trials": 4, "test_points": 0, "sampler": sampler}
    with monkeypatch.context() as patched:
        patched.setattr(job, "bench", dying)
        with pytest.raises(Killed):
            searched(tmp_path / "killed", config, **settings)
    searched(tmp_path / "killed", config, **settings)
    searched(tmp_path / "whole", config, **settings)
    assert trials_of(tmp_path / "killed") == trials_of(tmp_path / "whole")
    assert len(set(trials_of(tmp_path / "whole"))) == 4
    searched(tmp_path / "killed", config, **settings | {"trials": 5})
    assert trials_of(tmp_path / "killed")[:4] == trials_of(tmp_path / "whole")
    assert len(trials_of(tmp_path / "killed")) == 5


def test_a_trial_that_was_contended_is_measured_again(
    tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, company = Place.end, iter(["process 1 on core 0"])
    monkeypatch.setattr(Place, "end", lambda self, begun: next(company, None) or end(self, begun))
    searched(tmp_path, config, trials=1, test_points=0)
    assert len(trials_of(tmp_path)) == 2 and len(set(trials_of(tmp_path))) == 1


def test_a_search_goes_on_with_nothing_else(whole: Path, config: str) -> None:
    said = r"study\.db is of a search with another loss, prompts, rows: choose another name=NAME, or forget its trials"
    with pytest.raises(UserError, match=said):
        searched(whole, config, prompts=1, loss="agreement")


def test_a_folder_is_searched_by_one_process(tmp_path: Path, config: str) -> None:
    folder = tmp_path / "pareto" / "pareto"
    folder.mkdir(parents=True)
    with (
        job.alone(folder),
        pytest.raises(UserError, match="is being searched by another process: wait for it, or choose"),
    ):
        searched(tmp_path, config)


def test_overwrite_forgets_the_trials(tmp_path: Path, config: str) -> None:
    searched(tmp_path, config, trials=1, test_points=0)
    searched(tmp_path, config, trials=2, test_points=0, loss="quality", overwrite=True)
    assert len([row for row in lines(tmp_path) if row["arm"] == "via_sd"]) == 2
    assert len(trials_of(tmp_path)) == 3, "the runs of the first search stay"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["job.trials=0"], "job.trials=0: want at least 1."),
        (["job.sampler=cma"], "unknown job.sampler 'cma': Available: nsga2, tpe."),
        (["job.loss=speed"], "unknown job.loss 'speed': Available: agreement, greedy_share, quality."),
        (
            ["job.arm=via"],
            "unknown job.arm 'via': did you mean 'via_sd'? Available: autoregressive, speculative, via_sd.",
        ),
        (
            ["job.arm=speculative"],
            "job=pareto searches the thresholds of gate=strictness; speculative has another gate, or none.",
        ),
        (["gate=entropy"], "job=pareto searches the thresholds of gate=strictness; via_sd has another gate, or none."),
        (
            ["slim=several", "slim.masks=[[0,1,5]]"],
            "job=pareto searches the slim verifier's skip_ratio, which this slim=NAME does not have: choose slim=even, "
            "or another that has one.",
        ),
        (
            ["job.loss=agreement", "temperature=0.5"],
            "job.loss=agreement is of greedy runs, and temperature=0.5: choose greedy_share.",
        ),
        (["job.gammas=[3,1]"], "job.gammas=[3, 1]: want [FROM, TO], the smaller one first."),
    ],
)
def test_bad_settings_are_one_line(
    overrides: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["job=pareto", f"results_dir={tmp_path}"]
    arguments += [] if any(item.startswith("slim=") for item in overrides) else ["slim=even"]
    assert refused(monkeypatch, capsys, *arguments, *overrides) == said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_line_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (
        "job=pareto",
        "slim=even",
        "task=web_questions",
        "limit=1",
        "max_new_tokens=4",
        f"results_dir={tmp_path}",
    )
    main(monkeypatch, *arguments, "job.trials=2", "job.prompts=1", "job.test_points=1", "name=mine")
    assert (tmp_path / "tables" / "mine.md").is_file() and len(find_runs(tmp_path)) == 1
    assert json.loads((find_runs(tmp_path)[0] / "summary.json").read_text())["samples"] == 3
