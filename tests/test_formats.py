"""Tables as LaTeX and HTML: marks are set, everything else is escaped, rules are where a reader wants them."""

import re

import pandas as pd
import pytest

from harness.report.formats import html_prose, html_table, html_text, latex_table, latex_text


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("50 % of a_b & c", r"50 \% of a\_b \& c"),
        ("**lossy**", r"\textbf{lossy}"),
        ("`run_1` → 2", r"\texttt{run\_1} $\rightarrow$ 2"),
        ("-0.02 and (-1.5) in 2026-01-31, gpt-4", "$-$0.02 and ($-$1.5) in 2026-01-31, gpt-4"),
        ("\u2013 ± {x} <y>", r"-- $\pm$ \{x\} \ensuremath{<}y\ensuremath{>}"),
    ],
)
def test_latex_is_escaped_and_marked(text: str, want: str) -> None:
    assert latex_text(text) == want


def test_html_is_escaped_and_marked() -> None:
    assert html_text("**a<b** `c&d`") == "<b>a&lt;b</b> <code>c&amp;d</code>"
    assert html_prose("One.\n\n- a\n- **b**") == "<p>One.</p>\n<ul><li>a</li><li><b>b</b></li></ul>"


def test_a_long_cell_is_not_cut_in_html() -> None:
    text = html_table(pd.DataFrame({"a<b": ["x" * 200 + " & more"]}))
    assert "x" * 200 + " &amp; more" in text and "a&lt;b" in text and text.count("<t") - text.count("<th") >= 5


def test_what_repeats_is_said_once_under_a_rule() -> None:
    frame = pd.DataFrame({"task": ["a", "a", "b"], "arm": ["x", "y", "x"], "speed_up": ["1", "2", "**3**"]})
    text = latex_table(frame, "Mine, 100 %", "mine", ("First.",))
    assert r"\begin{tabular}{llr}" in text and r"\caption{Mine, 100 \%}" in text and r"\label{tab:mine}" in text
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0].split("\n")
    assert [line for line in body if line] == [r"a & x & 1 \\", r" & y & 2 \\", r"\midrule", r"b & x & \textbf{3} \\"]
    assert r"task & arm & speed\_up \\" in text and "First.\\par" in text
    once = latex_table(frame.drop_duplicates("task"), "", "once")
    assert once.count(r"\midrule") == 1


def test_two_rows_of_heads_have_rules_under_groups() -> None:
    heads = pd.MultiIndex.from_tuples([("", "models"), ("", "method"), ("A", "x"), ("A", "y"), ("B", "x")])
    text = latex_table(pd.DataFrame([list("abcde")], columns=heads), "", "two")
    lines = text.splitlines()
    top = lines.index(r"\toprule")
    assert lines[top + 2] == r"\cmidrule(lr){3-4} \cmidrule(lr){5-5}"
    assert r"\multicolumn{2}{c}{A}" in lines[top + 1] and lines[top + 3] == r"models & method & x & y & x \\"
    braces = re.sub(r"\\[{}]", "", text)
    assert braces.count("{") == braces.count("}") and text.count(r"\begin") == text.count(r"\end")
