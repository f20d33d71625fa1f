"""A checkpoint: the folder it lies in, from disk or from the hub, and its tensors, read one at a time."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.errors import UserError
from harness.hub import endpoint, note_failure, one_line, problem

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
"""Configuration and tokenizer; never code, and of the weights only what ``weight_files`` names."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FLOATS = ("F64", "F32", "F16", "BF16")


def local_folder(full: str) -> Path | None:
    """The folder that ``full`` names, or None if there is none."""
    folder = Path(full).expanduser()
    return folder if folder.is_dir() else None


def hub_folder(repo: str, revision: str, patterns: tuple[str, ...] = SMALL_FILES, key: str = "model.full") -> Path:
    """Fetch files of a model repository into the local cache, or find them there; its folder is named by the commit.

    ``key`` is the setting that an error names.

    Raises:
        UserError: no such repository or revision, or neither the hub nor its cache has it. Within seconds.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

    why = problem()
    try:
        found = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(patterns),
            endpoint=endpoint(),
            etag_timeout=5,
            local_files_only=why is not None,
        )
    except RevisionNotFoundError as error:
        raise UserError(f"{repo} has no revision {revision!r}: set model.revision to a branch, tag, commit.") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{key}={repo!r} is no folder here and no model at {endpoint()} that you may read: "
            "check the name, or log in with `hf auth login`."
        ) from error
    except (OSError, HTTPError, ValueError) as error:
        if why is None and not isinstance(error, HfHubHTTPError | ValueError):
            note_failure(one_line(error))
        raise UserError(
            f"{key}={repo!r} is no folder here, and the hub was not to be had ({why or one_line(error)}) nor is "
            f"revision {revision} in its cache: give a folder, or get it by `hf download {repo} --revision {revision}`."
        ) from error
    return Path(found)


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a checkpoint: those of its index, else the single one."""
    if not (folder / INDEX).is_file():
        return [SINGLE]
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise UserError(f"{folder / INDEX} has no weight_map; it is no safetensors index.")
    return sorted(set(shards.values()))


class Checkpoint:
    """The tensors of a folder's safetensors files. Opening it reads their headers only.

    ``shapes`` has every tensor. To be closed, or used in a ``with``.

    Raises:
        UserError: a file that is missing or broken, a tensor in two files, or one that holds no plain floats.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        with ExitStack() as on_failure:
            on_failure.push(self._open)
            for name in weight_files(folder):
                self._add(folder / name)
            on_failure.pop_all()

    def _add(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"{path} does not exist; only safetensors checkpoints are read.")
        try:
            file = self._open.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise UserError(f"{path} is not a whole safetensors file: {one_line(error)}.") from error
        for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            if name in self.shapes:
                raise UserError(f"{self.folder}: weight {name!r} is in more than one file.")
            entry = file.get_slice(name)
            if entry.get_dtype() not in FLOATS:
                raise UserError(
                    f"{self.folder}: weight {name!r} is {entry.get_dtype()}; only {', '.join(FLOATS)} are read."
                )
            self.shapes[name] = tuple(entry.get_shape())
            self._files[name] = file

    def read(self, name: str) -> Tensor:
        """One tensor as it is in the file; until it is let go it may keep pages of the file in memory."""
        return self._files[name].get_tensor(name)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open.close()


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} does not exist; want a checkpoint folder with config.json and *.safetensors.")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object; want what save_pretrained writes.")
    return found
