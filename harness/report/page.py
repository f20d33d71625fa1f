"""One page that needs no other file: tables that sort on a click, figures inside, what was run underneath."""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import matplotlib.style
import pandas as pd
from matplotlib.figure import Figure

from harness.report.figures import STYLE as FIGURE_STYLE
from harness.report.formats import html_prose, html_table
from harness.report.lines import DASH, RunReport
from harness.report.tables import DEFINED, definition, faults_of, identity, notes, sections

STYLE = """
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em; color: #222; background: #fff; }
h1 { font-size: 1.6em; overflow-wrap: anywhere; } h2 { font-size: 1.2em; margin-top: 2em; }
p, li { max-width: 60em; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: 13px; line-height: 1.4; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25em 0.7em; text-align: left; vertical-align: top; }
th { vertical-align: bottom; } thead tr:last-child th { border-bottom: 1px solid #777; }
th[colspan] { text-align: center; }
.wide td { white-space: nowrap; } .wide td:first-child { white-space: normal; min-width: 8em; max-width: 24em; }
.wide tbody tr:hover td { background: #f6f6f6; }
.wide, figure { overflow-x: auto; margin: 1em 0; } img { max-width: 100%; height: auto; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid #0072b2; }
th button::after { content: "\\2195"; color: #999; padding-left: 0.3em; }
th[aria-sort=ascending] button::after { content: "\\2191"; color: #222; }
th[aria-sort=descending] button::after { content: "\\2193"; color: #222; }
b { color: #a33d00; } code { font-size: 0.92em; } small { color: #555; }
@media (max-width: 40em) {
  body { margin: 1em auto; padding: 0 0.6em; } th, td { padding: 0.2em 0.45em; } ul { padding-left: 1.2em; }
  .wide tbody td:nth-child(-n+2) {
    position: sticky; left: 0; background: #fff; box-sizing: border-box; min-width: 6.2em; max-width: 6.2em;
    white-space: normal; overflow-wrap: anywhere;
  }
  .wide tbody td:nth-child(2) { left: 6.2em; min-width: 8em; max-width: 8em; border-right: 1px solid #ddd; }
  figure img { max-width: none; }
}
@media print { .wide { overflow: visible; } th button::after { content: none !important; } }
"""

SORT = """
"use strict";
// A number at the start of a cell, or behind one word as in "rouge2 8.2"; cells without a value stay last.
const NUMBER = /^(?:[A-Za-z][\\w-]* )?([+-]?\\d+(?:\\.\\d+)?(?:e[+-]?\\d+)?)/;
const EMPTY = text => text === "" || text === "not run" || text.startsWith("\\u2013");
function sortBy(table, column, ascending) {
  const rows = [...table.tBodies[0].rows];
  const texts = new Map(rows.map(row => [row, row.cells[column].textContent.trim()]));
  const full = rows.filter(row => !EMPTY(texts.get(row))), empty = rows.filter(row => EMPTY(texts.get(row)));
  const numeric = full.every(row => NUMBER.test(texts.get(row)));
  const number = row => Number(NUMBER.exec(texts.get(row))[1]);
  const compare = numeric
    ? (one, other) => number(one) - number(other)
    : (one, other) => texts.get(one).localeCompare(texts.get(other));
  full.sort((one, other) => (ascending ? 1 : -1) * compare(one, other));
  table.tBodies[0].append(...full, ...empty);
}
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.title = "sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      sortBy(table, column, ascending);
    });
  });
}
"""


def page(title: str, parts: Sequence[str]) -> str:
    """The whole page; ``parts`` are HTML."""
    head = (
        "<meta charset='utf-8'/><meta name='viewport' content='width=device-width, initial-scale=1'/>"
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return (
        f"<!DOCTYPE html>\n<html lang='en'><head>{head}</head><body>\n{body}\n<script>{SORT}</script>\n</body></html>\n"
    )


def run_page(reports: Sequence[RunReport], figures: Mapping[str, Figure], name: str) -> str:
    """The page of one or more runs: what their Markdown says, the main figure on top, the others below the results."""
    parts = [html_prose(note) for note in notes(reports)]
    drawn = {
        ending: picture(figure, f"{name}: {ending or 'main'} figure of this page's numbers")
        for ending, figure in figures.items()
    }
    parts += [drawn.pop("")] if "" in drawn else []
    for head, frame, remark in sections(reports):
        parts += [f"<h2>{escape(head)}</h2>", table(frame), html_prose(remark)]
        if head == "Results" and (faults := faults_of(reports)):
            parts += ["<h2>Faults</h2>", html_prose(bullets(faults))]
        if head == "Results":
            parts += drawn.values()
    facts = [fact for report in reports for fact in identity(report)]
    parts += ["<h2>Run</h2>", html_prose(bullets(facts))]
    parts += ["<h2>Definitions</h2>", html_prose(bullets(f"`{known}`: {definition(known)}" for known in DEFINED))]
    parts.append(html_prose(f"{DASH} means undefined (0/0) or not applicable."))
    return page(name, parts)


def sweep_page(facts: Sequence[str], shown: pd.DataFrame, figure: Figure, name: str) -> str:
    """The page of a sweep: what its Markdown says, with the figure."""
    parts = [html_prose(bullets(facts)), picture(figure, f"{name}: decode speedup over what was swept"), table(shown)]
    parts.append(html_prose(f"{DASH} means undefined (0/0) or not applicable."))
    return page(f"Sweep {name}", parts)


def table(frame: pd.DataFrame) -> str:
    """A table that scrolls by itself where the window is narrower."""
    return f"<div class='wide'>{html_table(frame)}</div>"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def picture(figure: Figure, text: str) -> str:
    """A figure as SVG inside the page; ``text`` for those who cannot see it."""
    buffer = io.BytesIO()
    with matplotlib.style.context(FIGURE_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"<figure><img alt='{escape(text, quote=True)}' src='data:image/svg+xml;base64,{data}'/></figure>"
