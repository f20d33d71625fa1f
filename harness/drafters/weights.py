"""A trained drafter as a folder: what is in it, written and read in one place.

``config.json`` has ``kind``, the shape, and ``model``, the name of the verifier it was made for; ``model.safetensors``
the drafter's own weights in bfloat16 and ``head_tokens`` (int32), the rows of the verifier's head that make its reduced
head; ``card.json`` how it was made and the sha256 of the weights; ``README.md`` is the card for people to read. The
verifier's embedding and head are used where they lie: neither is stored.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.errors import UserError
from harness.model.checkpoint import HUB_ID, hub_folder, read_json, weight_files
from harness.model.load import Model, Shape, layer_weights, matrices, norms
from harness.model.made import sha256
from harness.model.slim import CHECKOUT
from harness.model.spec import ModelSpec
from harness.model.transformer import LayerWeights

CONFIG, WEIGHTS, CARD, README = "config.json", "model.safetensors", "card.json", "README.md"
HEAD_TOKENS = "head_tokens"
CARD_KEYS = ("command", "data", "seed", "seconds", "held_out")
"""What a card must say: training command, data recipe, seed, seconds of training, numbers on held-out prompts."""


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """A folder that was read: its weights as they are stored, checked by name, shape and sha256."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    card: Mapping[str, Any]

    @property
    def head_tokens(self) -> Tensor | None:
        """Token ids of the reduced head, None where the drafter uses the whole head."""
        found = self.tensors.get(HEAD_TOKENS)
        return None if found is None else found.long()


def save_drafter(
    folder: Path, kind: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], card: Mapping[str, Any]
) -> None:
    """Write a drafter; the card comes last, so that a folder with a card that matches is whole.

    Args:
        config: the shape and ``model``; what ``shapes`` of the family reads.
        card: the keys of ``CARD_KEYS`` at least; ``held_out`` maps a name to a number.

    Raises:
        ValueError: the card lacks a key, or the config names no model.
    """
    if lacking := [key for key in CARD_KEYS if key not in card]:
        raise ValueError(f"the card of a drafter has no {', '.join(lacking)}")
    if "model" not in config:
        raise ValueError("the config of a drafter has no model, the name of the verifier it is for")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CARD).unlink(missing_ok=True)
    stored = {name: as_stored(tensor) for name, tensor in tensors.items()}
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    whole_config = {"kind": kind, **config}
    whole_card = {**card, "sha256": sha256(folder / WEIGHTS)}
    write_json(folder / CONFIG, whole_config)
    (folder / README).write_text(readme(folder.name, whole_config, whole_card, stored))
    write_json(folder / CARD, whole_card)


