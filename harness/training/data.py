"""Training data on disk: tokens with the full verifier's features, written once, shard by shard, and checked by sha256.

The folder is named by the digest of its recipe and lies in the user's cache, so that every drafter of one verifier
learns from the same texts and an interrupted writer goes on where it stopped.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load, save
from torch import Tensor

from harness.errors import UserError
from harness.model.load import Model
from harness.model.made import cache_dir, sha256
from harness.model.tokenizer import Tokenizer
from harness.store import write_atomic
from harness.training.recipe import Frame, Recipe, Request, Source, requests
from harness.training.write import Text, Writer

RECIPE, MANIFEST = "recipe.json", "manifest.json"


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side, padded behind. ``features[:, i]`` belong to ``tokens[:, i]``; those of the last are zero.

    ``states`` are laid out as ``features``; None where the recipe has no taps.
    """

    tokens: Int[Tensor, "B S"]
    features: Float[Tensor, "B S E"]
    lengths: Int[Tensor, "B"]
    prompt_lengths: Int[Tensor, "B"]
    states: Float[Tensor, "B S F"] | None = None


class TextData:
    """The texts, held-out ones apart, and how to name them: ``folder``, ``recipe`` in words, ``digest``."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any], texts: Sequence[Text], held_out: int) -> None:
        self.folder, self.recipe = folder, recipe
        self.held_out = [text for text in texts if text.index < held_out]
        kept = {text.tokens[: text.prompt_length] for text in self.held_out}
        self.trained = [
            text for text in texts if text.index >= held_out and text.tokens[: text.prompt_length] not in kept
        ]

    @property
    def digest(self) -> str:
        return self.folder.name

    @property
    def tokens(self) -> int:
        return sum(len(text.tokens) for text in self.trained)

    def frequent(self, count: int) -> Int[Tensor, "N"]:
        """The ``count`` most frequent tokens of the texts, a continuation's counted thrice; ids decide between equals.

        Fewer texts than tokens fill up with the lowest ids, which byte-pair tokenizers learnt first.
        """
        width = self.recipe["vocabulary"]
        counts = torch.zeros(width, dtype=torch.long)
        for text in self.trained:
            counts += torch.bincount(torch.tensor(text.tokens), minlength=width)
            counts += 2 * torch.bincount(torch.tensor(text.tokens[text.prompt_length :]), minlength=width)
        return counts.sort(descending=True, stable=True).indices[: min(count, width)].sort().values

    def tap_sizes(self) -> Float[Tensor, "F"]:
        """Root mean square of each column of the states, but for those of first tokens, whose size is another."""
        total, count = torch.zeros(()), 0
        for text in self.trained:
            assert text.states is not None
            total = total + text.states[1:].float().square().sum(0)
            count += len(text.states) - 1
        return (total / max(1, count)).sqrt().clamp(min=1e-3)

    def order(self, seed: int, epoch: int, batch_tokens: int) -> list[list[int]]:
        """The batches of an epoch as indices of texts: shuffled, neighbours of like length, shuffled again."""
        draw = random.Random(f"order/{seed}/{epoch}")
        indices = list(range(len(self.trained)))
        draw.shuffle(indices)
        batches: list[list[int]] = []
        for begin in range(0, len(indices), 256):
            pool = sorted(indices[begin : begin + 256], key=lambda index: len(self.trained[index].tokens))
            batches += list(grouped(pool, [len(self.trained[index].tokens) for index in pool], batch_tokens))
        draw.shuffle(batches)
        return batches


def grouped(indices: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Neighbours whose padded batch has at most ``batch_tokens`` tokens; one too long is alone."""
    group: list[int] = []
    for index, length in zip(indices, lengths, strict=True):
        if group and length * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def collate(texts: Sequence[Text]) -> Batch:
    """Texts as one padded batch."""
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
    states = [text.states for text in texts if text.states is not None]
    return Batch(
        tokens,
        padded([text.features for text in texts], longest),
        torch.tensor([len(text.tokens) for text in texts]),
        torch.tensor([text.prompt_length for text in texts]),
        padded(states, longest) if states else None,
    )


def padded(rows: Sequence[Float[Tensor, "S F"]], longest: int) -> Float[Tensor, "B S F"]:
    found = torch.zeros(len(rows), longest, rows[0].shape[-1], dtype=rows[0].dtype)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return found


