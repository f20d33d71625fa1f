"""EAGLE: a decoder layer over token and feature predicts the next feature, and through the verifier's head a token.

EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858; the tree of EAGLE-2 apart) and, with ``fused``, the head of EAGLE-3
(arXiv 2503.01840), as in SafeAILab/EAGLE ``cnets1.py`` and ``cnets.py``. A head of EAGLE-1's that copies from the text,
``beside``, is ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.drafters.heads import TEXT_TOKENS, Entries, HeadDrafter, HeadTier
from harness.drafters.weights import (
    CARD,
    check_head_tokens,
    drafter_folder,
    folder_name,
    load_drafter,
    load_public,
    own_spec,
)
from harness.errors import UserError
from harness.model.linear import linear, pack
from harness.model.load import Model, Shape, layer_weights, matrices, norms
from harness.model.sight import Sight
from harness.model.spec import ModelSpec
from harness.model.tiers import Tiers
from harness.model.transformer import AFTER_NORM, Transformer, Weights
from harness.sampling import Sampling

MATRIX, BIAS, EMBED, HEAD, NORM = "fc.weight", "fc.bias", "embed_tokens.weight", "lm_head.weight", "norm.weight"
HIDDEN_NORM = "midlayer.hidden_norm.weight"
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"


@dataclass(frozen=True, slots=True)
class PlainHead:
    """EAGLE-1: with e the token's embedding, f' = layer(W [e, f] + b), whose attention has no norm; logits = head f'.

    f is the state behind the verifier's last norm.
    """

    model: Transformer
    fuse: Float[Tensor, "E E2"]
    bias: Float[Tensor, "E"] | None
    taps: tuple[int, ...] = (AFTER_NORM,)

    def enter(self, features: Float[Tensor, "S E"]) -> Float[Tensor, "S E"]:
        return features

    def advance(
        self, tokens: Int[Tensor, "S"], states: Float[Tensor, "S E"], entries: Entries, sights: Sequence[Sight]
    ) -> Float[Tensor, "S E"]:
        embedded = self.model.embedded(tokens.to(self.model.input_device)).to(states.device)
        fused = linear(torch.cat((embedded, states), -1), self.fuse, self.bias)
        return self.model.layer(0, fused, entries[0], sights[0])

    def read(self, states: Float[Tensor, "S E"]) -> Float[Tensor, "S E"]:
        return states


@dataclass(frozen=True, slots=True)
class CopyingHead:
    """Ours: EAGLE-1 whose attention reads [x, norm e, norm s] where x = W [e, f] + b is all that it reads there.

    s are states of the verifier behind early layers, from which a row tells its own token: attention can look for the
    last token in the text and say what followed. Rows made of the head's own outputs have none; theirs are zero.
    """

    plain: PlainHead
    taps: tuple[int, ...]

    @property
    def model(self) -> Transformer:
        return self.plain.model

    def enter(self, features: Float[Tensor, "S F"]) -> Float[Tensor, "S F"]:
        """Normed but for the last part, the feature, which goes first."""
        *beside, feature = features.split(self.model.spec.hidden_size, -1)
        return torch.cat((feature, *(self.normed(state) for state in beside)), -1)

    def normed(self, x: Float[Tensor, "S E"]) -> Float[Tensor, "S E"]:
        return self.model.norm(x, torch.ones_like(x[0]), self.model.spec.norm_eps, self.model.compute_dtype)

    def advance(
        self, tokens: Int[Tensor, "S"], states: Float[Tensor, "S F"], entries: Entries, sights: Sequence[Sight]
    ) -> Float[Tensor, "S F"]:
        (layer,) = self.model.weights.layers
        embedded = self.model.embedded(tokens.to(self.model.input_device)).to(states.device)
        feature, beside = states.tensor_split([embedded.shape[-1]], -1)
        fused = linear(torch.cat((embedded, feature), -1), self.plain.fuse, self.plain.bias)
        read = torch.cat((fused, self.normed(embedded), beside), -1)
        made = self.model.add_layer(layer, fused, read, entries[0], sights[0])
        return torch.cat((made, torch.zeros_like(beside)), -1)

    def read(self, states: Float[Tensor, "S F"]) -> Float[Tensor, "S E"]:
        return states[:, : self.model.spec.hidden_size]


@dataclass(frozen=True, slots=True)
class FusedHead:
    """EAGLE-3: f' = layer(f) whose attention reads [norm e, norm f]; logits = head norm f'.

    The verifier's f is W [low, mid, high], the states that enter its layers 2, L/2 and L - 3.
    """

    model: Transformer
    fuse: Float[Tensor, "E E3"]
    hidden_norm: Float[Tensor, "E"]
    taps: tuple[int, ...]

    def enter(self, features: Float[Tensor, "S E3"]) -> Float[Tensor, "S E"]:
        return linear(features, self.fuse)

    def advance(
        self, tokens: Int[Tensor, "S"], states: Float[Tensor, "S E"], entries: Entries, sights: Sequence[Sight]
    ) -> Float[Tensor, "S E"]:
        (layer,) = self.model.weights.layers
        assert layer.attn_norm is not None
        embedded = self.model.embedded(tokens.to(self.model.input_device)).to(states.device)
        normed = [
            self.model.norm(x, gain, self.model.spec.norm_eps, self.model.compute_dtype)
            for x, gain in ((embedded, layer.attn_norm), (states, self.hidden_norm))
        ]
        return self.model.add_layer(layer, states, torch.cat(normed, -1), entries[0], sights[0])

    def read(self, states: Float[Tensor, "S E"]) -> Float[Tensor, "S E"]:
        return self.model.normed(states)


class Eagle(HeadDrafter):
    """A drafter folder of kind eagle, or a folder in the layout of yuhuili/EAGLE-* with safetensors.

    Args:
        features: where the full tier was skipped, ``slim`` or ``catch_up`` (``harness.drafters.heads``).
        text_tokens: tokens of the text, at most, that a head of few of the verifier's rows may say besides
            (``harness.drafters.heads.TextRows``); a head that brings rows of its own says no others.

    Raises:
        UserError: no such folder, or weights that are not those of such a head for this verifier.
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
        head = read_head(folder, model)
        text_tokens = text_tokens if (folder / CARD).is_file() else 0  # a public head has rows of its own
        super().__init__(f"eagle({folder_name(folder)})", HeadTier(tiers, head, features, text_tokens), sampling)


