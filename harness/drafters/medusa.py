"""Medusa (arXiv 2401.10774): independent heads on one feature, each for a place further ahead.

As in FasterDecoding/Medusa ``medusa_model.py``; the tree and the typical acceptance of that paper are not here: head i
drafts the token at place i of a chain, and verification is the method's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from harness.drafters.heads import Features, HeadDrafter
from harness.drafters.weights import CARD, drafter_folder, load_drafter, load_public
from harness.errors import UserError
from harness.model.linear import linear, pack
from harness.model.load import Model, Shape
from harness.model.spec import ModelSpec
from harness.model.tiers import Pick, Tier, Tiers
from harness.model.transformer import AFTER_NORM, Transformer
from harness.sampling import Sampling

Block = tuple[Float[Tensor, "E E"], Float[Tensor, "E"]]


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Head i says token n + 1 + i from the feature of token n - 1: x <- x + silu(W x + b) for each block, then rows.

    ``models[i]`` has the rows of head i: its own, or those of the verifier's head that it shares with the others.
    """

    models: tuple[Transformer, ...]
    blocks: tuple[tuple[Block, ...], ...]

    def logits(self, features: Float[Tensor, "S E"], index: int) -> Float[Tensor, "S V"]:
        for weight, bias in self.blocks[index]:
            features = features + F.silu(linear(features, weight, bias))
        return self.models[index].full_logits(features)


class MedusaTier(Tier):
    """The heads as a tier: one forward drafts a block. Nothing is cached, so that no history can be wrong."""

    def __init__(self, tiers: Tiers, heads: MedusaHeads, source: str) -> None:
        model = heads.models[0]
        super().__init__("draft", model, model.new_cache(tiers.cache.capacity), (), graphs=tiers.graphs)
        self.heads = heads
        self.source = Features(tiers, (AFTER_NORM,), source)
        tiers.others.append(self)

    @property
    def length(self) -> int:
        return 1

    def rollback(self, length: int) -> None:
        """There is nothing to cut."""

    def prefill(self, sequence: Sequence[int]) -> None:
        """There is nothing to fill."""

    @torch.inference_mode()
    def forward(
        self, sequence: Sequence[int], rows: int, drafts: Int[Tensor, "G"] | None = None
    ) -> Float[Tensor, "R V"]:
        """What the first head says after each of the last tokens of a sequence."""
        if drafts is not None:
            raise ValueError(f"{self.name}: drafts have no features")
        self.source.reach(sequence[:-1])
        end = len(sequence) - 1
        self.forwards += 1
        return self.heads.logits(self.source.rows(end - rows, end), 0)

    @torch.inference_mode()
    def extend(
        self, sequence: Sequence[int], count: int, pick: Pick, uniforms: Float[Tensor, "G"]
    ) -> tuple[Int[Tensor, "G"], Float[Tensor, "G V"]]:
        """Draft ``count`` tokens, no more than there are heads, behind a sequence of at least 2."""
        self.source.reach(sequence[:-1])
        begun = perf_counter()
        feature = self.source.rows(len(sequence) - 2, len(sequence) - 1)

        def whole(
            feature: Float[Tensor, "1 E"], uniforms: Float[Tensor, "G"]
        ) -> tuple[Int[Tensor, "G"], Float[Tensor, "G V"]]:
            found = [pick(self.heads.logits(feature, index), uniform) for index, uniform in enumerate(uniforms)]
            return torch.cat([token for token, _ in found]), torch.cat([drawn_from for _, drawn_from in found])

        drafts, probs = self.replayed((count,), whole, feature, uniforms[:count])
        self.forwards += 1
        self.seconds += perf_counter() - begun
        return drafts, probs


class Medusa(HeadDrafter):
    """A drafter folder of kind medusa, or a folder with ``medusa_lm_head.safetensors``.

    Drafts no more tokens than there are heads. Given the sequence its drafts are independent of each other, and so are
    the distributions they are drawn from.

    Args:
        features: where the full tier was skipped, ``slim`` or ``catch_up`` (``harness.drafters.heads``).

    Raises:
        UserError: no such folder, or weights that are not those of such heads for this verifier.
    """

    def __init__(self, tiers: Tiers, sampling: Sampling, model: Model, path: str, features: str = "slim") -> None:
        folder = drafter_folder(path)
        heads = read_heads(folder, model)
        longest = len(heads.blocks)
        super().__init__(f"medusa({folder.name})", MedusaTier(tiers, heads, features), sampling, longest)


def read_heads(folder: Path, model: Model) -> MedusaHeads:
    """The heads in a folder of either layout."""
    if (folder / CARD).is_file():
        found = load_drafter(folder, "medusa", model, shapes)
        return medusa_heads(found.config, found.tensors, model.transformer, found.head_tokens)
    config, tensors = load_public(folder, "medusa_lm_head", model, public_shapes)
    return medusa_heads(config, tensors, model.transformer)


def sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Heads, and residual blocks of each."""
    for key in ("medusa_num_heads", "medusa_num_layers"):
        if type(value := config.get(key)) is not int or value < 1:
            raise UserError(f"medusa: config.json has {key}={value!r}; want a whole number of at least 1.")
    return config["medusa_num_heads"], config["medusa_num_layers"]


def shapes(config: Mapping[str, Any], verifier: ModelSpec) -> dict[str, Shape]:
    """The weights of a drafter folder: the residual blocks alone."""
    heads, layers = sizes(config)
    width = verifier.hidden_size
    found: dict[str, Shape] = {}
    for base in (f"{head}.{layer}.linear" for head in range(heads) for layer in range(layers)):
        found |= {f"{base}.weight": (width, width), f"{base}.bias": (width,)}
    return found


def public_shapes(config: Mapping[str, Any], verifier: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """The weights of a public folder: behind the blocks each head has rows of its own."""
    heads, layers = sizes(config)
    table = (verifier.vocab_size, verifier.hidden_size)
    return shapes(config, verifier) | {f"{head}.{layers}.weight": table for head in range(heads)}


def medusa_heads(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    verifier: Transformer,
    head_tokens: Int[Tensor, "N"] | None = None,
) -> MedusaHeads:
    """The heads that ``shapes`` or ``public_shapes`` name the weights of, in the dtype of ``verifier``.

    Differentiable in ``tensors`` where ``verifier`` is in a dtype that is not packed.
    """
    heads, layers = sizes(config)
    spec = replace(verifier.spec, layers=0, sliding=frozenset(), no_rope=frozenset())
    shared = Transformer(spec, replace(verifier.weights, layers=()))
    if head_tokens is not None:
        shared = shared.with_head_tokens(head_tokens)

    def placed(name: str) -> Tensor:
        return tensors[name].to(verifier.device, verifier.dtype)

    def model(head: int) -> Transformer:
        name = f"{head}.{layers}.weight"
        if name not in tensors:
            return shared
        rows = placed(name)[: len(verifier.weights.head)]  # without padding, as the verifier's own
        return Transformer(spec, replace(verifier.weights, layers=(), head=pack(rows)))

    blocks = tuple(
        tuple((pack(placed(f"{base}.weight")), placed(f"{base}.bias")) for base in bases)
        for bases in ([f"{head}.{layer}.linear" for layer in range(layers)] for head in range(heads))
    )
    return MedusaHeads(tuple(model(head) for head in range(heads)), blocks)
