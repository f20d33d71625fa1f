"""Published speedups beside their ceilings: hand cases, known flags, and what the table says."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from harness.cost import Costs, ceiling
from harness.errors import UserError
from harness.jobs.plausibility import report_plausibility
from harness.report.paper_numbers import read_numbers, read_shapes
from harness.report.plausibility import (
    INDEPENDENT,
    PAIRS,
    Assumptions,
    judged,
    plausibility,
    summary,
)

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "results" / "paper"


@pytest.fixture(scope="module")
def found() -> pd.DataFrame:
    shapes, read_in = read_shapes(PAPER)
    return plausibility(read_numbers(PAPER), shapes, read_in, Assumptions())


def row(found: pd.DataFrame, **said: object) -> dict[str, Any]:
    for key, value in said.items():
        found = found[found[key] == value]
    (one,) = found.to_dict("records")
    return one


def test_the_paper_has_all_its_rows() -> None:
    numbers = read_numbers(PAPER)
    counts = numbers["source"].value_counts()
    assert len(numbers) == 1255
    assert {key: counts[key] for key in ("table8", "table9", "table3", "fig7", "fig8", "fig9")} == {
        **{"table8": 378, "table9": 252, "table3": 72},
        **{"fig7": 120, "fig8": 120, "fig9": 120},
    }
    assert numbers["origin"].isin(["table", "read_off_plot"]).all()


def test_every_pair_has_shapes_and_says_where_they_were_read() -> None:
    shapes, read_in = read_shapes(PAPER)
    scale = yaml.safe_load((ROOT / "conf" / "job" / "scale.yaml").read_text())
    named = {model for pair in PAIRS.values() for model in pair} | set(INDEPENDENT.values())
    named |= {model for pair in scale["pairs"].values() for model in pair.values()} | {scale["speed_model"]}
    assert named == set(shapes)
    assert all(isinstance(text, str) and text for text in read_in.values())


def test_every_speedup_gets_a_row(found: pd.DataFrame) -> None:
    assert len(found) == (read_numbers(PAPER)["metric"] == "speedup").sum()
    assert (found["ceiling"].isna() == (found["verdict"] == "no ceiling")).all()


def test_ceilings_of_a_known_pair(found: pd.DataFrame) -> None:
    """Gemma2 2B and 9B by hand: layers of 77.86 M and 198.18 M weights, heads of 589.8 M and 917.5 M."""
    draft = (26 * 77_856_768 + 589_824_000) / (42 * 198_180_864 + 917_504_000)
    slim = (23 * 198_180_864 + 917_504_000) / (42 * 198_180_864 + 917_504_000)
    one = row(found, source="table8", pair="gemma2_2b_9b", method="via_sd", task="webq")
    assert one["c"] == pytest.approx(draft)
    assert one["c_slim"] == pytest.approx(slim)
    assert one["ceiling"] == pytest.approx(5 / (5 * draft + slim))
    assert one["ceiling_bonus"] == pytest.approx(6 / (5 * draft + slim))
    assert one["verdict"] == "within"


@pytest.mark.parametrize("pair", ["llama2_7b_13b", "qwen_7b_14b"])
def test_pairs_of_like_size_cannot_gain_what_is_published(found: pd.DataFrame, pair: str) -> None:
    one = row(found, source="table8", pair=pair, method="via_sd", task="triviaqa")
    assert one["verdict"] == "above the ceiling"
    assert one["published"] > one["ceiling_bonus"]


def test_settings_in_a_rows_name_are_its_settings(found: pd.DataFrame) -> None:
    nine = row(found, source="fig9", pair="gemma2_2b_9b", method="via_sd_gamma=10", task="webq")
    assert nine["gamma"] == 10
    four = found[(found["source"] == "fig4") & (found["method"] == "via_sd_skip=75")].to_dict("records")[0]
    assert four["c_slim"] < row(found, source="table8", pair="gemma2_2b_9b", method="via_sd", task="nq")["c_slim"]


def test_verdicts_at_the_edges() -> None:
    shapes, _ = read_shapes(PAPER)
    pair, assumed = "gemma2_2b_27b", Assumptions()
    known = judged("via_sd", pair, 1.0, None, shapes, assumed)
    low, high = float(str(known["ceiling"])), float(str(known["ceiling_bonus"]))
    for published, rejection, verdict in (
        (low, None, "within"),
        (low + 0.01, None, "above the ceiling without a bonus token"),
        (high + 0.01, None, "above the ceiling"),
        (low, 0.5, "above what its rejection allows"),
    ):
        assert judged("via_sd", pair, published, rejection, shapes, assumed)["verdict"] == verdict


def test_a_drafter_in_half_the_precision_raises_the_ceiling() -> None:
    shapes, _ = read_shapes(PAPER)
    whole = judged("via_sd", "llama2_7b_13b", 2.2, None, shapes, Assumptions())
    half = judged("via_sd", "llama2_7b_13b", 2.2, None, shapes, Assumptions(draft_bytes=0.5))
    assert half["c"] == pytest.approx(float(str(whole["c"])) / 2)
    assert half["ceiling"] == pytest.approx(ceiling(5, Costs(float(str(half["c"])), float(str(half["c_slim"]))), 0))


def test_what_has_no_ceiling_says_why(found: pd.DataFrame) -> None:
    assert (found[found["verdict"] == "no ceiling"]["why"] != "").all()


def test_the_summary_counts_every_row_once(found: pd.DataFrame) -> None:
    assert summary(found)["values"].sum() == len(found)


def test_the_job_writes_both_files_and_lists_assumptions(tmp_path: Path) -> None:
    page, table, *_ = report_plausibility(str(tmp_path), gamma=4, paper=str(PAPER))
    text = page.read_text()
    assert "gamma 4" in text
    assert "from memory" in text
    assert len(pd.read_csv(table)) == 650


@pytest.mark.parametrize(
    ("key", "value"), [("gamma", 0), ("skip_ratio", 1.0), ("skip_ratio", -0.1), ("draft_bytes", 0.0)]
)
def test_an_assumption_out_of_bounds_is_named(tmp_path: Path, key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"job.{key}={value}"):
        report_plausibility(str(tmp_path), paper=str(PAPER), **{key: value})  # type: ignore[arg-type]


def test_a_folder_without_the_numbers_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"configs\.csv"):
        report_plausibility(str(tmp_path), paper=str(tmp_path))
