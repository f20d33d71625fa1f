"""Clocks that wait for the device; warm-up that leaves nothing behind; and rates on a machine of known speed."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from harness import measuring, timing
from harness.compare import BASELINE
from harness.decode.accept import first_stop
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.gate import AlwaysEscalate, Decision, Strictness
from harness.decode.gate.oracle import Oracle
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Drafter
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.self_skip import SelfSkip
from harness.kernels.gate import ACCEPT, ESCALATE
from harness.metrics import rows
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.model.toy import random_transformer, toy_spec
from harness.records import DataSource, Example, Route
from harness.sampling import RandomChooser, Sampling
from harness.store import RunData, read
from tasks.web_questions import WebQuestions
from tests.runs import ORACLE, Slip, qa, run_bench
from tests.toys import CPU, small_lm, tiers_of, tiny

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


def test_a_shape_is_warmed_once_a_process_for_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the largest, and not of a model that has not run, nor on a device that captures what it runs."""
    sizes: list[int] = []
    monkeypatch.setattr(Tier, "forward", lambda tier, sequence, rows: sizes.append(len(sequence) - tier.length))
    model, other = tiny(0), tiny(0)
    for largest in (2, 2, 3):
        timing.warm_up(tiers_of(model, 8), largest)
    timing.warm_up(tiers_of(other, 8), 1)
    assert sizes == [1, 2, 2, 3, 1]
    model.devices = (CUDA,)
    with patch.object(Tiers, "prefill"):
        timing.warm_up(tiers_of(model, 8), 2)
    assert sizes[5:] == [1, 2]


def test_warm_up_fits_a_cache_that_holds_one_token_and_its_block() -> None:
    timing.warm_up(tiers_of_every_kind(capacity=1 + 6), 6)
    with pytest.raises(ValueError, match="cache holds 6 positions, 7 are needed"):
        timing.warm_up(tiers_of_every_kind(capacity=6), 6)


def test_warm_up_leaves_nothing_behind() -> None:
    def decoded(tiers: Tiers) -> tuple[int, ...]:
        decoder = Decoder(Autoregressive(tiers, Sampling()))
        decoder.prefill(PROMPT)
        generation = decoder.decode(StopRule(12), RandomChooser(0, CPU))
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


# What a run measures, on a machine whose speed is known.


class Machine:
    """Time passes in forwards alone, each at a fixed cost in seconds.

    The first call of a tier takes ``first`` times as long, the first of each of its block sizes ``first_of_shape``
    times; so does the first prefill of a length with the same weights. What the bench does before it measures must
    take all of that upon itself.
    """

    COST = MappingProxyType({"full": 1.0, "slim": 0.5, "draft": 0.1, "oracle": 7.0})
    PREFILL = MappingProxyType({"full": 10.0, "draft": 2.0})

    def __init__(self, first: float = 1, first_of_shape: float = 1) -> None:
        self.now = 0.0
        self.first = first
        self.first_of_shape = first_of_shape
        self.seen: set[Hashable] = set()
        self.kept: list[object] = []

    def spend(self, cost: float, owner: object, size: int, kernels: Hashable = None) -> None:
        """``kernels``: whose shapes have a first call; None: the owner's."""
        self.kept.append(owner)  # so that no id is given out twice
        shape = (kernels or id(owner), size)
        slow = self.first if id(owner) not in self.seen else 1
        if shape not in self.seen:
            slow = max(slow, self.first_of_shape)
        self.seen |= {id(owner), shape}
        self.now += cost * slow

    @contextmanager
    def running(self) -> Iterator[None]:
        forward, prefill = Tier.forward, Tier.prefill

        def costly_forward(
            tier: Tier, sequence: Sequence[int], rows: int, drafts: torch.Tensor | None = None
        ) -> torch.Tensor:
            kernels = (id(tier.model), tier.layers)
            self.spend(self.COST[tier.name], tier, len(tier.fresh(sequence, drafts)), kernels)
            return forward(tier, sequence, rows, drafts)

        def costly_prefill(tier: Tier, sequence: Sequence[int]) -> None:
            if fresh := len(sequence) - tier.length:
                self.spend(self.PREFILL[tier.name], tier.model, fresh)
            prefill(tier, sequence)

        with (
            patch.object(Tier, "forward", costly_forward),
            patch.object(Tier, "prefill", costly_prefill),
            patch.object(measuring, "synced_clock", lambda device: lambda: self.now),
            patch.object(timing, "synced_clock", lambda device: lambda: self.now),
        ):
            yield


