"""Bytes held: every storage once and whole, wherever in our objects it is; nothing of other libraries."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from harness.decode.gate import Strictness
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.self_skip import SelfSkip
from harness.memory import held_bytes
from harness.model.cache import KVCache, Tail
from harness.model.transformer import Transformer
from harness.sampling import Sampling
from tests.toys import CPU, small_lm, tiers_of, tiny, tiny_model

ROW = torch.zeros(4, 8)  # 128 bytes in float32


def test_a_storage_counts_once_and_whole_however_many_views_there_are() -> None:
    assert held_bytes(ROW) == held_bytes(ROW, ROW) == held_bytes([ROW[:1], {"rest": (ROW[1:], ROW.T)}]) == 128
    assert held_bytes(ROW, ROW.clone()) == 256
    assert held_bytes(partial(print, ROW, end=ROW.double())) == 128 + 256


def test_a_packed_weight_counts_by_its_elements() -> None:
    packed = ROW.to_mkldnn()
    assert held_bytes(packed, [packed]) == 128


@dataclass
class Foreign:
    rows: torch.Tensor


def test_only_our_own_objects_are_looked_into() -> None:
    assert held_bytes(Foreign(ROW)) == 0


def test_attributes_in_slots_are_found() -> None:
    cache = KVCache(tiny(0).spec, 16, torch.float64, CPU)
    tail = Tail(cache)
    own = sum(keys.nbytes + values.nbytes for keys, values in cache.storages)
    assert held_bytes(cache) == held_bytes(cache, tail) == own
    tail.begin(3)
    tail.append(3)
    tail.save()
    assert held_bytes(tail) == own + 3 * own // 16


def weights_of(model: Transformer) -> int:
    weights = model.weights
    tensors = {weights.embed, weights.norm, weights.head} | {
        tensor for layer in weights.layers for name in layer.__slots__ if (tensor := getattr(layer, name)) is not None
    }
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def test_a_method_holds_its_weights_its_caches_and_its_tables() -> None:
    model = tiny_model(0, (0, 2))
    tiers = tiers_of(model, 64)
    method = Speculative(tiers, Sampling(), model, 3, PromptLookup)
    keys, values = tiers.cache.keys, tiers.cache.values
    tables = {id(table): table.nbytes for kind in model.transformer.kinds for table in kind.table or ()}
    parts = weights_of(model.transformer) + keys.nbytes + values.nbytes + sum(tables.values())
    assert parts <= held_bytes(method) < 1.1 * parts


@pytest.mark.parametrize("drafter", [PromptLookup, SelfSkip])
def test_a_third_tier_over_the_same_cache_holds_next_to_nothing_more(drafter: type) -> None:
    model = tiny_model(0, (0, 2))
    two = Speculative(tiers_of(model, 64), Sampling(), model, 3, drafter)
    three = ViaSD(tiers_of(model, 64), Sampling(), model, 3, drafter, Strictness())
    assert held_bytes(two) <= held_bytes(three) < 1.1 * held_bytes(two)


def test_a_drafter_of_its_own_is_counted() -> None:
    model, small = tiny_model(0, (0, 2)), tiny(1, layers=2)
    plain = Speculative(tiers_of(model, 64), Sampling(), model, 3, PromptLookup)
    drafted = Speculative(tiers_of(model, 64), Sampling(), model, 3, small_lm(small))
    assert held_bytes(drafted) >= held_bytes(plain) + weights_of(small)
