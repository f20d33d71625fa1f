"""What a student borrows of the full verifier, frozen: embedding, rows of the head, layers to start from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.errors import UserError
from harness.model.checkpoint import Checkpoint
from harness.model.load import EMBED, HEAD, NORM, Model
from harness.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Embedding and head in float32, from the checkpoint: the loaded model's may be packed for speed."""

    name: str
    spec: ModelSpec
    folder: Path
    embed: Float[Tensor, "V E"]
    head: Float[Tensor, "V E"]
    head_tokens: Int[Tensor, "N"]

    @property
    def rows(self) -> Float[Tensor, "N E"]:
        return self.head[self.head_tokens]

    def scaled(self, tokens: Int[Tensor, "B S"]) -> Float[Tensor, "B S E"]:
        """Embedded tokens, as the model scales them."""
        return self.embed[tokens] * (self.spec.embed_scale or 1.0)

    def capped(self, logits: Tensor) -> Tensor:
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def borrow(model: Model, head_tokens: Int[Tensor, "N"]) -> Borrowed:
    """Raises UserError of a model that was made here: it has no checkpoint to take layers from."""
    folder = checkpoint_folder(model)
    with Checkpoint(folder) as checkpoint:
        embed = checkpoint.read(EMBED).float()[: model.tokenizer.vocab_size]
        head = embed if model.transformer.spec.tied_head else checkpoint.read(HEAD).float()
    head = head[: model.tokenizer.vocab_size]
    return Borrowed(model.name, model.transformer.spec, folder, embed, head, head_tokens)


def checkpoint_folder(model: Model) -> Path:
    if model.folder is None:
        raise UserError(
            f"model {model.name!r} has no checkpoint folder to take layers from: use model=embedded, model.full=FOLDER."
        )
    return model.folder


def layer_choice(layers: Sequence[int], depth: int) -> list[int]:
    """Layers of the verifier by index, negative ones counted from its end.

    Raises:
        UserError: none, one that is not there, or as many as the verifier has or more.
    """
    if not layers or not all(type(index) is int and -depth <= index < depth for index in layers):
        raise UserError(f"job.layers={list(layers)}: want indices of the verifier's layers, -{depth} to {depth - 1}.")
    if len(layers) >= depth:
        raise UserError(
            f"job.layers has {len(layers)} layers, the verifier has {depth}: a drafter must have fewer to be quicker."
        )
    return [index % depth for index in layers]


def taken_layers(folder: Path, layers: Sequence[int]) -> dict[str, Tensor]:
    """Weights of chosen layers under the names of layers 0, 1, ..., and of the final norm, in float32."""
    taken: dict[str, Tensor] = {}
    with Checkpoint(folder) as checkpoint:
        for place, index in enumerate(layers):
            base = f"model.layers.{index}."
            for name in checkpoint.shapes:
                if name.startswith(base) and not name.endswith("rotary_emb.inv_freq"):
                    taken[f"model.layers.{place}.{name.removeprefix(base)}"] = checkpoint.read(name).float()
        taken[NORM] = checkpoint.read(NORM).float()
    return taken
