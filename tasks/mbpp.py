"""Short Python problems, MBPP (full), scored by running the row's asserts (pass@1)."""

import re
from collections.abc import Mapping
from typing import Any

from harness.records import Example
from tasks.code import Coding, of_example
from tasks.qa import texts
from tasks.source import Dataset, column

FUNCTION = re.compile(r"^(?:async )?def (\w+)", re.MULTILINE)


class Mbpp(Coding):
    """A task and its asserts a prompt, without which nobody could know the function's name. Three shots.

    Shots from the train split; the set's authors show three rows of a split of their own, ``prompt``. Challenge tests
    are not run: the paper's pass@1 is on ``test_list``.
    """

    name = "mbpp"
    dataset = Dataset("google-research-datasets/mbpp", "full", "mbpp_full", "mbpp", "mbpp")
    columns = ("text", "code", "test_list", "test_setup_code")
    template = "Write a Python function. Answer with the code alone.\n\n{input}"
    plain = "You are an expert Python programmer, and here is your task: {input}\n[BEGIN]\n{answer}\n[DONE]"
    max_input_tokens = 1024
    shots = 3

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        tests = "\n".join(texts(row, "test_list"))
        return f"{column(row, 'text')}\nYour code should pass these tests:\n\n{tests}", (column(row, "code"),)

    def answer(self, row: Mapping[str, Any]) -> str:
        r"""The solution with ``\n`` line ends: a model should not learn ``\r\n`` from it."""
        return column(row, "code").replace("\r\n", "\n")

    def meta(self, row: Mapping[str, Any]) -> dict[str, str]:
        tests, setup = "\n".join(texts(row, "test_list")), column(row, "test_setup_code")
        called = (name for name in FUNCTION.findall(column(row, "code")) if re.search(rf"\b{name}\(", tests))
        return {"tests": tests, "entry_point": next(called, ""), "setup": setup}

    def program(self, example: Example, text: str) -> str:
        found = of_example(text, example)
        return self.prediction(text) if found is text else found