def prepare(
    model: Model,
    recipe: Recipe,
    sources: Sequence[Source],
    described: Mapping[str, Any],
    seed: int,
    progress: Callable[[int, int, float], None],
) -> TextData:
    """Read the data, writing what is missing of it.

    ``described`` says where the sources' rows came from; ``progress`` gets sequences done, of how many, and tokens a
    second.

    Raises:
        UserError: a cache that cannot be written, or prompts that do not fit the model.
    """
    made = requests(recipe, model.tokenizer, sources, seed)
    frame = Frame.of(model.tokenizer)
    longest = max(request.longest for request in made)
    needed = longest + recipe.prompt_tokens + len(frame.behind) + recipe.reply_tokens
    if needed > (most := model.transformer.spec.max_positions):
        raise UserError(
            f"texts of {needed} positions are asked for, the model has {most}: lower tasks.NAME.max_input_tokens, "
            "job.data.prompt_tokens or job.data.reply_tokens."
        )
    whole = {
        "model": model.name,
        "dtype": str(model.transformer.dtype).removeprefix("torch."),
        "vocabulary": model.transformer.spec.vocab_size,
        "weights": weights_digest(model),
        "seed": seed,
        **{key: value for key, value in asdict(recipe).items() if key not in ("skip", "taps", "shown_tokens") or value},
        "rows": described,
        "prompts": hashlib.sha256(json.dumps([request.given for request in made]).encode()).hexdigest(),
        "version": 1,
    }
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_dir() / "drafter-data" / f"{model.slug}-{digest}"
    try:
        write_atomic(folder / RECIPE, json.dumps(whole, indent=2) + "\n")
        manifest = write_shards(folder, model, recipe, made, frame, seed, longest, progress)
    except OSError as error:
        raise UserError(
            f"cannot write training data to {str(folder)!r} ({error}): set HARNESS_CACHE=FOLDER."
        ) from error
    texts = [text for name in manifest for text in unpacked(load((folder / name).read_bytes()))]
    return TextData(folder, whole, texts, recipe.held_out)


def line_ends(tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    """Tokens whose text has a line's end."""
    return [token for token in range(vocabulary) if "\n" in tokenizer.decode([token])]


def weights_digest(model: Model) -> str:
    """A cheap digest of the verifier: its embedding's sum and its final norm, which no two checkpoints share."""
    sums = torch.cat((model.transformer.weights.embed.double().sum(0), model.transformer.weights.norm.double()))
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()[:16]


def write_shards(
    folder: Path,
    model: Model,
    recipe: Recipe,
    made: Sequence[Request],
    frame: Frame,
    seed: int,
    longest: int,
    progress: Callable[[int, int, float], None],
) -> dict[str, str]:
    """The names of all shards with their sha256; those on disk that match the manifest are left alone."""
    path = folder / MANIFEST
    manifest: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    writer: Writer | None = None
    wanted: dict[str, str] = {}
    for begin in range(0, len(made), recipe.shard):
        part = made[begin : begin + recipe.shard]
        name = f"shard-{begin // recipe.shard:05d}.safetensors"
        whole = name in manifest and (folder / name).is_file() and sha256(folder / name) == manifest[name]
        if not whole:
            if writer is None:
                ends = line_ends(model.tokenizer, model.transformer.spec.vocab_size) if recipe.shown_tokens else ()
                eos_ids = model.tokenizer.eos_ids
                writer = Writer(model.transformer, recipe, frame, eos_ids, seed, longest, frozenset(ends))
            texts: list[Text] = []
            begun, tokens = perf_counter(), 0
            for text in writer.write(part):
                texts.append(text)
                tokens += len(text.tokens)
                progress(begin + len(texts), len(made), tokens / (perf_counter() - begun))
            write_atomic(folder / name, packed(sorted(texts, key=lambda text: text.index)))
            manifest[name] = sha256(folder / name)
            write_atomic(path, json.dumps(manifest, indent=2) + "\n")
        wanted[name] = manifest[name]
        progress(begin + len(part), len(made), 0.0)
    return wanted


def packed(texts: Sequence[Text]) -> bytes:
    states = [text.states for text in texts if text.states is not None]
    return save(
        {
            "indices": torch.tensor([text.index for text in texts], dtype=torch.int32),
            "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int32),
            "prompt_lengths": torch.tensor([text.prompt_length for text in texts], dtype=torch.int32),
            "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
            "features": torch.cat([text.features for text in texts]),
            **({"states": torch.cat(states)} if states else {}),
        }
    )


def unpacked(stored: Mapping[str, Tensor]) -> Iterator[Text]:
    lengths = stored["lengths"].tolist()
    tokens = stored["tokens"].split(lengths)
    rows = [length - 1 for length in lengths]
    features = stored["features"].split(rows)
    states = stored["states"].split(rows) if "states" in stored else [None] * len(rows)
    for index, prompt, own, felt, deep in zip(
        stored["indices"].tolist(), stored["prompt_lengths"].tolist(), tokens, features, states, strict=True
    ):
        yield Text(index, tuple(own.tolist()), prompt, felt, deep)
