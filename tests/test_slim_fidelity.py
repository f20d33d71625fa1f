"""``job=fidelity``: sums against a slow computation, means by hand, and the files that a run leaves."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.decode import slim
from harness.dimr import calibration_text
from harness.drafters.self_skip import SelfSkip
from harness.jobs import fidelity as fidelity_module
from harness.jobs.fidelity import kind_of
from harness.model.load import Model
from harness.model.slim import LayerMask
from harness.model.tokenizer import ByteTokenizer
from harness.records import RunRecord
from harness.sampling import Sampling
from harness.slim_fidelity.gains import signs
from harness.slim_fidelity.measure import Margins, by_place, draft_logits, quantities, slim_logits
from harness.slim_fidelity.numbers import QUANTITIES, rows
from harness.slim_fidelity.records import SlimFacts, SlimFidelityRecord, SlimFidelitySum
from harness.slim_fidelity.tables import GAINS
from harness.store import from_json
from tests.rows import sample
from tests.runs import files, main, refused
from tests.theory import plain_cost
from tests.toys import shapes_unchecked, tiers_of, tiny

MARGINS = Margins(alpha=0.0, beta=1.0, accept_at=0.5, keep_at=0.3, alpha1=0.5, alpha2=0.3)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model("six", tiny(0, layers=6), ByteTokenizer(), LayerMask.of([0, 2, 3, 5], 6), "here")


def test_what_is_summed_is_what_a_slow_computation_finds(model: Model) -> None:
    """Position by position: agreement, costs, masses of the routes, from distributions in plain lists."""
    text = calibration_text(model.transformer, [3, 1, 4, 1, 5], 7, frozenset())
    name, draft = draft_logits(text, model, lambda t, s, m: SelfSkip(t, s, m, mask=[0, 5]), 3)
    facts, logits = slim_logits(text, model, slim.masked, "mask here", 3)
    assert name == "self_skip(0.67)" and text.tiers.others == []
    assert (facts.kind, facts.layers, facts.cache, facts.cache_bytes) == ("mask here", "0 2 3 5", "shared", 0)
    terms = quantities(text.full_logits, logits, draft, MARGINS)
    assert set(terms) == set(QUANTITIES)
    sums = by_place("one", "qa", "a", terms, 3)
    assert [(one.place, one.positions) for one in sums] == [(1, 3), (2, 2), (3, 2)]
    for place, one in enumerate(sums):
        positions = range(place, 7, 3)
        with shapes_unchecked():
            costs = [plain_cost(text.full_logits[n].tolist(), logits[n].tolist(), 0.0, 1.0) for n in positions]
            full_draft = [plain_cost(text.full_logits[n].tolist(), draft[n].tolist(), 0.0, 1.0) for n in positions]
        assert one.sums["cost_full_slim"] == pytest.approx(sum(costs))
        assert one.sums["cost_full_draft"] == pytest.approx(sum(full_draft))
        agree = [text.full_logits[n].argmax() == logits[n].argmax() for n in positions]
        assert one.sums["agreement"] == sum(agree)
        accepted = 0.0
        for n in positions:
            probs, wanted = torch.softmax(draft[n], -1).tolist(), torch.softmax(logits[n], -1).tolist()
            accepted += sum(p for p, q in zip(probs, wanted, strict=True) if q >= 0.5 * max(wanted))
        assert one.sums["accept"] == pytest.approx(accepted)
        shares = [one.sums[name] for name in ("accept", "regenerate", "escalate")]
        assert sum(shares) == pytest.approx(one.positions)


def test_the_drafter_is_asked_behind_the_same_committed_entries(model: Model) -> None:
    text = calibration_text(model.transformer, [3, 1, 4, 1, 5], 4, frozenset())
    _, draft = draft_logits(text, model, lambda t, s, m: SelfSkip(t, s, m, mask=[0, 5]), 2)
    for start in (0, 2):
        tiers = tiers_of(model)
        tiers.full.prefill(text.tokens[: 4 + start])
        fresh = SelfSkip(tiers, Sampling(), model, mask=[0, 5]).tier.forward(text.tokens[: 6 + start], 2)
        assert torch.allclose(draft[start : start + 2], fresh, atol=1e-10)


def test_an_own_cache_has_room_for_what_it_keeps(model: Model) -> None:
    text = calibration_text(model.transformer, [3, 1, 4], 4, frozenset())
    facts, _ = slim_logits(text, model, lambda t, m: slim.masked(t, m, cache="own"), "x", 2)
    spec = model.transformer.spec
    assert facts.cache_bytes == 4 * 2 * spec.kv_heads * spec.head_dim * 8  # layers, keys and values, float64


def record_of(*sums: SlimFidelitySum) -> SlimFidelityRecord:
    run = RunRecord("r", 1, "", "m", 0.0, 0, (), {}, {}, {}, None, None, {}, "finished")
    return SlimFidelityRecord(run, {}, "d", "g", {"one": SlimFacts("one", "even", 0.3, "own", "0 1", 8)}, sums)


def summed(example: str, place: int, positions: int, **sums: float) -> SlimFidelitySum:
    return SlimFidelitySum("one", "qa", example, place, positions, dict.fromkeys(QUANTITIES, 0.0) | sums)


def test_means_are_sums_over_positions_and_not_means_of_means() -> None:
    record = record_of(
        summed("a", 1, 1, agreement=1.0, cost_full_draft=5.0),
        summed("a", 2, 1, agreement=0.0, cost_slim_draft=1.0),
        summed("b", 1, 4, agreement=1.0, cost_full_slim=2.0),
    )
    found = {(row.metric, row.place): row for row in rows(record)}
    assert found["agreement", None].value == pytest.approx(2 / 6)
    assert found["agreement", 1].value == pytest.approx(2 / 5) and found["agreement", 2].value == 0.0
    assert found["gain", None].value == pytest.approx((5 - 1 - 2) / 6)
    assert (found["agreement", None].positions, found["agreement", None].n) == (6, 2)
    assert (found["agreement", 2].low, found["agreement", 2].n) == (None, 1)
    low, high = found["agreement", None].low, found["agreement", None].high
    assert low is not None and high is not None and low <= 2 / 6 <= high
    assert {row.unit for row in found.values() if row.metric == "gain"} == {"nats"}
    assert ("delta1", 1) not in found


SHORT = (
    *("job=fidelity", "task=web_questions", "limit=2", "max_new_tokens=5", "gamma=2"),
    *("job.skip_ratios=[0.3]", "job.speed=none"),
)


def test_the_job_writes_a_record_tables_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(monkeypatch, *SHORT, "job.caches=[shared,own,own]", f"results_dir={tmp_path}")
    made = files(tmp_path)
    assert made[0].startswith("fidelity/") and made[1:] == [
        *("figures/fidelity.pdf", "figures/fidelity.png", "tables/fidelity.csv", "tables/fidelity.md"),
    ]
    stored = json.loads((tmp_path / made[0]).read_text())
    numbers = stored.pop("rows")
    record = from_json(SlimFidelityRecord, stored)
    assert len(record.slims) == 2 * 5 and record.drafter == "self_skip(0.67)" and record.run.status == "finished"
    assert {facts.kind for facts in record.slims.values()} == {
        *("mask evenly spaced, skip 0.3", "random", "even", "prefix", "sublayers")
    }
    assert {one.place for one in record.sums} == {1, 2}
    assert {row["positions"] for row in numbers if row["place"] is None} == {2 * 5}
    page = (tmp_path / "tables" / "fidelity.md").read_text()
    for title in ("## Fidelity", "## Top-1 by place in the block", "## Costs of the chain", "## Routes and laws"):
        assert title in page
    assert "gate strictness(0.5, 0.3)" in page and "| prefix" in page
    tidy = list(csv.DictReader((tmp_path / "tables" / "fidelity.csv").read_text().splitlines()))
    assert len(tidy) == len(numbers) == 10 * (len(QUANTITIES) + 1 + 2 * 3)
    prefix = {
        (row["cache"], row["metric"], row["place"]): float(row["value"]) for row in tidy if row["kind"] == "prefix"
    }
    shared = {key[1:]: value for key, value in prefix.items() if key[0] == "shared"}
    own = {key[1:]: value for key, value in prefix.items() if key[0] == "own"}
    assert shared == pytest.approx(own, abs=1e-9), "of the first layers both modes have the same entries"
    assert "Costs of the chain" in capsys.readouterr().out


def test_the_gain_is_measured_beside_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tiers, and three with the model's mask in both modes, on the same prompts; no other source is timed."""
    speed = (
        "tasks.web_questions.shots=0",
        "job.speed=masks",
        "job.speed_prompts=1",
        "job.sources=[even]",
        "gate.alpha1=0.7",
    )
    main(monkeypatch, *SHORT, "tasks.web_questions.shots=0", *speed, f"results_dir={tmp_path}")
    (path,) = (tmp_path / "fidelity").glob("*.json")
    stored = json.loads(path.read_text())
    record = from_json(SlimFidelityRecord, {key: value for key, value in stored.items() if key != "rows"})
    masks = [name for name, facts in record.slims.items() if facts.kind.startswith("mask ")]
    assert {one.arm for one in record.timed} == {"autoregressive", "speculative", *masks} and len(masks) == 2
    arms = [(arm.drafter, arm.gate, arm.lossless) for arm in record.run.arms if arm.arm in masks]
    assert arms == [(record.drafter, "strictness(0.7, 0.3)", False)] * 2
    assert {one.example_id for one in record.timed} == {record.sums[0].example_id}
    assert {row["slim"] for row in stored["rows"] if row["metric"] == "third_tier_speedup"} == set(masks)
    page = (tmp_path / "tables" / "fidelity.md").read_text()
    gains = page.split(f"## {GAINS}")[1].split("##")[0]
    assert "**lossy**" in gains and "of 2 slim verifiers" in gains and gains.count("| mask ") == 2
    assert (tmp_path / "figures" / "fidelity_gain.png").is_file()
    assert GAINS in capsys.readouterr().out