def as_stored(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().to(torch.bfloat16 if tensor.is_floating_point() else torch.int32).contiguous()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def readme(name: str, config: Mapping[str, Any], card: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The model card. Every number in it is from the card or counted from the weights."""
    own = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    head = f"{len(tensors[HEAD_TOKENS])} rows of the verifier's" if HEAD_TOKENS in tensors else "the verifier's"
    held_out = "".join(f"| {key} | {value} |\n" for key, value in card["held_out"].items())
    further = "".join(f"- {key}: {card[key]}\n" for key in card if key not in (*CARD_KEYS, "sha256"))
    return (
        f"# {name}\n\n"
        f"A `{config['kind']}` drafter for {config['model']}: {own / 1e6:.2f} M weights of its own in bfloat16; "
        f"embedding: the verifier's; head: {head}.\n\n"
        f"- command: `{card['command']}`\n- data: {card['data']}\n- seed: {card['seed']}\n"
        f"- training time: {card['seconds']:.0f} s\n{further}- sha256 of {WEIGHTS}: `{card['sha256']}`\n\n"
        f"On held-out prompts:\n\n| | |\n|---|---|\n{held_out}"
    )


def load_drafter(
    folder: Path, kind: str, model: Model, shapes: Callable[[Mapping[str, Any], ModelSpec], Mapping[str, Shape]]
) -> DrafterWeights:
    """Read a drafter of ``kind`` for ``model``; ``shapes(config, spec of the verifier)`` says which weights it has.

    ``head_tokens`` may always be there.

    Raises:
        UserError: no such folder, another kind or verifier, weights that are not those of the card, or a weight that
            is missing, extra or misshapen.
    """
    config, card = read_json(folder / CONFIG), read_json(folder / CARD)
    if config.get("kind") != kind:
        raise UserError(
            f"{folder} is a drafter of kind {config.get('kind')!r}: want {kind!r}; set drafter accordingly."
        )
    if config.get("model") != model.name:
        raise UserError(
            f"{folder} was made for {config.get('model')!r}, the model is {model.name!r}: train one for it "
            "(job=train_drafter) and name its folder in drafter.path, or take drafter=prompt_lookup."
        )
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{path} does not exist; a drafter's folder has {CONFIG}, {WEIGHTS} and {CARD}.")
    if (found := sha256(path)) != card.get("sha256"):
        raise UserError(f"{path} has sha256 {found}, its card says {card.get('sha256')}: get or train it again.")
    tensors = read_tensors(path)
    check_weights(folder, tensors, shapes(config, model.transformer.spec))
    check_head_tokens(folder, tensors.get(HEAD_TOKENS), len(model.transformer.weights.head))
    return DrafterWeights(folder, config, tensors, card)


PublicShapes = Callable[[Mapping[str, Any], ModelSpec, Mapping[str, Tensor]], Mapping[str, Shape]]
"""The weights that a public folder must have: its config, the verifier's spec, its tensors -> names and shapes."""


def load_public(
    folder: Path, stem: str, model: Model, shapes: PublicShapes
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of a folder in a public layout, without a card; ``stem``.safetensors or its index.

    Raises:
        UserError: no safetensors, or a weight that is missing, extra or misshapen.
    """
    config = read_json(folder / CONFIG)
    index = folder / f"{stem}.safetensors.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else [f"{stem}.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            others = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth")]
            hint = f"; {others[0]} can run code: convert it with safetensors.torch.save_file" if others else ""
            raise UserError(f"{folder / name} does not exist; only safetensors are read{hint}.")
    tensors = {name: tensor for file in names for name, tensor in read_tensors(folder / file).items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    check_weights(folder, tensors, shapes(config, model.transformer.spec, tensors))
    return config, tensors


def drafter_folder(path: str, key: str = "drafter.path") -> Path:
    """The folder that ``path``, given as ``key``, names, from here or from the checkout, where shipped drafters lie.

    A hub id, org/name or org/name@revision, is fetched, or found in the hub's cache.

    Raises:
        UserError: there is none.
    """
    for folder in (Path(path).expanduser(), CHECKOUT / path):
        if folder.is_dir():
            return folder
    repo, _, revision = path.partition("@")
    if not HUB_ID.fullmatch(repo):
        raise UserError(f"{key}={path!r} is not a folder; give one with {CONFIG} and *.safetensors.")
    folder = hub_folder(repo, revision or "main", key=key)
    return hub_folder(repo, folder.name, tuple(weight_files(folder)), key)


def folder_name(folder: Path) -> str:
    """What a folder goes by in records; one in the hub's cache by its repository and commit."""
    if folder.parent.name != "snapshots":
        return folder.name
    return f"{folder.parents[1].name.rpartition('--')[2]}@{folder.name[:12]}"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file: {' '.join(str(error).split())[:160]}.") from error


def check_weights(folder: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Shape]) -> None:
    """Raises UserError on a missing, extra or misshapen weight."""
    for name, shape in wanted.items():
        if name not in tensors:
            raise UserError(f"{folder}: weight {name!r} is missing from the safetensors file.")
        if (got := tuple(tensors[name].shape)) != shape:
            raise UserError(f"{folder}: weight {name!r} has shape {got}, {CONFIG} says {shape}.")
    if extra := [name for name in tensors if name not in wanted and name != HEAD_TOKENS]:
        raise UserError(f"{folder}: {len(extra)} weights have no place in this drafter, first {extra[0]!r}.")


def check_head_tokens(folder: Path, tokens: Tensor | None, vocabulary: int) -> None:
    """Raises UserError unless ``tokens`` are distinct ids of the verifier's vocabulary, one at least."""
    if tokens is None:
        return
    ids = tokens.tolist() if tokens.dim() == 1 and not tokens.is_floating_point() else []
    if not ids or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= vocabulary:
        raise UserError(f"{folder}: {HEAD_TOKENS} must be distinct token ids from 0 to {vocabulary - 1}, at least one.")


def own_spec(config: Mapping[str, Any], verifier: ModelSpec) -> ModelSpec:
    """The shape of a drafter's Llama layers: ``config`` has Llama's keys for them, the rest is the verifier's.

    Needs num_hidden_layers, num_attention_heads and intermediate_size; width, positions and rotary base are the
    verifier's unless they are given.
    """
    given = {key: value for key, value in config.items() if key not in ("kind", "model", "model_type")}
    defaults = {
        "model_type": "llama",
        "hidden_size": verifier.hidden_size,
        "vocab_size": verifier.vocab_size,
        "rms_norm_eps": verifier.norm_eps,
        "rope_theta": verifier.rope_theta,
        "max_position_embeddings": verifier.max_positions,
    }
    spec = ModelSpec.from_hf({**defaults, **given}, "the drafter")
    if spec.hidden_size != verifier.hidden_size:
        raise UserError(f"the drafter is {spec.hidden_size} wide, the verifier {verifier.hidden_size}: want the same.")
    return replace(spec, embed_scale=verifier.embed_scale, logit_softcap=verifier.logit_softcap)


def layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Names and shapes of Llama layers, as in any Llama checkpoint."""
    found: dict[str, Shape] = {}
    for index in range(spec.layers):
        found |= dict(part for stack in matrices(spec, index).values() for part in stack)
        found |= dict(norms(spec, index).values())
    return found


def own_layers(
    spec: ModelSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> tuple[LayerWeights, ...]:
    """The layers that ``layer_shapes`` names, ready to run."""
    return tuple(layer_weights(spec, index, tensors.__getitem__, dtype, device) for index in range(spec.layers))
