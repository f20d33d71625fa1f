"""Outputs of lossless arms that differ from greedy: judged by the logits at the first difference, and only those."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.speculative import Speculative
from harness.divergence import NOISE, divergences, judged
from harness.metrics import rows
from harness.model.load import DTYPES, Model, load_model
from harness.model.tiers import Tiers
from harness.model.toy import toy_model
from harness.model.transformer import Transformer
from harness.records import SampleRecord
from harness.sampling import RandomChooser, Sampling
from harness.store import RunData, read
from tests.rows import sample
from tests.runs import ORACLE, Slip, run_bench
from tests.toys import CPU, tiers_of, tiny

PROMPT = (5, 9, 2, 5, 9)
INF, NAN = float("inf"), float("nan")


def output(ids: Sequence[int], arm: str = "arm") -> SampleRecord:
    return sample(ids=tuple(ids), arm=arm)


# The judgement, by hand: the bound is a quarter of the largest absolute logit.


@pytest.mark.parametrize(
    ("logits", "baseline", "arm", "gap", "distance", "bound"),
    [
        ([4.0, 3.5, 0.0], 0, 1, 0.5, 0.5, 1.0),
        ([4.0, 4.0, 0.0], 0, 1, 0.0, 0.0, 1.0),
        ([4.0, 3.5, 3.25, -8.0], 0, 2, 0.5, 0.75, 2.0),  # a token far below sets the scale of the noise
        ([4.0, 3.5, 3.75], 1, 2, 0.25, 0.5, 1.0),  # the arm is nearer than the baseline: the farther one counts
        ([4.0, 3.5, -INF], 0, 1, 0.5, 0.5, 1.0),  # a masked token is no noise
    ],
)
def test_a_near_tie_is_within_the_bound(
    logits: list[float], baseline: int, arm: int, gap: float, distance: float, bound: float
) -> None:
    found = judged(output([arm]), [baseline], 0, torch.tensor(logits, dtype=torch.float64), 0.25)
    assert (found.gap, found.distance, found.bound, found.near_tie) == (gap, distance, bound, True)
    assert (found.largest_logit, found.baseline_token, found.arm_token) == (4 * bound, baseline, arm)


@pytest.mark.parametrize(
    ("logits", "arm", "distance"),
    [
        ([4.0, 3.0, 0.0], 1, 1.0),  # on the bound is not within it
        ([4.0, 3.9, 0.0], 2, 4.0),  # the gap is small, and the arm wrote neither of the two
    ],
)
def test_a_token_beyond_the_bound_is_a_fault(logits: list[float], arm: int, distance: float) -> None:
    found = judged(output([arm]), [0], 0, torch.tensor(logits, dtype=torch.float64), 0.25)
    assert (found.near_tie, found.distance) == (False, distance)


def test_where_equal_tokens_are_promised_even_a_tie_is_a_fault() -> None:
    logits = torch.tensor([4.0, 4.0], dtype=torch.float64)
    assert judged(output([1]), [0], 0, logits, 0.25).near_tie and not judged(output([1]), [0], 0, logits, 0.0).near_tie


@pytest.mark.parametrize("logits", [[NAN, 1.0, 0.0], [1.0, NAN, 0.0], [INF, 1.0, 0.0], [1.0, -INF, 0.5], [NAN] * 3])
def test_logits_that_are_no_numbers_make_a_fault_without_numbers(logits: list[float]) -> None:
    found = judged(output([1]), [0], 0, torch.tensor(logits, dtype=torch.float64), 0.25)
    assert (found.gap, found.distance, found.largest_logit, found.bound, found.near_tie) == (*[None] * 4, False)
    json.dumps(found.gap, allow_nan=False)


# The pass over the common prefix.


def greedy(tiers: Tiers, count: int) -> tuple[int, ...]:
    decoder = Decoder(Autoregressive(tiers, Sampling()))
    decoder.prefill(PROMPT)
    return decoder.decode(StopRule(count), RandomChooser(0, CPU)).token_ids


def changed(ids: Sequence[int], place: int) -> tuple[int, ...]:
    return (*ids[:place], (ids[place] + 1) % 97, *ids[place + 1 :])


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens that a tier had and tokens it got, of every forward and prefill."""
    calls: list[tuple[int, int]] = []
    observe = Transformer.observe

    def noted(self: Transformer, tokens: torch.Tensor, cache: Any, *arguments: Any) -> Any:
        calls.append((cache.length, len(tokens)))
        return observe(self, tokens, cache, *arguments)

    monkeypatch.setattr(Transformer, "observe", noted)
    return calls


