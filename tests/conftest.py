"""Shared fixtures. Tensor shapes in the signatures of the decoder and the model are checked while tests run."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a network

import pytest
import torch
from jaxtyping import install_import_hook

from tests import shapes

# What else is measured on this machine is no test's business.
os.environ["HARNESS_OCCUPANCY"] = tempfile.mkdtemp()
atexit.register(shutil.rmtree, os.environ["HARNESS_OCCUPANCY"], ignore_errors=True)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which nothing above does

# The hook stays installed: it checks every module of these packages imported from here on.
shapes.install()
install_import_hook(
    [
        *("harness.model", "harness.decode", "harness.drafters", "harness.kernels", "harness.sampling"),
        *("harness.dimr", "harness.divergence", "harness.rescore", "harness.audit.judge"),
    ],
    "beartype.beartype",
)

torch.set_num_threads(1)

from harness import hub  # noqa: E402  after the hook
from tests.configs import composing  # noqa: E402


def pytest_runtest_setup() -> None:
    shapes.begin()


@pytest.fixture
def conf() -> Iterator[None]:
    """``hydra.compose`` reads ``conf/``."""
    with composing():
        yield


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing may reach for the network, nor find this machine's caches of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "probe", lambda url: pytest.fail(f"probed {url}"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
