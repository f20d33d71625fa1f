"""Clocks that wait for the device; warm-up that leaves nothing behind and no shape for the first timed forward."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from harness import timing
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.model.tiers import Tier, Tiers
from harness.sampling import GreedyChooser, Sampling
from tests.toys import CPU, tiers_of, tiny

CUDA = torch.device("cuda", 1)
PROMPT = (5, 9, 2, 5, 9)


def tiers_of_every_kind(capacity: int = 64) -> Tiers:
    tiers = tiers_of(tiny(0), capacity)
    tiers.provisional("slim", (0, 2, 3))
    tiers.provisional("draft", (0, 3))
    tiers.independent("small", tiny(1, layers=2))
    return tiers


@pytest.fixture
def device_log(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is asked of a device that is not there, and of the clock, in order."""
    log: list[object] = []

    def noted(name: str, answer: float | None = None) -> Callable[[torch.device], float | None]:
        def call(device: torch.device) -> float | None:
            log.append((name, device))
            return answer

        return call

    def now() -> float:
        log.append("clock")
        return float(len(log))

    monkeypatch.setattr(torch.cuda, "synchronize", noted("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", noted("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", noted("peak", 12))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=now))
    return log


def test_on_a_cpu_the_clock_is_the_monotonic_one_and_memory_is_unknown() -> None:
    clock = timing.synced_clock(CPU)
    before, read, after = time.perf_counter(), clock(), time.perf_counter()
    assert before <= read <= after
    readings = [clock() for _ in range(1000)]
    assert readings == sorted(readings)
    timing.reset_peak(CPU)
    assert timing.peak_bytes(CPU) is None


def test_on_an_accelerator_each_reading_waits_for_the_device_first(device_log: list[object]) -> None:
    clock = timing.synced_clock(CUDA)
    assert device_log == []
    assert (clock(), clock()) == (2.0, 4.0)
    assert device_log == [("synchronize", CUDA), "clock"] * 2


def test_a_cpu_clock_asks_no_accelerator(device_log: list[object]) -> None:
    timing.synced_clock(CPU)()
    timing.reset_peak(CPU)
    assert timing.peak_bytes(CPU) is None
    assert device_log == ["clock"]


def test_peak_memory_is_the_devices_own(device_log: list[object]) -> None:
    timing.reset_peak(CUDA)
    assert timing.peak_bytes(CUDA) == 12
    assert device_log == [("reset", CUDA), ("peak", CUDA)]


@pytest.mark.parametrize("largest", [1, 2, 6])
def test_warm_up_runs_every_tier_at_every_block_size(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[str, int, int, int]] = []
    forward = Tier.forward

    def noted(tier: Tier, sequence: Sequence[int], rows: int) -> torch.Tensor:
        length = tier.length
        logits = forward(tier, sequence, rows)
        shapes.append((tier.name, length, len(sequence) - length, logits.shape[0]))
        return logits

    monkeypatch.setattr(Tier, "forward", noted)
    timing.warm_up(tiers_of_every_kind(), largest)
    names = ("full", "slim", "draft", "small")
    # One position is committed: a block behind an empty cache is a prefill, not a step of decoding.
    assert shapes == [(name, 1, size, size) for name in names for size in range(1, largest + 1)]


def test_warm_up_fits_a_cache_that_holds_one_token_and_its_block() -> None:
    timing.warm_up(tiers_of_every_kind(capacity=1 + 6), 6)
    with pytest.raises(ValueError, match="cache holds 6 positions, 7 are needed"):
        timing.warm_up(tiers_of_every_kind(capacity=6), 6)


def test_warm_up_leaves_nothing_behind() -> None:
    def decoded(tiers: Tiers) -> tuple[int, ...]:
        decoder = Decoder(Autoregressive(tiers, Sampling()))
        decoder.prefill(PROMPT)
        generation = decoder.decode(StopRule(12), GreedyChooser())
        assert [block.full_forwards for block in generation.blocks] == [1] * 12
        return generation.token_ids

    warm, cold = tiers_of_every_kind(), tiers_of_every_kind()
    timing.warm_up(warm, 6)
    assert [tier.length for tier in warm.every] == [0, 0, 0, 0]
    assert decoded(warm) == decoded(cold)
    for tier, fresh in zip(warm.every, cold.every, strict=True):
        assert tier.length == fresh.length
    written = warm.cache.length
    assert torch.equal(warm.cache.keys[:, :, :written], cold.cache.keys[:, :, :written])
    slim, fresh = warm.every[1], cold.every[1]
    sequence = (*PROMPT, *range(12), 7)
    assert torch.equal(slim.forward(sequence, 1), fresh.forward(sequence, 1))
