"""A function of tensors with its inputs in fixed places, so that a CUDA graph can hold all of its kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM_UP_CALLS = 3
"""Calls before a capture: libraries allocate their workspaces in the first ones."""


class Replay:
    """Calls ``function`` on fixed input buffers; on a CUDA device, replays the graph captured of it.

    ``function`` must be repeatable: it is called several times on the first inputs. What a call returns lies in the
    graph's memory until the next call. Each graph has memory of its own: in a shared pool the intermediate values of
    one may lie where the results of another still wait to be read.
    """

    def __init__(self, function: Callable[..., Any], *inputs: Tensor) -> None:
        self.function = function
        self.inputs = tuple(value.clone() for value in inputs)
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.inputs[0].device.type == "cuda":
            self.capture()

    def capture(self) -> None:
        with torch.cuda.device(self.inputs[0].device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_CALLS):
                    self.function(*self.inputs)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self.function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        for place, value in zip(self.inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        if self.graph is None:
            return self.function(*self.inputs)
        self.graph.replay()
        return self.outputs
