"""Layer masks: how many layers stay, which ones, and what a mask file may not be."""

from itertools import pairwise
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.model.slim import (
    LayerMask,
    SublayerMask,
    evenly_spaced,
    first_layers,
    kept_count,
    random_layers,
    random_sublayers,
    read_mask,
    read_text,
)
from tests.toys import shapes_unchecked, write_mask


@pytest.mark.parametrize(
    ("depth", "ratio", "kept"),
    [
        (30, 0.3, 21),
        (30, 0.43, 17),  # 12.9 layers are 13
        (32, 0.4, 19),
        (28, 0.3, 20),
        (10, 0.25, 8),  # 2.5 is rounded to even, as Python does
        (10, 0.35, 6),
        (10, 0.0, 10),
        (4, 0.6, 2),
        (1, 0.4, 1),
        (2, 0.74, 1),
    ],
)
def test_kept_layers_are_depth_less_the_rounded_share(depth: int, ratio: float, kept: int) -> None:
    assert kept_count(depth, ratio) == kept == depth - round(ratio * depth)
    mask = evenly_spaced(depth, ratio)
    assert len(mask.layers) == kept and len(mask.kept) == depth
    assert mask.skip_ratio == pytest.approx(1 - kept / depth)


@pytest.mark.parametrize(("depth", "ratio"), [(30, 1.0), (30, -0.1), (30, 1.5), (4, 0.9), (1, 0.6)])
def test_a_ratio_that_leaves_nothing_is_refused(depth: int, ratio: float) -> None:
    message = rf"^skip_ratio={ratio} leaves no layer of {depth}; give a value from 0 to below 1\.$"
    with pytest.raises(UserError, match=message):
        kept_count(depth, ratio)
    with pytest.raises(UserError, match=message):
        evenly_spaced(depth, ratio)


@pytest.mark.parametrize(
    ("depth", "ratio", "layers"),
    [
        (4, 0.0, (0, 1, 2, 3)),
        (4, 0.25, (0, 1, 3)),
        (4, 0.5, (0, 3)),
        (4, 0.75, (3,)),
        (6, 0.33, (0, 1, 3, 5)),
        (10, 0.3, (0, 1, 3, 4, 6, 8, 9)),
        (5, 0.6, (0, 4)),
    ],
)
def test_evenly_spaced_by_hand(depth: int, ratio: float, layers: tuple[int, ...]) -> None:
    assert evenly_spaced(depth, ratio).layers == layers


def test_evenly_spaced_masks_keep_both_ends_and_spread_the_gaps() -> None:
    for depth in range(1, 41):
        for percent in range(0, 100, 3):
            skipped = round(percent / 100 * depth)
            if skipped == depth:
                continue
            mask = evenly_spaced(depth, percent / 100)
            assert sum(mask.kept) == depth - skipped
            if skipped > depth - 2:
                continue
            assert mask.kept[0] and mask.kept[-1]
            dropped = [index for index, kept in enumerate(mask.kept) if not kept]
            steps = {after - before for before, after in pairwise(dropped)}
            assert not steps or max(steps) - min(steps) <= 1


def test_a_mask_of_layers() -> None:
    mask = LayerMask.of([2, 0], depth=4)
    assert mask.kept == (True, False, True, False)
    assert mask.layers == (0, 2)
    assert mask.skip_ratio == 0.5


def test_masks_are_read_from_a_list_or_a_file(tmp_path: Path) -> None:
    path = write_mask(tmp_path / "mask.json", [0, 1, 3], depth=4)
    want = LayerMask((True, True, False, True))
    assert read_mask(path, 4) == read_mask(str(path), 4) == read_mask([0, 1, 3], 4) == read_mask((3, 1, 0), 4) == want


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", r"mask\.json is not a layer mask \(JSONDecodeError.*want keys 'layers' and 'kept_layers'"),
        ("", r"mask\.json is not a layer mask"),
        ("[0, 1, 3]", r"mask\.json is not a layer mask \(TypeError"),
        ("3", r"mask\.json is not a layer mask \(TypeError"),
        ("null", r"mask\.json is not a layer mask"),
        ('{"layers": 4}', r"mask\.json is not a layer mask \(KeyError\('kept_layers'\)"),
        ('{"kept_layers": [0]}', r"mask\.json is not a layer mask \(KeyError\('layers'\)"),
        (
            '{"layers": 30, "kept_layers": [0, 1]}',
            "is a mask over 30 layers, the model has 4; search one for this model",
        ),
        ('{"layers": "4", "kept_layers": [0, 1]}', "is a mask over 4 layers, the model has 4"),
        ('{"layers": 4, "kept_layers": []}', r"kept layers \[\] must be distinct integers from 0 to 3"),
        ('{"layers": 4, "kept_layers": [0, 4]}', r"kept layers \[0, 4\] must be distinct integers from 0 to 3"),
        ('{"layers": 4, "kept_layers": [-1, 0]}', r"kept layers \[-1, 0\] must be"),
        ('{"layers": 4, "kept_layers": [1, 1]}', r"kept layers \[1, 1\] must be distinct"),
        ('{"layers": 4, "kept_layers": [0.0, 1]}', r"kept layers \[0\.0, 1\] must be distinct integers"),
        ('{"layers": 4, "kept_layers": [true, 1]}', r"kept layers \[True, 1\] must be distinct integers"),
        ('{"layers": 4, "kept_layers": ["0", "1"]}', r"must be distinct integers"),
        ('{"layers": 4, "kept_layers": 3}', r"mask\.json"),
        ('{"layers": 4, "kept_layers": null}', r"mask\.json"),
        ('{"layers": 4, "kept_layers": [[0], [1]]}', r"must be distinct integers"),
        ('{"layers": 4, "kept_layers": "01"}', r"must be distinct integers"),
    ],
)
def test_a_file_that_is_no_mask_for_this_model_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mask.json"
    path.write_text(text)
    # Off, since the check of annotations would find some of these before the code under test does.
    with shapes_unchecked(), pytest.raises(UserError, match=message) as caught:
        read_mask(path, 4)
    assert "\n" not in str(caught.value)


