"""The path that CUDA graphs replay, on the CPU: fixed input buffers, whole drafts at once, and the same tokens.

Where there is no CUDA device ``Replay`` calls the function that it would have captured. What a capture itself needs
is tested in ``tests/gpu``.
"""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from harness.decode.base import Decoder, StopRule
from harness.model.replay import Replay
from harness.model.tiers import Tier
from harness.sampling import RandomChooser, Sampling
from tests.arms import DRAFTERS, METHODS, PROMPT, model_of, output, tiers_with
from tests.toys import CPU, shapes_unchecked


@pytest.fixture
def pretend_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers believe that they run on a CUDA device."""
    build = Tier.__init__

    def pretending(self: Tier, *args: object, graphs: bool = False, **kwargs: object) -> None:
        build(self, *args, **kwargs)  # type: ignore[arg-type]
        self.graphs = True

    monkeypatch.setattr(Tier, "__init__", pretending)


def test_a_replay_reads_its_inputs_anew_each_time() -> None:
    seen: list[int] = []

    def function(value: torch.Tensor) -> torch.Tensor:
        seen.append(value.data_ptr())
        return value * 2

    given = torch.tensor([1.0])
    replay = Replay(function, given)
    assert [float(replay(torch.tensor([x]))) for x in (1.0, 5.0)] == [2.0, 10.0]
    assert len(set(seen)) == 1 and given.data_ptr() not in seen


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.8)], ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_the_same_with_and_without(
    method: str, drafter: str, sampling: Sampling, request: pytest.FixtureRequest
) -> None:
    cases = [model_of(seed, torch.float64) for seed in range(2)]

    def all_outputs() -> list[tuple[int, ...]]:
        found = []
        for seed, model in enumerate(cases):
            make = DRAFTERS[drafter](model, range(97))
            tiers = tiers_with(model, None, False)
            with shapes_unchecked() if seed else nullcontext():
                found.append(output(METHODS[method](tiers, model, make, sampling), seed))
            used.append(sum(len(tier.replays) for tier in tiers.every))
        return found

    used: list[int] = []
    plain = all_outputs()
    assert not any(used)
    request.getfixturevalue("pretend_graphs")
    used.clear()
    assert all_outputs() == plain
    assert all(used)


def test_a_drafted_block_is_one_replay(pretend_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(0, torch.float64)
    calls: list[int] = []
    replay = Replay.__call__

    def counted(self: Replay, *inputs: torch.Tensor) -> object:
        calls.append(len(inputs[0]))
        return replay(self, *inputs)

    monkeypatch.setattr(Replay, "__call__", counted)
    tiers = tiers_with(model, None, True)
    method = METHODS["speculative"](tiers, model, DRAFTERS["self_skip"](model, ()), Sampling())
    output(method)
    drafting, verifying = (len(calls) - tiers.full.forwards, tiers.full.forwards)
    assert verifying > 5 and drafting in (verifying, verifying - 1), "the last block may have room for no draft"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_decision_reaches_the_host_by_one_read(
    method: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a block, and a second time where VIA-SD escalates: whether the full verifier runs depends on the routes."""
    reads = 0

    def counted(name: str) -> Callable[..., object]:
        read = getattr(torch.Tensor, name)

        def reading(self: torch.Tensor, *arguments: object) -> object:
            nonlocal reads
            reads += 1
            return read(self, *arguments)

        return reading

    model = model_of(0, torch.float64)
    made = METHODS[method](tiers_with(model, None, False), model, DRAFTERS["self_skip"](model, ()), sampling)
    decoder = Decoder(made)
    decoder.prefill(PROMPT)
    for name in ("item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    blocks = decoder.decode(StopRule(40), RandomChooser(0, CPU)).blocks
    monkeypatch.undo()
    escalated = 0 if made.tier_roles()[1] is None else sum(block.full_forwards for block in blocks if block.drafted)
    assert reads == len(blocks) + escalated and len(blocks) > 5
