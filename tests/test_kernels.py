"""Which implementation of a kernel runs, what it asks of the device, and whether it compiles."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.kernels import gate, residual
from harness.kernels.gate import Routed, route_block, route_block_reference
from harness.kernels.residual import sample_residual, sample_residual_reference
from tests.kernels import RACES, ROUTERS, as_read, at, block_of, implementations, needs_triton, race_of

ROOT = Path(__file__).parents[1]


def test_on_the_cpu_the_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "route_block_triton", None)
    monkeypatch.setattr(residual, "sample_residual_triton", None)
    scores, tokens = (tensor.cpu() for tensor in block_of(0, 4, 31, torch.bfloat16, masked=False, tied=False))
    got, want = route_block(scores, tokens, 0.5, 0.2), route_block_reference(scores, tokens, 0.5, 0.2)
    assert as_read(got) == as_read(want)
    verifier, draft, drafted, noise = (tensor.cpu() for tensor in race_of(0, 4, 31, torch.float32))
    arguments = (verifier, draft, drafted, torch.tensor(2), noise)
    assert int(sample_residual(*arguments)) == int(sample_residual_reference(*arguments))


def test_on_the_device_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def noting(name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*arguments: Any) -> Any:
            launched.append(name)
            return reference(*arguments)

        return launch

    for module, name in ((gate, "route_block"), (residual, "sample_residual")):
        monkeypatch.setattr(module, "on_device", lambda tensor: True)
        monkeypatch.setattr(module, f"{name}_triton", noting(name, getattr(module, f"{name}_reference")))
    scores, tokens = block_of(0, 4, 31, torch.bfloat16, masked=False, tied=False)
    route_block(scores.double(), tokens, 0.5, 0.2)
    assert launched == []
    route_block(scores, tokens, 0.5, 0.2)
    verifier, draft, drafted, noise = race_of(0, 4, 31, torch.float32)
    sample_residual(verifier, draft, drafted, at(2), noise)
    assert launched == ["route_block", "sample_residual"]


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from harness.kernels import backend, gate, residual
assert backend.tl is None
routed = gate.route_block(torch.tensor([[0.0, 1.0], [3.0, 0.0]]), torch.tensor([1, 1]), 0.5, 0.2)
token = residual.sample_residual(torch.eye(2), None, torch.tensor([0]), torch.tensor(1), torch.ones(2))
print(routed.codes.tolist(), int(routed.stop), int(token))
"""


def test_without_triton_the_kernels_import_and_the_references_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[0, 2] 1 1\n", "", 0)


class NothingRead(TorchDispatchMode):
    """Refuses every operation that brings a value, or a size that depends on one, to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero"), f"{name} waits"
        return func(*args, **(kwargs or {}))


@implementations(ROUTERS)
def test_routing_reads_nothing_back(run: Callable[..., Routed]) -> None:
    scores, tokens = block_of(0, 4, 31, torch.bfloat16, masked=True, tied=False)
    with NothingRead():
        run(scores, tokens, 0.5, 0.2)


@implementations(RACES)
def test_the_race_reads_nothing_back(run: Callable[..., Tensor]) -> None:
    verifier, draft, tokens, noise = race_of(0, 4, 31, torch.float32)
    stop = at(2)
    with NothingRead():
        run(verifier, draft, tokens, stop, noise)
        run(verifier, None, tokens, stop, noise)


@pytest.mark.parametrize("read", [int, lambda stop: torch.eye(3)[stop], lambda stop: torch.eye(3)[stop > 0]])
def test_the_check_of_reads_can_fail(read: Callable[[Tensor], Any]) -> None:
    with NothingRead(), pytest.raises(AssertionError, match="waits"):
        read(torch.tensor(1))


@needs_triton
def test_the_launchers_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """Everything up to the launch, for an H100 or H200; what the interpreter runs need not compile."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-m", "tests.kernel_builds"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    builds = json.loads(done.stdout)
    assert {build["kernel"] for build in builds} == {"route_rows", "race_part", "race_winners"}
    assert len(builds) == 33
    assert max(build["shared"] for build in builds) <= 48 * 1024, "what every GPU gives a program unasked"
    for build in builds:
        assert build["fma.rn"] == build["div.full.f32"] == build["div.approx"] == 0, "the reference rounds each step"
        assert (build["red.global"] > 0) == (build["kernel"] == "route_rows")
    assert sum(build["div.rn.f32"] > 0 for build in builds) == 6
    assert sum(build["div.rn.f64"] > 0 for build in builds) == 6
