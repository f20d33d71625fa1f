"""The identity of a run: what changes it, what does not, and that files count by their bytes."""

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from harness import cells
from harness.cells import EXCLUDED, cell_of, code_sha, content, digest, paths_in
from harness.config import Settings
from harness.model.made import CACHE_VARIABLE
from harness.records import DataSource

CONFIG: dict[str, Any] = {
    "gamma": 3,
    "seed": 0,
    "model": {"_target_": "harness.model.toy.toy_model", "seed": 0},
    "methods": {"a": {"_target_": "harness.decode.speculative.Speculative"}, "b": {"gamma": 2}},
    "tasks": {"one": {}, "two": {}},
}
ENV = {"cpu": "some", "python": "3.12", "device": "cpu", "dtype": "float64", "threads": "1", "load_average": "0.5"}
SOURCE = DataSource("builtin", "rows.jsonl", "test", None, None, "ab" * 32, 2)
DATA = {"one": SOURCE}
PROMPTS = {"one": "cd" * 32}


def key(config: dict[str, Any] | None = None, **changes: Any) -> str:
    given: dict[str, Any] = {"env": ENV, "data": DATA, "prompts_sha": PROMPTS} | changes
    return cell_of({**CONFIG, **(config or {})}, **given).key


def test_a_cell_is_16_hex_digits_and_the_same_each_time() -> None:
    assert len(key()) == 16 and int(key(), 16) >= 0
    assert key() == key() == key({"methods": dict(CONFIG["methods"])})


@pytest.mark.parametrize("name", EXCLUDED)
def test_what_cannot_change_a_number_does_not_change_the_cell(name: str) -> None:
    assert key({name: "another"}) == key()


def test_every_key_that_is_left_out_exists_and_every_other_counts() -> None:
    root = {item.name for item in fields(Settings)}
    assert set(EXCLUDED) <= root
    counted = root - set(EXCLUDED)
    assert {"seed", "limit", "gamma", "temperature", "numerics", "fidelity", "source", "data_dir"} <= counted
    assert len({key({name: "another"}) for name in counted} | {key()}) == len(counted) + 1
    assert key({"a_key_of_tomorrow": 1}) != key()


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"one": replace(SOURCE, sha256="00" * 32)}},
        {"data": {"one": replace(SOURCE, shots=SOURCE)}},
        {"prompts_sha": {"one": "00" * 32}},
        *({"env": {**ENV, name: "another"}} for name in ("cpu", "python", "device", "dtype", "threads")),
    ],
)
def test_data_prompts_and_machine_count(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()


def test_the_load_and_where_rows_lie_do_not_count() -> None:
    assert key(env={**ENV, "load_average": "9.0"}) == key()
    assert key(data={"one": replace(SOURCE, location="elsewhere")}) == key()


def test_the_order_of_arms_and_tasks_counts_and_that_of_other_keys_does_not() -> None:
    turned = dict(reversed(CONFIG["methods"].items()))
    assert key({"methods": turned}) != key()
    assert key({"model": dict(reversed(CONFIG["model"].items()))}) == key()


def test_versions_and_code_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(cells, "version", lambda name: "9.9" if name == "torch" else None)
    assert key() != before
    monkeypatch.undo()
    monkeypatch.setattr(cells, "code_sha", lambda: {"harness/decode/base.py": "00"})
    assert key() != before


def test_code_is_read_from_its_files(tmp_path: Path) -> None:
    for name in ("harness/a.py", "tasks/b.py", "tasks/rows.jsonl", "harness/__pycache__/a.pyc", "tests/c.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    before = code_sha(tmp_path)
    assert sorted(before) == ["harness/a.py", "tasks/b.py", "tasks/rows.jsonl"]
    (tmp_path / "harness/a.py").write_text("other")
    code_sha.cache_clear()
    after = code_sha(tmp_path)
    assert [name for name in after if after[name] != before[name]] == ["harness/a.py"]


def test_code_of_ones_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_method_of_cells.py").write_text("x = 1")
    own = {"methods": {"a": {"_target_": "my_method_of_cells.Method"}}}
    before = key(own)
    (tmp_path / "my_method_of_cells.py").write_text("x = 2")
    assert key(own) != before


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"12345678")
    return folder


def test_weights_count_by_their_bytes_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    drafter = {"methods": {"a": {"drafter": {"path": str(folder)}}}}
    with_drafter, with_model = key(drafter), key(folder=folder)
    assert len({with_drafter, with_model, key()}) == 3
    weights = folder / "model.safetensors"
    before = weights.stat()
    weights.touch()
    assert (key(drafter), key(folder=folder)) == (with_drafter, with_model)
    weights.write_bytes(b"12345679")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert key(drafter) != with_drafter and key(folder=folder) != with_model


def test_files_that_a_config_names_are_found_and_other_texts_are_not(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    mask = tmp_path / "mask.json"
    mask.write_text("[1]")
    (tmp_path / "plain").mkdir()
    texts = [str(mask), str(folder), str(tmp_path / "plain"), "via_sd", "", "x" * 5000, "{input}", "a\0b", 3, None]
    assert list(paths_in({"some": texts})) == [mask, folder]
    shipped = "results/masks/embedded_skip30.json"
    assert [path.name for path in paths_in([shipped])] == ["embedded_skip30.json"]


def test_a_large_files_digest_is_remembered_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cells, "LARGE", 4)
    monkeypatch.setattr(cells, "_known", {})
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"12345678")
    first = content(path)
    monkeypatch.setattr(cells, "_known", {})  # another process
    monkeypatch.setattr(cells, "sha256", lambda path: pytest.fail("read again"))
    assert content(path) == first
    monkeypatch.setattr(cells, "sha256", lambda path: "new")
    path.write_bytes(b"12345679")
    os.utime(path, ns=(0, 0))
    assert content(path) == "new"


def test_files_of_the_hubs_cache_are_known_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    monkeypatch.setattr(cells, "sha256", lambda path: pytest.fail("read"))
    assert content(link) == "ab" * 32


def test_parts_say_what_differs() -> None:
    one = cell_of(CONFIG, ENV, DATA, PROMPTS)
    other = cell_of({**CONFIG, "gamma": 4}, ENV, DATA, {"one": "00" * 32})
    assert [name for name in one.parts if one.parts[name] != other.parts[name]] == ["config", "prompts"]
    assert one.key == digest(one.parts)
