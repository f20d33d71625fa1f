"""Going on with a run that was killed: what is on disk is kept, and what is missing is measured.

A run folder's name has its cell in it. Samples are known by task, example and arm; prompts come in the order in which
they would have come, and where some arms of a prompt are there, the others take their turns alone.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness import pairing
from harness.compare import BASELINE
from harness.errors import UserError
from harness.records import Divergence, FidelityRecord, RunRecord, SampleRecord
from harness.store import FILES, RUN, RunData, RunFolder, is_finished, read, read_config, remove_temporaries, writing

Key = tuple[str, str, str]
"""Task, example and arm."""


def key_of(record: SampleRecord | Divergence | FidelityRecord) -> Key:
    return record.task, record.example_id, record.arm


def runs_of_cell(results: Path, cell: str) -> list[Path]:
    """Folders of the runs that measured a cell, the newest first. Of one that was killed at its birth there is none."""
    return sorted((path.parent for path in (results / "runs").glob(f"*-{cell}-*/{RUN}")), reverse=True)


def finished_or_begun(results: Path, cell: str) -> tuple[Path | None, Path | None]:
    """The newest finished run of a cell, and the newest that can be gone on with."""
    runs = runs_of_cell(results, cell)
    finished = next((path for path in runs if is_finished(path)), None)
    return finished, next((path for path in runs if not is_finished(path)), None)


def begun_again(results: Path, cell: str) -> Path | None:
    """The newest run of a cell, where ``rerun=true`` began it and it is not finished: the same command goes on with it.

    What was killed before it was asked for anew stays as it is.
    """
    newest = next(iter(runs_of_cell(results, cell)), None)
    if newest is None or is_finished(newest) or read_config(newest).get("rerun") is not True:
        return None
    return newest


def gone_on_with(path: Path, now: RunRecord, visits: int) -> tuple[RunFolder, RunData]:
    """The folder of an unfinished run, ready for more lines, and what it holds.

    ``now`` is the same run as it would begin today, which decodes each prompt ``visits`` times. Half-written last lines
    are cut off and counted.

    Raises:
        UserError: files that cannot be read, or a folder of a newer version or another cell.
    """
    data = read(path)
    if data.run.cell != now.cell:
        raise UserError(f"{path}: cell {data.run.cell}, want {now.cell}: delete the folder, or set rerun=true.")
    with writing(path):
        remove_temporaries(path)
        dropped = sum(mend(path / name) for name in FILES.values())
    run = replace(
        data.run,
        status="running",
        error=None,
        resumed=data.run.resumed + 1,
        dropped=data.run.dropped + dropped,
        split=split_prompts(data.samples, visits),
    )
    folder = RunFolder(path, run)
    with writing(path):
        folder.set_status("running")
    return folder, data._replace(run=run)


def mend(path: Path) -> int:
    """Make a file of lines end with a whole one; 1 where half a line was cut off.

    A last line is whole without its newline when ``read`` has taken it.
    """
    text = path.read_bytes()
    if not text or text.endswith(b"\n"):
        return 0
    begin = text.rfind(b"\n") + 1
    if whole(text[begin:]):
        with path.open("ab") as file:
            file.write(b"\n")
        return 0
    os.truncate(path, begin)
    return 1


def whole(line: bytes) -> bool:
    """Whether a line that was cut somewhere is a whole JSON object: no beginning of one is."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def split_prompts(samples: Sequence[SampleRecord], visits: int) -> int:
    """Prompts of which some of the ``visits`` are there and some are not, and those of which that was so before."""
    done: dict[tuple[str, str], list[SampleRecord]] = {}
    for sample in samples:
        done.setdefault((sample.task, sample.example_id), []).append(sample)
    alone = [key for key, found in done.items() if [one.arm for one in found] == [BASELINE]]
    if len(alone) > 1:  # a baseline that is measured before all others, as pairing=shared has it, splits no prompt
        for key in alone:
            del done[key]
    return sum(len(found) < visits or any(one.resumed for one in found) for found in done.values())


def by_key(samples: Iterable[SampleRecord]) -> Mapping[pairing.Key, SampleRecord]:
    """What need not be measured any more."""
    return {pairing.key_of(sample): sample for sample in samples}
