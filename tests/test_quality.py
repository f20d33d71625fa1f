"""Quality with its error, and the paired difference from the baseline."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from harness import quality
from harness.compare import BASELINE
from harness.metrics import rows
from harness.quality import Estimate, difference, standard_error
from harness.records import SampleRecord
from harness.report import tables
from harness.report.frames import tidy_frame
from harness.report.lines import DASH, build
from harness.report.quality import estimate
from harness.scoring import METRICS
from tests.rows import run_record, sample

TEXTS = ["the old cat sat on the mat", "the old dog sat on the mat", "a cat", "the old cat sat on a mat"]
WORSE = ["the old cat sat on the mat", "a dog", "a cat lay", "an old cat"]
REFERENCE = "the old cat sat on the mat"


def scored(texts: list[str], arm: str = "via_sd", references: tuple[str, ...] = (REFERENCE,)) -> list[SampleRecord]:
    made = [sample(tokens=1, example=str(i), arm=arm, prediction=text) for i, text in enumerate(texts)]
    return [replace(one, references=references) for one in made]


def pairs(mine: list[str], base: list[str]) -> list[tuple[SampleRecord, SampleRecord]]:
    return list(zip(scored(mine), scored(base, BASELINE), strict=True))


@pytest.mark.parametrize("name", ["f1", "bleu", "chrf"])
def test_value_is_the_corpus_value_inside_its_interval(name: str) -> None:
    found = quality.quality(METRICS[name], scored(TEXTS), seed=0)
    assert found.value == pytest.approx(METRICS[name].corpus(TEXTS, [[REFERENCE]] * 4))
    assert found.value is not None and found.low is not None and found.high is not None
    assert found.low < found.value < found.high and found.stderr is not None and found.stderr > 0
    assert quality.quality(METRICS[name], scored(TEXTS), seed=0) == found
    several = scored([*TEXTS, *WORSE])
    assert quality.quality(METRICS[name], several, seed=1) != quality.quality(METRICS[name], several, seed=0)


def test_standard_error_of_a_mean_by_hand() -> None:
    assert standard_error(np.array([0.0, 100.0])) == pytest.approx(50)  # s = 70.71, over the root of 2
    answers = scored(["4", "4", "5", "6"], references=("4",))
    found = quality.quality(METRICS["exact_match"], answers, seed=0)
    assert found.value == 50 and found.stderr == pytest.approx(100 * math.sqrt(1 / 3) / 2)


@pytest.mark.parametrize("name", ["f1", "bleu", "chrf"])
def test_one_prompt_has_a_value_alone_and_none_has_nothing(name: str) -> None:
    only = quality.quality(METRICS[name], scored(TEXTS[1:2]), seed=0)
    assert only.value is not None and only == Estimate(only.value)
    assert quality.quality(METRICS[name], [], seed=0) == Estimate(None)
    assert difference(METRICS[name], [], seed=0) == Estimate(None)
    single = difference(METRICS[name], pairs(TEXTS[1:2], TEXTS[:1]), seed=0)
    assert single.value is not None and single == Estimate(single.value)


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_corpus_intervals_are_close_to_those_of_sacrebleu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sacrebleu draws its own samples and prints a normal interval around their mean."""
    monkeypatch.setenv("SACREBLEU_SEED", "12345")
    texts = [*TEXTS, *WORSE] * 5
    scorer = {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF()}[name]
    theirs = scorer.corpus_score(texts, [[REFERENCE] * len(texts)], n_bootstrap=1000)
    found = quality.quality(METRICS[name], scored(texts), seed=0)
    assert found.low is not None and found.high is not None
    assert (found.high - found.low) / 2 == pytest.approx(theirs._ci, rel=0.1)
    assert (found.high + found.low) / 2 == pytest.approx(theirs._mean, rel=0.05)


@pytest.mark.parametrize("name", ["f1", "bleu", "chrf"])
def test_difference_is_paired(name: str) -> None:
    """Against itself it is 0 without error; two independent intervals would both be wide."""
    same = difference(METRICS[name], pairs(TEXTS, TEXTS), seed=0)
    assert same == Estimate(0, 0, 0, 0)
    alone = quality.quality(METRICS[name], scored(TEXTS), seed=0)
    assert alone.stderr is not None and alone.stderr > 1
    worse = difference(METRICS[name], pairs(WORSE, TEXTS), seed=0)
    corpora = [METRICS[name].corpus(texts, [[REFERENCE]] * 4) or 0.0 for texts in (WORSE, TEXTS)]
    assert worse.value == pytest.approx(corpora[0] - corpora[1]) and worse.value is not None and worse.value < 0
    better = difference(METRICS[name], pairs(TEXTS, WORSE), seed=0)
    assert better.value == pytest.approx(-worse.value)
    assert better.low is not None and worse.high is not None and better.low == pytest.approx(-worse.high, abs=1e-6)