def timed_record(*deltas: float) -> SlimFidelityRecord:
    """Slim verifiers with these costs R(q||p), on two texts, of which number k writes 8 tokens in 1 + k seconds."""
    names = [f"slim {number}" for number in range(len(deltas))]
    facts = {name: SlimFacts(name, "even", 0.3, "own", "0 1", 8) for name in names}
    sums = [
        SlimFidelitySum(name, "translation", example, 1, 1, dict.fromkeys(QUANTITIES, 0.0) | {"cost_full_draft": delta})
        for name, delta in zip(names, deltas, strict=True)
        for example in ("a", "b")
    ]
    timed = [
        sample(arm=arm, example=example, ids=ids, decode_s=seconds)
        for example in ("a", "b")
        for arm, seconds, ids in (
            ("autoregressive", 3.0, (1,) * 8),
            ("speculative", 2.0, (1,) * 8),
            *((name, 1.0 + number, (1,) * 6 + (2,) * 2) for number, name in enumerate(names)),
        )
    ]
    return replace(record_of(*sums), slims=facts, timed=tuple(timed))


def test_a_gain_is_over_two_tiers_and_its_sign_beside_delta() -> None:
    """Number 0 is twice as fast as two tiers and number 2 slower; of number 1 nobody knows which sign it has."""
    found = rows(timed_record(0.5, 0.5, 0.5, -0.5))
    value = {(one.slim, one.metric): one.value for one in found if one.place is None}
    assert [value[f"slim {k}", "third_tier_speedup"] for k in range(4)] == pytest.approx([2.0, 1.0, 2 / 3, 1 / 2])
    assert [value[f"slim {k}", "signs_agree"] for k in range(4)] == [1.0, 0.0, 0.0, 1.0]
    assert value["slim 0", "third_tier_agreement"] == 0.75
    assert signs(found) == (2, 4, 2, 3)


