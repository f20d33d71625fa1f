"""Search what the slim verifier keeps on calibration text that no test uses; every evaluated mask is kept."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import track

from harness.claims import claimed
from harness.config import FILE_NAME
from harness.decode.slim import CACHES
from harness.dimr import calibration_text, check_margins, evaluate
from harness.environment import git_state
from harness.errors import UserError, unknown
from harness.jobs.bench import positions_needed
from harness.model.load import Model
from harness.model.slim import LayerMask, Mask, mask_stem, read_text
from harness.prompts import Prompt, Task, make_prompt
from harness.proposals import Evaluation, SearchPlan
from harness.proposals import search as search_masks
from harness.records import DataSource
from harness.store import check_writable, remove_temporaries, write_atomic, writing

HEAD = ("kept", "cost", "agreement", "positions", "seconds", "proposal")


def search(
    model: Callable[..., Model],
    tasks: Mapping[str, Task],
    results_dir: str,
    seed: int,
    skip_ratio: float,
    units: str,
    cache: str,
    evaluations: int,
    bayes_every: int | None,
    patience: int | None,
    exchange: float,
    prompts: int,
    new_tokens: int,
    block: int,
    alpha: float,
    beta: float,
    mask_name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``masks/<name>.json`` (the best) and ``masks/<name>.csv`` (all) under ``results_dir``.

    A search that was killed goes on when it is run again with the same settings, model and calibration rows: the masks
    in the CSV are not scored again, and the result is that of a search nobody killed. Until it is done
    ``<name>.search.json`` says what it was of.

    Args:
        skip_ratio, units, evaluations, bayes_every, patience, exchange: see ``harness.proposals.SearchPlan``.
        cache: the cache mode that masks are scored in, ``shared`` or ``own``.
        prompts: calibration prompts a task.
        new_tokens: tokens the full verifier writes for each, at most; these are scored.
        block: positions scored from one committed prefix.
        alpha, beta: of the step cost, eq. 9.
        overwrite: replace a mask of the same name, finished or not.

    Raises:
        Busy: another process is searching the mask of this name.
        UserError: bad settings, anything missing, or a mask or table that cannot be written.
    """
    screen = Console(stderr=True)
    counts = {"evaluations": evaluations, "prompts": prompts, "new_tokens": new_tokens, "block": block}
    for key, value in counts.items():
        if value < 1:
            raise UserError(f"job.{key}={value}: want at least 1.")
    if cache not in CACHES:
        raise unknown("job.cache", cache, CACHES)
    check_margins(alpha, beta)
    if not tasks:
        raise UserError("no task is chosen: write task=quick_four, or another of `python -m harness --help`.")
    folder = Path(results_dir) / "masks"
    check_writable(folder)
    rows = {name: task.calibration(prompts, seed) for name, task in tasks.items()}
    full = model(slim_mask=None, notify=lambda line: screen.print(line, style="dim", highlight=False))
    plan = SearchPlan(
        full.transformer.spec.layers, skip_ratio, evaluations, seed, units, bayes_every, patience, exchange
    )
    settings = {
        "skip_ratio": skip_ratio,
        "units": units,
        "cache_mode": cache,
        "seed": seed,
        "steps": evaluations,
        "bayes_every": bayes_every,
        "patience": patience,
        "exchange": exchange,
        "prompts_per_task": prompts,
        "new_tokens": new_tokens,
        "block": block,
        "alpha": alpha,
        "beta": beta,
    }
    state = State(folder, mask_name or mask_stem(full.slug, skip_ratio, cache, units))
    if not FILE_NAME.fullmatch(state.name):
        raise UserError(f"job.mask_name={state.name!r}: want a plain file name of letters, digits, '_', '-' and '.'.")
    prompts_made = [
        make_prompt(full, key, tasks[key], example) for key, (found, _) in rows.items() for example in found
    ]
    identity = identify(full, settings, {key: source for key, (_, source) in rows.items()})
    positions_needed(full, prompts_made, new_tokens + 1, "job.new_tokens")
    with claimed(Path(results_dir), f"search-{state.name}", f"{state.mask} is being searched") as claim:
        remembered = state.opened(identity, plan, overwrite)
        if remembered:
            screen.print(f"going on from {len(remembered)} masks of {state.table}", style="dim", highlight=False)

        begun = perf_counter()
        score = scorer(full, prompts_made, new_tokens, block, alpha, beta, cache, screen)
        calibration_s = perf_counter() - begun
        claim.check()
        state.begin(identity)
        evaluated: list[Evaluation] = []
        masks = search_masks(plan, score, remembered)
        for evaluation in track(masks, "scoring masks", total=evaluations, console=screen):
            evaluated.append(evaluation)
            if len(evaluated) > len(remembered):  # a killed search keeps what it has scored
                claim.check()
                with writing(state.table):
                    write_atomic(state.table, table(evaluated))
        best = min(evaluated, key=lambda evaluation: evaluation.cost)
        description = described(identity, best, evaluated, calibration_s, plan)
        claim.check()
        state.finish(description, evaluated)
    screen.print(
        f"best of {len(evaluated)} masks: cost {best.cost:.3f} nats, top-1 agreement {best.agreement:.2f}; scored in "
        f"{description['search_s']:.0f} s, ended by {description['ended_by']}; wrote {state.mask}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return state.mask


def scorer(
    full: Model,
    prompts: Sequence[Prompt],
    new_tokens: int,
    block: int,
    alpha: float,
    beta: float,
    cache: str,
    screen: Console,
) -> Callable[[Mask], Evaluation]:
    """Write the calibration text; what scores a mask on it."""
    texts = [
        calibration_text(full.transformer, prompt.ids, new_tokens, full.tokenizer.eos_ids)
        for prompt in track(prompts, "writing calibration text", console=screen)
    ]
    return lambda mask: evaluate(mask, texts, block, alpha, beta, cache)


@dataclass(frozen=True, slots=True)
class State:
    """What a search has on disk: the mask once it is done, the table of all masks, and until then its identity."""

    folder: Path
    name: str

    @property
    def mask(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def table(self) -> Path:
        return self.folder / f"{self.name}.csv"

    @property
    def running(self) -> Path:
        return self.folder / f"{self.name}.search.json"

    def opened(self, identity: Mapping[str, Any], plan: SearchPlan, overwrite: bool) -> dict[Mask, Evaluation]:
        """The masks that a killed search of the same identity has scored; nothing is written yet.

        Raises:
            UserError: a finished mask, or a killed search of something else, and not ``overwrite``.
        """
        if overwrite:
            return {}
        choose = "choose another job.mask_name=NAME, or replace it with job.overwrite=true."
        if self.running.exists():
            before = json.loads(self.running.read_text())
            changed = sorted(key for key in {*before, *identity} if before.get(key) != identity.get(key))
            if changed:
                raise UserError(f"{self.running} is of a search with another {', '.join(changed)}: {choose}")
            return read_table(self.table, plan) if self.table.exists() else {}
        taken = [path for path in (self.mask, self.table) if path.exists()]
        if taken:
            raise UserError(f"{taken[0]} exists: {choose}")
        return {}

    def begin(self, identity: Mapping[str, Any]) -> None:
        """From here on the search can be resumed. A mask that is to be replaced stays until then."""
        with writing(self.running):
            remove_temporaries(self.folder, f"{self.name}.*")
            if not self.running.exists() or json.loads(self.running.read_text()) != identity:
                self.table.unlink(missing_ok=True)
            write_atomic(self.running, json.dumps(identity, indent=2) + "\n")

    def finish(self, description: Mapping[str, Any], evaluated: Sequence[Evaluation]) -> None:
        with writing(self.mask):
            write_atomic(self.table, table(evaluated))
            write_atomic(self.mask, json.dumps(description, indent=2) + "\n")
            self.running.unlink()


def identify(full: Model, settings: Mapping[str, Any], data: Mapping[str, DataSource]) -> dict[str, Any]:
    """Everything that a search's result depends on."""
    return {
        "model": full.name,
        "layers": full.transformer.spec.layers,
        **settings,
        "dtype": str(full.transformer.dtype).removeprefix("torch."),
        "calibration": {
            key: {"source": f"{source.kind}: {source.location}", "rows": source.rows, "sha256": source.sha256}
            for key, source in data.items()
        },
    }


def described(
    identity: Mapping[str, Any],
    best: Evaluation,
    evaluated: Sequence[Evaluation],
    calibration_s: float,
    plan: SearchPlan,
) -> dict[str, Any]:
    """What a mask file says: what is kept, how good it is, and how it was found.

    ``search_s`` are the seconds of proposing and scoring all masks, of every session of the search;
    ``calibration_s`` those of writing the calibration text, in the last one. ``ended_by``: ``patience``, or
    ``evaluations`` where the steps or the masks were used up.
    """
    commit, dirty = git_state()
    mask = best.mask
    return {
        "model": identity["model"],
        "layers": identity["layers"],
        **kept(mask),
        "kept_share": 1 - mask.skip_ratio,
        "cost": best.cost,
        "agreement": best.agreement,
        "positions": best.positions,
        "evaluations": len(evaluated),
        "bayes_evaluations": sum(one.proposal == "bayes" for one in evaluated),
        "ended_by": "patience" if len(evaluated) < plan.most else "evaluations",
        "best_at": 1 + evaluated.index(best),
        "search_s": sum(one.seconds for one in evaluated),
        "calibration_s": calibration_s,
        **identity,
        "git_commit": commit,
        "git_dirty": dirty,
    }


def kept(mask: Mask) -> dict[str, list[int]]:
    """The keys that ``read_mask`` reads."""
    if isinstance(mask, LayerMask):
        return {"kept_layers": list(mask.layers)}
    halves = (LayerMask(mask.attention), LayerMask(mask.mlp))
    return {"kept_attention": list(halves[0].layers), "kept_mlp": list(halves[1].layers)}


def table(evaluated: Sequence[Evaluation]) -> str:
    """Every mask in the order of evaluation; numbers can be read back exactly."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD)
    for one in evaluated:
        writer.writerow((one.mask.text, one.cost, one.agreement, one.positions, round(one.seconds, 3), one.proposal))
    return text.getvalue()


def read_table(path: Path, plan: SearchPlan) -> dict[Mask, Evaluation]:
    """Inverse of ``table``."""
    found: dict[Mask, Evaluation] = {}
    for row in csv.DictReader(path.read_text().splitlines()):
        mask = read_text(row["kept"], plan.depth, plan.units)
        numbers = (float(row["cost"]), float(row["agreement"]), int(row["positions"]), float(row["seconds"]))
        found[mask] = Evaluation(mask, *numbers, row["proposal"])
    return found