def test_difference_of_a_mean_by_hand() -> None:
    found = difference(METRICS["f1"], pairs(["x", "x y", "q"], ["x", "q", "q"]), seed=0)
    assert found.value == found.stderr == 0  # the reference shares no word with any
    mine, base = scored(["4", "4", "5"], references=("4",)), scored(["4", "5", "5"], BASELINE, ("4",))
    found = difference(METRICS["exact_match"], list(zip(mine, base, strict=True)), seed=0)
    assert found.value == pytest.approx(100 / 3) and found.stderr == pytest.approx(100 / 3)  # of 0, 100, 0
    assert (found.low, found.high) == (0, 100)


def test_programs_are_not_run_again_on_reading() -> None:
    made = [
        replace(one, scores={"pass@1": score, "timeout": 100.0 - score})
        for one, score in zip(scored(["raise SystemError"] * 4), (100.0, 0.0, 0.0, 0.0), strict=True)
    ]
    assert quality.quality(METRICS["pass@1"], made, seed=0).value == 25
    assert quality.quality(METRICS["timeout"], made, seed=0).value == 75
    assert quality.quality(METRICS["pass@1"], scored(TEXTS), seed=0) == Estimate(None)  # nobody ran them


# In rows and tables.


def two_arm_run() -> tuple[list[SampleRecord], list[SampleRecord]]:
    return scored(["4", "5", "x", "4"], BASELINE, ("4",)), scored(["4", "4", "5", "4"], references=("4",))


def test_rows_have_the_difference_of_each_quality_metric() -> None:
    base, mine = two_arm_run()
    run = replace(run_record(), task_metrics={"translation": ("accuracy", "unparsed")})
    found = {(row.arm, row.metric): row for row in rows(run, [*base, *mine])}
    assert found["via_sd", "accuracy"].value == 75 and found[BASELINE, "accuracy"].value == 50
    apart = found["via_sd", "accuracy_difference"]
    assert (apart.value, apart.unit) == (25, "%") and apart.stderr == pytest.approx(25)
    assert found[BASELINE, "accuracy_difference"].value == 0
    assert found["via_sd", "unparsed_difference"].value == -25 and not found["via_sd", "unparsed"].higher_is_better
    assert found["via_sd", "reject_rate"].stderr is None


def test_tables_show_error_difference_and_scorer() -> None:
    base, mine = two_arm_run()
    run = replace(run_record(), task_metrics={"translation": ("accuracy", "unparsed", "bleu")})
    report = build(run, [*base, *mine])
    text = tables.markdown([report], "title")
    head, _, *lines = text.split("## Quality\n\n")[1].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]
    names, table = cells[0], {(row[1], row[2]): row for row in cells[1:]}
    assert names == ["task", "arm", "metric", "unit", "better", "value", "minus autoregressive"]
    assert table["via_sd", "accuracy"][5:] == ["75.0 ± 25.0 [25.0, 100.0]", "+25.0 ± 25.0 [+0.0, +75.0]"]
    assert table[BASELINE, "accuracy"][5] == "50.0 ± 28.9 [0.0, 100.0]" and table[BASELINE, "accuracy"][6] == DASH
    assert table["via_sd", "unparsed"][4:6] == ["lower", "0.0 ± 0.0 [0.0, 0.0]"]
    signature = f"BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    assert f"\n- translation, bleu: sacrebleu {signature}\n" in text
    assert "accuracy 75.0 % (+25.0)" in "".join(str(cell) for cell in tables.console([report])[0].columns[2].cells)
    assert "stderr" in tidy_frame([report]).columns


def test_a_value_without_error_or_interval_prints_alone() -> None:
    found = rows(run_record(), [*scored(["4"], BASELINE), *scored(["4"])])
    row = next(row for row in found if row.metric == "exact_match")
    assert estimate(row, "-") == "0.0" and estimate(replace(row, value=None), "-") == estimate(None, "-") == "-"


def test_scorers_of_tasks_without_samples_are_left_out(tmp_path: Path) -> None:
    run = replace(run_record(), task_metrics={"translation": ("chrf",), "qa": ("f1",)})
    found = quality.scorers(run, scored(TEXTS, references=("a", "b")))
    assert list(found) == ["translation, chrf"] and "chrF2|nrefs:2|" in found["translation, chrf"]
    assert json.loads(json.dumps(found)) == found
