"""Rows of a Hugging Face dataset: streamed from the hub when it answers, else taken from its local cache."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.errors import UserError
from harness.hub import endpoint, note_failure, one_line, probe, problem

INFO_TIMEOUT_S = 5.0


class HubUnavailable(Exception):
    """Neither the hub nor its local cache gave the rows; the text says why, as part of a line."""


@dataclass(frozen=True, slots=True)
class HubRows:
    """Rows in file order. ``commit`` is what the hub or the cache named, else None; ``why_cached`` is None online."""

    rows: list[dict[str, Any]]
    commit: str | None
    why_cached: str | None


def fetch(path: str, config: str, split: str, limit: int, revision: str) -> HubRows:
    """The first ``limit`` rows of a split, fewer if it has fewer.

    ``path`` and ``config`` as for ``datasets.load_dataset`` (``default`` for a dataset without configurations).
    Raises HubUnavailable, or UserError for a revision that does not exist.
    """
    why = problem()
    if why is None:
        try:
            return _stream(path, config, split, limit, revision)
        except HubUnavailable as error:
            why = str(error)
    for read in (_from_hub_cache, _from_datasets_cache):
        try:
            found = read(path, config, split, limit, revision)
        except (OSError, ValueError) as error:  # pyarrow reports a damaged file as a ValueError
            raise HubUnavailable(f"{why}; its local cache of {path} is damaged: {one_line(error)}") from error
        if found is not None:
            rows, commit = found
            return HubRows(rows, commit, why)
    raise HubUnavailable(why)


@contextmanager
def _few_retries() -> Iterator[None]:
    """Limits the reading retries of ``datasets``, by default 20 with 5 s and more between them."""
    from datasets import config

    old = config.STREAMING_READ_MAX_RETRIES, config.STREAMING_OPEN_MAX_RETRIES
    config.STREAMING_READ_MAX_RETRIES = config.STREAMING_OPEN_MAX_RETRIES = 1
    try:
        yield
    finally:
        config.STREAMING_READ_MAX_RETRIES, config.STREAMING_OPEN_MAX_RETRIES = old


def _check_file_host(path: str, commit: str | None, names: list[str]) -> None:
    """Raises ConnectionError when the host that holds the files does not answer, which the hub redirects to."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    name = next((name for name in names if name.endswith(".parquet")), None)
    if name is None:
        return
    url = hf_hub_url(path, name, repo_type="dataset", revision=commit, endpoint=endpoint())
    host = urlsplit(get_hf_file_metadata(url, timeout=INFO_TIMEOUT_S).location)
    if why := probe(f"{host.scheme}://{host.netloc}"):
        raise ConnectionError(why)


def _commit(name: str | None) -> str | None:
    return name if name and re.fullmatch(r"[0-9a-f]{40}", name) else None


def _stream(path: str, config: str, split: str, limit: int, revision: str) -> HubRows:
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, RevisionNotFoundError

    try:
        info = HfApi(endpoint=endpoint()).dataset_info(path, revision=revision, timeout=INFO_TIMEOUT_S)
        _check_file_host(path, info.sha, [file.rfilename for file in info.siblings or []])
        with _few_retries():
            builder = load_dataset_builder(f"hf://datasets/{path}", config, revision=info.sha)
            rows = list(builder.as_streaming_dataset(split=split).take(limit))
    except RevisionNotFoundError as error:
        raise UserError(
            f"dataset {path} has no revision {revision!r}: take main, or a commit or tag listed at "
            f"{endpoint()}/datasets/{path}"
        ) from error
    except (OSError, HTTPError, ValueError) as error:
        if not isinstance(error, HfHubHTTPError | ValueError):
            note_failure(one_line(error))
        raise HubUnavailable(one_line(error)) from error
    # Not the commit asked for: on trouble midway the library may have turned to its cache by itself.
    return HubRows(rows, _commit(builder.hash), None)


def _from_hub_cache(
    path: str, config: str, split: str, limit: int, revision: str
) -> tuple[list[dict[str, Any]], str | None] | None:
    """Parquet files that ``hf download`` left; they lie in a folder named as the configuration, or ``data``."""
    from huggingface_hub.constants import HF_HUB_CACHE

    root = Path(HF_HUB_CACHE) / f"datasets--{path.replace('/', '--')}"
    ref = root / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    folder = root / "snapshots" / commit / ("data" if config == "default" else config)
    files = sorted(folder.glob(f"{split}-*.parquet"))
    if not files or not files[0].name.startswith(f"{split}-00000-of-"):
        return None
    from pyarrow.parquet import ParquetFile

    batches = (batch for file in files for batch in ParquetFile(file).iter_batches(batch_size=min(limit, 1024)))
    return list(islice((row for batch in batches for row in batch.to_pylist()), limit)), _commit(commit)


def _from_datasets_cache(
    path: str, config: str, split: str, limit: int, revision: str
) -> tuple[list[dict[str, Any]], str | None] | None:
    """What ``datasets.load_dataset`` left: the latest one, whose folder is named by its commit."""
    from datasets.packaged_modules.cache.cache import Cache

    try:
        builder = Cache(repo_id=path, dataset_name=path.split("/")[-1], config_name=config, version="auto", hash="auto")
    except ValueError:  # how it says that there is none
        return None
    if revision not in ("main", builder.hash) or split not in (builder.info.splits or {}):
        return None
    rows = builder.as_dataset(split=split)
    return list(islice(iter(rows), limit)), _commit(builder.hash)
