"""Every notebook runs from its own folder on stored results, takes parameters, and carries no output."""

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import FOLDER, code_cells, executed, notebook, outputs
from tests.test_paper_tables import run

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
REFERENCE = FOLDER.parent / "results" / "reference"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_without_output(path: Path) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells(path))
    assert set(notebook(path)["metadata"]) == {"kernelspec", "language_info"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_takes_parameters_and_defines_no_function(path: Path) -> None:
    cells = code_cells(path)
    (parameters,) = (cell for cell in cells if "parameters" in cell["metadata"].get("tags", ()))
    assert all(isinstance(node, ast.Assign) for node in parsed(parameters).body)
    kinds = {type(node) for cell in cells for node in ast.walk(parsed(cell))}
    assert not kinds & {ast.FunctionDef, ast.ClassDef, ast.Lambda}, "what is computed stands in harness"


def parsed(cell: dict[str, Any]) -> ast.Module:
    """Its Python; ``%matplotlib inline``, without which no figure is drawn, is none."""
    return ast.parse("".join(line for line in cell["source"] if line.strip() != "%matplotlib inline"))


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.slow
def test_a_cell_that_fails_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no finished run"):
        executed("read_a_run", tmp_path, results_dir=str(tmp_path))


@pytest.mark.slow
def test_read_a_run(tmp_path: Path) -> None:
    made = executed("read_a_run", tmp_path, results_dir=str(REFERENCE / "quickstart"))
    found = list(outputs(made, "text/html"))
    assert found[0].count("<td>via_sd</td>") == 4 and found[0].count("<td>**lossy**</td>") == 4
    assert len(list(outputs(made, "image/png"))) == 1


@pytest.mark.slow
def test_paper_tables(tmp_path: Path) -> None:
    run(tmp_path / "results", speeds={"speculative": 2.0})
    made = executed("paper_tables", tmp_path, results_dir=str(tmp_path / "results"), tables=["table8", "table1"])
    found = list(outputs(made, "text/html"))
    assert len(found) == 3 and "<h2>Table 1 of the paper" in found[0] and "2.00 / 1.50 (+0.50)" in found[1]
    assert "lacks the weights of" in found[0]
    assert found[2].count("speculative") == 2, "accuracy and speed; nothing was drafted"
