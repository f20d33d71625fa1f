"""Search the layers of the slim verifier on calibration text that no test uses; every evaluated mask is kept."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from harness.config import FILE_NAME
from harness.dimr import Evaluation, calibration_text, inner_layers, random_search
from harness.environment import git_state
from harness.errors import UserError
from harness.jobs.bench import positions_needed
from harness.model.load import Model
from harness.prompts import Task, make_prompt
from harness.records import DataSource
from harness.store import check_writable, write_atomic


def search(
    model: Callable[..., Model],
    tasks: Mapping[str, Task],
    results_dir: str,
    seed: int,
    skip_ratio: float,
    evaluations: int,
    prompts: int,
    new_tokens: int,
    block: int,
    alpha: float,
    beta: float,
    exchange: float,
    mask_name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``masks/<name>.json`` (the best) and ``masks/<name>.csv`` (all) under ``results_dir``.

    Args:
        skip_ratio: share r of layers to skip; L - round(r L) stay.
        prompts: calibration prompts a task.
        new_tokens: tokens the full verifier writes for each, at most; these are scored.
        block: positions scored from one committed prefix.
        alpha, beta: of the step cost, eq. 9.
        exchange: see ``harness.dimr.random_search``.
        overwrite: replace a mask of the same name.

    Raises:
        UserError: bad settings, or anything missing.
    """
    screen = Console(stderr=True)
    for name, value in (("prompts", prompts), ("new_tokens", new_tokens), ("block", block)):
        if value < 1:
            raise UserError(f"job.{name}={value}: want at least 1.")
    if not tasks:
        raise UserError("no task is chosen: write task=quick_four, or another of `python -m harness --help`.")
    folder = Path(results_dir) / "masks"
    check_writable(folder)
    rows = {name: task.calibration(prompts, seed) for name, task in tasks.items()}
    full = model(slim_mask=None, notify=lambda line: screen.print(line, style="dim", highlight=False))
    depth = full.transformer.spec.layers
    inner_layers(depth, skip_ratio, evaluations, alpha, beta, exchange)
    name = mask_name or f"{full.slug}_skip{round(100 * skip_ratio)}"
    if not FILE_NAME.fullmatch(name):
        raise UserError(f"job.mask_name={name!r}: want a plain file name of letters, digits, '_', '-' and '.'.")
    prompts_made = [
        make_prompt(full, key, tasks[key], example) for key, (found, _) in rows.items() for example in found
    ]
    taken = [path for path in (folder / f"{name}.json", folder / f"{name}.csv") if path.exists()]
    if taken and not overwrite:
        raise UserError(f"{taken[0]} exists: choose another job.mask_name=NAME, or replace it with job.overwrite=true.")
    positions_needed(full, prompts_made, new_tokens + 1, "job.new_tokens")
    texts = [
        calibration_text(full.transformer, prompt.ids, new_tokens, full.tokenizer.eos_ids)
        for prompt in track(prompts_made, "writing calibration text", console=screen)
    ]
    found = random_search(texts, depth, skip_ratio, evaluations, seed, block, alpha, beta, exchange)
    evaluated: list[Evaluation] = []
    for evaluation in track(found, "scoring masks", total=evaluations, console=screen):
        evaluated.append(evaluation)
        write_atomic(folder / f"{name}.csv", table(evaluated))  # a killed search keeps what it has scored
    best = min(evaluated, key=lambda evaluation: evaluation.cost)
    settings = {
        "skip_ratio": skip_ratio,
        "seed": seed,
        "prompts_per_task": prompts,
        "new_tokens": new_tokens,
        "block": block,
        "alpha": alpha,
        "beta": beta,
        "exchange": exchange,
    }
    description = describe(full, best, evaluated, settings, {key: source for key, (_, source) in rows.items()})
    path = folder / f"{name}.json"
    write_atomic(path, json.dumps(description, indent=2) + "\n")
    screen.print(
        f"best of {len(evaluated)} masks: cost {best.cost:.3f} nats, top-1 agreement {best.agreement:.2f}; "
        f"wrote {path}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return path


def describe(
    full: Model,
    best: Evaluation,
    evaluated: Sequence[Evaluation],
    settings: Mapping[str, Any],
    data: Mapping[str, DataSource],
) -> dict[str, Any]:
    """What a mask file says: the kept layers, how good they are, and how they were found."""
    commit, dirty = git_state()
    return {
        "model": full.name,
        "layers": full.transformer.spec.layers,
        "kept_layers": list(best.mask.layers),
        "cache_mode": "shared",
        "cost": best.cost,
        "agreement": best.agreement,
        "positions": best.positions,
        "evaluations": len(evaluated),
        "search_s": sum(evaluation.seconds for evaluation in evaluated),
        **settings,
        "dtype": str(full.transformer.dtype).removeprefix("torch."),
        "calibration": {
            key: {"source": f"{source.kind}: {source.location}", "rows": source.rows, "sha256": source.sha256}
            for key, source in data.items()
        },
        "git_commit": commit,
        "git_dirty": dirty,
    }


def table(evaluated: list[Evaluation]) -> str:
    """Every mask in the order of evaluation."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("kept_layers", "cost", "agreement", "positions", "seconds"))
    for found in evaluated:
        layers = " ".join(map(str, found.mask.layers))
        writer.writerow((layers, found.cost, found.agreement, found.positions, round(found.seconds, 3)))
    return text.getvalue()
