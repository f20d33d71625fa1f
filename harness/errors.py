"""The one exception that means "the user can mend this": printed as one line, exit code 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Bad input. The text names the value, what was allowed and what to do."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """An error for a name that does not exist, with near matches first.

    >>> str(unknown("task", "translate", ["translation", "qa"]))
    "unknown task 'translate': did you mean 'translation'? Available: qa, translation."
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return UserError(f"unknown {kind} {name!r}: {hint}Available: {', '.join(names)}.")


def forbidden(error: PermissionError) -> UserError:
    """An error for a file or folder that this user may not read, write or look into."""
    return UserError(f"{error.filename}: {error.strerror or error}: check its permissions and those of its folders.")
