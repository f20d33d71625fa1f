"""The audit names every token that the slim verifier let through and the full one would not have written."""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch

from harness.audit import judge
from harness.audit import records as audit_records
from harness.audit.continued import gone_on_by_full, with_continuations
from harness.audit.judge import FullView, SlimView, Writes, audited, decided, judged, pieces_of
from harness.audit.page import page
from harness.audit.records import AuditedOutput, Continuation, SlimToken, shares, worst_first
from harness.audit.tables import markdown, quoted, token_frame
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, Method, StopRule
from harness.decode.gate import AlwaysEscalate, Decision, Strictness
from harness.decode.slim import several
from harness.decode.via_sd import ViaSD
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.jobs.audit import audit
from harness.model.load import Model
from harness.model.slim import LayerMask
from harness.model.tokenizer import ByteTokenizer
from harness.prompts import Prompt
from harness.records import BlockTrace, Example, Generation
from harness.sampling import RandomChooser, Sampling
from tasks.web_questions import WebQuestions
from tests.arms import PROMPT, model_of, tiers_with
from tests.rows import BONUS, CHEAP, CUT, MIXED, REJECTED, plain, run_record, sample
from tests.runs import main, refused, unreported
from tests.toys import CPU

GREEDY = Sampling()
A, R, B = audit_records.Decision.ACCEPT, audit_records.Decision.REGENERATE, audit_records.Decision.BONUS
WITH_BONUS = Writes(bonus=True)


def decoded(method: Method) -> Generation:
    decoder = Decoder(method)
    decoder.prefill(PROMPT)
    return decoder.decode(StopRule(40), RandomChooser(0, CPU))


class Noted(Strictness):
    """Notes the ratio of every drafted token."""

    def __init__(self) -> None:
        super().__init__(alpha1=0.6, alpha2=0.3)
        self.ratios: list[list[float]] = []

    def __call__(self, scores: torch.Tensor, tokens: torch.Tensor) -> Decision:
        probs = torch.softmax(scores, -1)
        self.ratios.append((probs.gather(-1, tokens[:, None])[:, 0] / probs.amax(-1)).tolist())
        return super().__call__(scores, tokens)


def three_tiers(model: Model, sampling: Sampling, gate: Strictness | AlwaysEscalate) -> ViaSD:
    return ViaSD(tiers_with(model, None, False), sampling, model, 5, partial(SelfSkip, mask=[0, 2]), gate)


def audit_of(model: Model, generation: Generation, sampling: Sampling = GREEDY) -> AuditedOutput:
    assert model.slim_mask is not None
    return audit_by(model, generation, (model.slim_mask.layers,), sampling)


def audit_by(
    model: Model,
    generation: Generation,
    masks: Sequence[Sequence[int]],
    sampling: Sampling = GREEDY,
    writes: Writes = Writes(),  # noqa: B008
) -> AuditedOutput:
    tiers = tiers_with(model, None, False)
    slims = [tiers.provisional(f"slim{number}", layers) for number, layers in enumerate(masks)]
    mine = replace(sample(tokens=1), generation=generation)
    return audited(tiers, slims, model.tokenizer, PROMPT, mine, sample(tokens=1), sampling, writes)


@pytest.mark.parametrize(
    ("block", "places"),
    [
        (MIXED, [(0, A, 0), (2, A, 0), (3, R, 0)]),
        (REJECTED, []),
        (CHEAP, [(0, A, 0), (1, A, 0)]),
        (replace(MIXED, deciders=(0, 1, 0, 1), slim_forwards=2), [(0, A, 0), (2, A, 0), (3, R, 1)]),
        (BONUS, []),
        (CUT, []),
        (plain(0), []),
    ],
)
def test_the_slim_verifier_decides_what_it_accepted_or_wrote(
    block: BlockTrace, places: list[tuple[int, str, int]]
) -> None:
    assert list(decided(block)) == places


def test_what_the_full_verifier_writes_in_place_of_a_draft_is_not_the_slim_ones() -> None:
    """As with ``ending=full``."""
    assert list(decided(MIXED, Writes(regenerated=False))) == [(0, A, 0), (2, A, 0)]


