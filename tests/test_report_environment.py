"""``pip install -e '.[report]'`` by itself: no torch, and results on disk become tables, figures and pages."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results" / "reference" / "quickstart" / "runs"
COPIED = (
    *("pyproject.toml", "constraints.txt", "README.md", "LICENSE"),
    *("harness", "tasks", "conf", "results/paper"),
)
ABSENT = {"torch", "transformers", "datasets", "safetensors", "tokenizers", "accelerate"}


def called(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment of its own; its project is a copy, two folders up."""
    folder = tmp_path_factory.mktemp("report")
    clone = folder / "clone"
    for name in COPIED:
        place = clone / name
        place.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place)
    assert called(sys.executable, "-m", "venv", clone / "env", cwd=clone).returncode == 0
    found = clone / "env" / "bin" / "python"
    pip = (found, "-m", "pip", "--disable-pip-version-check")
    if called(*pip, "download", "--no-deps", "--dest", folder, "tabulate", cwd=clone).returncode:
        pytest.skip("no package index is reached")
    done = called(*pip, "install", "-c", "constraints.txt", "-e", ".[report]", cwd=clone)
    assert done.returncode == 0, done.stderr[-2000:]
    return found


@pytest.mark.slow
def test_reporting_works_where_torch_is_not_installed(python: Path) -> None:
    clone = python.parents[2]
    listed = called(python, "-m", "pip", "list", "--format=freeze", cwd=clone).stdout
    names = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert {"pandas", "matplotlib", "jinja2"} <= names and not names & ABSENT
    assert "No module named 'torch'" in called(python, "-c", "import torch", cwd=clone).stderr
    shutil.copytree(RUNS, clone / "results" / "runs")
    for arguments in (["format=[html,latex]"], ["paper=all", "format=html"]):
        done = called(python, "-m", "harness", "job=report", *arguments, cwd=clone)
        assert (done.returncode, done.stderr) == (0, "")
    tables = {path.name for path in (clone / "results" / "tables").iterdir()}
    assert {"quickstart.md", "quickstart.html", "quickstart.tex", "paper_table8.tex", "paper_tables.html"} <= tables
    assert (clone / "results" / "figures" / "quickstart.png").is_file()