def test_equal_outputs_cost_no_forward(forwards: list[tuple[int, int]]) -> None:
    tiers = tiers_of(tiny(0))
    ids = greedy(tiers, 6)
    forwards.clear()
    assert list(divergences(tiers, PROMPT, output(ids), [output(ids), output(ids, "other")])) == []
    assert forwards == []


def test_all_arms_are_judged_in_one_pass_on_the_baselines_own_path(forwards: list[tuple[int, int]]) -> None:
    tiers = tiers_of(tiny(0))
    ids = greedy(tiers, 6)
    theirs = list(forwards)
    forwards.clear()
    others = [output(changed(ids, place), f"arm{place}") for place in (3, 1)] + [output(ids, "equal")]
    found = list(divergences(tiers, PROMPT, output(ids), others))
    assert [(one.arm, one.position) for one in found] == [("arm1", 1), ("arm3", 3)]
    assert forwards == theirs[: 1 + 4] == [(0, 4), (4, 1), (5, 1), (6, 1), (7, 1)]


def test_the_numbers_are_those_of_the_full_verifier_there() -> None:
    model = tiny(0)
    ids = greedy(tiers_of(model), 6)
    (found,) = divergences(tiers_of(model), PROMPT, output(ids), [output(changed(ids, 4))])
    logits = tiers_of(model).full.forward((*PROMPT, *ids[:4]), rows=1)[0]
    top, second = logits.topk(2).values.tolist()
    wrong = (ids[4] + 1) % 97
    assert (found.position, found.baseline_token, found.arm_token) == (4, ids[4], wrong) and not found.near_tie
    assert found.gap == pytest.approx(top - second) and found.distance == pytest.approx(top - logits[wrong].item())
    assert found.largest_logit == pytest.approx(logits.abs().max().item())
    assert found.bound == pytest.approx(32 * 2.0**-52 * logits.abs().max().item())


@pytest.mark.parametrize(("mine", "baseline"), [(3, 5), (5, 3)])
def test_an_output_that_only_ends_elsewhere_is_a_fault_without_numbers(mine: int, baseline: int) -> None:
    tiers = tiers_of(tiny(0))
    ids = greedy(tiers, 5)
    (found,) = divergences(tiers, PROMPT, output(ids[:baseline]), [output(ids[:mine])])
    assert (found.position, found.near_tie, found.gap, found.distance, found.bound) == (3, False, None, None, None)
    assert (found.arm_token, found.baseline_token) == ((None, ids[3]) if mine < baseline else (ids[3], None))