def test_a_bonus_of_the_slim_verifier_is_the_last_ones_that_ran() -> None:
    kept = replace(CHEAP, emitted=3, bonus=1)
    assert list(decided(kept)) == [(0, A, 0), (1, A, 0)], "it may be the full verifier's"
    assert list(decided(kept, WITH_BONUS)) == [(0, A, 0), (1, A, 0), (2, B, 0)]
    second = replace(kept, deciders=(0, 1), slim_forwards=2)
    assert list(decided(second, WITH_BONUS)) == [(0, A, 0), (1, A, 1), (2, B, 1)]
    assert list(decided(CHEAP, WITH_BONUS)) == [(0, A, 0), (1, A, 0)], "the stop rule cut it off"


def test_a_regenerated_token_that_the_stop_rule_cut_off_is_not_there() -> None:
    assert list(decided(replace(MIXED, emitted=3))) == [(0, A, 0), (2, A, 0)]


@pytest.mark.parametrize(
    ("distance", "law", "slim", "token", "temperature", "expected"),
    [
        (0.0, 1.0, 1.0, 5, 0.0, (False, False)),
        (0.3, 0.0, 1.0, 6, 0.0, (True, False)),
        (0.1, 0.0, 1.0, 6, 0.0, (False, True)),
        (0.3, 0.30, 0.5, 6, 1.0, (False, False)),
        (0.3, 0.20, 0.5, 6, 1.0, (True, False)),
        (0.3, 0.00, 0.0, 6, 1.0, (True, False)),
    ],
)
def test_what_is_wrong(
    distance: float, law: float, slim: float, token: int, temperature: float, expected: tuple[bool, bool]
) -> None:
    assert judged(FullView(5, distance, 0.2, law), SlimView(0.9, slim), token, Sampling(temperature)) == expected


def test_confidences_are_those_that_the_gate_read() -> None:
    model, gate = model_of(3, torch.float64), Noted()
    generation = decoded(three_tiers(model, GREEDY, gate))
    found = {token.position: token.confidence for token in audit_of(model, generation).tokens if token.route is A}
    drafting = [block for block in generation.blocks if block.drafted]
    expected = {
        block.start + place: ratios[place]
        for block, ratios in zip(drafting, gate.ratios, strict=True)
        for place, route, _ in decided(block)
        if route is A
    }
    assert len(expected) > 5 and found == pytest.approx(expected)
    assert min(found.values()) >= 0.6 and min(found.values()) < 0.999


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_of_several_slim_verifiers_answers_for_what_it_decided(temperature: float) -> None:
    """Confidences are those that the gate of the verifier read that let the draft pass."""
    model, gate, masks = model_of(3, torch.float64), Noted(), [[0, 3], [0, 1, 3]]
    tiers, sampling = tiers_with(model, None, False), Sampling(temperature)
    drafter = partial(SelfSkip, mask=[0, 2])
    generation = decoded(ViaSD(tiers, sampling, model, 5, drafter, gate, slim=partial(several, masks=masks)))
    asked = iter(gate.ratios)
    expected: dict[int, Any] = {}
    for block in (block for block in generation.blocks if block.drafted):
        ratios = [next(asked) for _ in range(block.slim_forwards)]
        expected |= {block.start + at: (ratios[who][at], who + 1) for at, how, who in decided(block) if how is A}
    found = audit_by(model, generation, masks, sampling).tokens
    assert {who for _, who in expected.values()} == {1, 2}
    assert {token.position: token.slim for token in found if token.route is A} == {
        place: who for place, (_, who) in expected.items()
    }
    for token in found:
        if token.route is A:
            assert token.confidence == pytest.approx(expected[token.position][0])
    assert {one.value for one in shares([replace(OUTPUT, tokens=found)]) if one.by == "slim verifier"} == {"1", "2"}


def test_a_bonus_that_the_full_verifier_would_not_have_written_is_named() -> None:
    model = model_of(3, torch.float64)
    method = ViaSD(
        *(tiers_with(model, None, False), GREEDY, model, 1, partial(SelfSkip, mask=[0, 2]), Strictness(0.3, 0.2)),
        bonus="slim",
    )
    generation = decoded(method)
    assert model.slim_mask is not None
    found = [
        token
        for token in audit_by(model, generation, [model.slim_mask.layers], GREEDY, WITH_BONUS).tokens
        if token.route is B
    ]
    bonuses = {block.start + block.kept for block in generation.blocks if block.bonus}
    assert len(bonuses) > 2 and {token.position for token in found} == bonuses
    assert all(token.confidence == 1.0 for token in found), "greedy: the slim verifier's likeliest"
    assert any(token.wrong for token in found)


