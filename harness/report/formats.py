"""Tables of text as LaTeX (booktabs) and HTML, by pandas' styler.

Cells and prose may hold the Markdown that the tables of this project hold: ``**bold**``, `` `code` `` and lists.
"""

import re
from html import escape
from itertools import groupby

import pandas as pd
from tabulate import LATEX_ESCAPE_RULES

BOLD, CODE = re.compile(r"\*\*(.+?)\*\*"), re.compile(r"`([^`]+)`")
MINUS = re.compile(r"(?<![\w-])-(?=\d)")
"""A hyphen that is a sign."""
LATEX = str.maketrans(
    LATEX_ESCAPE_RULES
    | {"→": r"$\rightarrow$", "±": r"$\pm$", "≤": r"$\le$", "≥": r"$\ge$", "\u2013": "--", "\u00d7": r"$\times$"}
)
PACKAGES = "% needs \\usepackage{booktabs} and \\usepackage{adjustbox}\n"


def latex_text(text: object) -> str:
    """Escaped, with bold and code set."""
    marked = MINUS.sub("$-$", str(text).translate(LATEX))
    return CODE.sub(r"\\texttt{\1}", BOLD.sub(r"\\textbf{\1}", marked))


def html_text(text: object) -> str:
    """Escaped, with bold and code set."""
    return CODE.sub(r"<code>\1</code>", BOLD.sub(r"<b>\1</b>", escape(str(text), quote=False)))


def html_prose(text: str) -> str:
    """Paragraphs and lists, which empty lines part."""
    found = []
    for part in filter(None, text.split("\n\n")):
        lines = part.splitlines()
        if all(line.startswith("- ") for line in lines):
            found.append("<ul>" + "".join(f"<li>{html_text(line[2:])}</li>" for line in lines) + "</ul>")
        else:
            found.append(f"<p>{html_text(part)}</p>")
    return "\n".join(found)


def html_table(frame: pd.DataFrame) -> str:
    """A table with one or more rows of heads, and no style of its own."""
    styled = frame.style.hide(axis="index").format(html_text).format_index(html_text, axis="columns")
    return str(styled.to_html(exclude_styles=True))


def latex_table(frame: pd.DataFrame, caption: str, label: str, notes: tuple[str, ...] = ()) -> str:
    """A ``table*`` as wide as the page at most. What repeats in the first column is said once, with a rule above it.

    ``frame`` has at least a row; the first columns, up to the one named ``method`` or ``arm``, are words.
    """
    first = frame.iloc[:, 0]
    begins = first.ne(first.shift())
    shown = frame.copy()
    shown.isetitem(0, first.where(begins, ""))
    names = [column[-1] if isinstance(column, tuple) else column for column in frame.columns]
    words = 1 + max((names.index(name) for name in ("method", "arm") if name in names), default=0)
    styled = shown.style.hide(axis="index").format(latex_text).format_index(latex_text, axis="columns")
    text = styled.to_latex(hrules=True, column_format="l" * words + "r" * (len(names) - words), multicol_align="c")
    lines = text.splitlines()
    body = lines.index(r"\midrule") + 1
    if not begins.all():
        for place in reversed([place for place, new in enumerate(begins) if new and place]):
            lines.insert(body + place, r"\midrule")
    if frame.columns.nlevels > 1:
        lines.insert(lines.index(r"\toprule") + 2, spans(frame))
    tabular = "\n".join(lines)
    remarks = "".join(f"\n{latex_text(note)}\\par" for note in notes)
    return (
        f"\\begin{{table*}}\n\\centering\n\\caption{{{latex_text(caption)}}}\n\\label{{tab:{label}}}\n"
        f"\\begin{{adjustbox}}{{max width=\\textwidth}}\n{tabular}\n\\end{{adjustbox}}\n"
        f"\\par\\smallskip\\raggedright\\footnotesize{remarks}\n\\end{{table*}}\n"
    )


def spans(frame: pd.DataFrame) -> str:
    """Rules under the names that stand over several columns."""
    found, place = [], 1
    for name, columns in groupby(frame.columns.get_level_values(0)):
        last = place + len(list(columns)) - 1
        if name:
            found.append(rf"\cmidrule(lr){{{place}-{last}}}")
        place = last + 1
    return " ".join(found)
