"""Compile the kernels for a GPU that need not be here, called as their launchers call them; print what came out.

Run by ``tests.test_kernels`` in a process of its own, since Triton either compiles or interprets.
"""

import json
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from harness.kernels.gate import route_block_triton
from harness.kernels.residual import sample_residual_triton

COUNTED = ("div.rn.f32", "div.rn.f64", "div.full.f32", "div.approx", "fma.rn", "red.global")


class AbsentDevice:
    """As much of a driver as a launch asks for before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def built() -> list[dict[str, Any]]:
    """One entry per launch: kernel, bytes of shared memory, size of the binary, counts of some instructions."""
    found: list[dict[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        ptx = kernel.asm["ptx"]
        entry = {"kernel": self.fn.__name__, "shared": kernel.metadata.shared, "binary": len(kernel.asm["cubin"])}
        found.append(entry | {name: ptx.count(name) for name in COUNTED})

    driver.set_active(AbsentDevice())
    with patch.object(JITFunction, "run", compile_only):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for gamma, vocabulary in ((5, 49152), (1, 4099), (8, 1)):
                tokens = torch.zeros(gamma, dtype=torch.int64)
                route_block_triton(torch.zeros(gamma, vocabulary, dtype=dtype), tokens, 0.5, 0.3)
        for dtype in (torch.float32, torch.float64):
            for gamma, vocabulary in ((5, 49152), (1, 4099), (8, 1)):
                tokens, stop = torch.zeros(gamma, dtype=torch.int64), torch.tensor(0)
                verifier, noise = torch.zeros(gamma + 1, vocabulary, dtype=dtype), torch.ones(vocabulary, dtype=dtype)
                for draft in (None, verifier[1:]):
                    sample_residual_triton(verifier, draft, tokens, stop, noise)
    return found


if __name__ == "__main__":
    print(json.dumps(built()))
