"""Folders in the user's cache that are made once: whole or not at all, and checked by sha256 on every use."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError

CACHE_VARIABLE = "HARNESS_CACHE"
MANIFEST = "manifest.json"

Progress = Callable[[str], None]


def cache_dir() -> Path:
    """``$HARNESS_CACHE``, else the user's cache folder for this project."""
    import platformdirs

    override = os.environ.get(CACHE_VARIABLE)
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("via-sd-harness"))


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Made:
    """What is made: the folder's name in the cache, what to call it, the room it takes, how each file came about."""

    name: str
    what: str
    needs: str
    source: Mapping[str, Any]

    def folder(self, make: Callable[[Path], None], say: Progress) -> Path:
        """The folder, filled by ``make`` on the first call and whenever its files are not what was written.

        ``make`` gets the path of a folder to fill and wraps what writes there in ``writing``. ``say`` gets a line for
        each slow step. Processes that call this at once wait for one of them to make it.

        Raises:
            UserError: the cache cannot be written.
        """
        cache = cache_dir()
        folder = cache / self.name
        if _intact(folder):
            return folder
        with self.writing():
            cache.mkdir(parents=True, exist_ok=True)
        with self._only_process(cache, say):
            if not _intact(folder):  # another process may have made it while this one waited
                self._make(folder, make, say)
        return folder

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failure to write into a UserError. Only around code that reads nothing but what it wrote."""
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"cannot write {self.what} to {str(cache_dir())!r} ({error}): "
                f"needs {self.needs} in a writable folder; set {CACHE_VARIABLE}=FOLDER to use another."
            ) from error

    @contextlib.contextmanager
    def _only_process(self, cache: Path, say: Progress) -> Iterator[None]:
        """Hold the lock of the folder; the system drops it when the process dies."""
        from filelock import FileLock, Timeout

        lock = FileLock(cache / f"{self.name}.lock")
        with self.writing():
            try:
                lock.acquire(timeout=0)
            except Timeout:
                say(f"waiting for another process that makes {self.what}")
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _make(self, folder: Path, make: Callable[[Path], None], say: Progress) -> None:
        """Make ``folder`` anew beside the old one, then exchange them. The caller holds the lock."""
        cache = folder.parent
        if folder.exists():
            say(f"{self.what} in {folder} is damaged or incomplete: making it again")
        with self.writing():
            for leftover in cache.glob(f".{self.name}-*"):  # of processes that were killed
                shutil.rmtree(leftover)
            work = Path(tempfile.mkdtemp(prefix=f".{self.name}-", dir=cache))
        new = work / "new"
        try:
            make(new)
            with self.writing():
                _write_manifest(new, self.source)
                if folder.exists():
                    folder.rename(work / "damaged")
                new.rename(folder)
                _flush(cache)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _intact(folder: Path) -> bool:
    """True if every file that the manifest lists has the digest it was written with."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return bool(files) and all(sha256(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # no manifest, one cut short, or a file gone: not what is left by who made it


def _write_manifest(folder: Path, source: Mapping[str, Any]) -> None:
    """Digests of all files and what made them; then everything is on the disk before the folder gets its name."""
    files = sorted(path for path in folder.iterdir())
    manifest = {
        "source": source,
        "libraries": {name: importlib.metadata.version(name) for name in ("gguf", "torch", "transformers")},
        "files": {path.name: sha256(path) for path in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in [*files, folder / MANIFEST, folder]:
        _flush(path)


def _flush(path: Path) -> None:
    """fsync a file or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
