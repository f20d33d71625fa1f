"""Search thresholds, depth and gamma for speed and quality at once, by ask and tell; every trial is a bench run.

A search that was killed goes on when the same command is given again: trials that were told are in the study's
database, and one that was not is proposed again. What is proposed depends on the seed and on what was measured.
"""

import io
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from rich.console import Console

from harness.compare import BASELINE
from harness.config import RunSettings, called, check_calls
from harness.errors import UserError, unknown
from harness.jobs.bench import bench
from harness.log import NullLogger
from harness.measuring import occupied
from harness.model.load import Model
from harness.pareto.score import LOSSES, Score, Value, score_of
from harness.pareto.space import Point, Space, arms_at, check_arm, front_arms
from harness.pareto.tables import Found, Search, write_pareto
from harness.prompts import Task
from harness.records import DataSource, Example
from harness.report.load import load
from harness.store import check_writable, read, unwritable, writing

SAMPLERS = ("tpe", "nsga2")
POPULATION = 10
"""Of NSGA-II: its default of 50 would make a search of a few dozen trials a random one."""
STUDY = "pareto"


class CalibrationRows:
    """A task whose rows are its calibration rows: what a trial is measured on."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def load(self, limit: int, seed: int) -> tuple[list[Example], DataSource]:
        return self.task.calibration(limit, seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)


@occupied
def pareto(
    settings: RunSettings,
    model: Callable[..., Model],
    tasks: Mapping[str, Task],
    config: str,
    trials: int,
    sampler: str,
    loss: str,
    prompts: int,
    arm: str,
    alpha1: Sequence[float],
    alpha2_share: Sequence[float],
    skip_ratios: Sequence[float],
    gammas: Sequence[int],
    test_points: int,
    overwrite: bool = False,
) -> list[Path]:
    """Write ``tables/<name>.md`` and ``.csv`` and ``figures/<name>.*`` of the trials and their front; their paths.

    Trials are run folders in ``pareto/<name>/runs`` under the results folder, the run on test rows is one of
    ``runs``.

    Args:
        config: the composed config as YAML: its ``methods`` are the arms.
        trials: measured in all, those of earlier calls included.
        sampler: ``tpe`` or ``nsga2`` (both of several objectives).
        loss: see ``harness.pareto.score``.
        prompts: calibration prompts a task, of each trial.
        arm: the method that is searched.
        alpha1, alpha2_share, skip_ratios, gammas: see ``harness.pareto.space.Space``.
        test_points: points of the front that are measured again on test rows, ``settings.limit`` a task.
        overwrite: forget the trials of a search of the same name.

    Raises:
        UserError: bad settings, anything missing, or a search of the same name of something else.
    """
    screen = Console(stderr=True)
    methods = yaml.safe_load(config)["methods"]
    check(trials, sampler, loss, prompts, test_points, settings.temperature)
    check_arm(methods, arm)
    space = Space(as_pair(alpha1), as_pair(alpha2_share), tuple(skip_ratios), as_pair(gammas))
    if not tasks:
        raise UserError("no task is chosen: write task=quick_four, or another of `python -m harness --help`.")
    check_calls({"job": {"methods": methods}}, {"job": {"methods": methods}})
    folder = Path(settings.results_dir) / "pareto" / settings.name
    check_writable(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    sources = {name: task.calibration(prompts, settings.seed)[1] for name, task in tasks.items()}
    full = model(notify=lambda line: screen.print(line, style="dim", highlight=False))
    runner = Runner(settings, full, tasks, config, folder, prompts, again=overwrite)
    identity = identify(settings, full, methods, arm, space, sampler, loss, prompts, sources)
    database = folder / "study.db"
    with alone(folder), keeping(database), opened(database, identity, overwrite, settings.name) as study:
        for found in search(
            study, space, sampler, settings.seed, trials, lambda point: runner.trial(arm, point), arm, loss
        ):
            screen.print(found, highlight=False, markup=False, soft_wrap=True)
        points = told_trials(study, arm)
        chosen = spread([one for one in points if one.front], loss, test_points)
        tested, run_id = tested_on(study, runner, methods, arm, chosen)
    about = Search(
        settings.name, arm, loss, prompts, settings.limit if run_id else 0, run_id, full.name, sampler, sources
    )
    paths = write_pareto(settings.results_dir, about, points, tested)
    for path in paths:
        print(f"wrote {path}")
    return paths


def check(trials: int, sampler: str, loss: str, prompts: int, test_points: int, temperature: float) -> None:
    """
    Raises:
        UserError: the first value out of bounds.
    """
    for key, value, least in (("trials", trials, 1), ("prompts", prompts, 1), ("test_points", test_points, 0)):
        if value < least:
            raise UserError(f"job.{key}={value}: want at least {least}.")
    if sampler not in SAMPLERS:
        raise unknown("job.sampler", sampler, SAMPLERS)
    if loss not in LOSSES:
        raise unknown("job.loss", loss, LOSSES)
    if loss == "agreement" and temperature > 0:
        raise UserError(f"job.loss=agreement is of greedy runs, and temperature={temperature}: choose greedy_share.")


def as_pair(bounds: Sequence[Any]) -> Any:
    return tuple(bounds)


# Measuring.


@dataclass(frozen=True)
class Runner:
    """Measures arms on calibration or test rows with one model, loaded once; ``again`` what is finished too.

    A run whose timings are contended is measured once more.
    """

    settings: RunSettings
    model: Model
    tasks: Mapping[str, Task]
    config: str
    folder: Path
    prompts: int
    again: bool

    def trial(self, arm: str, point: Point) -> tuple[str, dict[str, Score]]:
        """One point on calibration rows: the run's id and the scores of its arms."""
        chosen = replace(self.settings, results_dir=str(self.folder), limit=self.prompts, gamma=point.gamma)
        rows: Any = {name: CalibrationRows(task) for name, task in self.tasks.items()}
        return self.measured(chosen, rows, arms_at(yaml.safe_load(self.config)["methods"], arm, point), "calibration")

    def test(self, arms: Mapping[str, Any]) -> tuple[str, dict[str, Score]]:
        """Arms on test rows, in a run beside all others."""
        chosen = replace(self.settings, name=f"{self.settings.name}_test")
        return self.measured(chosen, self.tasks, arms, "test")

    def measured(
        self, settings: RunSettings, tasks: Mapping[str, Task], arms: Mapping[str, Any], rows: str
    ) -> tuple[str, dict[str, Score]]:
        made = yaml.safe_load(self.config)
        changed = {key: getattr(settings, key) for key in ("name", "results_dir", "limit", "gamma")}
        about = {"job": {"_target_": "harness.jobs.bench.bench", "rows": rows}}
        text = yaml.safe_dump({**made, **changed, **about, "methods": dict(arms)}, sort_keys=False)
        methods = {name: called(node) for name, node in arms.items()}

        def run(again: bool) -> Path:
            return bench(settings, lambda **_: self.model, methods, tasks, NullLogger(), text, rerun=again)

        with redirect_stdout(io.StringIO()):  # a run's own tables; they are in its folder
            folder = run(self.again)
            if any(one.contended for one in read(folder).samples):  # it has no speeds, and is finished for good
                folder = run(True)
        report = load(folder)
        names = [one.arm for one in report.run.arms]
        return folder.name, {name: score_of(report.run, report.rows, name) for name in names}


