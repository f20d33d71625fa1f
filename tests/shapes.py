"""How often tensor shapes are checked: in the first calls of a function in each test, not in all of a loop's.

A check takes several times what a tiny model takes, and a loop calls a function with alike shapes again and again.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import jaxtyping

CALLS = 16
"""Checked calls of each function in a test."""

_calls: Counter[int] = Counter()


def sparing(decorate: Callable[..., Any]) -> Callable[..., Any]:
    """``jaxtyping.jaxtyped``, which the import hook calls, with functions that check ``CALLS`` calls of theirs."""

    def decorator(typechecker: Any) -> Callable[[Any], Any]:
        def apply(function: Any) -> Any:
            checked = decorate(typechecker=typechecker)(function)
            if not inspect.isfunction(function):
                return checked
            key = id(checked)

            @wraps(function)
            def call(*arguments: Any, **keywords: Any) -> Any:
                if _calls[key] >= CALLS:
                    return function(*arguments, **keywords)
                _calls[key] += 1
                return checked(*arguments, **keywords)

            return call

        return apply

    return decorator


def install() -> None:
    """Before anything that is checked is imported."""
    jaxtyping.jaxtyped = sparing(jaxtyping.jaxtyped)


def begin() -> None:
    """Check the next calls of every function again."""
    _calls.clear()
