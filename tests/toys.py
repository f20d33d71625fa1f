"""Small models and scripted parts that many tests share. CPU, float64, random weights."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jaxtyping
import torch

from harness.drafters import small_lm as small_lm_module
from harness.drafters.base import Draft, Drafter
from harness.drafters.small_lm import SmallLM, load_small
from harness.model.cache import KVCache
from harness.model.load import Model
from harness.model.slim import LayerMask
from harness.model.tiers import Tier, Tiers
from harness.model.tokenizer import ByteTokenizer
from harness.model.toy import random_transformer, toy_spec
from harness.model.transformer import Transformer
from harness.sampling import Chooser, Sampling

CPU = torch.device("cpu")
GREEDY = Sampling()
DrafterFactory = Callable[[Tiers, Sampling, Model], Drafter]


def tiny(
    seed: int, layers: int = 4, layer_scale: float = 0.5, vocab_size: int = 97, head_scale: float = 3.0
) -> Transformer:
    spec = toy_spec(vocab_size=vocab_size, layers=layers)
    return random_transformer(spec, seed, torch.float64, layer_scale, head_scale)


def tiny_model(
    seed: int, kept: Sequence[int], layer_scale: float = 0.5, vocab_size: int = 97, head_scale: float = 3.0
) -> Model:
    transformer = tiny(seed, 4, layer_scale, vocab_size, head_scale)
    return Model("tiny", transformer, ByteTokenizer(), LayerMask.of(kept, transformer.spec.layers), "test")


def tiers_of(model: Model | Transformer, capacity: int = 256) -> Tiers:
    transformer = model.transformer if isinstance(model, Model) else model
    return Tiers(transformer, KVCache(transformer.spec, capacity, transformer.dtype, transformer.device))


def drafted(ids: Sequence[int], probs: torch.Tensor | None = None) -> Draft:
    """A draft of these tokens, on the CPU."""
    return Draft(torch.tensor(ids, dtype=torch.long), probs)


class Scripted:
    """Drafts the next tokens of a fixed continuation, each wrong with probability ``noise`` (seeded)."""

    tier: Tier | None = None
    has_probs = False
    name = "scripted"

    def __init__(self, script: Sequence[int], noise: float, vocab_size: int, seed: int) -> None:
        self.script = tuple(script)
        self.noise = noise
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        begin = len(tokens)
        block = list(self.script[begin : begin + count])
        for index in range(len(block)):
            if float(torch.rand(1, generator=self.generator)) < self.noise:
                block[index] = (block[index] + 1) % self.vocab_size
        return drafted(block)


def scripted(script: Sequence[int], noise: float, vocab_size: int, seed: int) -> DrafterFactory:
    """A drafter factory as methods want it."""
    return lambda tiers, sampling, model: Scripted(script, noise, vocab_size, seed)


class Mixed:
    """Another drafter's blocks; every other one is replaced by ``script`` up to a cut and a wrong token there.

    ``cuts`` says how many drafts are right each time. ``own`` notes for each call whether the block is the drafter's.
    """

    def __init__(self, inner: Drafter, script: Sequence[int], cuts: Iterator[int], vocab_size: int) -> None:
        self.inner = inner
        self.name = inner.name
        self.tier = inner.tier
        self.has_probs = False
        self.script = tuple(script)
        self.cuts = cuts
        self.vocab_size = vocab_size
        self.own: list[bool] = []

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        self.own.append(len(self.own) % 2 == 0)
        if self.own[-1]:
            return self.inner.draft(tokens, count, chooser)
        block = list(self.script[len(tokens) : len(tokens) + count])
        cut = next(self.cuts)
        if cut < len(block):
            block[cut] = (block[cut] + 1) % self.vocab_size
        return drafted(block)


def whole(drafter: Drafter, tokens: Sequence[int], count: int, chooser: Chooser) -> Iterator[Draft]:
    """In place of ``drafters.base.pieces``: as it is on an accelerator."""
    if len(piece := drafter.draft(tokens, count, chooser)):
        yield piece


class BytesOf(ByteTokenizer):
    """A byte tokenizer that knows the first ``vocab_size`` tokens alone."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size


def perturbed(model: Transformer, seed: int, noise: float, padding: int = 0) -> Transformer:
    """``model`` with noise of relative size ``noise`` on head and embedding, and ``padding`` rows more in both.

    The padding rows of the head are large, so that they win now and then wherever they are not cut off.
    """
    generator = torch.Generator().manual_seed(seed)

    def shaken(weight: torch.Tensor, pad_scale: float) -> torch.Tensor:
        drawn = torch.randn(weight.shape[0] + padding, weight.shape[1], generator=generator, dtype=torch.float64)
        drawn = (drawn * weight.std()).to(weight.dtype)
        return torch.cat((weight + noise * drawn[: weight.shape[0]], pad_scale * drawn[weight.shape[0] :]))

    weights = replace(model.weights, embed=shaken(model.weights.embed, 1.0), head=shaken(model.weights.head, 3.0))
    return Transformer(replace(model.spec, vocab_size=model.spec.vocab_size + padding), weights)


def small_lm(small: Transformer) -> DrafterFactory:
    """The real ``SmallLM`` around ``small``, as if it had been read from a folder beside the model's own tokenizer."""

    def make(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
        load_small.cache_clear()  # it would find the one before under the same folder
        with (
            patch.object(small_lm_module, "load_transformer", lambda folder, dtype, device: small),
            patch.object(small_lm_module, "load_tokenizer", lambda folder, spec: model.tokenizer),
        ):
            return SmallLM(tiers, sampling, model, str(Path(__file__).parent))

    return make


@contextmanager
def shapes_unchecked() -> Iterator[None]:
    """Tensor shapes are not checked inside: for long runs whose first part has been checked."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


WORDS = ("<s>", "</s>", "?", *"abcdefghijklmnopqrstuvwxyz")


def write_checkpoint(
    folder: Path,
    seed: int = 0,
    words: Sequence[str] = WORDS,
    loud_from: int | None = None,
    shard_size: str = "1GB",
    **shape: Any,
) -> Path:
    """A tiny random Llama checkpoint with a tokenizer of ``words``, written by ``transformers`` as any other is.

    Embedding and head have 40 rows unless ``shape`` says otherwise; rows of the head from ``loud_from`` on are large.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    default = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**{**default, **heads, "bos_token_id": 0, "eos_token_id": 1, **shape})
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
        if loud_from is not None:
            model.lm_head.weight[loud_from:] *= 100
    model.save_pretrained(folder, max_shard_size=shard_size)
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="?")
    tokenizer.save_pretrained(folder)
    return folder


def write_mask(path: Path, kept: Sequence[int], depth: int) -> Path:
    """A mask file with the two keys that are read."""
    path.write_text(json.dumps({"layers": depth, "kept_layers": list(kept)}))
    return path
