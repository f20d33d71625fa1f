"""The page of a run: whole in one file, and its tables sort on a click, in a real browser."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from harness.compare import BASELINE
from harness.errors import UserError
from harness.jobs.report import write_reports
from harness.report import tables
from harness.report.exports import chosen_formats
from tests.pictures import made_run
from tests.test_report import RUN, SETTINGS, differing, samples

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def written(folder: Path, *formats: str) -> list[Path]:
    made, judged = differing(faults=1)
    settings = SETTINGS | {"note": "A note, <b>not bold</b>.", "not_run": {"bild": "greedy alone"}}
    built = tables.build(RUN, made, settings, divergences=judged)
    return write_reports([built], folder / "tables", folder / "figures", "mine", formats)


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    path = written(tmp_path, "html")[-1]
    assert path.name == "mine.html"
    text = path.read_text()
    assert text.count("<table>") == 7 and text.count("data:image/svg+xml;base64,") == 1
    links = re.findall(r"""(?:src|href)=['"]([^'"]+)""", text)
    assert links and all(link.startswith("data:") for link in links) and "@import" not in text


def test_the_page_has_every_figure_of_the_run(tmp_path: Path) -> None:
    built = tables.build(RUN, samples(), SETTINGS)
    paths = write_reports([built], tmp_path / "t", tmp_path / "f", "mine", ["html"], further=True)
    drawn = [path for path in paths if path.suffix == ".png"]
    assert len(drawn) == paths[-1].read_text().count("data:image/svg+xml;base64,") == 3


def test_the_page_says_what_the_markdown_says(tmp_path: Path) -> None:
    paths = written(tmp_path, "html")
    text, page = paths[0].read_text(), paths[-1].read_text()
    assert re.findall(r"^## (.*)$", text, re.M) == re.findall(r"<h2>(.*?)</h2>", page)
    assert "<b>lossy</b>" in page and "A note, &lt;b&gt;not bold&lt;/b&gt;." in page and "<h2>Faults</h2>" in page
    assert "Not run: bild: greedy alone" in page and "0123456789ab" in page and "2.00 [2.00, 2.00]" in page


def test_the_page_has_the_figure_of_predictions(tmp_path: Path) -> None:
    plain = {"_target_": "harness.decode.autoregressive.Autoregressive"}
    built = made_run("run", {"speculative": 2.0}, ["gsm8k"], methods={BASELINE: plain, "speculative": plain})
    page = write_reports([built], tmp_path / "t", tmp_path / "f", "mine", ["html"])[-1].read_text()
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


# In a browser.


def opened(page: Path, script: str = "") -> str:
    """The page's elements after ``script`` has run in Chromium."""
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome: apt-get install chromium")
    copy = page.with_name("opened.html")
    copy.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    profile = page.parent / "profile"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    return subprocess.run([*command, copy.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout


def column(dom: str, name: str) -> list[str]:
    """The cells of the first table under a head, top to bottom."""
    table = dom.partition("<table")[2].partition("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in re.findall(r"<tr.*?</tr>", table, re.S)]
    cells = [[re.sub(r"<[^>]+>", "", cell).strip() for cell in row] for row in rows]
    return [row[cells[0].index(name)] for row in cells[1:]]


CLICK = """
const button = [...document.querySelectorAll("th button")].find(one => one.textContent === NAME);
for (let count = 0; count < TIMES; count++) button.click();
"""


def clicked(name: str, times: int) -> str:
    return CLICK.replace("NAME", f'"{name}"').replace("TIMES", str(times))


@pytest.mark.slow
def test_a_table_sorts_by_number_on_a_click_and_back_on_the_next(tmp_path: Path) -> None:
    page = written(tmp_path, "html")[-1]
    name = "speedup, decode"
    before = column(opened(page), name)
    numbers = [float(cell.split()[0]) for cell in before if cell != tables.DASH]
    assert numbers != sorted(numbers) and before.count(tables.DASH) == 1
    for times, want in ((1, sorted(numbers)), (2, sorted(numbers, reverse=True))):
        dom = opened(page, clicked(name, times))
        cells = column(dom, name)
        assert [float(cell.split()[0]) for cell in cells[:-1]] == want and cells[-1] == tables.DASH, "a dash stays last"
        assert dom.count('aria-sort="') == 1


@pytest.mark.slow
def test_numbers_are_no_words_and_words_no_numbers(tmp_path: Path) -> None:
    seconds = {"autoregressive": 8.0, "speculative": 1.0, "via_sd": 0.5}
    made = [replace(one, decode_s=seconds[one.arm] * (1 if one.task == "qa" else 4)) for one in samples()]
    page = write_reports([tables.build(RUN, made)], tmp_path / "t", tmp_path / "f", "mine", ["html"])[-1]
    assert column(opened(page, clicked("speedup, decode", 1)), "speedup, decode")[-1].startswith("16.00")
    assert column(opened(page, clicked("arm", 1)), "arm") == sorted(arm.arm for arm in RUN.arms for _ in range(2))
    scores = [float(cell.split()[1]) for cell in column(opened(page, clicked("quality", 1)), "quality")]
    assert scores == sorted(scores) and len(set(scores)) == 3, "numbers behind the metric's name"


@pytest.mark.slow
def test_what_was_not_run_stays_last(tmp_path: Path) -> None:
    page = written(tmp_path, "html")[-1]
    assert column(opened(page, clicked("quality", 2)), "quality")[-1] == "not run"
