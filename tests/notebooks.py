"""Notebooks, run as a reader runs them: by papermill in a process of their own, from the folder they lie in."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SECONDS = 300


def notebook(path: Path) -> dict[str, Any]:
    """A notebook as its file has it."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in notebook(path)["cells"] if cell["cell_type"] == "code"]


def executed(name: str, folder: Path, **parameters: Any) -> dict[str, Any]:
    """``notebooks/<name>.ipynb`` with these parameters, run into ``folder``; with its outputs.

    Raises:
        AssertionError: a cell failed; the end of its traceback.
    """
    path = folder / f"{name}.ipynb"
    command = [sys.executable, "-m", "papermill", str(FOLDER / f"{name}.ipynb"), str(path), "--no-progress-bar"]
    command += ["--cwd", str(FOLDER), "--parameters_yaml", yaml.safe_dump(parameters)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return notebook(path)


def outputs(made: dict[str, Any], kind: str = "text/plain") -> Iterator[str]:
    """What its cells showed, of one media type (``image/png`` is base64), and what they printed."""
    for cell in made["cells"]:
        for output in cell.get("outputs", ()):
            text = output.get("data", {}).get(kind) or (output.get("text") if kind == "text/plain" else None)
            if text:
                yield text if isinstance(text, str) else "".join(text)