def test_a_missing_mask_file_is_named_with_the_command_that_makes_one(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UserError, match=r"does not exist; make one with job=search, "):
            read_mask(path, 4)


@pytest.mark.parametrize("layers", [[], [4], [0, 0], [-1], [True, 1]])
def test_a_list_that_is_no_mask_is_refused(layers: list[int]) -> None:
    with pytest.raises(UserError, match=r"^layer mask: kept layers .* must be distinct integers from 0 to 3"):
        read_mask(layers, 4)


def test_a_mask_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mask.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="is not a layer mask"):
        read_mask(path, 4)


def test_a_shipped_mask_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(read_mask("results/masks/embedded_skip30.json", 30).layers) == 21


def test_a_mask_of_sublayers() -> None:
    mask = SublayerMask.of(attention=[0, 2, 3], mlp=[0, 3], depth=5)
    assert mask.attention == (True, False, True, True, False) and mask.mlp == (True, False, False, True, False)
    assert (mask.layers, mask.attending, mask.text) == ((0, 2, 3), (0, 2, 3), "0 2a 3")
    assert SublayerMask.of([0], [0, 1], 2).text == "0 1m" and SublayerMask.of([0], [0, 1], 2).attending == (0,)
    assert mask.skip_ratio == pytest.approx(0.5)


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.3, 0.45, 0.6])
def test_random_masks_keep_the_ends_and_the_right_number(ratio: float) -> None:
    for seed in range(5):
        layers, halves = random_layers(30, ratio, seed), random_sublayers(30, ratio, seed)
        assert len(layers.layers) == kept_count(30, ratio) and layers.kept[0] and layers.kept[-1]
        assert sum(halves.attention) + sum(halves.mlp) == 60 - round(60 * ratio)
        assert all(half[end] for half in (halves.attention, halves.mlp) for end in (0, -1))
        assert halves.skip_ratio == pytest.approx(layers.skip_ratio, abs=1 / 59)
    assert (random_sublayers(30, ratio, 0) == random_sublayers(30, ratio, 1)) == (ratio == 0)


def test_a_prefix_by_hand() -> None:
    assert first_layers(10, 0.3).layers == (0, 1, 2, 3, 4, 5, 6)


def test_masks_are_read_back_from_what_tables_say() -> None:
    for seed in range(5):
        layers, halves = random_layers(12, 0.45, seed), random_sublayers(12, 0.45, seed)
        assert read_text(layers.text, 12, "layers") == layers
        assert read_text(halves.text, 12, "sublayers") == halves
    whole = SublayerMask.of([0, 2, 3], [0, 2, 3], 4)
    assert whole.text == "0 2 3" and read_text(whole.text, 4, "sublayers") == whole != read_text("0 2 3", 4, "layers")


def test_a_mask_of_sublayers_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mask.json"
    path.write_text('{"layers": 4, "kept_attention": [0, 3], "kept_mlp": [0, 1, 3]}')
    assert read_mask(path, 4) == SublayerMask.of([0, 3], [0, 1, 3], 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"layers": 4, "kept_attention": [0, 3]}', r"mask\.json is not a layer mask \(KeyError\('kept_mlp'\)"),
        ('{"layers": 4, "kept_attention": [], "kept_mlp": [0]}', r"kept layers \[\] must be distinct integers"),
        ('{"layers": 4, "kept_attention": [0], "kept_mlp": [4]}', r"kept layers \[4\] must be distinct integers"),
        ('{"layers": 3, "kept_attention": [0], "kept_mlp": [0]}', "is a mask over 3 layers, the model has 4"),
    ],
)
def test_a_file_that_is_no_mask_of_sublayers_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mask.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_mask(path, 4)
