"""What is our reading of a source is said of the arm that does it, and of no other."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.decode.gate.doubt import Margin
from harness.decode.gate.thresholds import Strictness
from harness.decode.readings import readings
from harness.decode.rules import Rules
from harness.decode.speculative import Speculative
from harness.decode.typical import Typical
from harness.decode.via_sd import ViaSD
from harness.drafters.self_skip import SelfSkip
from tests.runs import main
from tests.toys import GREEDY, tiers_of, tiny_model


def test_a_methods_own_reading_and_that_of_its_parts() -> None:
    model = tiny_model(0, kept=(0, 1, 3))

    def via_sd(gate: Strictness | Margin, **rules: Any) -> ViaSD:
        return ViaSD(tiers_of(model), GREEDY, model, 2, SelfSkip, gate, **rules)

    mode = "the cache mode of the slim verifier"
    sure = "a sure slim verifier judges by the ratio"
    found = readings(
        {
            "plain": Speculative(tiers_of(model), GREEDY, model, 2, SelfSkip),
            "typical": Speculative(tiers_of(model), GREEDY, model, 2, SelfSkip, rule=Typical),
            "paper": via_sd(Strictness()),
            "more": via_sd(Margin(0.1), escalate="rest", bonus="full"),
        }
    )
    assert found == (f"typical: {Typical.reading}; paper: {mode}; more: {mode}, {sure}, escalate=rest, bonus=full")
    assert readings({"plain": Speculative(tiers_of(model), GREEDY, model, 2, SelfSkip)}) == ""
    assert readings({"none": SimpleNamespace()}) == "" and Rules().reading == ""


def test_tables_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("task=web_questions", "tasks.web_questions.shots=0", "limit=1", "max_new_tokens=2", "fidelity=false")
    main(monkeypatch, *short, "method=[speculative,clasp]", f"results_dir={tmp_path}")
    (page,) = (tmp_path / "tables").glob("*.md")
    assert "- reading, ours: clasp: the share and choice of layers to skip, one token as evidence" in page.read_text()