def test_every_dtype_has_its_bound() -> None:
    assert set(NOISE) == set(DTYPES.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_another_block_length_changes_is_within_the_bound_and_the_tenth_token_is_not(dtype: str) -> None:
    """On the embedded model, single steps against blocks of four: the top logit's distance to each of the next nine."""
    model = load_model(dtype=dtype, device="cpu")
    prompt = model.tokenizer.chat("Write a short story about a mill and its miller.")
    tiers = tiers_of(model)
    tiers.prefill(prompt)
    sequence, single = list(prompt), []
    for _ in range(16):
        single.append(tiers.full.forward(sequence, rows=1)[0].double().clone())
        sequence.append(int(single[-1].argmax()))
    tiers.prefill(prompt)
    ends = range(len(prompt) + 3, len(sequence), 4)
    blocks = torch.cat([tiers.full.forward(sequence[:end], rows=4).double().clone() for end in ends])
    steps = torch.stack(single)
    nearest = steps.topk(10).indices
    before, after = steps.gather(1, nearest), blocks.gather(1, nearest)
    moved = ((after - after[:, :1]) - (before - before[:, :1])).abs().amax(1)
    bound = NOISE[DTYPES[dtype]] * torch.finfo(DTYPES[dtype]).eps * steps.abs().amax(1)
    assert moved.max() > 0 and (moved < bound).all()
    assert (before[:, 0] - before[:, 9] > bound).all()


# In a run.


def twins(dtype: str) -> Model:
    """The toy model, each odd row of its head the one before times 1 + 2**-7: the least that bfloat16 tells apart."""
    model = toy_model(dtype)
    packed = model.transformer.weights.head
    head = packed.to_dense() if packed.is_mkldnn else packed.clone()
    head[1:-1:2] = head[0:-1:2] * (1 + 2.0**-7)
    transformer = Transformer(model.transformer.spec, replace(model.transformer.weights, head=head))
    return replace(model, transformer=transformer)


def judged_counts(data: RunData, arm: str) -> dict[str, float | None]:
    names = ("near_ties", "faults", "largest_gap")
    found = rows(data.run, data.samples, data.divergences)
    return {row.metric: row.value for row in found if row.arm == arm and row.metric in names}


def test_a_method_that_keeps_a_wrong_token_has_a_fault_a_prompt(tmp_path: Path) -> None:
    honest: partial[Any] = partial(Speculative, gamma=3, drafter=ORACLE)
    arms: dict[str, partial[Any]] = {"slip": partial(Slip), "speculative": honest}
    data = read(run_bench(tmp_path, arms, model=lambda **_: twins("float64")))
    ids = {(one.arm, one.example_id): one.generation.token_ids for one in data.samples}
    assert [(one.arm, one.task, one.near_tie) for one in data.divergences] == [("slip", "qa", False)] * 2
    for one in data.divergences:
        assert one.position == 2 and one.run_id == data.run.run_id
        assert one.baseline_token == ids["autoregressive", one.example_id][2]
        assert one.arm_token == ids["slip", one.example_id][2]
        assert one.gap == one.distance and one.gap is not None and one.bound is not None and one.gap > 1000 * one.bound
    assert len({one.example_id for one in data.divergences}) == 2
    largest = max(one.gap or 0.0 for one in data.divergences)
    assert judged_counts(data, "slip") == {"near_ties": 0, "faults": 2, "largest_gap": largest}
    assert judged_counts(data, "speculative") == {"near_ties": 0, "faults": 0, "largest_gap": None}


def test_the_same_token_is_a_near_tie_where_the_dtype_hardly_tells_it_from_the_best(tmp_path: Path) -> None:
    data = read(run_bench(tmp_path, {"slip": partial(Slip)}, model=lambda **_: twins("bfloat16")))
    assert [(one.arm, one.position, one.near_tie) for one in data.divergences] == [("slip", 2, True)] * 2
    for one in data.divergences:
        assert one.gap is not None and one.largest_logit is not None
        assert 0 <= one.gap <= 2 * 2.0**-7 * one.largest_logit and one.bound == 4 * 2.0**-7 * one.largest_logit
    assert judged_counts(data, "slip")["near_ties"] == 2 and judged_counts(data, "slip")["faults"] == 0


def test_a_lossy_arm_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("harness.divergence.judged", lambda *arguments: calls.append(arguments))
    data = read(run_bench(tmp_path, {"slip": partial(Slip, lossless=False)}))
    assert calls == [] and data.divergences == ()
    assert judged_counts(data, "slip") == dict.fromkeys(("near_ties", "faults", "largest_gap"))
    assert judged_counts(data, "autoregressive")["faults"] == 0


def test_nothing_is_judged_when_sampling(tmp_path: Path) -> None:
    data = read(run_bench(tmp_path, {"slip": partial(Slip)}, temperature=1.5))
    ids = {(one.arm, one.example_id): one.generation.token_ids for one in data.samples}
    assert all(ids["slip", example] != ids["autoregressive", example] for _, example in ids)
    assert data.divergences == () and judged_counts(data, "slip")["faults"] is None


def test_judging_one_prompt_changes_no_other(tmp_path: Path) -> None:
    """The pass goes through the cache that all arms share."""
    honest: dict[str, partial[Any]] = {"speculative": partial(Speculative, gamma=3, drafter=ORACLE)}
    alone = read(run_bench(tmp_path / "alone", honest, limit=4)).samples
    beside = read(run_bench(tmp_path / "beside", honest | {"slip": partial(Slip)}, limit=4)).samples
    assert {(one.arm, one.example_id, one.generation.token_ids) for one in alone} == {
        (one.arm, one.example_id, one.generation.token_ids) for one in beside if one.arm != "slip"
    }