# The study.


@contextmanager
def alone(folder: Path) -> Any:
    """
    Raises:
        UserError: another process is searching in this folder.
    """
    lock = FileLock(folder / "study.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"{folder} is being searched by another process: wait for it, or choose another name."
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def keeping(path: Path) -> Any:
    """
    Raises:
        UserError: the study at ``path`` cannot be written inside, as on a full disk.
    """
    try:
        yield
    except Exception as error:
        found = (getattr(one, "orig", None) for one in (error, error.__cause__))  # SQLAlchemy's, or Optuna's of that
        reason = next((one for one in found if isinstance(one, sqlite3.Error)), None)
        if reason is None:
            raise
        raise unwritable(path, reason) from error


@contextmanager
def opened(path: Path, identity: Mapping[str, Any], overwrite: bool, name: str) -> Any:
    """The study at ``path``, made where there is none; trials that were begun and not told are given up.

    Raises:
        UserError: it is of something else, and not ``overwrite``.
    """
    import optuna  # a second to load, and only this needs it

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if overwrite:
        path.unlink(missing_ok=True)
    storage = optuna.storages.RDBStorage(f"sqlite:///{path.resolve()}")
    try:
        study = optuna.create_study(
            storage=storage, study_name=STUDY, directions=["maximize", "minimize"], load_if_exists=True
        )
        before = study.user_attrs.get("identity")
        now = json.loads(json.dumps(identity))
        if before is None:
            study.set_user_attr("identity", now)
        elif before != now:
            changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
            raise UserError(
                f"{path} is of a search with another {', '.join(changed)}: choose another name=NAME, or forget its "
                "trials with job.overwrite=true."
            )
        state = optuna.trial.TrialState
        for trial in study.get_trials(deepcopy=False, states=(state.RUNNING,)):
            study.tell(trial.number, state=state.FAIL)
        yield study
    finally:
        storage.remove_session()
        storage.engine.dispose()


def search(
    study: Any,
    space: Space,
    sampler: str,
    seed: int,
    trials: int,
    measured: Callable[[Point], tuple[str, dict[str, Score]]],
    arm: str,
    loss: str,
) -> Any:
    """Ask, measure and tell until ``trials`` are told; yields a line of each.

    A sampler is made anew for each trial, seeded by how many were told: a search that was killed proposes what one that
    was not would have.
    """
    while (done := len(told_trials(study, arm))) < trials:
        study.sampler = made_sampler(sampler, seed + done)
        trial = study.ask()
        point = space.ask(trial)
        yield f"trial {done + 1} of {trials}: {point.text}"
        run_id, scores = measured(point)
        score = scores[arm]
        if loss not in score.losses:
            raise UserError(f"job.loss={loss}: run {run_id} has none on some task; choose another.")
        trial.set_user_attr("point", asdict(point))
        trial.set_user_attr("run", run_id)
        trial.set_user_attr("scores", {name: asdict(one) for name, one in scores.items()})
        study.tell(trial, [score.speedup.value, score.losses[loss].value])
        yield f"  speedup {score.speedup.value:.2f}, loss ({loss}) {score.losses[loss].value:.3f}"


def made_sampler(name: str, seed: int) -> Any:
    import optuna

    if name == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed % 2**32, population_size=POPULATION)
    return optuna.samplers.TPESampler(seed=seed % 2**32)


