"""Everything in this folder is marked ``gpu``, and skipped with one reason where there is no CUDA device."""

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before -m gpu or -m "not gpu" chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    present = torch.cuda.is_available()
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not present:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
