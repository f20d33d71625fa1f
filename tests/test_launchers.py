"""Sweeps in other processes: the same cells as in this one, each with its output in its file, and what is refused."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from packaging.utils import canonicalize_name

from harness import workers
from harness.environment import CHECKOUT
from harness.help import CONF, missing_launcher
from harness.launch import LOST
from harness.store import read, read_config
from harness.sweeps import read_cells
from harness.workers import printed_to
from tests.runs import outcome, refused

GAMMAS = [2, 3, 4, 5]
CELLS = ("task=web_questions", "limit=1", "max_new_tokens=4", "fidelity=false", "gamma=2,3,4,5")
PLUGINS = {"joblib": "joblib", "submitit_local": "submitit", "ray": "ray"}


@pytest.fixture(scope="module")
def with_ray(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with the extra ray, which finds all else where this one does.

    Ray's plugin wants older releases of three packages than constraints.txt pins; they come first there.
    """
    folder = tmp_path_factory.mktemp("ray")
    lines = pinned("constraints.txt") + pinned("constraints-ray.txt")
    pins = {canonicalize_name(line.partition("==")[0]): line for line in lines}  # of two the later
    (folder / "constraints.txt").write_text("\n".join(pins.values()))
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = str(folder / "env" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    asked = [*pip, "download", "--no-deps", "--dest", str(folder), "tabulate"]
    if subprocess.run(asked, capture_output=True).returncode:
        pytest.skip("no package index is reached")
    wanted = [*pip, "install", "-c", str(folder / "constraints.txt"), *extras()["ray"]]
    done = subprocess.run(wanted, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (own,) = (folder / "env" / "lib").glob("python*/site-packages")
    (own / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def pinned(name: str) -> list[str]:
    return [line for line in (CHECKOUT / name).read_text().splitlines() if "==" in line]


def extras() -> dict[str, list[str]]:
    found: dict[str, list[str]] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return found


def sweep(folder: Path, launcher: str, python: str = sys.executable) -> str:
    """What a sweep of four cells of the toy model printed, both streams."""
    command = [python, "-m", "harness", "-m", "model=toy", "source=builtin", *CELLS, f"launcher={launcher}"]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"results_dir={folder}"],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def by_gamma(folder: Path) -> dict[int, Path]:
    runs = list((folder / "runs").iterdir())
    assert all(read(run).run.status == "finished" for run in runs)
    found = {read_config(run)["gamma"]: run for run in runs}
    assert len(found) == len(runs)
    return found


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("basic")
    printed = sweep(folder, "basic")
    assert not (folder / "logs").exists() and "started on" not in printed
    return by_gamma(folder)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(PLUGINS))
def test_four_cells_run_in_workers_as_they_do_in_place(
    launcher: str, tmp_path: Path, in_place: dict[int, Path], request: pytest.FixtureRequest
) -> None:
    if importlib.util.find_spec(f"hydra_plugins.hydra_{PLUGINS[launcher]}_launcher") is not None:
        printed = sweep(tmp_path, launcher)
    elif launcher == "ray":
        printed = sweep(tmp_path, launcher, request.getfixturevalue("with_ray"))
    else:
        pytest.skip(f"the extra {PLUGINS[launcher]} is not installed: {missing_launcher(launcher)}")
    found = by_gamma(tmp_path)
    assert sorted(found) == sorted(in_place) == GAMMAS
    for gamma, run in found.items():
        assert outcome(run) == outcome(in_place[gamma])
    logs = sorted((tmp_path / "logs" / "run").glob("*.log"))
    assert [log.name for log in logs] == ["001.log", "002.log", "003.log", "004.log"]
    for log, gamma in zip(logs, GAMMAS, strict=True):
        text = log.read_text()
        assert text.count("run folder") == 1 and str(found[gamma]) in text, "its own cell's output, and no other's"
    assert "run folder" not in printed
    if launcher.startswith("submitit"):  # each cell is a process with a file of submitit's for what it prints itself
        printed = "".join(path.read_text() for path in tmp_path.rglob("*_log.out"))
    started = re.findall(r"cell (\d) \(.*gamma=(\d).*\): started on \S+, process (\d+), output in (\S+)", printed)
    assert sorted(map(int, (number for number, *_ in started))) == [1, 2, 3, 4]
    assert all(
        int(gamma) == GAMMAS[int(number) - 1] and Path(log).stem == f"00{number}" for number, gamma, _, log in started
    )
    processes = {process for *_, process, _ in started}
    assert len(processes) == (4 if launcher.startswith("submitit") else 2) and str(os.getpid()) not in processes
    assert len(re.findall(r"cell \d \(.*\): ended after \d+ s", printed)) == 4


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_sweep_with_its_closing_list(tmp_path: Path) -> None:
    if importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None:
        pytest.skip("the extra joblib is not installed")
    small = ("task=web_questions", "limit=4", "max_new_tokens=64", "gamma=2,3,4,5", "fidelity=false")
    command = [sys.executable, "-m", "harness", "-m", "model=toy", "source=builtin", *small, "launcher=joblib"]
    command.append(f"results_dir={tmp_path}")
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=CHECKOUT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"cell \d \(.*\): started on \S+, process (\d+)", line):
                os.kill(int(found[1]), signal.SIGKILL)
                break
        said = process.stderr.read()
    assert process.returncode == 1 and "Traceback" not in said
    assert "harness: the sweep ended early, TerminatedWorkerError: " in said
    (folder,) = (tmp_path / "sweeps").iterdir()
    cells = read_cells(folder)
    assert 1 <= len(cells) <= 2 and {(one.state, one.error) for one in cells} == {("failed", LOST)}
    assert f"{len(cells)} failed" in said and all(f"gamma={one.index + 2}" in said for one in cells)
    again = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=900)
    assert again.returncode == 0 and "4 finished" in again.stderr, again.stderr


