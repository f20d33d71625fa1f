"""Files of an earlier report that a later one of the same name has nothing for: they would stand beside its numbers."""

from collections.abc import Container, Iterable
from pathlib import Path


def remove_stale(possible: Iterable[Path], written: Container[Path]) -> None:
    """Remove what such a report may write and this one did not."""
    for path in possible:
        if path not in written:
            path.unlink(missing_ok=True)
