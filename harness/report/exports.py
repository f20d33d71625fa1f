"""Tables of runs and sweeps in further formats: LaTeX to paste into a paper, and one page to open in a browser."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from harness.errors import UserError, unknown
from harness.report.formats import PACKAGES, latex_table
from harness.report.lines import RunReport
from harness.report.page import run_page, sweep_page
from harness.report.tables import identity, notes, sections
from harness.store import write_atomic

FORMATS = ("html", "latex")


def chosen_formats(asked: object) -> tuple[str, ...]:
    """The formats asked for: None, a name, or a list of names.

    Raises:
        UserError: no such format.
    """
    wanted = [asked] if isinstance(asked, str) else asked
    if wanted is None:
        return ()
    if not isinstance(wanted, Sequence):
        raise UserError(f"format={asked!r}: want html, latex, or a list of both.")
    for name in wanted:
        if name not in FORMATS:
            raise unknown("format", str(name), FORMATS)
    return tuple(dict.fromkeys(wanted))


def write_exports(
    reports: Sequence[RunReport], figures: Mapping[str, Figure], folder: Path, name: str, formats: Sequence[str]
) -> list[Path]:
    """``<name>.html`` and ``<name>.tex``, where asked for, each whole or not at all; ``figures`` as ``figures_of``."""
    files: dict[Path, str] = {}
    if "html" in formats:
        files[folder / f"{name}.html"] = run_page(reports, figures, name)
    if "latex" in formats:
        files[folder / f"{name}.tex"] = run_latex(reports, name)
    for path, text in files.items():
        write_atomic(path, text)
    return list(files)


def sweep_exports(
    facts: Sequence[str], table: pd.DataFrame, figure: Figure, name: str, formats: Sequence[str]
) -> dict[str, str]:
    """A sweep's page and its table in LaTeX, by what their files' names end in, where asked for."""
    found: dict[str, str] = {}
    if "html" in formats:
        found["html"] = sweep_page(facts, table, figure, name)
    if "latex" in formats:
        plain = tuple(fact.replace("**", "") for fact in facts)
        found["tex"] = PACKAGES + latex_table(table, f"Sweep {name}", f"{name}-sweep", plain)
    return found


def run_latex(reports: Sequence[RunReport], name: str) -> str:
    """Every table of one or more runs; under the first what the runs were."""
    found: list[str] = []
    for head, frame, remark in sections(reports):
        facts = [fact for report in reports for fact in identity(report)] if not found else []
        lines = [*(notes(reports) if not found else []), *remark.splitlines(), *facts]
        label = f"{name}-{re.sub(r'[^a-z0-9]+', '-', head.lower()).strip('-')}"
        said = tuple(line.removeprefix("- ") for line in lines if line)
        found.append(latex_table(frame, f"{name}: {head}", label, said))
    return PACKAGES + "\n".join(found)