def test_all_that_a_process_prints_goes_to_the_file_and_only_while_it_is_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cell.log"
    path.write_text("before\n")
    print("out before")
    with pytest.raises(ValueError, match="of the cell"), printed_to(path):
        print("out")
        print("err", file=sys.stderr)
        subprocess.run([sys.executable, "-c", "print('child')"], check=True)
        raise ValueError("of the cell")
    print("out after")
    said = capfd.readouterr()
    assert (said.out, said.err) == ("out before\nout after\n", "")
    lines = path.read_text().splitlines()
    assert lines[0] == "before" and sorted(lines[1:]) == ["child", "err", "out"]


SWEPT = ("-m", "limit=1", "seed=1,2")


def test_a_launcher_that_cannot_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = ("launcher=submitit_slurm", *SWEPT, f"results_dir={tmp_path}")
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        pytest.skip("the extra submitit is not installed")
    assert refused(monkeypatch, capsys, *slurm) == (
        "hydra.launcher.partition has no value: add hydra.launcher.partition=NAME; sinfo lists them."
    )
    with patch.object(workers.shutil, "which", return_value=None):
        said = refused(monkeypatch, capsys, *slurm, "hydra.launcher.partition=gpu")
    assert said == "launcher=submitit_slurm needs sbatch, which is not found: start it where Slurm is."
    said = refused(monkeypatch, capsys, "launcher=submitit_local", "limit=1", f"results_dir={tmp_path}")
    assert said == "launcher=submitit_local is for sweeps: add -m, or leave it out."
    assert not list(tmp_path.iterdir())


def test_a_launcher_whose_plugin_is_missing_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (
        tmp_path / "launcher" / "ray_other.yaml"
    )  # a name of ours with no plugin behind it, wherever this test runs
    config.parent.mkdir()
    config.write_text((CONF / "launcher" / "ray.yaml").read_text().replace("launcher: ray\n", "launcher: ray_other\n"))
    with patch("harness.help.options", lambda conf, group: ["ray_other"]):
        said = refused(monkeypatch, capsys, "--config-dir", str(tmp_path), "launcher=ray_other", *SWEPT)
    assert said == (
        "launcher=ray_other needs a package that is not installed: "
        "run `python -m pip install -c constraints-ray.txt -e '.[ray]'`."
    )


def test_each_launcher_has_an_extra_that_is_pinned() -> None:
    for path in (CONF / "launcher").glob("*.yaml"):
        if path.stem == "basic":
            continue
        (chosen,) = [item["override /hydra/launcher"] for item in yaml.safe_load(path.read_text())["defaults"]]
        extra = chosen.split("_")[0]
        command = missing_launcher(path.stem)
        assert path.stem.startswith(chosen) and f"'.[{extra}]'" in command
        pins = (CHECKOUT / re.findall(r"-c (\S+)", command)[0]).read_text()
        assert all(f"\n{requirement.split('>=')[0]}==" in pins for requirement in extras()[extra])
