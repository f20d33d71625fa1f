"""A W&B workspace that compares cells side by side: ``python -m harness job=workspace``. Imports no torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.compare import BASELINE
from harness.errors import UserError, unknown
from harness.log.workspace import build, definition
from harness.store import check_writable, write_atomic, writing

MODES = ("online", "offline")
FILE = "workspace.json"


def workspace(
    results_dir: str,
    project: str,
    entity: str | None,
    name: str,
    tasks: Sequence[str],
    arms: Sequence[str],
    mode: str = "online",
) -> Path:
    """Build the workspace, write its definition to ``results_dir/wandb/workspace.json`` and save it to W&B.

    Saved again it replaces itself: the file knows its address. ``mode=offline`` asks no server. Panels that compare
    tasks and arms are made for ``tasks`` and ``arms``; the baseline has no speedup.

    Raises:
        UserError: an unknown mode, the package is missing, a folder that cannot be written, or W&B refuses.
    """
    if mode not in MODES:
        raise unknown("job.mode", mode, MODES)
    path = Path(results_dir) / "wandb" / FILE
    check_writable(path.parent)
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    screen = Console(stderr=True)
    compared = [arm for arm in arms if arm != BASELINE]
    try:
        owner = entity or (default_entity() if mode == "online" else "")
        made = build(owner, project, name, tasks, compared)
    except ImportError as error:
        raise UserError(
            f"job=workspace needs the package wandb-workspaces ({error}): run pip install -e '.[workspace]'."
        ) from error
    url = before.get("url") if (before.get("entity"), before.get("project")) == (owner, project) else None
    if mode == "online":
        url = saved(made, url)
    found = {"entity": owner, "project": project, "name": name, "url": url, "spec": definition(made)}
    with writing(path):
        write_atomic(path, json.dumps(found, indent=1) + "\n")
    panels = sum(len(section.panels) for section in made.sections)
    screen.print(f"{len(made.sections)} sections, {panels} panels; wrote {path}", highlight=False, soft_wrap=True)
    screen.print(
        f"saved {url}" if mode == "online" else "not saved to W&B: job.mode=offline", highlight=False, soft_wrap=True
    )
    return path


def default_entity() -> str:
    """The user's or team's name that the key belongs to.

    Raises:
        UserError: W&B is not reached, or there is no key.
    """
    import wandb

    try:
        found = wandb.Api().default_entity
    except Exception as error:
        raise refused(error) from error
    if not found:
        raise UserError("W&B names no default entity: set job.entity=TEAM.")
    return str(found)


def saved(made: Any, url: str | None) -> str:
    """Save to W&B, in place of what is at ``url``; the address.

    Raises:
        UserError: W&B refuses.
    """
    import wandb_workspaces.workspaces as ws

    try:
        if url is None:
            return str(made.save().url)
        view = ws.Workspace.from_url(url)
        for part in ("name", "sections", "settings", "runset_settings"):
            setattr(view, part, getattr(made, part))
        return str(view.save().url)
    except Exception as error:
        raise refused(error) from error


def refused(error: Exception) -> UserError:
    """One line of what W&B says, and the two ways on."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"W&B did not save the workspace ({reason}): run wandb login, or set job.mode=offline.")