class Every:
    """Accepts every draft, but escalates the first one of each ``period``-th block."""

    name = "every"
    reachable = frozenset((Route.ACCEPT, Route.ESCALATE))
    lossless = False

    def __init__(self, period: int) -> None:
        self.period = period
        self.blocks = 0

    def __call__(self, scores: torch.Tensor, tokens: torch.Tensor) -> Decision:
        codes = torch.full_like(tokens, ACCEPT)
        self.blocks += 1
        if self.blocks % self.period == 0:
            codes[0] = ESCALATE
        return Decision(codes, first_stop(codes == ACCEPT))


def small(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
    """A smaller model of its own as drafter."""
    spec = toy_spec(vocab_size=257, layers=2, max_positions=8192)
    return small_lm(random_transformer(spec, 1, torch.float64))(tiers, sampling, model)


def measured(folder: Path, machine: Machine, methods: Mapping[str, partial[Any]], **settings: Any) -> RunData:
    timing._warm.clear()  # another machine has run nothing
    with machine.running():
        return read(run_bench(folder, methods, **{"limit": 3, "max_new_tokens": 8} | settings))


def rates(data: RunData) -> dict[tuple[str, str], float]:
    """Every number of the tables that this machine's clock decides."""
    return {
        (row.arm, row.metric): row.value
        for row in rows(data.run, data.samples)
        if (row.metric.startswith("speedup") or row.metric.endswith("_s")) and row.value is not None
    }


ORACLE_ARMS: dict[str, partial[Any]] = {
    "speculative": partial(Speculative, gamma=3, drafter=ORACLE),
    "slim_alone": partial(ViaSD, gamma=4, drafter=ORACLE, gate=Every(10**9)),
    "escalating": partial(ViaSD, gamma=4, drafter=ORACLE, gate=AlwaysEscalate()),
}
DECODE_S = {
    "autoregressive": 8 * 1.0,  # a forward a token
    "speculative": 6 * 0.1 + 2 * 1.0,  # twice: three drafts, one pass, the bonus token
    "slim_alone": 8 * 0.1 + 2 * 0.5,  # twice: four drafts, one slim pass
    "escalating": 8 * 0.1 + 2 * 0.5 + 2 * 1.0,
}


def test_speedups_on_a_known_machine_are_what_arithmetic_says(tmp_path: Path) -> None:
    """Eight tokens of every arm, prefill 10 s: decode speedup is without it, end to end with it on both sides."""
    data = measured(tmp_path, Machine(), ORACLE_ARMS)
    assert len({sample.prompt_tokens for sample in data.samples}) == 3, "a longer prompt makes no rate higher"
    for sample in data.samples:
        assert len(sample.generation.token_ids) == 8
        assert sample.prefill_s == pytest.approx(10.0, rel=1e-12)
        assert sample.decode_s == pytest.approx(DECODE_S[sample.arm], rel=1e-12)
    found = rates(data)
    for arm, decode_s in DECODE_S.items():
        expected = {
            "speedup_decode": 8 / decode_s,
            "speedup_end_to_end": 18 / (10 + decode_s),
            "decode_tokens_per_s": 8 / decode_s,
            "end_to_end_tokens_per_s": 8 / (10 + decode_s),
            "mean_prefill_s": 10.0,
            "mean_decode_s": decode_s,
        }
        assert {name: found[arm, name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_judging_what_differs_from_greedy_is_nobodys_time(tmp_path: Path) -> None:
    """A pass of several seconds after every prompt: the seconds and forwards of all arms are what they are without."""
    data = measured(tmp_path, Machine(), ORACLE_ARMS | {"slip": partial(Slip)}, limit=4)
    assert [(one.arm, one.position) for one in data.divergences] == [("slip", 6)] * 4
    for sample in data.samples:
        assert sample.prefill_s == pytest.approx(10.0, rel=1e-12)
        assert sample.decode_s == pytest.approx((DECODE_S | {"slip": 8.0})[sample.arm], rel=1e-12)
    forwards = [sum(block.full_forwards for block in s.generation.blocks) for s in data.samples if s.arm == BASELINE]
    assert forwards == [8] * 4


def test_what_an_oracle_does_to_know_is_nobodys_time(tmp_path: Path) -> None:
    """A forward of seven seconds in every block: seconds and forwards are those of a gate that guesses as well."""
    seen: list[Tiers] = []

    def noted(tiers: Tiers, **others: Any) -> ViaSD:
        seen.append(tiers)
        return ViaSD(tiers=tiers, gamma=4, drafter=ORACLE, gate=Oracle(), **others)

    for sample in measured(tmp_path, Machine(), {"seeing": partial(noted)}).samples:
        assert sample.decode_s == pytest.approx({**DECODE_S, "seeing": 8 * 0.1 + 2 * 0.5}[sample.arm], rel=1e-12)
        assert sum(block.full_forwards for block in sample.generation.blocks) == 8 * (sample.arm == BASELINE)
    assert seen[0].aside_s >= 3 * 2 * 7.0, "the passes are there, and they are noted"


def test_a_drafters_own_prefill_counts_end_to_end(tmp_path: Path) -> None:
    data = measured(tmp_path, Machine(), {"small": partial(Speculative, gamma=3, drafter=small)})
    assert {(s.arm, round(s.prefill_s, 9)) for s in data.samples} == {("autoregressive", 10.0), ("small", 12.0)}
    for sample in data.samples:
        full, draft = (
            sum(getattr(block, f"{tier}_forwards") for block in sample.generation.blocks) for tier in ("full", "draft")
        )
        assert sample.decode_s == pytest.approx(full + 0.1 * draft, rel=1e-12)


WARMED: dict[str, Callable[[], partial[Any]]] = {
    "prompt_lookup": lambda: partial(Speculative, gamma=3, drafter=partial(PromptLookup, max_ngram=3)),
    "self_skip": lambda: partial(Speculative, gamma=5, drafter=partial(SelfSkip, skip_ratio=0.6)),
    "small_lm": lambda: partial(Speculative, gamma=2, drafter=small),
    "via_sd": lambda: partial(ViaSD, gamma=4, drafter=partial(SelfSkip, skip_ratio=0.6), gate=Strictness()),
    "via_sd_prompt_lookup": lambda: partial(ViaSD, gamma=4, drafter=partial(PromptLookup), gate=Strictness()),
    "full_verifier_far_behind": lambda: partial(ViaSD, gamma=4, drafter=ORACLE, gate=Every(3)),
}


@pytest.mark.parametrize("arm", WARMED)
def test_slow_first_calls_are_nobodys_time(arm: str, tmp_path: Path) -> None:
    """The first call a hundred times slower, the first of each shape ten times: the rates are the same."""
    even, slow = (
        rates(measured(tmp_path / name, machine, {arm: WARMED[arm]()}, max_new_tokens=24))
        for name, machine in (("even", Machine()), ("slow", Machine(first=100, first_of_shape=10)))
    )
    assert slow == pytest.approx(even, rel=1e-9)


def test_the_order_of_prompts_changes_no_rate(tmp_path: Path) -> None:
    class Reversed(WebQuestions):
        def load(self, limit: int, seed: int) -> tuple[list[Example], DataSource]:
            found, source = super().load(limit, seed)
            return found[::-1], source

    arms = {name: WARMED[name]() for name in ("prompt_lookup", "self_skip")}
    forth, back = (
        rates(measured(tmp_path / str(index), Machine(first=100, first_of_shape=10), arms, tasks={"qa": task}))
        for index, task in enumerate((qa(), Reversed(source="builtin", shots=0)))
    )
    assert back == pytest.approx(forth, rel=1e-9)
