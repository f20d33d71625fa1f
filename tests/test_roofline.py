"""The roofline by hand, its limits, and constants found again from the forwards that they made."""

import math
from dataclasses import replace
from typing import Any

import pytest

from harness.cost import Shape
from harness.errors import UserError
from harness.roofline import Load, Machine, Timed, calibrated, errors, forward_s, load_of

LLAMA_8B = Shape("llama3_8b", "decoder", 32, 4096, 14336, 32, 8, 128, 128256, False, 3)
H100 = Machine(3.35e12, 9.89e14)


def test_a_llama_of_8b_on_an_h100_has_the_floor_of_the_methods() -> None:
    """methods.md 7.4: weights of about 15 GB, without the embedding, over 3.35 TB/s: 4.5 ms; 4.8 with it."""
    load = load_of(LLAMA_8B, 2, 2)
    assert load.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert forward_s(H100, load, 1, 0) == pytest.approx(4.48e-3, rel=0.01)
    assert load.cache_bytes == 2 * 32 * 8 * 128 * 2


def test_rows_are_free_until_products_take_longer_than_bytes() -> None:
    load = load_of(LLAMA_8B, 2, 2)
    edge = int(H100.compute / H100.bandwidth)  # rows at which both take the same time, in bfloat16
    assert forward_s(H100, load, edge - 1, 0) == forward_s(H100, load, 1, 0)
    assert forward_s(H100, load, 2 * edge, 0) == pytest.approx(2 * forward_s(H100, load, 1, 0), rel=0.01)


def test_a_long_context_costs_its_cache() -> None:
    load = load_of(LLAMA_8B, 2, 2)
    extra = forward_s(H100, load, 1, 131072) - forward_s(H100, load, 1, 0)
    assert extra == pytest.approx(131072 * load.cache_bytes / H100.bandwidth)


def test_a_batch_shares_the_weights_and_not_the_cache() -> None:
    load = Load(weight_bytes=100.0, cache_bytes=1.0, weights=50.0, layers=2)
    machine = Machine(bandwidth=10.0, compute=1e9, layer_overhead_s=0.5)
    assert forward_s(machine, load, 1, 20, batch=3) == pytest.approx((100 + 60) / 10 + 1)


def test_a_slim_verifier_reads_what_it_keeps() -> None:
    whole, half = load_of(LLAMA_8B, 2, 2), load_of(LLAMA_8B, 2, 2, 0.5)
    assert half.layers == 16 and half.cache_bytes == whole.cache_bytes / 2
    assert half.weight_bytes > whole.weight_bytes / 2, "the head stays"


def test_several_devices_divide_bytes_and_products() -> None:
    load = load_of(LLAMA_8B, 2, 2)
    for rows in (1, 4000):
        assert forward_s(H100.times(4), load, rows, 100) == pytest.approx(forward_s(H100, load, rows, 100) / 4)
    with pytest.raises(UserError, match="devices=0"):
        H100.times(0)


def made(machine: Machine) -> list[Timed]:
    loads = {"full": Load(2e8, 2e4, 1e8, 30), "draft": Load(5e7, 4e3, 2.5e7, 6)}
    return [
        Timed(tier, load, rows, context, forward_s(machine, load, rows, context))
        for tier, load in loads.items()
        for rows in (1, 4, 16, 64)
        for context in (64, 2048)
    ]


def test_constants_are_found_again() -> None:
    truth = Machine(2e10, 2e11, 1e-4)
    timed = made(truth)
    found = calibrated(Machine(2e10, 1e11), [one for one in timed if one.tier == "full"])
    assert found.compute == pytest.approx(truth.compute, rel=0.02)
    assert found.layer_overhead_s == pytest.approx(truth.layer_overhead_s, rel=0.02)
    assert max(map(abs, errors(found, timed))) < 0.02, "of the tier that it was not fitted to as well"


def test_an_error_is_what_is_predicted_over_what_was_measured() -> None:
    (one, *_) = made(H100)
    assert errors(H100, [replace(one, seconds=one.seconds / 2)]) == [pytest.approx(1.0)]


def test_nothing_to_calibrate_with_is_said() -> None:
    with pytest.raises(UserError, match="no forward"):
        calibrated(H100, [])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bandwidth", 0.0),
        ("bandwidth", math.inf),
        ("compute", -1.0),
        ("layer_overhead_s", -1e-6),
        ("compute", math.nan),
    ],
)
def test_a_constant_out_of_bounds_is_named(key: str, value: float) -> None:
    constants: dict[str, Any] = {"bandwidth": 1.0, "compute": 1.0, key: value}
    with pytest.raises(UserError, match=key):
        Machine(**constants)


@pytest.mark.parametrize(("key", "value"), [("weight_bytes", 0.0), ("cache_bytes", -2.0)])
def test_bytes_out_of_bounds_are_named(key: str, value: float) -> None:
    with pytest.raises(UserError, match=key):
        load_of(LLAMA_8B, **{"weight_bytes": 2.0, "cache_bytes": 2.0, key: value})