def test_the_full_verifier_goes_on_as_if_it_had_never_been_left() -> None:
    """The text is greedy's own behind the tokens kept; to go on from the start is the baseline."""
    model = model_of(3, torch.float64)
    task = WebQuestions(data_dir=None, source="builtin")
    prompt = Prompt("qa", task, Example("1", "", ()), PROMPT, 0)
    baseline = decoded(Autoregressive(tiers_with(model, None, False), GREEDY)).token_ids
    tiers = tiers_with(model, None, False)
    assert gone_on_by_full(tiers, model, prompt, (), 40) == model.tokenizer.decode(baseline)
    assert gone_on_by_full(tiers, model, prompt, baseline[:7], 40) == model.tokenizer.decode(baseline)
    generation = decoded(three_tiers(model, GREEDY, Strictness(0.5, 0.3)))
    found = audit_of(model, generation)
    asked: list[str] = []

    def score(prompt: Prompt, text: str) -> float:
        asked.append(text)
        return float(len(asked))

    went_on = with_continuations(found, generation.token_ids, tiers, model, prompt, score, 2, 40)
    first, second = went_on.continuations
    assert first.text == model.tokenizer.decode(baseline), "until the first wrong token it was greedy"
    assert second.text != first.text and asked == [first.text, second.text]
    kept = generation.token_ids[: second.position]
    tiers.prefill((*PROMPT, *kept))
    best = int(tiers.full.forward((*PROMPT, *kept), rows=1).argmax())
    assert second.text.startswith(model.tokenizer.decode((*kept, best)))
    stopping = replace(prompt, stop=(first.text[3:5],))
    assert gone_on_by_full(tiers, model, stopping, (), 40) == first.text[: first.text.index(first.text[3:5])]


def wrong_by_single_steps(model: Model, generation: Generation) -> dict[int, tuple[int, float]]:
    """Positions that the slim verifier decided otherwise than greedy, with greedy's token and the gap."""
    tiers = tiers_with(model, None, False)
    tiers.prefill(PROMPT)
    found = {}
    slim = {block.start + place for block in generation.blocks for place, _, _ in decided(block)}
    for place, token in enumerate(generation.token_ids):
        law = torch.log_softmax(tiers.full.forward((*PROMPT, *generation.token_ids[:place]), rows=1)[0], -1)
        if place in slim and int(law.argmax()) != token:
            found[place] = int(law.argmax()), float(law.max() - law[token])
    return found


def test_every_wrong_token_is_named_with_what_greedy_would_write() -> None:
    model = model_of(3, torch.float64)
    generation = decoded(three_tiers(model, GREEDY, Strictness(0.5, 0.3)))
    expected = wrong_by_single_steps(model, generation)
    found = {token.position: (token.wanted, token.gap) for token in audit_of(model, generation).wrong}
    assert len(expected) > 2 and set(found) == set(expected)
    for place, (wanted, gap) in expected.items():
        assert found[place][0] == wanted and found[place][1] == pytest.approx(gap)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_slim_verifier_that_is_the_full_one_lets_nothing_wrong_through(temperature: float) -> None:
    model = replace(model_of(3, torch.float64), slim_mask=LayerMask.of(range(4), 4))
    sampling = Sampling(temperature)
    method = three_tiers(model, sampling, Strictness(0.999, 0.5))
    found = audit_of(model, decoded(method), sampling)
    assert len(found.tokens) > 5
    if temperature == 0:
        assert found.wrong == () and all(token.gap == pytest.approx(0, abs=1e-9) for token in found.tokens)
    else:
        assert found.wrong == ()


def test_a_sampled_token_that_the_slim_verifier_overrates_twofold_is_wrong() -> None:
    model, sampling = model_of(3, torch.float64), Sampling(0.8)
    found = audit_of(model, decoded(three_tiers(model, sampling, Strictness(0.2, 0.1))), sampling)
    assert 0 < len(found.wrong) < len(found.tokens)
    with patch.object(judge, "KEPT_AT_LEAST", 0.0):
        assert audit_of(model, decoded(three_tiers(model, sampling, Strictness(0.2, 0.1))), sampling).wrong == ()


