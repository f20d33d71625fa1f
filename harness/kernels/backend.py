"""The one import of Triton: without it the kernels stay plain functions, which nobody launches.

With ``TRITON_INTERPRET=1`` set before this module is imported, kernels run in Triton's interpreter, on CPU tensors too.
"""

from collections.abc import Callable

from torch import Tensor

try:
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:
    tl = None
    constexpr = int

    def jit(kernel: Callable[..., None]) -> Callable[..., None]:
        return kernel


def on_device(tensor: Tensor) -> bool:
    """Whether kernels can be launched where this tensor is."""
    return tl is not None and tensor.is_cuda


def blocks(size: int, block: int) -> int:
    """How many blocks cover ``size`` entries."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below ``size``: what Triton's blocks must be."""
    return 1 << (size - 1).bit_length()
