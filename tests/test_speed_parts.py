"""What job=speed times, on a clock that only work moves: forwards, products, decoding of both sides."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder
from harness.decode.speculative import Speculative
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.small_lm import SmallLM
from harness.model.load import Model, load_model
from harness.model.slim import SublayerMask
from harness.model.sublayers import skipping
from harness.model.tiers import Tier, Tiers
from harness.model.toy import random_transformer, toy_spec
from harness.model.truncated import first_layers_folder
from harness.sampling import Sampling
from harness.speed import bandwidth as bandwidth_module
from harness.speed.bandwidth import MIB, last_cache_bytes, matrix_bytes, time_products
from harness.speed.decoding import Item, OurArm, StockArm, decode_in_turn
from harness.speed.forwards import WARM, first_layers, fitting, forward_bytes, forwards_timed, time_forwards
from harness.speed.stock import ASSISTANT, PLAIN, PROMPT_LOOKUP, Stock
from tests.toys import CPU, WORDS, tiers_of, tiny, write_checkpoint

COSTS = {"full": 4.0, "slim": 3.0, "draft": 1.0}


@dataclass
class Machine:
    """A clock that forwards move: each tier by its cost, later ones by more where ``drift`` is not 0."""

    now: float = 0.0
    drift: float = 0.0
    calls: int = 0

    def clock(self) -> float:
        return self.now

    def work(self, name: str) -> None:
        self.calls += 1
        self.now += COSTS[name] * (1 + self.drift * self.calls)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made, forward = Machine(), Tier.forward

    def timed(tier: Tier, sequence: Any, rows: int) -> torch.Tensor:
        made.work(tier.name)
        return forward(tier, sequence, rows)

    monkeypatch.setattr(Tier, "forward", timed)
    return made


def three_tiers(capacity: int = 64) -> tuple[Tiers, dict[str, Tier]]:
    tiers = tiers_of(tiny(0), capacity)
    slim, draft = tiers.provisional("slim", (0, 2, 3)), tiers.independent("draft", first_layers(tiers.model, 2))
    return tiers, {"full": tiers.full, "slim": slim, "draft": draft}


def test_each_tier_is_timed_at_each_shape_and_the_cache_is_filled_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, timed = three_tiers()
    starts: list[int] = []
    filled: list[int] = []
    work, prefill = machine.work, Tiers.prefill

    def noted_work(name: str) -> None:
        starts.append(timed[name].length)
        work(name)

    def noted_prefill(tiers: Tiers, prompt: Sequence[int]) -> None:
        filled.append(len(prompt) - 1)
        prefill(tiers, prompt)

    monkeypatch.setattr(machine, "work", noted_work)
    monkeypatch.setattr(Tiers, "prefill", noted_prefill)
    steps: list[int] = []
    found = list(time_forwards(tiers, timed, [8, 20], [1, 3], 4, machine.clock, lambda: steps.append(1)))
    assert filled == [8, 20]
    assert len(steps) == machine.calls == forwards_timed(3, 2, 2, 4) == 3 * 2 * 2 * (4 + WARM)
    assert {(one.tier, one.block, one.context) for one in found} == {
        (name, block, context) for name in COSTS for block in (1, 3) for context in (8, 20)
    }
    for one in found:
        assert one.seconds == (COSTS[one.tier],) * 4
        assert one.read_bytes == forward_bytes(timed[one.tier].model, timed[one.tier].layers, one.block, one.context)
    assert set(starts) == {8, 20}, "every forward starts behind the context"
    assert [tier.length for tier in timed.values()] == [0, 0, 0]


def test_tiers_take_turns_within_a_repeat(machine: Machine) -> None:
    """On a machine that slows down with every call neighbours still compare."""
    machine.drift = 0.01
    tiers, timed = three_tiers()
    found = {one.tier: one for one in time_forwards(tiers, timed, [8], [1], 6, machine.clock)}
    quotients = [a / b for a, b in zip(found["draft"].seconds, found["full"].seconds, strict=True)]
    assert found["full"].seconds[-1] > 1.1 * found["full"].seconds[0]
    assert all(quotient == pytest.approx(0.25, rel=0.03) for quotient in quotients)


def test_contexts_must_leave_room_for_the_largest_block() -> None:
    assert fitting([64, 96, 97], [1, 32], 128) == ([64, 96], [97])


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "norms": {"qk_norm": True, "post_norms": True, "offset_norm": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_bytes_of_a_forward_are_those_of_its_tensors(family: str, dtype: torch.dtype) -> None:
    spec = replace(toy_spec(layers=4), **FAMILIES[family])
    model = random_transformer(spec, 0, dtype)
    weights = model.weights
    layers = sum(
        tensor.nbytes
        for index in (0, 3)
        for name in weights.layers[index].__slots__
        if (tensor := getattr(weights.layers[index], name)) is not None
    )
    edges = weights.norm.nbytes + weights.head.nbytes + 3 * weights.embed[0].nbytes
    keys, values = model.new_cache(23).layers[0]  # 20 cached, 3 new
    assert forward_bytes(model, (0, 3), 3, 20) == layers + edges + 2 * (keys.nbytes + values.nbytes)


def test_a_skipped_half_of_a_layer_is_not_read() -> None:
    model = random_transformer(toy_spec(layers=4), 0, torch.float64)
    kept = SublayerMask.of(attention=[0, 1], mlp=[0, 2], depth=4)
    attention, mlp = ("qkv", "out", "attn_norm"), ("gate_up", "down", "mlp_norm")
    weights = model.weights.layers[0]
    read = {half: sum(getattr(weights, name).nbytes for name in half) for half in (attention, mlp)}
    entries = sum(part.nbytes for part in model.new_cache(23).layers[0])
    none = forward_bytes(model, (), 3, 20)
    assert forward_bytes(skipping(model, kept), kept.layers, 3, 20) == none + 2 * (
        read[attention] + read[mlp] + entries
    )


def test_behind_a_sliding_window_fewer_keys_are_read() -> None:
    spec = replace(toy_spec(layers=2), window=8, sliding=frozenset((1,)))
    model = random_transformer(spec, 0, torch.float64)
    entry = 2 * spec.kv_heads * spec.head_dim * 8

    def read(layer: int, block: int, context: int) -> int:
        return forward_bytes(model, (layer,), block, context) - forward_bytes(model, (layer,), block, 0)

    assert read(0, 1, 30) == 30 * entry
    assert read(1, 1, 30) == 7 * entry, "a query sees itself and seven before it"
    assert read(1, 1, 5) == 5 * entry


def test_the_matrix_is_larger_than_the_cache_and_small_beside_the_memory() -> None:
    assert matrix_bytes(None, None) == matrix_bytes(MIB, 2**40) == 512 * MIB
    assert matrix_bytes(260 * MIB, 2**40) == 1040 * MIB
    assert matrix_bytes(260 * MIB, 2**30) == 128 * MIB
    cache = last_cache_bytes(CPU)
    assert cache is None or cache > 2**15


def test_products_move_the_matrix_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()

    def slow(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def product(vector: torch.Tensor) -> torch.Tensor:
            machine.now += 2.0
            return vector @ weight.T

        return product

    monkeypatch.setattr(bandwidth_module, "PRODUCTS", {"slow": slow})
    (found,) = time_products(torch.bfloat16, CPU, 3 * 8192 * 2, 5, machine.clock)
    assert (found.product, found.moved_bytes, found.seconds) == ("slow", 3 * 8192 * 2, (2.0,) * 5)


@pytest.mark.parametrize("make", bandwidth_module.PRODUCTS.values())
def test_every_product_is_the_product(make: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 64, generator=generator).bfloat16()
    vector = torch.randn(1, 64, generator=generator).bfloat16()
    got = make(weight)(vector)
    torch.testing.assert_close(got.float(), vector.float() @ weight.float().T, rtol=2e-2, atol=2e-1)


def ticking() -> Callable[[], float]:
    """A clock that moves by 1 at each reading."""
    readings: Iterator[int] = iter(range(10**6))
    return lambda: float(next(readings))


@dataclass(frozen=True)
class Setting:
    model: Model
    draft: Path
    stock: Stock


GAMMA, NGRAM = 3, 3


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A tiny Llama in float64 on both sides, with its first layer as the small model."""
    root = tmp_path_factory.mktemp("stock")
    shape: dict[str, Any] = {"vocab_size": len(WORDS), "num_hidden_layers": 3, "max_position_embeddings": 128}
    folder = write_checkpoint(root / "big", seed=6, **shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HARNESS_CACHE", str(root / "cache"))
        draft = first_layers_folder(folder, 1)
    model = load_model(str(folder), dtype="float64", device="cpu")
    eos = model.tokenizer.eos_ids
    return Setting(model, draft, Stock(folder, torch.float64, CPU, eos, GAMMA, NGRAM, draft))


def our_arm(setting: Setting, theirs: str, items: list[Item], tokens: int, clock: Callable[[], float]) -> OurArm:
    tiers, sampling = tiers_of(setting.model, 128), Sampling()
    method: Any = Autoregressive(tiers, sampling)
    if theirs == PROMPT_LOOKUP:
        method = Speculative(tiers, sampling, setting.model, GAMMA, PromptLookup)
    if theirs == ASSISTANT:
        drafter = partial(SmallLM, path=str(setting.draft))
        method = Speculative(tiers, sampling, setting.model, GAMMA, drafter)
    eos = setting.model.tokenizer.eos_ids
    return OurArm("ours", False, Decoder(method), lambda: None, items, tokens, eos, clock)


PROMPTS = [Item("qa", str(place), ids, 0) for place, ids in enumerate([(3, 4, 5, 3, 4), (7,), (9, 8, 7, 6, 9, 8)])]


@pytest.mark.parametrize("theirs", [PLAIN, PROMPT_LOOKUP, ASSISTANT])
@pytest.mark.parametrize("tokens", [1, 2, 3, 24])
def test_both_sides_write_the_same_tokens_up_to_the_limit(setting: Setting, theirs: str, tokens: int) -> None:
    ours = our_arm(setting, theirs, PROMPTS, tokens, ticking())
    stock = StockArm(theirs, setting.stock, PROMPTS, tokens, ticking())
    for item in PROMPTS:
        mine, base = ours.decode(item), stock.decode(item)
        assert mine.token_ids == base.token_ids
        assert len(mine.token_ids) == tokens or mine.token_ids[-1] in setting.model.tokenizer.eos_ids
        assert mine.prompt_tokens == base.prompt_tokens == len(item.ids)


@pytest.mark.parametrize("theirs", [PLAIN, PROMPT_LOOKUP, ASSISTANT])
def test_both_sides_stop_at_the_end_of_sequence_token(setting: Setting, theirs: str) -> None:
    item = PROMPTS[0]
    long = our_arm(setting, theirs, [item], 24, ticking()).decode(item).token_ids
    end = next(token for place, token in enumerate(long) if place >= 2 and token not in long[:place])
    ours = replace(our_arm(setting, theirs, [item], 24, ticking()), eos_ids=frozenset((end, 1)))
    stopping = Stock.__new__(Stock)
    stopping.__dict__.update(setting.stock.__dict__ | {"ends": {"eos_token_id": [1, end], "pad_token_id": 1}})
    want = long[: long.index(end) + 1]
    assert (
        ours.decode(item).token_ids == StockArm(theirs, stopping, [item], 24, ticking()).decode(item).token_ids == want
    )


@pytest.mark.parametrize("theirs", [PLAIN, PROMPT_LOOKUP, ASSISTANT])
def test_the_clock_is_read_when_the_first_tokens_are_there_and_at_both_ends(setting: Setting, theirs: str) -> None:
    found = StockArm(theirs, setting.stock, PROMPTS, 12, ticking()).decode(PROMPTS[0])
    assert (found.first_s, found.rest_s) == (1.0, 1.0)
    assert found.first_tokens == 1 if theirs == PLAIN else 1 <= found.first_tokens <= GAMMA + 1
    assert (found.decode_s, found.tier_s, found.read_bytes) == (None, None, None)
    mine = our_arm(setting, theirs, PROMPTS, 12, ticking()).decode(PROMPTS[0])
    assert (mine.first_s, mine.rest_s, mine.decode_s) == (2.0, 1.0, 2.0), "ours is also read after prefill"
    assert mine.first_tokens == found.first_tokens
    assert mine.tier_s is not None and len(mine.tier_s) == 3


@pytest.mark.parametrize("theirs", [PLAIN, PROMPT_LOOKUP, ASSISTANT])
def test_the_first_forward_alone_is_that_of_the_whole_output(setting: Setting, theirs: str) -> None:
    for item in PROMPTS:
        whole, first = (
            setting.stock.decode(theirs, item.ids, 12, ticking(), first_only=only) for only in (False, True)
        )
        assert first[1] == whole[1] and first[0] == whole[0][: whole[1]]


def test_the_assistant_drafts_gamma_tokens_in_every_block(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    _, models = setting.stock.methods[ASSISTANT]
    asked: list[int] = []
    assistant = models["assistant_model"]
    generate = type(assistant).generate

    def noted(model: Any, *given: Any, **named: Any) -> Any:
        if model is assistant:
            asked.append(named["max_new_tokens"])
        return generate(model, *given, **named)

    monkeypatch.setattr(type(assistant), "generate", noted)
    found = setting.stock.decode(ASSISTANT, PROMPTS[0].ids, 24, ticking())
    assert len(found[0]) == 24
    assert set(asked[:-2]) == {GAMMA}, "fewer only before the limit"


def test_the_bytes_read_are_those_of_forwards_of_one_token(setting: Setting) -> None:
    arm, item = our_arm(setting, PLAIN, PROMPTS, 4, ticking()), PROMPTS[0]
    model = setting.model.transformer
    want = sum(forward_bytes(model, range(3), 1, cached) for cached in (5, 6, 7))
    assert len(arm.decode(item).token_ids) == 4
    assert arm.decode(item).read_bytes == want
    assert our_arm(setting, PROMPT_LOOKUP, PROMPTS, 4, ticking()).decode(item).read_bytes is None


@dataclass(frozen=True)
class Noted:
    """An arm that only notes what it is asked."""

    name: str
    items: list[Item]
    log: list[str]
    prefilled: frozenset[Any]

    def prepare(self) -> None:
        self.log.append(f"prepare {self.name}")

    def warm(self, item: Item) -> None:
        self.log.append(f"warm {self.name}{item.example_id}")

    def decode(self, item: Item) -> Any:
        self.log.append(f"{self.name}{item.example_id}")
        return self.name


def test_arms_take_turns_on_their_prompts_and_warm_what_no_other_has() -> None:
    log: list[str] = []
    first, second, third = PROMPTS
    a = Noted("a", [first, second, third], log, frozenset("m"))
    b = Noted("b", [first, second, third], log, frozenset("m"))
    c = Noted("c", [second], log, frozenset("mn"))
    steps: list[int] = []
    found: list[Any] = list(decode_in_turn([a, b, c], lambda: steps.append(1)))
    assert log == [
        *("prepare a", "prepare b", "prepare c"),
        *("warm a0", "a0", "b0"),
        *("warm a1", "warm c1", "b1", "c1", "a1"),
        *("warm a2", "b2", "a2"),
    ]
    assert [sorted(done) for done in found] == [["a", "b"], ["a", "b", "c"], ["a", "b"]]
    assert len(steps) == 7
