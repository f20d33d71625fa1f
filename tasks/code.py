"""What sets of programming problems share: the program in a generated text, and pass@1."""

import re
from abc import ABC

from harness.records import Example
from tasks.base import Task

BLOCK = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
"""A fenced block of Markdown, also one that the end of the output cut off."""


class Coding(Task, ABC):
    """``Example.meta`` has ``tests``, Python that runs behind the program, ``entry_point`` and ``setup``.

    The one reference is the row's own solution.
    """

    group = "coding"
    metrics = ("pass@1",)

    def prediction(self, text: str) -> str:
        """The first block of code, or the whole text where there is none. White space is part of it."""
        found = BLOCK.search(text)
        return found[1] if found else text


def defines(source: str, name: str) -> bool:
    """Whether a text has a function of that name at its left edge."""
    return re.search(rf"^(?:async )?def {re.escape(name)}\b", source, re.MULTILINE) is not None


def of_example(program: str, example: Example) -> str:
    """The block among several that defines what the tests call, else ``program``."""
    return next((found for found in BLOCK.findall(program) if defines(found, example.meta["entry_point"])), program)
