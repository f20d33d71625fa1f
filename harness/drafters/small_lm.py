"""A smaller model with the same tokenizer drafts: a checkpoint, or layers trained between parts of the verifier."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from harness.drafters.base import TierDrafter
from harness.drafters.weights import CARD, drafter_folder, folder_name, layer_shapes, load_drafter, own_layers, own_spec
from harness.errors import UserError
from harness.model.checkpoint import read_json
from harness.model.load import Model, Shape, load_tokenizer, load_transformer
from harness.model.spec import ModelSpec
from harness.model.tiers import Tiers
from harness.model.tokenizer import Tokenizer
from harness.model.transformer import Transformer, Weights
from harness.sampling import Sampling

NORM = "model.norm.weight"


class SmallLM(TierDrafter):
    """Any checkpoint folder of a supported architecture whose tokenizer is the full verifier's, or a drafter folder.

    Embedding and head of a checkpoint may be padded to other sizes than the full verifier's: both heads end at the last
    token the tokenizer knows. A drafter folder (``harness.drafters.weights``) has a few Llama layers and a norm, which
    run between the verifier's own embedding and head.

    Args:
        head_tokens: JSON file ``{"head_tokens": [...]}`` with the token ids that the head is reduced to, the most
            frequent first. What the drafter then cannot say is legal all the same: verification has it in the
            residual. A drafter folder brings its own list.
        head_size: how many of them, the first ones; null is all.

    Raises:
        UserError: no such folder, another tokenizer, or no such list.
    """

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        path: str,
        dtype: str | None = None,
        head_tokens: str | None = None,
        head_size: int | None = None,
    ) -> None:
        folder = drafter_folder(path)
        full = model.transformer
        if (folder / CARD).is_file():
            if (dtype, head_tokens, head_size) != (None, None, None):
                raise UserError(
                    f"{folder} runs between parts of the verifier: dtype, head_tokens and head_size stay null."
                )
            small = between(model, folder)
        else:
            small = beside(model, folder, dtype or str(full.dtype).removeprefix("torch."))
            if head_tokens is not None:
                small = small.with_head_tokens(read_head_tokens(head_tokens, head_size, len(small.weights.head)))
            elif head_size is not None:
                raise UserError(f"drafter.head_size={head_size} needs drafter.head_tokens, the file with the tokens.")
        super().__init__(f"small_lm({folder_name(folder)})", tiers.independent("draft", small), sampling)


def beside(model: Model, folder: Path, dtype: str, role: str = "drafter") -> Transformer:
    """The model of a checkpoint folder, whose tokenizer must be that of ``model``; ``role`` is named if it is not."""
    small, tokenizer = load_small(folder, dtype, str(model.transformer.device))
    if tokenizer.digest != model.tokenizer.digest:
        raise UserError(
            f"{role} {str(folder)!r} has another tokenizer than {model.name!r} ({tokenizer.vocab_size} and "
            f"{model.tokenizer.vocab_size} tokens); token ids would not mean the same."
        )
    return small


@lru_cache(maxsize=4)
def load_small(folder: Path, dtype: str, device: str) -> tuple[Transformer, Tokenizer]:
    """Weights and tokenizer, read once for all arms that draft with them."""
    transformer = load_transformer(folder, dtype, device)
    tokenizer = load_tokenizer(folder, transformer.spec)
    return transformer.with_vocabulary(tokenizer.vocab_size), tokenizer


def between(model: Model, folder: Path) -> Transformer:
    """The model of a drafter folder: its layers and norm, the embedding and the head of ``model``."""
    full = model.transformer
    found = load_drafter(folder, "small_lm", model, shapes)
    spec = own_spec(found.config, full.spec)
    layers = own_layers(spec, found.tensors, full.dtype, full.device)
    norm = found.tensors[NORM].to(full.device, full.dtype)
    small = Transformer(spec, Weights(full.weights.embed, layers, norm, full.weights.head))
    return small if found.head_tokens is None else small.with_head_tokens(found.head_tokens)


def shapes(config: Mapping[str, Any], verifier: ModelSpec) -> dict[str, Shape]:
    """The weights of a drafter folder of this kind, as in any Llama checkpoint."""
    return layer_shapes(own_spec(config, verifier)) | {NORM: (verifier.hidden_size,)}


def read_head_tokens(path: str, size: int | None, vocabulary: int) -> Int[Tensor, "N"]:
    """The first ``size`` of the token ids in a JSON file.

    Raises:
        UserError: no such file, no distinct token ids in it, or fewer than ``size``.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f'drafter.head_tokens={path!r} does not exist: give a JSON file {{"head_tokens": [...]}}.')
    ids = read_json(file).get("head_tokens")
    valid = isinstance(ids, list) and all(type(token) is int and 0 <= token < vocabulary for token in ids)
    if not isinstance(ids, list) or not valid or not 0 < len(set(ids)) == len(ids):
        raise UserError(f"{file}: head_tokens must be distinct token ids from 0 to {vocabulary - 1}, at least one.")
    if size is not None and not 0 < size <= len(ids):
        raise UserError(f"drafter.head_size={size}: want 1 to {len(ids)}, the tokens in {file}.")
    return torch.tensor(ids[:size])
