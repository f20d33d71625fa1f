"""Which figures a run gets, and that job=report writes them all and prints where they are."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import compare
from harness.compare import BASELINE
from harness.jobs.report import Target, write_reports
from harness.report.choice import figures_of
from harness.report.lines import RunReport
from tests.pictures import made_run

SPLIT = (0.25, 0.5, 1.0)
PLAIN = {arm: {"_target_": "harness.decode.autoregressive.Autoregressive"} for arm in (BASELINE, "speculative")}


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RESAMPLES", 50)


@pytest.mark.parametrize(
    ("reports", "endings"),
    [
        ([made_run("run", {"speculative": 1.2}, ["gsm8k"])], {"", "rates"}),
        ([made_run("run", {"speculative": 1.2, "via_sd": 1.2}, ["gsm8k"])], {"", "rates", "routes"}),
        ([made_run("run", {"speculative": 1.2}, ["gsm8k"], tier_s=SPLIT)], {"", "rates", "time"}),
        ([made_run("table8", {"via_sd": 1.2}, ["gsm8k"])], {"", "rates", "routes"}),
        ([made_run("fig9", {"gamma_3": 1.2}, ["gsm8k"])], {"", "quality", "rates", "routes"}),
        ([made_run("fig9", {"gamma_3": 1.2}, ["gsm8k"], run_id=one) for one in "ab"], {"", "rates", "routes"}),
        ([made_run("run", {"speculative": 1.2}, ["gsm8k"], methods=PLAIN)], {"", "rates", "predicted"}),
        ([made_run("run", {}, ["gsm8k"])], {""}),
    ],
)
def test_a_run_gets_the_figures_that_it_has_numbers_for(reports: Sequence[RunReport], endings: set[str]) -> None:
    assert set(figures_of(reports)) == endings


def test_the_bench_writes_the_main_figure_and_the_report_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = made_run("fig9", {"gamma_3": 1.2}, ["gsm8k"])
    for further, endings in ((False, [""]), (True, ["", "_quality", "_rates", "_routes"])):
        folder = tmp_path / str(further)
        paths = write_reports([report], Target.below(folder, "mine", further=further))
        wanted = [f"mine{ending}.{kind}" for ending in endings for kind in ("png", "pdf")]
        assert [path.name for path in paths if path.parent.name == "figures"] == wanted
        said = capsys.readouterr().out
        assert all(f"wrote {path}" in said and path.stat().st_size for path in paths)


def test_the_main_figure_of_an_experiment_of_the_paper_is_its_own() -> None:
    report = made_run("fig9", {"gamma_3": 1.2}, ["gsm8k"])
    (axes,) = figures_of([report], further=False)[""].axes
    assert axes.get_xlabel() == "gamma"
