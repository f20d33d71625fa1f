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
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Draft, TierDrafter
from harness.drafters.self_skip import SelfSkip
from harness.jobs import bench as bench_module
from harness.jobs.bench import bench
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.model.transformer import Transformer
from harness.records import FidelityRecord, Generation
from harness.rescore import committed_lengths, draft_scores, fidelity_records, full_scores, kept_drafts
from harness.sampling import Chooser, RandomChooser, Sampling
from harness.store import read
from tests import runs
from tests.arms import DRAFTERS, METHODS, PROMPT, model_of, tiers_with
from tests.rows import sample
from tests.runs import ORACLE, run_bench
from tests.toys import CPU, perturbed, small_lm

COUNT = 40


def decoded(method: Method, seed: int = 0) -> Generation:
    decoder = Decoder(method)
    decoder.prefill(PROMPT)
    return decoder.decode(StopRule(COUNT), RandomChooser(seed, CPU))


def made(name: str, drafter: str, model: Model, temperature: float = 0.0, block: int | None = None) -> Method:
    script = decoded(Autoregressive(tiers_with(model, None, False), Sampling()))
    near = small_lm(perturbed(model.transformer, 0, 0.1))
    factory = near if drafter == "small_lm" else DRAFTERS[drafter](model, (*PROMPT, *script.token_ids))
    return METHODS[name](tiers_with(model, block, False), model, factory, Sampling(temperature))


class Noted:
    """Notes every draft of a drafter with what it was drawn from."""

    def __init__(self, drafter: TierDrafter) -> None:
        self.drafter = drafter
        self.logs: list[list[float]] = []

    def __call__(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        found = self.inner(tokens, count, chooser)
        if not len(found):
            return found
        chosen = found.distributions().gather(-1, found.tokens[:, None])[:, 0]
        self.logs.append(chosen.log().tolist())
        return found

    def __enter__(self) -> "Noted":
        self.inner = self.drafter.draft
        self.drafter.draft = self  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.drafter.draft = self.inner  # type: ignore[method-assign]


def noted_and_again(name: str, drafter: str, temperature: float, block: int | None) -> tuple[list[float], list[float]]:
    """Log-probabilities of the accepted drafts, as they were drafted and as they are scored again."""
    method = made(name, drafter, model_of(3, torch.float64), temperature, block)
    source: TierDrafter = method.drafter  # type: ignore[attr-defined]
    with Noted(source) as notes:
        generation = decoded(method)
    drafting = [one for one in generation.blocks if one.drafted]
    expected = [value for one, log in zip(drafting, notes.logs, strict=True) for value in log[: one.kept]]
    full_scores(method.tiers, PROMPT, generation.token_ids, temperature)
    return expected, draft_scores(method.tiers, source.tier, PROMPT, generation, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafter", ["self_skip", "early_exit", "small_lm"])
@pytest.mark.parametrize("name", ["speculative", "via_sd"])
def test_draft_probabilities_are_those_that_were_drafted_with(name: str, drafter: str, temperature: float) -> None:
    expected, again = noted_and_again(name, drafter, temperature, None)
    assert len(expected) > 5 and again == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_they_are_in_one_shape_for_all_forwards_too() -> None:
    expected, again = noted_and_again("via_sd", "self_skip", 0.0, 6)
    assert len(expected) > 5 and again == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_what_was_committed_before_a_block_matters() -> None:
    """The wrong neighbour: a tail that starts at the prompt whatever the full verifier has processed since."""
    with patch.object(rescore, "committed_lengths", lambda prompt, blocks: [prompt - 1] * len(blocks)):
        expected, again = noted_and_again("via_sd", "self_skip", 0.0, None)
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
    assert found["autoregressive"].overshoot is None and found["lookup"].overshoot is None
    generation = decoded(methods["via_sd"])
    assert len(found["via_sd"].overshoot or ()) == len(kept_drafts(generation)) > 5
    tiers = methods["via_sd"].tiers
    tiers.rollback(0)
    _, full = full_scores(tiers, PROMPT, generation.token_ids, 0.0)
    tier: Tier = methods["via_sd"].drafter.tier  # type: ignore[attr-defined]
    drafted = draft_scores(tiers, tier, PROMPT, generation, 0.0)
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
