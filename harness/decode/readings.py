"""Where a method does what its source leaves open, or what of its source we have not read: said in every table."""

from collections.abc import Mapping

PARTS = ("rule", "deferral", "gate", "rules")
"""Where a method keeps what decides for it. Each, and the method, may have ``reading``: a phrase, empty for none."""


def readings(methods: Mapping[str, object]) -> str:
    """``clasp: one token as evidence; via_sd: ...``: the arms whose ``reading`` is ours; empty where none has one."""
    return "; ".join(f"{name}: {said}" for name, method in methods.items() if (said := reading_of(method)))


def reading_of(part: object) -> str:
    """The phrases of ``part`` and of what decides for it."""
    if part is None:
        return ""
    phrases = [getattr(part, "reading", ""), *(reading_of(getattr(part, key, None)) for key in PARTS)]
    return ", ".join(filter(None, phrases))
