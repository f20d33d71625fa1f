"""Bytes that objects of ours hold in tensors, each storage counted once."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def held_bytes(*roots: Any) -> int:
    """Bytes of all tensors that can be reached from ``roots`` through our own objects and plain containers.

    Of a decoder these are the weights and their packed copies, caches, saved tails, tables and static buffers of its
    tiers. A storage that several tensors view counts once and whole. What other libraries' objects hold (a tokenizer)
    is not looked at.
    """
    return sum({key: size for tensor in tensors(roots) for key, size in (storage(tensor),)}.values())


def storage(tensor: Tensor) -> tuple[Any, int]:
    """What identifies the memory behind a tensor, and its bytes. A packed layout shows no storage: elements count."""
    if tensor.layout is not torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()
    memory = tensor.untyped_storage()
    place = memory._cdata if tensor.device.type == "meta" else memory.data_ptr()  # there all addresses are 0
    return (str(tensor.device), place), memory.nbytes()


def tensors(roots: Sequence[Any]) -> Iterator[Tensor]:
    """Every tensor reached, some more than once by way of views."""
    waiting, seen = list(roots), {}
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, str | bytes | type):
            continue
        seen[id(found)] = found  # kept, so that no other object gets its id meanwhile
        if isinstance(found, Tensor):
            yield found
        elif isinstance(found, Mapping):
            waiting += found.values()
        elif isinstance(found, list | tuple | set | frozenset):
            waiting += found
        elif isinstance(found, partial):
            waiting += (*found.args, *found.keywords.values())
        elif type(found).__module__.partition(".")[0] == "harness":
            waiting += attributes(found)


def attributes(found: Any) -> Iterator[Any]:
    """What an object's own attributes hold, those in slots included."""
    yield from getattr(found, "__dict__", {}).values()
    for kind in type(found).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(found, name):
                yield getattr(found, name)
