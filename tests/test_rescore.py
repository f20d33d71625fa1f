"""Outputs scored again: the numbers are those of the decoding, at one forward an output, after the clock."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from harness import rescore
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, Method, StopRule
from harness.decode.gate import Strictness
from harness.decode.hierarchical import Hierarchical
from harness.decode.slim import masked
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Draft
from harness.drafters.graft import Graft
from harness.drafters.retrieval import Retrieval
from harness.drafters.self_skip import SelfSkip
from harness.jobs import bench as bench_module
from harness.jobs.bench import bench
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.model.transformer import Transformer
from harness.records import BlockTrace, FidelityRecord, Generation, Route
from harness.rescore import committed_lengths, draft_scores, fidelity_records, full_scores, kept_drafts
from harness.sampling import Chooser, RandomChooser, Sampling
from harness.store import read
from tests import runs
from tests.arms import DRAFTERS, METHODS, NESTED, PROMPT, model_of, tiers_with
from tests.heads import head_drafter
from tests.rows import sample
from tests.runs import ORACLE, run_bench
from tests.toys import CPU, perturbed, small_lm

COUNT = 40


def decoded(method: Method, seed: int = 0, prompt: Sequence[int] = PROMPT) -> Generation:
    decoder = Decoder(method)
    decoder.prefill(prompt)
    return decoder.decode(StopRule(COUNT), RandomChooser(seed, CPU))


def made(name: str, drafter: str, model: Model, temperature: float = 0.0, block: int | None = None) -> Method:
    script = decoded(Autoregressive(tiers_with(model, None, False), Sampling()))
    near = small_lm(perturbed(model.transformer, 0, 0.1))
    if drafter in HEADS:
        factory = head_drafter(drafter)
    else:
        factory = near if drafter == "small_lm" else DRAFTERS[drafter](model, (*PROMPT, *script.token_ids))
    return (METHODS | NESTED)[name](tiers_with(model, block, False), model, factory, Sampling(temperature))


class Noted:
    """Notes what each token was drafted with, by its position in the text, as drafting goes on; the last word counts.

    ``drafter`` may be made of others, which are listened to as well: a greedy block of mixed makers keeps no logits.
    """

    def __init__(self, drafter: Any) -> None:
        members = [member for member, _ in getattr(drafter, "members", ())]
        self.heard = [
            *[(member, "extend") for member in members],
            *[(inner, "draft") for inner in [getattr(drafter, "inner", None)] if isinstance(drafter, Graft)],
            (drafter, "draft"),
        ]
        self.logs: dict[int, float] = {}

    def note(self, tokens: Sequence[int], draft: Draft) -> None:
        table = draft.probs is None and draft.logits is None
        if len(draft) and not table:
            chosen = draft.distributions().gather(-1, draft.tokens[:, None])[:, 0]
            self.logs |= enumerate(chosen.log().tolist(), len(tokens))
        looked_up = len(draft) if table and len(self.heard) == 1 else draft.looked_up
        end = len(tokens) + len(draft)
        self.logs |= dict.fromkeys(range(end - looked_up, end), 0.0)

    def __enter__(self) -> "Noted":
        def noting(inner: Any) -> Any:
            def call(tokens: Sequence[int], count: int, chooser: Chooser) -> Any:
                found = inner(tokens, count, chooser)
                self.note(tokens, found[0] if isinstance(found, tuple) else found)
                return found

            return call

        self.patches = [patch.object(one, name, noting(getattr(one, name))) for one, name in self.heard]
        for one in self.patches:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.patches:
            one.stop()


def noted_and_again(
    method: Method, temperature: float, before: Sequence[int] = (9, 8, 7, 6, 5, 4, 3)
) -> tuple[list[float], list[float], Generation]:
    """Log-probabilities of the accepted drafts, as they were drafted and as they are scored again.

    Another prompt, ``before``, is decoded first and again in between: nothing of it may be left.
    """
    drafter: Any = method.drafter  # type: ignore[attr-defined]
    decoded(method, prompt=before)
    with Noted(drafter) as notes:
        generation = decoded(method)
    expected = [notes.logs[len(PROMPT) + place] for place in kept_drafts(generation)]
    decoded(method, prompt=before)
    (record,) = fidelity_records(
        {"arm": method}, PROMPT, [replace(sample(tokens=1, arm="arm"), generation=generation)], temperature
    )
    assert record.overshoot is not None
    method.tiers.rollback(0)
    _, full = full_scores(method.tiers, PROMPT, generation.token_ids, temperature)
    again = [mine + full[at] for mine, at in zip(record.overshoot, kept_drafts(generation), strict=True)]
    return expected, again, generation


MODELS = ("self_skip", "early_exit", "self_slim", "small_lm")
HEADS = ("eagle", "fused", "mtp", "medusa")


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafter", [*MODELS, *HEADS, "prompt_lookup", "retrieval", "graft"])
@pytest.mark.parametrize("name", ["speculative", "via_sd"])
def test_draft_probabilities_are_those_that_were_drafted_with(name: str, drafter: str, temperature: float) -> None:
    method = made(name, drafter, model_of(3, torch.float64), temperature)
    expected, again, _ = noted_and_again(method, temperature)
    assert again == pytest.approx(expected, rel=1e-8, abs=1e-8)
    if drafter in ("prompt_lookup", "retrieval"):
        assert set(expected) <= {0.0}
    else:
        assert min(expected) < 0


def test_a_draft_from_a_table_was_certain() -> None:
    """By hand: two kept drafts and a correction, so that overshoot is what the full verifier finds unlikely."""
    model = model_of(3, torch.float64)
    lookup = Speculative(tiers_with(model, None, False), Sampling(), model, 5, DRAFTERS["prompt_lookup"](model, ()))
    block = BlockTrace(0, 5, 3, (Route.ESCALATE,) * 3, 2, 3, 0, 0, 0, 1)
    written = sample((block,), ids=(5, 6, 7), arm="lookup")
    (record,) = fidelity_records({"lookup": lookup}, PROMPT, [written], 0.0)
    lookup.tiers.rollback(0)
    _, full = full_scores(lookup.tiers, PROMPT, (5, 6, 7), 0.0)
    assert record.overshoot == pytest.approx([-full[0], -full[1]]) and min(full[:2]) < -0.1


def test_they_are_in_one_shape_for_all_forwards_too() -> None:
    expected, again, _ = noted_and_again(made("via_sd", "self_skip", model_of(3, torch.float64), 0.0, 6), 0.0)
    assert len(expected) > 5 and again == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("cache", ["shared", "own"])
@pytest.mark.parametrize("source", ["slim", "catch_up"])
def test_a_head_reads_again_what_it_read(kind: str, cache: str, source: str) -> None:
    model = model_of(3, torch.float64)
    method = ViaSD(
        tiers_with(model, None, False),
        Sampling(),
        model,
        5,
        head_drafter(kind, 0, source),
        Strictness(),
        slim=partial(masked, cache=cache),
    )
    expected, again, generation = noted_and_again(method, 0.0)
    assert source == "catch_up" or any(not block.full_forwards for block in generation.blocks)
    assert expected and again == pytest.approx(expected, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("inner", ["small_lm", "eagle"])
@pytest.mark.parametrize("own_output", ["prompt", "run"])
def test_a_grafted_block_is_scored_by_who_made_each_token(inner: str, own_output: str, temperature: float) -> None:
    model = model_of(3, torch.float64)
    near = head_drafter("eagle") if inner == "eagle" else small_lm(perturbed(model.transformer, 0, 0.1))
    drafter = partial(Graft, inner=near, retrieval=partial(Retrieval, own_output=own_output), threshold=0.5)
    method = METHODS["via_sd"](tiers_with(model, None, False), model, drafter, Sampling(temperature))
    expected, again, generation = noted_and_again(method, temperature, before=(*PROMPT, 9, 8))
    assert expected and again == pytest.approx(expected, rel=1e-8, abs=1e-8)
    assert any(block.looked_up for block in generation.blocks) and min(expected) < -1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["hierarchical", "cascade_sd"])
@pytest.mark.parametrize("drafter", ["self_skip", "small_lm", "eagle", "prompt_lookup"])
def test_a_reviewed_draft_is_the_reviewers(name: str, drafter: str, temperature: float) -> None:
    method = made(name, drafter, model_of(3, torch.float64), temperature)
    expected, again, _ = noted_and_again(method, temperature)
    assert len(expected) > 2 and again == pytest.approx(expected, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("name", ["swift", "clasp"])
def test_layers_that_change_leave_no_law(name: str) -> None:
    found = records({"arm": made(name, "self_skip", model_of(3, torch.float64))})
    assert found["arm"].overshoot is None and found["arm"].greedy == COUNT


def test_a_review_over_entries_of_its_own_drafts_leaves_no_law() -> None:
    model = model_of(3, torch.float64)
    for source, known in (("slim", True), ("catch_up", False)):
        method = Hierarchical(
            tiers_with(model, None, False), Sampling(), model, 5, head_drafter("eagle", 0, source), slim_gamma=2
        )
        assert (records({"arm": method})["arm"].overshoot is not None) == known


def test_what_was_committed_before_a_block_matters() -> None:
    """The wrong neighbour: a tail that starts at the prompt whatever the full verifier has processed since."""
    with patch.object(rescore, "committed_lengths", lambda prompt, blocks: [prompt - 1] * len(blocks)):
        expected, again, _ = noted_and_again(made("via_sd", "self_skip", model_of(3, torch.float64)), 0.0)
    assert max(abs(mine - theirs) for mine, theirs in zip(again, expected, strict=True)) > 1e-3


def test_committed_lengths_are_those_of_the_decoding() -> None:
    method = made("via_sd", "self_skip", model_of(3, torch.float64))
    seen: list[int] = []
    step = method.step

    def noted(*arguments: Any) -> Any:
        seen.append(method.tiers.full.length)
        return step(*arguments)

    with patch.object(method, "step", noted):
        generation = decoded(method)
    assert committed_lengths(len(PROMPT), generation.blocks) == seen
    assert len(set(seen)) < len(seen), "some blocks left the full verifier where it was"


@pytest.mark.parametrize(("temperature", "rows"), [(0.0, 128), (0.7, 7)])
def test_the_full_verifiers_scores_are_those_of_single_steps(temperature: float, rows: int) -> None:
    model = model_of(1, torch.float64)
    output = decoded(made("via_sd", "self_skip", model)).token_ids
    tiers = tiers_with(model, None, False)
    with patch.object(rescore, "ROWS", rows):
        greedy, found = full_scores(tiers, PROMPT, output, temperature)
    tiers.prefill(PROMPT)
    steps = torch.cat([tiers.full.forward((*PROMPT, *output[:end]), rows=1).clone() for end in range(len(output))])
    laws = torch.log_softmax(steps / (temperature or 1.0), -1)
    assert found == pytest.approx([float(row[token]) for row, token in zip(laws, output, strict=True)])
    assert greedy == sum(int(row.argmax()) == token for row, token in zip(steps, output, strict=True)) < len(output)


def records(methods: dict[str, Method], temperature: float = 0.0) -> dict[str, FidelityRecord]:
    samples = [replace(sample(tokens=1, arm=arm), generation=decoded(method)) for arm, method in methods.items()]
    return {one.arm: one for one in fidelity_records(methods, PROMPT, samples, temperature)}


def shared_arms(model: Model) -> dict[str, Method]:
    cache = model.transformer.new_cache(96)
    tiers = lambda: Tiers(model.transformer, cache)  # noqa: E731
    drafter = partial(SelfSkip, mask=[0, 2])
    return {
        "autoregressive": Autoregressive(tiers(), Sampling()),
        "speculative": Speculative(tiers(), Sampling(), model, 5, drafter),
        "via_sd": ViaSD(tiers(), Sampling(), model, 5, drafter, Strictness()),
        "lookup": Speculative(tiers(), Sampling(), model, 5, DRAFTERS["prompt_lookup"](model, ())),
    }


def test_each_arm_has_its_record_and_greedy_is_all_greedy() -> None:
    methods = shared_arms(model_of(3, torch.float64))
    found = records(methods)
    assert list(found) == list(methods)
    assert {found[arm].greedy for arm in ("autoregressive", "speculative", "lookup")} == {COUNT}
    assert found["via_sd"].greedy < COUNT == found["via_sd"].tokens
    assert found["autoregressive"].overshoot is None
    generation = decoded(methods["via_sd"])
    assert len(found["via_sd"].overshoot or ()) == len(kept_drafts(generation)) > 5
    tiers = methods["via_sd"].tiers
    tiers.rollback(0)
    _, full = full_scores(tiers, PROMPT, generation.token_ids, 0.0)
    drafter = methods["via_sd"].drafter  # type: ignore[attr-defined]
    drafted = draft_scores(tiers, drafter, PROMPT, generation, 0.0)
    expected = [mine - full[at] for mine, at in zip(drafted, kept_drafts(generation), strict=True)]
    assert found["via_sd"].overshoot == pytest.approx(expected) and found["via_sd"].nll == pytest.approx(-sum(full))


def test_a_logit_that_is_not_finite_leaves_no_number() -> None:
    methods = shared_arms(model_of(3, torch.float64))
    with patch.object(rescore, "full_scores", lambda *arguments: (0, [float("nan")] * COUNT)):
        assert {(one.nll, one.overshoot) for one in records(methods).values()} == {(None, None)}


@pytest.fixture
def forwards() -> Iterator[list[int]]:
    """Tokens of every forward of a whole model and of its layers."""
    calls: list[int] = []
    observe = Transformer.observe

    def noted(self: Transformer, tokens: torch.Tensor, cache: Any, layers: Any, *arguments: Any) -> Any:
        calls.append(len(tokens) if len(layers) == self.spec.layers else 0)
        return observe(self, tokens, cache, layers, *arguments)

    with patch.object(Transformer, "observe", noted):
        yield calls


def test_a_prompt_costs_a_prefill_and_each_different_output_one_forward(forwards: list[int]) -> None:
    model = model_of(3, torch.float64)
    methods = shared_arms(model)
    plain = {arm: methods[arm] for arm in ("autoregressive", "lookup")}
    samples = [sample(ids=ids, arm=arm) for ids, arm in (((5, 6, 7), "lookup"), ((5, 6, 7), "autoregressive"))]
    samples.append(sample(ids=(5, 6), arm="lookup"))
    forwards.clear()
    list(fidelity_records(plain, PROMPT, samples, 0.0))
    assert forwards == [len(PROMPT) - 1, 3, 2]


def test_a_run_is_scored_when_all_of_it_is_on_disk_and_the_clock_is_done(tmp_path: Path) -> None:
    methods = {"speculative": partial(Speculative, gamma=3, drafter=ORACLE)}
    lines: list[int] = []

    def noted(*arguments: Any) -> Iterator[FidelityRecord]:
        (path,) = (tmp_path / "runs").glob("*/samples.jsonl")
        lines.append(len(path.read_text().splitlines()))
        return fidelity_records(*arguments)

    with patch.object(bench_module, "fidelity_records", noted):
        data = read(run_bench(tmp_path, methods))
    assert lines == [4, 4] and len(data.samples) == len(data.fidelity) == 4
    assert all(one.greedy == one.tokens == 4 for one in data.fidelity)
    assert all(abs(value) < 1e-9 for one in data.fidelity for value in one.overshoot or ())
    assert sum(one.overshoot is not None for one in data.fidelity) == 2


def test_scoring_again_changes_no_output_and_can_be_left_out(tmp_path: Path) -> None:
    methods = {"speculative": partial(Speculative, gamma=3, drafter=ORACLE)}
    beside = read(run_bench(tmp_path / "with", methods))
    with patch.object(runs, "bench", partial(bench, fidelity=False)):
        without = read(run_bench(tmp_path / "without", methods))
    assert without.fidelity == () and len(beside.fidelity) == 4
    assert [one.generation.token_ids for one in without.samples] == [one.generation.token_ids for one in beside.samples]