def read_head(folder: Path, model: Model) -> PlainHead | CopyingHead | FusedHead:
    """The head in a folder of either layout."""
    if (folder / CARD).is_file():
        found = load_drafter(folder, "eagle", model, shapes)
        return eagle_head(found.config, found.tensors, model.transformer, found.head_tokens)
    config, tensors = load_public(folder, "model", model, public_shapes)
    chosen = None
    if DRAFT_TO_TARGET in tensors:
        chosen = torch.arange(len(tensors[DRAFT_TO_TARGET])) + tensors[DRAFT_TO_TARGET].long()
        check_head_tokens(folder, chosen, model.transformer.spec.vocab_size)
    return eagle_head(config, tensors, model.transformer, chosen)


def is_fused(config: Mapping[str, Any]) -> bool:
    """Told by ``fused``, in a public layout by ``draft_vocab_size``, which EAGLE-3 alone has."""
    return bool(config.get("fused", "draft_vocab_size" in config))


def beside_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers whose states a head reads to copy; none in EAGLE's own layouts."""
    return () if is_fused(config) else tuple(config.get("beside", ()))


def read_width(config: Mapping[str, Any], width: int) -> int | None:
    """What attention reads; None: as wide as the layer."""
    parts = 2 if is_fused(config) else 1 + bool(beside_of(config)) + len(beside_of(config))
    return None if parts == 1 else parts * width


def head_spec(config: Mapping[str, Any], verifier: ModelSpec) -> ModelSpec:
    spec = own_spec(config, verifier)
    if spec.layers != 1:
        raise UserError(f"an EAGLE head has one layer, this one {spec.layers} (num_hidden_layers).")
    return spec


