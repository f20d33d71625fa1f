"""Checkpoints: weights streamed from one file or many, what is refused, hub ids."""

import hashlib
import json
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.errors import UserError
from harness.hub import probe
from harness.model import checkpoint as checkpoint_module
from harness.model.checkpoint import INDEX, SINGLE, Checkpoint
from harness.model.load import find_checkpoint, load_model, load_transformer
from harness.model.transformer import Transformer
from tests.families import CASES, write_reference

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKENS = torch.arange(20)


def logits_of(model: Transformer) -> torch.Tensor:
    return model.forward(TOKENS, model.new_cache(20), range(model.spec.layers), rows=20)


def sharded(folder: Path, shards: int = 3) -> Path:
    """A copy of the checkpoint in ``folder`` whose tensors are dealt out to several files, with an index."""
    target = folder.parent / f"{folder.name}-sharded"
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for place, (name, tensor) in enumerate(sorted(load_file(folder / SINGLE).items())):
        parts[place % shards][name] = tensor
    names = [f"model-{index + 1:05}-of-{shards:05}.safetensors" for index in range(shards)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, target / name)
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_reference("llama", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("name", ["llama_biases", "qwen3", "gemma3"])
def test_shards_give_the_same_weights_as_one_file(name: str, tmp_path: Path) -> None:
    write_reference(name, tmp_path / name)
    one = load_transformer(tmp_path / name, "float32", "cpu")
    many = load_transformer(sharded(tmp_path / name), "float32", "cpu")
    assert torch.equal(logits_of(one), logits_of(many))


@pytest.mark.parametrize("name", CASES)
def test_only_one_tensor_of_the_files_is_in_memory_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the most that is there twice is the largest matrix of a layer, or the embedding."""
    write_reference(name, tmp_path / name)
    folder = sharded(tmp_path / name)
    alive: set[str] = set()
    most: list[int] = []
    read = Checkpoint.read

    def counting(self: Checkpoint, key: str) -> torch.Tensor:
        tensor = read(self, key)
        alive.add(key)
        most.append(len(alive))
        weakref.finalize(tensor, alive.discard, key)
        return tensor

    monkeypatch.setattr(Checkpoint, "read", counting)
    loaded = load_transformer(folder, "float32", "cpu")  # the dtype of the files: no cast would make a copy anyway
    assert not alive, "nothing of ours looks into the files"
    assert max(most) == 1
    fused = [w for layer in loaded.weights.layers for w in (layer.qkv, layer.gate_up, layer.out, layer.down)]
    assert all(weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes for weight in fused)
    assert len(most) == len(Checkpoint(folder).shapes), "every tensor is read once"


def test_the_count_of_live_tensors_can_fail(folder: Path) -> None:
    alive: set[str] = set()
    with Checkpoint(folder) as checkpoint:
        kept = [checkpoint.read(name) for name in list(checkpoint.shapes)[:2]]
        for index, tensor in enumerate(kept):
            alive.add(str(index))
            weakref.finalize(tensor, alive.discard, str(index))
        assert len(alive) == 2
        kept.clear()
        del tensor
    assert not alive


Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"weight 'model.layers.1.mlp.up_proj.weight' is missing",
        ),
        (lambda t: t.pop("lm_head.weight"), "weight 'lm_head.weight' is missing"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}), "1 weights have no place"),
        (lambda t: t.update({"model.layers.4.mlp.up_proj.weight": torch.zeros(2)}), "have no place .* 'model.layers.4"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(47)}), r"has shape \(47,\), config.json says \(48,\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}), "is I8; only F64, F32, F16"),
    ],
)
def test_wrong_weights_are_refused_before_any_is_read(
    change: Change, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read"))
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)
    with pytest.raises(UserError, match=message):
        load_transformer(folder, "float32", "cpu")


def test_weights_that_do_not_count_may_be_there(folder: Path, tmp_path: Path) -> None:
    """Rotary frequencies of old checkpoints, and the head a second time where it is the embedding."""
    write_reference("llama_biases", tmp_path / "tied")
    for path, extra in (
        (folder, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        (tmp_path / "tied", "lm_head.weight"),
    ):
        tensors = load_file(path / SINGLE)
        save_file(tensors | {extra: torch.zeros(4)}, path / SINGLE)
        load_transformer(path, "float32", "cpu")


def test_broken_and_missing_files_are_named(folder: Path) -> None:
    many = sharded(folder)
    second = sorted(many.glob("*.safetensors"))[1]
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"00002-of-00003.safetensors is not a whole safetensors file"):
        load_transformer(many, "float32", "cpu")
    shutil.copy(sorted(many.glob("*.safetensors"))[0], second)
    with pytest.raises(UserError, match="is in more than one file"):
        load_transformer(many, "float32", "cpu")
    second.unlink()
    with pytest.raises(UserError, match=r"00002-of-00003.safetensors does not exist; only safetensors"):
        load_transformer(many, "float32", "cpu")
    (many / INDEX).write_text("{}")
    with pytest.raises(UserError, match="has no weight_map"):
        load_transformer(many, "float32", "cpu")
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"model.safetensors does not exist; only safetensors checkpoints are read"):
        load_transformer(folder, "float32", "cpu")


# Hub ids


@pytest.fixture
def closed_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub that refuses connections; returns its empty cache."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("harness.hub._failed", {})
    probe.cache_clear()
    return tmp_path / "hub"


def test_a_hub_that_does_not_answer_is_reported_in_seconds(closed_hub: Path) -> None:
    begun = time.perf_counter()
    with pytest.raises(
        UserError, match=r"'org/name' is no folder .*127\.0\.0\.1:9: .* `hf download org/name --revision v2`"
    ):
        load_model("org/name", revision="v2")
    assert time.perf_counter() - begun < 10


def test_the_hubs_cache_is_used_without_it(closed_hub: Path, folder: Path) -> None:
    root = closed_hub / "models--org--name"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    shutil.copytree(sharded(folder), root / "snapshots" / COMMIT)
    found, name = find_checkpoint("org/name", None, None)
    assert (found, name) == (root / "snapshots" / COMMIT, f"org/name@{COMMIT[:12]}")
    assert torch.equal(
        logits_of(load_transformer(found, "float32", "cpu")), logits_of(load_transformer(folder, "float32", "cpu"))
    )
    assert find_checkpoint("org/name", COMMIT, None)[0] == found
    with pytest.raises(UserError, match="nor is revision v2 in its cache"):
        find_checkpoint("org/name", "v2", None)


def test_the_weights_of_an_unsupported_model_are_never_fetched(
    closed_hub: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any]] = []
    snapshot = sharded(folder).rename(folder.parent / COMMIT)

    def download(repo: str, *, revision: str, allow_patterns: list[str], **_: Any) -> str:
        asked.append((revision, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    said: list[str] = []
    assert find_checkpoint("org/name", "v2", said.append) == (snapshot, f"org/name@{COMMIT[:12]}")
    files = [f"model-{index:05}-of-00003.safetensors" for index in (1, 2, 3)]
    assert asked == [("v2", list(checkpoint_module.SMALL_FILES)), (COMMIT, files)]
    assert len(said) == 1 and "org/name" in said[0]
    config = json.loads((snapshot / "config.json").read_text()) | {"model_type": "qwen"}
    (snapshot / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="architecture 'qwen' is not supported"):
        find_checkpoint("org/name", None, said.append)
    assert len(asked) == 3 and not any("safetensors" in str(pattern) for pattern in asked[2][1])
    assert not any(pattern.endswith((".py", "*")) for pattern in checkpoint_module.SMALL_FILES), "no code is fetched"


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a download needs: one repository, its files and one revision."""

    folder: Path
    fetched: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/api/models/org/name/revision/"):
            known = path.rsplit("/", 1)[1] in ("main", "v2")
            return self.send(json.dumps({"id": "org/name", "sha": COMMIT}).encode(), body, not known and "Revision")
        if path == f"/api/models/org/name/tree/{COMMIT}":
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                for file in sorted(self.folder.iterdir())
            ]
            return self.send(json.dumps(files).encode(), body)
        if path.startswith(f"/org/name/resolve/{COMMIT}/"):
            name = path.rsplit("/", 1)[1]
            self.fetched.append(name)
            return self.send((self.folder / name).read_bytes(), body)
        return self.send(b"", body, "Repo")

    def send(self, content: bytes, body: bool, missing: str | Literal[False] = False) -> None:
        self.send_response(404 if missing else 200)
        if missing:
            self.send_header("X-Error-Code", f"{missing}NotFound")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def fake_hub(closed_hub: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    handler = type("Handler", (FakeHub,), {"folder": sharded(folder), "fetched": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield handler
        server.shutdown()
        thread.join()


def test_a_model_is_fetched_from_the_hub_once(fake_hub: type[FakeHub], folder: Path) -> None:
    (fake_hub.folder / "modeling_name.py").write_text("raise SystemExit")
    (fake_hub.folder / "pytorch_model.bin").write_bytes(b"pickled")
    (fake_hub.folder / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    found, name = find_checkpoint("org/name", "v2", None)
    assert name == f"org/name@{COMMIT[:12]}"
    wanted = {"config.json", INDEX, *(f"model-{index:05}-of-00003.safetensors" for index in (1, 2, 3))}
    assert {path.name for path in found.iterdir()} == wanted == set(fake_hub.fetched)
    assert torch.equal(
        logits_of(load_transformer(found, "float32", "cpu")), logits_of(load_transformer(folder, "float32", "cpu"))
    )
    fake_hub.fetched.clear()
    assert find_checkpoint("org/name", "v2", None)[0] == found and not fake_hub.fetched


def test_names_that_the_hub_does_not_know_are_refused(fake_hub: type[FakeHub]) -> None:
    with pytest.raises(UserError, match=r"org/name has no revision 'v3': set model\.revision"):
        find_checkpoint("org/name", "v3", None)
    with pytest.raises(UserError, match=r"'org/other' is no folder here and no model at http://127.*`hf auth login`"):
        find_checkpoint("org/other", None, None)


@pytest.mark.parametrize("full", ["smollm", "./missing", "/missing/folder", "a/b/c", "~/missing"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(full: str) -> None:
    with pytest.raises(UserError, match=r"does not exist: .* neither embedded, nor a checkpoint folder, nor a hub id"):
        find_checkpoint(full, None, None)


def test_a_folder_wins_over_a_hub_id_and_has_no_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    full = f"{folder.parent.name}/{folder.name}"
    assert find_checkpoint(full, None, None) == (Path(full), full)
    with pytest.raises(UserError, match=r"model.revision=v1 is for a hub id"):
        find_checkpoint(full, "v1", None)
    with pytest.raises(UserError, match=r"model.revision=v1 is for a hub id"):
        find_checkpoint("embedded", "v1", None)


def test_device_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UserError, match=r"model.device=cpu and model.devices=\['cpu', 'cpu'\]: set one of them"):
        load_model("embedded", device="cpu", devices=["cpu", "cpu"])
    with pytest.raises(UserError, match="'gpu7' is not known"):
        load_transformer(Path("nowhere"), "float32", ["cpu", "gpu7"])
