"""Pages in a real browser: their tables sort on a click, and they fit a wide window and a phone."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import matplotlib.image
import pytest

from harness.compare import BASELINE
from harness.jobs.report import Target, write_reports
from harness.report.lines import DASH, build
from harness.report.sweep import write_sweep
from tests.pictures import made_run
from tests.test_page import written
from tests.test_report import RUN, samples

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PLAIN = {"_target_": "harness.decode.autoregressive.Autoregressive"}


def browse(folder: Path, page: Path, *options: str) -> str:
    """What Chromium says of a page."""
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome: apt-get install chromium")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--hide-scrollbars", "--virtual-time-budget=5000", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def opened(page: Path, script: str = "") -> str:
    """The page's elements after ``script`` has run in Chromium."""
    copy = page.with_name("opened.html")
    copy.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    return browse(page.parent, copy, "--dump-dom")


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
    numbers = [float(cell.split()[0]) for cell in before if cell != DASH]
    assert numbers != sorted(numbers) and before.count(DASH) == 1
    for times, want in ((1, sorted(numbers)), (2, sorted(numbers, reverse=True))):
        dom = opened(page, clicked(name, times))
        cells = column(dom, name)
        assert [float(cell.split()[0]) for cell in cells[:-1]] == want and cells[-1] == DASH, "a dash stays last"
        assert dom.count('aria-sort="') == 1


@pytest.mark.slow
def test_numbers_are_no_words_and_words_no_numbers(tmp_path: Path) -> None:
    seconds = {"autoregressive": 8.0, "speculative": 1.0, "via_sd": 0.5}
    made = [replace(one, decode_s=seconds[one.arm] * (1 if one.task == "qa" else 4)) for one in samples()]
    page = write_reports([build(RUN, made)], Target(tmp_path / "t", tmp_path / "f", "mine", ["html"]))[-1]
    assert column(opened(page, clicked("speedup, decode", 1)), "speedup, decode")[-1].startswith("16.00")
    assert column(opened(page, clicked("arm", 1)), "arm") == sorted(arm.arm for arm in RUN.arms for _ in range(2))
    scores = [float(cell.split()[1]) for cell in column(opened(page, clicked("quality", 1)), "quality")]
    assert scores == sorted(scores) and len(set(scores)) == 3, "numbers behind the metric's name"


@pytest.mark.slow
def test_what_was_not_run_stays_last(tmp_path: Path) -> None:
    page = written(tmp_path, "html")[-1]
    assert column(opened(page, clicked("quality", 2)), "quality")[-1] == "not run"


# Its looks.

SAY = """
addEventListener("load", () => parent.postMessage({
  inside: innerWidth, wide: document.documentElement.scrollWidth,
  images: [...document.images].map(one => [one.naturalWidth, one.clientWidth, one.clientHeight]),
  tables: [...document.querySelectorAll(".wide")].map(one => [one.clientWidth, one.clientHeight]),
}, "*"));
"""
HEIGHT = 1600


def framed(page: Path, width: int) -> Path:
    """A page that shows ``page`` in so many pixels, however wide a window is at least, and says what it measures."""
    copy, frame = page.with_name("said.html"), page.with_name("frame.html")
    copy.write_text(page.read_text().replace("</body>", f"<script>{SAY}</script></body>"))
    listen = "addEventListener('message', told => document.body.dataset.told = JSON.stringify(told.data));"
    frame.write_text(
        f"<!DOCTYPE html><body style='margin:0'><script>{listen}</script>"
        f"<iframe src='said.html' style='border:0; width:{width}px; height:{HEIGHT}px'></iframe></body>"
    )
    return frame


def a_run(folder: Path) -> Path:
    speeds = {"speculative": 1.2, "via_sd": 1.5}
    methods = {BASELINE: PLAIN, "speculative": PLAIN}
    run = made_run("run", speeds, ["gsm8k", "xsum"], methods=methods, tier_s=(0.25, 0.5, 1.0))
    return write_reports([run], Target.below(folder, "run", ["html"], further=True))[-1]


def a_sweep(folder: Path) -> Path:
    cells = [made_run("swept", {"speculative": 1 + gamma / 10}, run_id=f"{gamma}") for gamma in (3, 5)]
    for gamma, one in zip((3, 5), cells, strict=True):
        one.settings["gamma"] = gamma  # type: ignore[index]
    return next(path for path in write_sweep(folder, cells, "swept", ["html"]) if path.suffix == ".html")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(("made", "pictures"), [(a_run, 5), (a_sweep, 1)])
def test_a_page_fits_its_window_and_shows_its_figures(
    tmp_path: Path, made: Callable[[Path], Path], pictures: int, width: int
) -> None:
    frame, shot = framed(made(tmp_path), width), tmp_path / "shot.png"
    (said,) = re.findall(r'data-told="([^"]*)"', browse(tmp_path, frame, "--dump-dom"))
    told = json.loads(unescape(said))
    assert told["wide"] <= told["inside"] == width, "the page itself never scrolls sideways"
    assert len(told["images"]) == pictures and all(min(sizes) > 0 for sizes in told["images"])
    assert told["tables"] and all(0 < wide <= width and high > 40 for wide, high in told["tables"])
    browse(tmp_path, frame, f"--window-size={max(width, 500)},{HEIGHT}", f"--screenshot={shot}")
    pixels = matplotlib.image.imread(shot)[:, :width, :3]
    assert pixels.shape[:2] == (HEIGHT, width) and pixels.std() > 0.05, "something is drawn"
    for band in range(0, HEIGHT // 2, HEIGHT // 8):
        assert pixels[band : band + HEIGHT // 8].std() > 0.02, f"nothing is drawn below {band} px"
