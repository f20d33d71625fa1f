"""The notebook of ceilings: runs on the stored reference run, and says what the job says."""

from pathlib import Path

import pytest

from tests.notebooks import executed, outputs


@pytest.mark.slow
def test_it_shows_the_arithmetic_of_a_pair(tmp_path: Path) -> None:
    made = executed("ceilings", tmp_path, pair="gemma2_2b_9b", gamma=4)
    said = "\n".join(outputs(made))
    assert "gemma2_9b" in said and "23 of 42 layers kept" in said
    assert "gamma 4 and 45%" in said
    assert "Median absolute error" in said
    assert len(list(outputs(made, "image/png"))) == 2