def test_without_timed_arms_nothing_is_said_of_gains_and_sampling_has_no_agreement() -> None:
    record = timed_record(0.5)
    assert not {one.metric for one in rows(replace(record, timed=()))} & {"third_tier_speedup", "signs_agree"}
    sampled = rows(replace(record, run=replace(record.run, temperature=1.0)))
    assert [one.value for one in sampled if one.metric == "third_tier_agreement"] == [None]


def test_a_run_that_fails_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter([calibration_text])
    monkeypatch.setattr(fidelity_module, "calibration_text", lambda *arguments: next(texts)(*arguments))
    with pytest.raises(StopIteration):
        main(monkeypatch, *SHORT, "job.sources=[even]", f"results_dir={tmp_path}")
    (path,) = (tmp_path / "fidelity").glob("*.json")
    stored = json.loads(path.read_text())
    assert stored["run"]["status"] == "failed" and len({one["example_id"] for one in stored["sums"]}) == 1
    assert stored["rows"] == [] and not (tmp_path / "tables").exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    {
        "job.speed=mask": "unknown job.speed 'mask': did you mean 'masks'",
        "job.speed_prompts=0": "job.speed_prompts=0: want at least 1; job.speed=none measures no gain.",
        "job.sources=[evn]": "unknown job.sources 'evn': did you mean 'even'",
        "job.caches=[mine]": "unknown slim cache 'mine': ",
        "job.beta=0.5": "job.alpha=0.0, job.beta=0.5: want",
        "job.delta_alphas=[0.5]": "job.delta_alphas=[0.5]: want [alpha1, alpha2], both between 0 and 1.",
        "gate=always_escalate": "job=fidelity needs a gate with thresholds, and always_escalate has none",
        "drafter=prompt_lookup": "job=fidelity asks the drafter for its distribution at every position, and ",
        "job.skip_ratios=[1.0]": "skip_ratio=1.0 leaves no layer of 6",
        "job.masks=[no.json]": "layer mask 'no.json' does not exist",
        "task=[]": "no task is chosen",
        "job.checkpoints=[no/such/folder]": "slim.path='no/such/folder' is not a folder",
    }.items(),
)
def test_what_cannot_be_scored_is_refused_in_one_line_and_leaves_nothing(
    argument: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, capsys, *SHORT, argument, f"results_dir={tmp_path}").startswith(message)
    assert files(tmp_path) == []


def test_mask_files_of_all_ratios_make_one_line_of_the_figure() -> None:
    assert kind_of("results/masks/embedded_skip45_own.json") == "mask embedded_own"
    assert kind_of("results/masks/embedded_skip20.json") == "mask embedded"
