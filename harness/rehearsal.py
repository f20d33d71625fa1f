"""A run's arms built on a model without weights: what the run would refuse to build is known before it starts.

The model is the run's own, its tensors on torch's meta device: they have shapes and no memory. So a mask of another
depth, a drafter that was made for another model, another tokenizer and settings that do not go together are refused
here in the words in which the run would refuse them, and what each arm would hold can be counted. Of drafters the files
of a head are read; of a checkpoint its config, its tokenizer and the headers of its weights.

Not covered: what is known once prompts are made, as a prompt that does not fit; and the embedded model before it has
been made for the first time, or a checkpoint that the hub's cache does not have, which have no shape yet.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from harness.config import called
from harness.decode.base import Method
from harness.errors import UserError
from harness.hub import FIRST_LOOK, closed
from harness.model.embedded import FOLDER, NAME
from harness.model.load import (
    META,
    Model,
    bare_transformer,
    find_checkpoint,
    known_dtype,
    load_tokenizer,
    load_transformer,
    slug_of,
)
from harness.model.made import cache_dir
from harness.model.slim import mask_or_evenly_spaced, read_mask
from harness.model.spec import ModelSpec
from harness.model.tiers import Tiers
from harness.model.tokenizer import ByteTokenizer, Tokenizer
from harness.sampling import Sampling

Config = Mapping[str, Any]


class Silent:
    """A tokenizer that reads no text: what learns from texts is asked whether it can, and learns nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str) -> list[int]:
        return []


def bare_model(node: Config) -> Model | None:
    """The model that ``node`` calls for, without weights; None where its shape is not known here yet.

    Raises:
        UserError: as where it is loaded.
    """
    return _bare_model(json.dumps(node, sort_keys=True, default=str))


@lru_cache(maxsize=4)
def _bare_model(text: str) -> Model | None:
    node: dict[str, Any] = json.loads(text)
    if "config" in node:
        spec = ModelSpec.from_hf(node["config"], "model.config")
        mask, mask_name = mask_or_evenly_spaced(node.get("slim_mask"), spec.layers, node.get("skip_ratio", 0.3))
        transformer = bare_transformer(spec, known_dtype(node["dtype"]))
        return Model(node["name"], transformer, silent(ByteTokenizer()), mask, mask_name, slug=node["name"])
    if "full" not in node:  # a toy, made in no time
        return called(node)()
    if node["full"] == "embedded":
        folder, name = cache_dir() / FOLDER, NAME
        if not (folder / "config.json").is_file():
            return None
    else:
        try:
            with closed(FIRST_LOOK):
                folder, name = find_checkpoint(node["full"], node.get("revision"), None)
        except UserError:
            return None
    transformer = load_transformer(folder, node["dtype"], META.type)
    tokenizer = load_tokenizer(folder, transformer.spec)
    kept = None if node.get("slim_mask") is None else read_mask(node["slim_mask"], transformer.spec.layers)
    transformer = transformer.with_vocabulary(tokenizer.vocab_size)
    named = None if kept is None else str(node["slim_mask"])
    return Model(name, transformer, silent(tokenizer), kept, named, slug_of(node["full"]), folder)


def silent(tokenizer: Tokenizer) -> Any:
    return Silent(tokenizer)


def rehearsed(config: Config, arm: str, model: Model, capacity: int) -> Method:
    """An arm of ``config`` over a cache of ``capacity`` positions of its own.

    Raises:
        UserError: as where the run builds it.
    """
    sampling = Sampling(config["temperature"], config["top_p"], config["top_k"])
    tiers = Tiers(model.transformer, model.transformer.new_cache(capacity))
    method: Method = called(config["methods"][arm])(tiers=tiers, sampling=sampling, model=model)
    return method


def refusals(config: Config) -> Iterator[str]:
    """The line with which the model, or an arm over it, is refused; for each that is."""
    try:
        model = bare_model(config["model"])
    except UserError as error:
        yield str(error)
        return
    if model is None:
        return
    for arm in config["methods"]:
        try:
            rehearsed(config, arm, model, capacity=8)
        except UserError as error:
            yield str(error)
