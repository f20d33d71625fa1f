"""The paper's tables with ours beside: Markdown, LaTeX and HTML for reading, a tidy CSV in full precision.

A cell reads ``ours / paper (ours - paper)``; a dash is a value that is not there, and below the table stands why.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from harness.errors import UserError, unknown
from harness.report.formats import PACKAGES, html_prose, latex_table
from harness.report.lines import DASH
from harness.report.page import bullets, page
from harness.report.page import table as html_part
from harness.report.paper_numbers import read_numbers
from harness.report.paper_tables_cells import Cell, cells
from harness.report.paper_tables_sources import Source, read_failures, read_sources
from harness.report.paper_tables_spec import TABLES, PaperTable
from harness.report.predicted import REMARK, with_error
from harness.report.tables import markdown_table
from harness.store import check_writable, write_atomic, writing

ALL = "all"
FORETOLD = "predicted (error); ceiling"
READING = (
    "A cell: ours / the paper's (ours - the paper's). A dash: not there, and below stands why. Rows of other models "
    "than the paper's have no value of the paper beside them. **lossy**: the output is not the full verifier's law."
)


def chosen(names: object) -> list[PaperTable]:
    """The tables asked for: ``all``, a name such as ``table8``, or a list of names.

    Raises:
        UserError: no such table, or no name.
    """
    wanted = [names] if isinstance(names, str) else names
    if not (isinstance(wanted, Sequence) and wanted and all(type(name) is str for name in wanted)):
        raise UserError(f"paper={names!r}: want all, a table such as table8, or a list of tables.")
    for name in wanted:
        if name not in (ALL, *TABLES):
            raise unknown("table of the paper", name, (ALL, *TABLES))
    return [table for name, table in TABLES.items() if ALL in wanted or name in wanted]


def paper_cells(results_dir: str | Path, names: object = ALL) -> dict[str, list[Cell]]:
    """Every cell of the tables asked for, from the finished runs in ``results_dir``.

    Raises:
        UserError: no such table, or a run that cannot be read.
    """
    root, tables, numbers = Path(results_dir), chosen(names), read_numbers()
    sources, failures = read_sources(root, tables), read_failures(root, tables)
    return {table.name: cells(table, sources[table.name], numbers, failures[table.name]) for table in tables}


def write_paper_tables(results_dir: str | Path, names: object = ALL, one_page: bool = False) -> list[Path]:
    """Write ``tables/paper_<table>.md``, ``.csv``, ``.tex`` and ``.html`` of each; their paths.

    ``one_page``: also all of them in ``paper_tables.html``.

    Raises:
        UserError: no such table, a run that cannot be read, or the folder cannot be written.
    """
    folder = Path(results_dir) / "tables"
    check_writable(folder)
    files: dict[str, str] = {}
    together: list[str] = []
    for name, table_cells in paper_cells(results_dir, names).items():
        table = TABLES[name]
        parts = html_parts(table, table_cells)
        files |= {
            f"paper_{name}.md": markdown(table, table_cells),
            f"paper_{name}.csv": tidy_frame(table, table_cells).to_csv(index=False, lineterminator="\n"),
            f"paper_{name}.tex": latex(table, table_cells),
            f"paper_{name}.html": page(title(table), parts),
        }
        together += [f"<h2>{title(table)}</h2>", *parts]
    if one_page:
        files["paper_tables.html"] = page("Tables of the paper with ours beside", together)
    with writing(folder):
        for name, text in files.items():
            write_atomic(folder / name, text)
    return [folder / name for name in files]


def title(table: PaperTable) -> str:
    return f"Table {table.name.removeprefix('table')} of the paper: {table.title}"


def tidy_frame(table: PaperTable, table_cells: Sequence[Cell]) -> pd.DataFrame:
    """One cell a line with all that identifies it, in full precision; what is not there is empty."""
    return pd.DataFrame(
        [
            {
                "table": table.name,
                "models": cell.block.label,
                "method": cell.row.label,
                "arms": " ".join(cell.row.arms),
                "lossy": cell.lossy,
                "task": cell.column.group,
                "metric": cell.column.metric,
                "ours": cell.ours.value,
                "ours_low": cell.ours.low,
                "ours_high": cell.ours.high,
                "paper": cell.paper,
                "difference": cell.difference,
                "predicted": cell.predicted,
                "ceiling": cell.ceiling,
                "n": cell.ours.n,
                "run": cell.source and cell.source.name,
                "seed": cell.source and cell.source.seed,
                "device": cell.source and cell.source.device,
                "commit": cell.source and cell.source.commit,
                "why_not": cell.why,
            }
            for cell in table_cells
        ]
    ).astype({"n": "Int64", "seed": "Int64"})


def frame(table: PaperTable, table_cells: Sequence[Cell]) -> pd.DataFrame:
    """The table as text, in the paper's rows and columns; two rows of heads: sets, then metrics.

    Behind a column of speedups stand our predictions and ceilings, where any row has them.
    """
    foretold = {cell.column for cell in table_cells if cell.predicted is not None or cell.ceiling is not None}
    found: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for cell in table_cells:
        method = f"{cell.row.label}, **lossy**" if lossy(cell, table_cells) else cell.row.label
        line = found.setdefault((cell.block.label, method), {})
        line[cell.column.group, cell.column.label] = shown(cell)
        if cell.column in foretold:
            line[cell.column.group, f"{cell.column.label}: {FORETOLD}"] = shown_foretold(cell)
    heads = [("", "models"), ("", "method"), *next(iter(found.values()))]
    lines = [[*names, *line.values()] for names, line in found.items()]
    return pd.DataFrame(lines, columns=pd.MultiIndex.from_tuples(heads))


def lossy(cell: Cell, table_cells: Sequence[Cell]) -> bool:
    """Of a whole row, also where only some of its cells were run."""
    return any(other.lossy for other in table_cells if other.block is cell.block and other.row is cell.row)


def shown(cell: Cell) -> str:
    """``0.25 / 0.27 (-0.02)``; dashes for what is not there; ours alone in rows that the paper does not have."""
    digits = cell.column.digits
    ours, paper = (DASH if value is None else f"{value:.{digits}f}" for value in (cell.ours.value, cell.paper))
    if cell.paper is None and (cell.block.paper is None or cell.row.method is None):
        return ours
    return f"{ours} / {paper}" + ("" if cell.difference is None else f" ({cell.difference:+.{digits}f})")


def shown_foretold(cell: Cell) -> str:
    """``1.31 (-2 %); 2.90``: the prediction of ours with its error, and the ceiling; a dash in place of either."""
    predicted = with_error(cell.predicted, cell.ours.value, DASH)
    most = DASH if cell.ceiling is None else f"{cell.ceiling:.2f}"
    return DASH if predicted == most == DASH else f"{predicted}; {most}"


def flat(table_frame: pd.DataFrame) -> pd.DataFrame:
    """One row of heads: "WebQ accuracy"."""
    return table_frame.set_axis([" ".join(filter(None, names)) for names in table_frame.columns], axis="columns")


def sources_of(table_cells: Sequence[Cell]) -> list[Source]:
    """Runs whose numbers stand in the table."""
    return list({cell.source.name: cell.source for cell in table_cells if cell.source is not None}.values())


def remarks(table: PaperTable, table_cells: Sequence[Cell]) -> list[str]:
    """How to read the table, and what its runs say of themselves."""
    sources = sources_of(table_cells)
    said = [source.note for source in sources if source.note]
    if any(cell.column.ours == "speedup_decode" and cell.source is not None for cell in table_cells):
        said += [f"Predicted and ceiling are of ours. {REMARK}", *(line for one in sources for line in one.unpredicted)]
    return [READING, *table.notes, *dict.fromkeys(said)]


def identity(table_cells: Sequence[Cell]) -> list[str]:
    """Number of examples, seed, device and commit of each run."""
    found = [source.identity for source in sources_of(table_cells)]
    return found or ["no run: number of examples, seed, device and commit are those of a run, and there is none"]


def reasons(table_cells: Sequence[Cell]) -> list[str]:
    """Why cells have no value of ours, each reason once, with the rows and columns that it is of."""
    places: dict[str, list[Cell]] = {}
    for cell in table_cells:
        if cell.why:
            places.setdefault(cell.why, []).append(cell)
    return [f"{'; '.join(places_of(mine, table_cells))}: {why}" for why, mine in places.items()]


def places_of(mine: Sequence[Cell], every: Sequence[Cell]) -> Iterator[str]:
    """Where cells stand: their models; also the rows, or the columns, where not all of the block's are meant."""
    for label in dict.fromkeys(cell.block.label for cell in mine):
        members, block = ([cell for cell in group if cell.block.label == label] for group in (mine, every))
        some, all_of_them = (list(dict.fromkeys(cell.row.label for cell in group)) for group in (members, block))
        rows = some if len(some) < len(all_of_them) else []
        yield ", ".join([label, *rows, *columns_of(members, block)])