def told_trials(study: Any, arm: str) -> list[Found]:
    """The trials that were measured, as the study has them; those on the front are not beaten in both objectives."""
    import optuna

    trials = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    best = {trial.number for trial in study.best_trials} if trials else set()
    return [
        Found(
            trial.number,
            Point(**trial.user_attrs["point"]),
            {name: score_from(one) for name, one in trial.user_attrs["scores"].items()},
            trial.user_attrs["run"],
            trial.number in best,
            arm,
        )
        for trial in trials
    ]


def score_from(stored: Mapping[str, Any]) -> Score:
    """Inverse of ``asdict``."""
    return Score(Value(**stored["speedup"]), {name: Value(**one) for name, one in stored["losses"].items()})


def spread(front: Sequence[Found], loss: str, count: int) -> list[Found]:
    """``count`` points of the front at most, from its fastest to its least lossy, evenly by rank."""
    ordered = sorted(front, key=lambda one: one.scores_of_arm.losses[loss].value)
    if count < 1 or not ordered:
        return []
    if len(ordered) <= count:
        return ordered
    places = [round(index * (len(ordered) - 1) / max(1, count - 1)) for index in range(count)]
    return [ordered[place] for place in dict.fromkeys(places)]


def tested_on(
    study: Any, runner: Runner, methods: Mapping[str, Any], arm: str, chosen: Sequence[Found]
) -> tuple[dict[str, Score], str | None]:
    """Scores on test rows of ``chosen`` and of the arms beside them, by arm; once for the same points and settings."""
    if not chosen:
        return {}, None
    points = {f"{arm}_{one.number}": one.point for one in chosen}
    asked = json.dumps([sorted(points), asdict(runner.settings)], default=str)
    before = study.user_attrs.get("test")
    if before is None or before["asked"] != asked:
        run_id, scores = runner.test(front_arms(methods, arm, points))
        before = {"asked": asked, "run": run_id, "scores": {key: asdict(one) for key, one in scores.items()}}
        study.set_user_attr("test", before)
    return {key: score_from(one) for key, one in before["scores"].items()}, before["run"]


def identify(
    settings: RunSettings,
    model: Model,
    methods: Mapping[str, Any],
    arm: str,
    space: Space,
    sampler: str,
    loss: str,
    prompts: int,
    sources: Mapping[str, DataSource],
) -> dict[str, Any]:
    """Everything that a trial's numbers and the proposals depend on."""
    kept = ("seed", "max_new_tokens", "temperature", "top_p", "top_k", "numerics")
    return {
        "model": model.name,
        "dtype": str(model.transformer.dtype).removeprefix("torch."),
        **{key: getattr(settings, key) for key in kept},
        "methods": dict(methods),
        "baseline": BASELINE,
        "arm": arm,
        **asdict(space),
        "sampler": sampler,
        "loss": loss,
        "prompts": prompts,
        "rows": {name: source.sha256 for name, source in sources.items()},
    }