def test_nothing_is_decided_where_everything_escalates() -> None:
    model = model_of(3, torch.float64)
    assert audit_of(model, decoded(three_tiers(model, GREEDY, AlwaysEscalate()))).tokens == ()
    assert audit_of(model, decoded(Autoregressive(tiers_with(model, None, False), GREEDY))).tokens == ()


def test_pieces_join_to_the_text_and_wait_for_whole_characters() -> None:
    tokenizer = ByteTokenizer()
    assert pieces_of(tokenizer, tokenizer.encode("aé!")) == ("a", "", "é", "!")
    cut = tokenizer.encode("aé")[:2]
    assert pieces_of(tokenizer, cut) == ("a", tokenizer.decode(cut)[1:])


# By hand.

RIGHT = SlimToken(0, 1, A, 0.95, 5, "a", 5, "a", 0.0, False, False)
WRONG = SlimToken(17, 2, A, 0.55, 6, "<b>", 7, "c", 2.5, True, False)
WRITTEN = SlimToken(3, 3, R, 1.0, 8, " d", 9, "e", 1.5, True, False)
TIE = SlimToken(4, 1, A, 1.0, 8, "d", 9, "e", 0.01, False, True)
OUTPUT = AuditedOutput(
    task="translation",
    arm="via_sd",
    example_id="1",
    pieces=("a", "x", "y", " d", *"z" * 13, "<b>"),
    baseline_text="<i>base</i>",
    references=("ref & more",),
    metric="exact_match",
    score=20.0,
    baseline_score=50.0,
    tokens=(RIGHT, WRITTEN, TIE, WRONG),
)
CLEAN = replace(OUTPUT, example_id="2", tokens=(RIGHT,))
NO_SCORE = replace(OUTPUT, example_id="3", score=None, tokens=(WRONG,))
GAIN = replace(OUTPUT, example_id="4", score=60.0, tokens=(WRITTEN,))


def test_the_worst_prompt_is_the_one_that_lost_most_then_the_one_furthest_off() -> None:
    assert [one.example_id for one in worst_first([GAIN, CLEAN, NO_SCORE, OUTPUT])] == ["1", "3", "4"]
    assert OUTPUT.score_change == -30.0 and NO_SCORE.score_change is None and OUTPUT.largest_gap == 2.5


def test_shares_are_wrong_over_decided() -> None:
    found = {(one.by, one.value): (one.wrong, one.decided, one.near_ties) for one in shares([OUTPUT, CLEAN])}
    assert found == {
        ("all", "all"): (2, 5, 1),
        ("route", "accept"): (1, 4, 1),
        ("route", "regenerate"): (1, 1, 0),
        ("confidence", "0.4 to 0.6"): (1, 1, 0),
        ("confidence", "0.8 to 1.0"): (0, 3, 1),
        ("confidence", "written by slim"): (1, 1, 0),
        ("place in the block", "1"): (0, 3, 1),
        ("place in the block", "2"): (1, 1, 0),
        ("place in the block", "3"): (1, 1, 0),
        ("output position", "1 to 16"): (1, 4, 1),
        ("output position", "17 to 32"): (1, 1, 0),
    }
    (every,) = (one for one in shares([OUTPUT, CLEAN]) if one.by == "all")
    assert every.share == 0.4


def test_a_token_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="is not wrong"):
        replace(WRONG, near_tie=True)


def test_effects_add_up_to_what_the_first_wrong_token_and_all_behind_it_cost() -> None:
    went_on = replace(OUTPUT, continuations=(Continuation(3, "as greedy", 50.0), Continuation(17, "later", 45.0)))
    assert went_on.effects == {3: -5.0, 17: -25.0}
    assert OUTPUT.score == 50.0 + (-5.0 - 25.0)
    assert replace(OUTPUT, continuations=went_on.continuations[:1]).effects == {3: -30.0}
    unscored = (Continuation(3, "", None), Continuation(17, "", 45.0))
    assert replace(OUTPUT, continuations=unscored).effects == {3: None, 17: -25.0}
    assert list(token_frame([went_on])["effect"].fillna(99)) == [-5.0, 99, -25.0]
    text = page(run_record(), [went_on], [])
    assert "full verifier from output token 4 on: exact_match 50.0" in text and "as greedy" in text
    assert "<td>50.0</td><td>-5.0</td>" in text and "<td>45.0</td><td>-25.0</td>" in text


