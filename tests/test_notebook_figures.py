"""The notebooks of figures and of any runs, run on the reference runs, on a sweep and on exports of W&B."""

import json
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.report.load import load
from tests.notebooks import executed, outputs
from tests.test_explorer import sent

REFERENCE = Path(__file__).resolve().parents[1] / "results" / "reference"


@pytest.mark.slow
def test_figures_of_a_run(tmp_path: Path) -> None:
    made = executed("paper_figures", tmp_path, results_dir=str(REFERENCE / "quickstart"))
    assert len(list(outputs(made, "image/png"))) == 5, "main, quality again, rates, routes, time"


@pytest.mark.slow
def test_runs_of_two_folders_and_of_an_export(tmp_path: Path) -> None:
    (folder,) = (REFERENCE / "quickstart" / "runs").iterdir()
    report = load(folder)
    exported = tmp_path / "runs.json"
    exported.write_text(json.dumps([sent(report) | {"name": "from W&B"}]))
    made = executed("sweep_explorer", tmp_path, exports=[str(exported)])
    assert len(list(outputs(made, "image/png"))) == 1
    assert any("speedup_decode" in text for text in outputs(made))
    with pytest.raises((AssertionError, UserError), match="is not there"):
        executed("sweep_explorer", tmp_path, exports=[str(tmp_path / "none.csv")])
