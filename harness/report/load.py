"""A run's numbers from its folder; of one that did not finish, of the prompts that all its arms decoded."""

from pathlib import Path

from harness.errors import UserError
from harness.metrics import complete_prompts
from harness.report.lines import RunReport, build
from harness.store import read, read_config


def load(folder: Path) -> RunReport:
    """What the tables and figures of a run are made of.

    Raises:
        UserError: the folder cannot be read, or all arms decoded no prompt.
    """
    if (found := load_if_any(folder)) is None:
        raise UserError(f"run {folder.name!r} has no prompt that all arms decoded: run it again.")
    return found


def load_if_any(folder: Path) -> RunReport | None:
    """The same; None where all arms decoded no prompt."""
    data = read(folder)
    samples, note = data.samples, ""
    if data.run.status != "finished":
        samples = tuple(complete_prompts(data.run, samples))
        left = len(data.samples) - len(samples) + data.dropped
        note = f"this run did not finish: only prompts decoded by all arms are shown, {left} samples are left out"
    if not samples:
        return None
    return build(data.run, samples, read_config(folder), note, data.divergences, data.fidelity)