STRANGE = replace(
    OUTPUT,
    pieces=("\x01\u0645\u0631\u062d\u0628\u0627 ", "\u4f60\u597d", "\u00a0", "", *["long " * 40] * 13, "<b>"),
    baseline_text="",
    references=(),
)


@pytest.mark.parametrize("output", [OUTPUT, STRANGE, replace(STRANGE, pieces=("",) * 18)])
def test_every_element_of_the_page_is_closed_whatever_the_texts(output: AuditedOutput) -> None:
    """Its HTML is XML as well, which a strict parser reads."""
    text = page(run_record(), [output], ["a & b"])
    body = ElementTree.fromstring(text)
    said = ["".join(one.itertext()) for one in body.iter("div") if one.get("class") == "text"]
    written = "".join(output.pieces).replace("\x01", "\u2401")
    assert said[1:] == [output.baseline_text or "(no text)"]
    assert said[0] == written if all(output.pieces) else said[0].replace("\u25a1", "") == written


def test_the_page_marks_wrong_tokens_and_trusts_no_text() -> None:
    text = page(run_record(), [OUTPUT, CLEAN], ["a fact"])
    assert "<b></b>" not in text and "<i>base" not in text and "ref &amp; more" in text
    assert "<mark title=" in text and ">&lt;b&gt;</mark>" in text and "<mark class='regenerate'" in text
    assert text.count("<h3>") == 1 and "src=" not in text and "href=" not in text


def test_the_table_has_every_wrong_token_and_the_near_ties() -> None:
    frame = token_frame([OUTPUT, CLEAN, GAIN])
    assert list(frame["position"]) == [3, 4, 17, 3] and list(frame["wrong"]) == [True, False, True, True]
    text = markdown(run_record(), [OUTPUT, CLEAN], [])
    assert "exact_match 20.0 (50.0)" in text and re.search(r"\| 0\.400 +\|", text) and "`<b>`" in text
    assert quoted("a\n\x01`é") == "`a\\n\\u0001'é`" and quoted("") == "(none)"
    assert "No token of the slim verifier is wrong." in markdown(run_record(), [CLEAN], [])


# A run.


def run_toy(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> Path:
    with unreported():
        main(
            *(monkeypatch, "task=web_questions", "limit=2", "max_new_tokens=12", "drafter=self_skip", "fidelity=false"),
            *(f"results_dir={folder}", *arguments),
        )
    return max((folder / "runs").iterdir())


def test_a_run_is_audited_from_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = run_toy(monkeypatch, tmp_path, "method=via_sd")
    for asked in ((), (f"run={run.name}",), (f"run={run}",)):
        for path in tmp_path.glob("*/*_audit*"):
            path.unlink()
        main(monkeypatch, "job=audit", f"results_dir={tmp_path}", *asked)
        assert sorted(path.name for path in tmp_path.glob("*/*_audit*")) == [
            *("run_audit.csv", "run_audit.html", "run_audit.md", "run_audit.pdf", "run_audit.png"),
            "run_audit_shares.csv",
        ]
    with (tmp_path / "tables" / "run_audit_shares.csv").open() as file:
        (every,) = [row for row in csv.DictReader(file) if row["by"] == "all"]
    with (tmp_path / "tables" / "run_audit.csv").open() as file:
        listed = list(csv.DictReader(file))
    assert int(every["decided"]) > 0 and len(listed) == int(every["wrong"]) + int(every["near_ties"])

    path = run / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"prompt_sha": "0" * 64}) + "\n" for line in lines))
    with pytest.raises(UserError, match="is no longer what it was"):
        audit(str(tmp_path), run.name)


def test_a_run_without_a_slim_verifier_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_toy(monkeypatch, tmp_path, "method=speculative")
    line = refused(monkeypatch, capsys, "job=audit", f"results_dir={tmp_path}")
    assert "no arm has a token that a slim verifier decided; audit a run with method=via_sd" in line
