"""Python functions to complete, HumanEval, scored by running the row's tests (pass@1)."""

import re
from collections.abc import Mapping
from typing import Any

from harness.records import Example
from tasks.code import Coding, defines, of_example
from tasks.source import Dataset, column

LEFT_EDGE = re.compile(r"\n(?=[^\s#)\]}])")
"""Where a continued function ends: at the next line that begins at the left edge and closes no bracket."""

INDENTED = re.compile(r"(?:[ \t]*\n)*[ \t]+\S")
"""How an output begins that goes on from the prompt."""


class HumanEval(Coding):
    """Signature and docstring a prompt. No train split: shots, were they asked for, are the built-in rows.

    A chat model is asked for the whole function; a model without a chat template goes on from the prompt.
    """

    name = "humaneval"
    dataset = Dataset(
        *("openai/openai_humaneval", "openai_humaneval", "openai_humaneval", "humaneval", "humaneval"),
        calibration=(),
        shots=(),
    )
    columns = ("prompt", "canonical_solution", "test", "entry_point")
    continues = True
    template = "Complete this Python function. Answer with the whole function in one block of code.\n\n{input}"
    plain = "{input}{answer}"

    def parse(self, row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        return column(row, "prompt"), (column(row, "canonical_solution"),)

    def meta(self, row: Mapping[str, Any]) -> dict[str, str]:
        entry_point = column(row, "entry_point")
        return {"tests": f"{column(row, 'test')}\ncheck({entry_point})", "entry_point": entry_point, "setup": ""}

    @property
    def plain_stop(self) -> tuple[str, ...]:
        """What begins behind a finished function."""
        return (*self.stop, "\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(")

    def program(self, example: Example, text: str) -> str:
        """The prompt, then either the function anew or what goes on from the prompt, up to its end.

        The prompt stays in front of a whole function too: it has the imports and helpers that both may use.
        """
        found = of_example(text, example)
        if found is text and not INDENTED.match(text):
            found = self.prediction(text)
        if defines(found, example.meta["entry_point"]):
            return f"{example.input}\n{found}"
        return example.input + LEFT_EDGE.split(found, maxsplit=1)[0]
