"""The page of a run, whole in one file; and LaTeX, and which formats there are."""

import re
from pathlib import Path

import pytest

from harness.compare import BASELINE
from harness.errors import UserError
from harness.jobs.report import Target, write_reports
from harness.report.exports import chosen_formats
from harness.report.lines import build
from tests.pictures import made_run
from tests.test_report import RUN, SETTINGS, differing, samples


def written(folder: Path, *formats: str) -> list[Path]:
    made, judged = differing(faults=1)
    settings = SETTINGS | {"note": "A note, <b>not bold</b>.", "not_run": {"bild": "greedy alone"}}
    built = build(RUN, made, settings, divergences=judged)
    return write_reports([built], Target.below(folder, "mine", formats))


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    path = written(tmp_path, "html")[-1]
    assert path.name == "mine.html"
    text = path.read_text()
    assert text.count("<table>") == 7 and text.count("data:image/svg+xml;base64,") == 1
    links = re.findall(r"""(?:src|href)=['"]([^'"]+)""", text)
    assert links and all(link.startswith("data:") for link in links) and "@import" not in text


def test_the_page_has_every_figure_of_the_run(tmp_path: Path) -> None:
    built = build(RUN, samples(), SETTINGS)
    paths = write_reports([built], Target(tmp_path / "t", tmp_path / "f", "mine", ["html"], further=True))
    drawn = [path for path in paths if path.suffix == ".png"]
    page = paths[-1].read_text()
    assert len(drawn) == page.count("data:image/svg+xml;base64,") == 3
    above, _, below = page.partition("<h2>Results</h2>")
    assert above.count("<figure>") == 1 and below.partition("<h2>Quality</h2>")[0].count("<figure>") == 2


def test_the_page_says_what_the_markdown_says(tmp_path: Path) -> None:
    paths = written(tmp_path, "html")
    text, page = paths[0].read_text(), paths[-1].read_text()
    assert re.findall(r"^## (.*)$", text, re.M) == re.findall(r"<h2>(.*?)</h2>", page)
    assert "<b>lossy</b>" in page and "A note, &lt;b&gt;not bold&lt;/b&gt;." in page and "<h2>Faults</h2>" in page
    assert "Not run: bild: greedy alone" in page and "0123456789ab" in page and "2.00 [2.00, 2.00]" in page


def test_the_page_has_the_figure_of_predictions(tmp_path: Path) -> None:
    plain = {"_target_": "harness.decode.autoregressive.Autoregressive"}
    built = made_run("run", {"speculative": 2.0}, ["gsm8k"], methods={BASELINE: plain, "speculative": plain})
    page = write_reports([built], Target(tmp_path / "t", tmp_path / "f", "mine", ["html"]))[-1].read_text()
    assert page.count("data:image/svg+xml;base64,") == page.count("<figure>") == 2
    assert "mine: predicted figure" in page and "2.00 (+0 %)" in page


def test_latex_has_every_table_once(tmp_path: Path) -> None:
    path = written(tmp_path, "latex")[-1]
    text = path.read_text()
    assert path.name == "mine.tex" and text.count(r"\begin{table*}") == text.count(r"\bottomrule") == 7
    labels = re.findall(r"\\label\{(.*?)\}", text)
    assert labels[:2] == ["tab:mine-results", "tab:mine-quality"] and len(set(labels)) == 7
    assert r"\textbf{lossy}" in text and text.count(r"seed 7") == 1


def test_only_what_is_asked_for_is_written(tmp_path: Path) -> None:
    assert [path.suffix for path in written(tmp_path)] == [".md", ".csv", ".csv", ".png", ".pdf"]
    assert [path.suffix for path in written(tmp_path, "html", "latex")][-2:] == [".html", ".tex"]


@pytest.mark.parametrize(("asked", "want"), [(None, ()), ("html", ("html",)), (["latex", "html"], ("latex", "html"))])
def test_formats_are_names_or_a_list(asked: object, want: tuple[str, ...]) -> None:
    assert chosen_formats(asked) == want


@pytest.mark.parametrize("asked", ["htm", ["html", "pdf"], 3])
def test_an_unknown_format_is_named(asked: object) -> None:
    with pytest.raises(UserError, match="html, latex"):
        chosen_formats(asked)