def shapes(config: Mapping[str, Any], verifier: ModelSpec) -> dict[str, Shape]:
    """The weights of a drafter folder: those of the public layout without embedding and head."""
    spec, width, fused = head_spec(config, verifier), verifier.hidden_size, is_fused(config)
    parts = [part for stack in matrices(spec, 0, read_width(config, width)).values() for part in stack]
    gains = [(name, shape) for field, (name, shape) in norms(spec, 0).items() if fused or field != "attn_norm"]
    found = {renamed(name, fused): shape for name, shape in (*parts, *gains)}
    if fused:
        return found | {MATRIX: (width, 3 * width), HIDDEN_NORM: (width,), NORM: (width,)}
    return found | {MATRIX: (width, 2 * width)} | ({BIAS: (width,)} if config.get("bias", True) else {})


def public_shapes(config: Mapping[str, Any], verifier: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """The weights of a public folder. It may bring an embedding, EAGLE-3 brings a head, of a smaller vocabulary."""
    found = shapes(config, verifier)
    if EMBED in tensors:
        found[EMBED] = (verifier.vocab_size, verifier.hidden_size)
    if is_fused(config):
        size = config.get("draft_vocab_size", verifier.vocab_size)
        found[HEAD] = (size, verifier.hidden_size)
        if size != verifier.vocab_size or DRAFT_TO_TARGET in tensors:
            found |= {DRAFT_TO_TARGET: (size,), TARGET_TO_DRAFT: (verifier.vocab_size,)}
    return found


def renamed(name: str, fused: bool) -> str:
    """A Llama checkpoint's name of a weight of layer 0 as EAGLE has it."""
    return name.replace("model.layers.0.", "midlayer." if fused else "layers.0.")


def eagle_head(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    verifier: Transformer,
    head_tokens: Int[Tensor, "N"] | None = None,
) -> PlainHead | CopyingHead | FusedHead:
    """The head that ``shapes`` names the weights of, in the dtype of ``verifier``, whose embedding and head it uses.

    Differentiable in ``tensors`` where ``verifier`` is in a dtype that is not packed.
    """
    spec, fused, device, dtype = head_spec(config, verifier.spec), is_fused(config), verifier.device, verifier.dtype
    width = spec.hidden_size
    ones = torch.ones(width)  # of norms that EAGLE-1 does not have

    def read(name: str) -> Tensor:
        name = renamed(name, fused)
        return ones if name == "layers.0.input_layernorm.weight" else tensors[name]

    def placed(name: str) -> Tensor:
        return tensors[name].to(device, dtype)

    layer = layer_weights(spec, 0, read, dtype, device, read_width(config, width))
    embed = placed(EMBED) if EMBED in tensors else verifier.weights.embed
    norm = placed(NORM) if fused else ones.to(device, dtype)
    weights = Weights(embed, (layer if fused else replace(layer, attn_norm=None),), norm, verifier.weights.head)
    if HEAD in tensors:
        tokens = torch.arange(len(tensors[HEAD])) if head_tokens is None else head_tokens
        known = tokens < len(verifier.weights.head)  # of padding the verifier's head has no rows
        rows = pack(tensors[HEAD][known.to(tensors[HEAD].device)].to(device, dtype))
        weights = replace(
            weights, head=rows, head_tokens=tokens[known].to(device), vocabulary=len(verifier.weights.head)
        )
    model = Transformer(spec, weights)
    if head_tokens is not None and HEAD not in tensors:
        model = model.with_head_tokens(head_tokens)
    if not fused:
        plain = PlainHead(model, pack(placed(MATRIX)), placed(BIAS) if BIAS in tensors else None)
        beside = beside_of(config)
        return CopyingHead(plain, (*beside, AFTER_NORM)) if beside else plain
    return FusedHead(model, pack(placed(MATRIX)), placed(HIDDEN_NORM), taps_of(config, verifier.spec.layers))


def taps_of(config: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    """The layers behind which low, mid and high features are taken: ``taps`` if given, else those of EAGLE-3."""
    return tuple(config.get("taps", eagle3_taps(depth)))


def eagle3_taps(depth: int) -> list[int]:
    return [max(0, tap) for tap in (1, depth // 2 - 1, depth - 4)]
