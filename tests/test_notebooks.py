"""Every notebook runs from its own folder, on the reference run, and carries no output."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_is_stored_without_output(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)  # the notebooks are ours
    assert len(names["reports"]) == 1 and names["figure"].axes
    assert len(names["results_frame"](names["reports"])) == 12


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS
