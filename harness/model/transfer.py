"""Token ids between host and device without waiting, but for the one read that a block ends with."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


def to_device(ids: Sequence[int], device: torch.device) -> Int[Tensor, "S"]:
    """``ids`` on ``device``; the host does not wait for the copy."""
    tensor = torch.tensor(ids, dtype=torch.long)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: Int[Tensor, "..."]) -> list[int]:
    """All values of tensors on one device, in order, by one transfer that waits for the device."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist()