def columns_of(members: Sequence[Cell], block: Sequence[Cell]) -> list[str]:
    """The columns of ``members``, a group of columns by its name alone; none where they are all of the block's."""
    every = list(dict.fromkeys(cell.column for cell in block))
    some = list(dict.fromkeys(cell.column for cell in members))
    if len(some) == len(every):
        return []
    groups = [name for name in dict.fromkeys(one.group for one in some) if name]
    whole = [
        name for name in groups if sum(one.group == name for one in some) == sum(one.group == name for one in every)
    ]
    return whole + [f"{one.group} {one.label}".strip() for one in some if one.group not in whole]


def markdown(table: PaperTable, table_cells: Sequence[Cell]) -> str:
    parts = [f"# {title(table)}", markdown_table(flat(frame(table, table_cells)))]
    for head, lines in underneath(table, table_cells):
        parts += [f"## {head}", bullets(lines)]
    return "\n\n".join(parts) + "\n"


def html_parts(table: PaperTable, table_cells: Sequence[Cell]) -> list[str]:
    """The table and what stands under it."""
    parts = [html_part(frame(table, table_cells))]
    for head, lines in underneath(table, table_cells):
        parts += [f"<h3>{head}</h3>", html_prose(bullets(lines))]
    return parts


def latex(table: PaperTable, table_cells: Sequence[Cell]) -> str:
    under = underneath(table, table_cells)
    notes = tuple(f"{head}: {line.removesuffix('.')}." for head, lines in under for line in lines)
    return PACKAGES + latex_table(frame(table, table_cells), title(table), f"paper-{table.name}", notes)


def underneath(table: PaperTable, table_cells: Sequence[Cell]) -> list[tuple[str, list[str]]]:
    """Heading and lines of what stands under a table."""
    found = [
        ("Not run", reasons(table_cells)),
        ("Runs", identity(table_cells)),
        ("Reading", remarks(table, table_cells)),
    ]
    return [(head, lines) for head, lines in found if lines]
