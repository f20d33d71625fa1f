"""One full verifier in memory: cells that use the same one do not load it again."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from harness.cells import content, digest, paths_in
from harness.model.load import Model

_loaded: dict[str, Model] = {}
"""The last model, by its key."""


def loaded_once(make: Callable[..., Model], notify: Callable[[str], None]) -> Model:
    """What ``make`` gives, or what it gave when it was last asked with the same arguments and files.

    A model of other arguments is let go before the next one is loaded: two never lie in memory side by side. Only
    partial calls of plain values are known again.
    """
    key = key_of(make)
    if key is None or key not in _loaded:
        forget()
        model = make(notify=notify)
        if key is None:
            return model
        _loaded[key] = model
    return _loaded[key]


def key_of(make: Any) -> str | None:
    """A digest of the call and of the files that it names; None where that cannot be told."""
    if not isinstance(make, partial) or make.args:
        return None
    called = f"{make.func.__module__}.{make.func.__qualname__}"
    files = [content(path) for path in paths_in(make.keywords)]
    return digest({"call": called, "arguments": make.keywords, "files": files})


def forget() -> None:
    """Let the last model go, and its memory with it."""
    _loaded.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
