"""The first layers of a Llama checkpoint as a checkpoint of its own: a drafter where none has been trained."""

import hashlib
import json
import re
import shutil
from pathlib import Path

from harness.errors import UserError
from harness.model.checkpoint import Checkpoint, read_json, weight_files
from harness.model.made import Made, Progress

BESIDE = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.jinja"),
    "generation_config.json",
)
"""Files that a checkpoint needs besides its weights and ``config.json``; they stay as they are."""

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def is_llama(folder: Path) -> bool:
    return read_json(folder / "config.json").get("model_type") == "llama"


def first_layers_folder(source: Path, count: int, on_progress: Progress | None = None) -> Path:
    """Folder of a Llama with the first ``count`` layers of the one in ``source``, and its embedding, norm and head.

    Made in the user's cache on the first call, and again when ``source`` is another checkpoint by then.

    Raises:
        UserError: ``source`` is no Llama, has no more layers than that, or the cache cannot be written.
    """
    say = on_progress or (lambda _: None)
    config = read_json(source / "config.json")
    if not is_llama(source):
        raise UserError(f"{source}: only a Llama is cut to its first layers, not a {config.get('model_type')!r}.")
    if not 0 < count < config["num_hidden_layers"]:
        raise UserError(f"{source} has {config['num_hidden_layers']} layers: cut to {count}, want fewer, 1 at least.")
    stats = {name: (source / name).stat() for name in weight_files(source)}
    written = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
    digest = hashlib.sha256(json.dumps([str(source.resolve()), config, written]).encode()).hexdigest()
    made = Made(
        name=f"{source.name}-first{count}-{digest[:12]}-v1",
        what=f"the first {count} layers of {source.name}",
        needs="the room of these layers",
        source={"folder": str(source.resolve()), "layers": count},
    )
    return made.folder(lambda folder: _cut(source, config | {"num_hidden_layers": count}, folder, made, say), say)


def _cut(source: Path, config: dict[str, object], folder: Path, made: Made, say: Progress) -> None:
    """Fill ``folder`` with the weights that ``config`` has a place for."""
    from safetensors.torch import save_file

    say(f"writing {made.what} to the cache (once)")
    count = config["num_hidden_layers"]
    assert isinstance(count, int)
    with Checkpoint(source) as checkpoint:
        layers = {name: LAYER.match(name) for name in checkpoint.shapes}
        kept = {name: checkpoint.read(name) for name, found in layers.items() if found is None or int(found[1]) < count}
        with made.writing():
            folder.mkdir()
            save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for pattern in BESIDE:
                for path in source.glob(pattern):
                    shutil.copyfile(path, folder / path.name)
