"""Whether the Hugging Face hub answers. The client libraries would retry for half a minute at every request."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

PROBE_TIMEOUT_S = 2.0

FIRST_LOOK = "looking at its cache first"
"""Why the hub is closed at first to one who asks what is missing."""

_failed: dict[str, str] = {}  # endpoint -> why, once a request failed although the probe had been answered


_closed: list[str] = []  # why the hub is left alone for a while, the last one first


@contextmanager
def closed(why: str) -> Iterator[None]:
    """Leave the hub alone inside, for the reason ``why``: what its caches have is all there is."""
    _closed.insert(0, why)
    try:
        yield
    finally:
        _closed.pop(0)


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def problem() -> str | None:
    """Why the hub is not to be used, or None. Costs at most ``PROBE_TIMEOUT_S`` and a bit, once a process."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    return next(iter(_closed), None) or _failed.get(endpoint()) or probe(endpoint())


def note_failure(why: str) -> None:
    """Remember that a request failed, so that the next one need not wait as long to find out."""
    _failed[endpoint()] = why


@cache
def probe(url: str) -> str | None:
    """Connects to the host of ``url``, or to the proxy that leads to it; why that failed, or None."""
    try:
        parts = urlsplit(url)
        proxy = getproxies().get(parts.scheme)
        if proxy and parts.hostname and not proxy_bypass(parts.hostname):
            parts = urlsplit(proxy)
        host, port = parts.hostname, parts.port or {"http": 80}.get(parts.scheme, 443)
    except ValueError:
        host = None
    if host is None:
        return f"{url!r} is not a URL like https://huggingface.co"
    outcome: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S).close()
            outcome.append("")
        except OSError as error:
            outcome.append(error.strerror or str(error))

    # In a thread, since no timeout bounds the name lookup, and each address of a host has the timeout to itself.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S + 0.5)
    why = outcome[0] if outcome else f"no answer in {PROBE_TIMEOUT_S:g} s"
    return f"{host}:{port}: {why}" if why else None


def one_line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:160]
