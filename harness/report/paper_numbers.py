"""The paper's numbers and the shapes of its models, as they are kept in ``results/paper``."""

from dataclasses import fields
from pathlib import Path

import pandas as pd

from harness.cost import Shape
from harness.errors import UserError

PAPER = Path(__file__).resolve().parents[2] / "results" / "paper"
"""The checkout's own."""
NUMBERS, CONFIGS = "numbers.csv", "configs.csv"


def read_numbers(folder: Path = PAPER) -> pd.DataFrame:
    """The paper's values, a row each, with where each was read.

    Raises:
        UserError: the file is not there.
    """
    return _read(folder / NUMBERS)


def read_shapes(folder: Path = PAPER) -> tuple[dict[str, Shape], dict[str, str]]:
    """Shapes by model, and where each was read.

    Raises:
        UserError: the file is not there.
    """
    frame = _read(folder / CONFIGS)
    names = [field.name for field in fields(Shape)]
    shapes = {row["model"]: Shape(**{name: row[name] for name in names}) for row in frame.to_dict("records")}
    return shapes, dict(zip(frame["model"], frame["read_in"], strict=True))


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise UserError(f"{path} is not there: restore it, or run from the checkout's folder, where results/paper is.")
    return pd.read_csv(path)
