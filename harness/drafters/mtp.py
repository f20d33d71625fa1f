"""MTP: a multi-token prediction layer, applied again and again, drafts.

The module of DeepSeek-V3 (arXiv 2412.19437, eq. 21 to 23) with one layer for every depth, as serving systems run the
single layer that checkpoints have (vLLM ``deepseek_mtp.py``, SGLang's ``*_nextn.py``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.drafters.heads import TEXT_TOKENS, Entries, HeadDrafter, HeadTier
from harness.drafters.weights import drafter_folder, layer_shapes, load_drafter, own_layers, own_spec
from harness.errors import UserError
from harness.model.linear import linear, pack
from harness.model.load import Model, Shape
from harness.model.sight import Sight
from harness.model.spec import ModelSpec
from harness.model.tiers import Tiers
from harness.model.transformer import AFTER_NORM, Transformer, Weights
from harness.sampling import Sampling

MATRIX, TOKEN_NORM, STATE_NORM, NORM = "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"


@dataclass(frozen=True, slots=True)
class MtpHead:
    """With e the token's embedding: h' = layer(W [norm e, norm h]), logits = head norm h'.

    The first h is the state behind the verifier's last norm; h' itself, before its norm, goes into the next row.
    """

    model: Transformer
    fuse: Float[Tensor, "E E2"]
    token_norm: Float[Tensor, "E"]
    state_norm: Float[Tensor, "E"]
    taps: tuple[int, ...] = (AFTER_NORM,)

    def enter(self, features: Float[Tensor, "S E"]) -> Float[Tensor, "S E"]:
        return features

    def advance(
        self, tokens: Int[Tensor, "S"], states: Float[Tensor, "S E"], entries: Entries, sights: Sequence[Sight]
    ) -> Float[Tensor, "S E"]:
        embedded = self.model.embedded(tokens.to(self.model.input_device)).to(states.device)
        normed = [
            self.model.norm(x, gain, self.model.spec.norm_eps, self.model.compute_dtype)
            for x, gain in ((embedded, self.token_norm), (states, self.state_norm))
        ]
        return self.model.layer(0, linear(torch.cat(normed, -1), self.fuse), entries[0], sights[0])

    def read(self, states: Float[Tensor, "S E"]) -> Float[Tensor, "S E"]:
        return self.model.normed(states)


class Mtp(HeadDrafter):
    """A drafter folder of kind mtp.

    Args:
        features: where the full tier was skipped, ``slim`` or ``catch_up`` (``harness.drafters.heads``).
        text_tokens: tokens of the text, at most, that a head of few of the verifier's rows may say besides
            (``harness.drafters.heads.TextRows``).

    Raises:
        UserError: no such folder, or weights that are not those of such a layer for this verifier.
    """

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        path: str,
        features: str = "slim",
        text_tokens: int = TEXT_TOKENS,
    ) -> None:
        folder = drafter_folder(path)
        found = load_drafter(folder, "mtp", model, shapes)
        head = mtp_head(found.config, found.tensors, model.transformer, found.head_tokens)
        super().__init__(f"mtp({folder.name})", HeadTier(tiers, head, features, text_tokens), sampling)


def shapes(config: Mapping[str, Any], verifier: ModelSpec) -> dict[str, Shape]:
    """The weights of a drafter folder: a Llama layer as in any checkpoint, and DeepSeek's names for the rest."""
    spec, width = own_spec(config, verifier), verifier.hidden_size
    if spec.layers != 1:
        raise UserError(f"an MTP drafter has one layer, this one {spec.layers} (num_hidden_layers).")
    norms: dict[str, Shape] = {name: (width,) for name in (TOKEN_NORM, STATE_NORM, NORM)}
    return layer_shapes(spec) | norms | {MATRIX: (width, 2 * width)}


def mtp_head(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    verifier: Transformer,
    head_tokens: Int[Tensor, "N"] | None = None,
) -> MtpHead:
    """The head that ``shapes`` names the weights of, in the dtype of ``verifier``, whose embedding and head it uses.

    Differentiable in ``tensors`` where ``verifier`` is in a dtype that is not packed.
    """
    spec, device, dtype = own_spec(config, verifier.spec), verifier.device, verifier.dtype

    def placed(name: str) -> Tensor:
        return tensors[name].to(device, dtype)

    layers = own_layers(spec, tensors, dtype, device)
    model = Transformer(spec, Weights(verifier.weights.embed, layers, placed(NORM), verifier.weights.head))
    if head_tokens is not None:
        model = model.with_head_tokens(head_tokens)
    return MtpHead(model, pack(placed(MATRIX)), placed(TOKEN_NORM), placed(STATE_NORM))
