"""Counts by place in the block, on a case small enough to check by hand."""

import pytest

from harness.compare import BASELINE
from harness.positions import position_rows
from tests.rows import run_record, two_arms


def test_position_rows_count_drafted_examined_and_kept() -> None:
    found = position_rows(run_record(), two_arms()[:2])
    counts = [(row.position, row.drafted, row.examined, row.kept) for row in found]
    assert counts == [(1, 3, 3, 2), (2, 3, 2, 2), (3, 2, 1, 1), (4, 1, 1, 0)]
    assert {row.arm for row in found} == {"via_sd"}
    assert found[1].accept_rate == pytest.approx(2 / 3) and found[1].accept_rate_if_examined == 1.0


def test_an_arm_that_never_drafted_has_no_row() -> None:
    assert position_rows(run_record((BASELINE,)), two_arms()[:1]) == []
