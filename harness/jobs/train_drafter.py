"""Train a drafter on what the full verifier writes, and store it with its card. Read top to bottom.

A run that was killed goes on when the same command is given again: texts from the last whole file, training from the
last checkpoint.
"""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from harness.config import FILE_NAME
from harness.drafters.eagle import eagle3_taps
from harness.drafters.weights import CARD, CONFIG, HEAD_TOKENS, WEIGHTS, load_drafter, read_tensors, save_drafter
from harness.environment import environment, git_state
from harness.errors import UserError, unknown
from harness.log import Logger
from harness.model.checkpoint import read_json
from harness.model.load import Model
from harness.model.made import sha256
from harness.prompts import Task, make_prompt
from harness.records import SCHEMA, DataSource, RunRecord
from harness.store import check_writable, new_run_id, write_atomic
from harness.training.copier import begin_copier
from harness.training.data import TextData, prepare
from harness.training.decoding import accept_length, drafter_folder
from harness.training.distil import Distillation, measure
from harness.training.heads import STUDENTS, CopyingStudent, EagleStudent, FusedStudent
from harness.training.loop import CHECKPOINT, Losses, Schedule, Training
from harness.training.on_policy import OnPolicy
from harness.training.recipe import Recipe, Source
from harness.training.students import Student, check_plain
from harness.training.verifier import Borrowed, borrow, checkpoint_folder, layer_choice

OBJECTIVES = ("kd", "draft_opd")
IDENTITY, LOG = "training.json", "log.jsonl"


def train_drafter(
    model: Callable[..., Model],
    tasks: Mapping[str, Task],
    log: Logger,
    results_dir: str,
    seed: int,
    kind: str,
    objective: str,
    layers: list[int],
    turns: int,
    head_tokens: int,
    data: Recipe,
    schedule: Schedule,
    gamma: int,
    decode_prompts: int = 12,
    decode_tokens: int = 64,
    start_from: str | None = None,
    drafter_name: str | None = None,
    fused: bool = False,
    beside: list[int] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``drafters/<name>/`` under ``results_dir``; checkpoints and log go to ``training/<name>/``.

    Args:
        kind: drafter family, one of ``STUDENTS``.
        objective: ``kd``, forward KL on written texts; ``draft_opd``, on blocks that verification rejected.
        layers: of the verifier, to start from; negative ones are counted from its end. ``eagle`` and ``mtp`` have one
            layer and take the last of these, ``medusa`` none.
        turns: how often ``eagle`` and ``mtp`` read their own outputs in training; heads of ``medusa``.
        head_tokens: rows of the verifier's head, of the most frequent tokens, that the drafter may say.
        data: what the verifier writes.
        gamma: tokens drafted a block, where the drafter decodes.
        decode_prompts: held-out prompts that are decoded with the drafter at each measurement.
        decode_tokens: of each, at most.
        start_from: folder of a drafter of this kind, whose weights and head tokens are taken instead.
        drafter_name: None: made of the model's name and the kind.
        fused: ``eagle`` reads states of a low, a middle and a high layer (EAGLE-3); where ``data`` has no taps, those
            of EAGLE-3 are taken.
        beside: layers, of ``data``'s taps, whose states the attention of ``eagle`` reads to copy from the text; such a
            head may begin with one that does not (``start_from``). None or []: it reads the last features alone.
        overwrite: begin anew where a drafter or a training of that name exists.

    Raises:
        UserError: bad settings, anything missing, or a training folder of other settings.
    """
    screen = Console(stderr=True)
    if kind not in STUDENTS:
        raise unknown("job.kind", kind, STUDENTS)
    if objective not in OBJECTIVES:
        raise unknown("job.objective", objective, OBJECTIVES)
    for key, value in (
        *(("job.head_tokens", head_tokens), ("job.decode_prompts", decode_prompts)),
        *(("job.decode_tokens", decode_tokens), ("gamma", gamma), ("job.turns", turns)),
    ):
        if value < 1:
            raise UserError(f"{key}={value}: want at least 1.")
    if fused and kind != "eagle":
        raise UserError(f"job.fused=true is for eagle, not {kind}: set job.kind=eagle or job.fused=false.")
    if beside and (kind != "eagle" or fused):
        raise UserError(
            "job.beside is for an eagle that is not fused: set job.beside=[], or job.kind=eagle job.fused=false."
        )
    if not tasks:
        raise UserError("no task is chosen: write task=quick_four, or another of `python -m harness --help`.")
    for folder in ("drafters", "training"):
        check_writable(Path(results_dir) / folder)
    rows = {name: task.calibration(data.calibration, seed) for name, task in tasks.items()}
    full = model(slim_mask=None, notify=lambda line: screen.print(line, style="dim", highlight=False))
    checkpoint_folder(full)
    check_plain(full.transformer.spec)
    chosen = layer_choice(layers, full.transformer.spec.layers)
    depth = full.transformer.spec.layers
    if fused and not data.taps:
        data = replace(data, taps=tuple(eagle3_taps(depth)))
    if (fused and len(data.taps) != 3) or not all(type(tap) is int and 0 <= tap < depth for tap in data.taps):
        raise UserError(f"job.data.taps={list(data.taps)}: want three layers of the verifier, 0 to {depth - 1}.")
    if absent := [tap for tap in beside or () if tap not in data.taps]:
        raise UserError(f"job.beside has layers {absent}, whose states are not kept: name them in job.data.taps.")
    name = drafter_name or f"{full.slug}_{kind}"
    if not FILE_NAME.fullmatch(name):
        raise UserError(f"job.drafter_name={name!r}: want a plain file name of letters, digits, '_', '-' and '.'.")
    output, work = Path(results_dir) / "drafters" / name, Path(results_dir) / "training" / name

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        console=screen,
    ) as progress:
        identity = {
            **{
                "model": full.name,
                "kind": kind,
                "objective": objective,
                "layers": chosen,
                "turns": turns,
                "seed": seed,
            },
            **{
                "head_tokens": head_tokens,
                "data": asdict(data) | {"taps": list(data.taps)},
                "schedule": asdict(schedule),
            },
            **({"fused": True} if fused else {}),
            **({"beside": list(beside)} if beside else {}),
            **{"gamma": gamma, "start_from": start_from and sha256(start_file(Path(start_from)))},
            "rows": {key: source.sha256 for key, (_, source) in rows.items()},
        }
        claim(work, output, identity, overwrite)
        texts = write_texts(full, tasks, rows, data, seed, progress)
        make = STUDENTS[kind]
        if fused:
            make = partial(FusedStudent, taps=data.taps, sizes=texts.tap_sizes())
        elif beside:
            make = partial(CopyingStudent, beside=tuple(beside), kept=data.taps)
        student = make_student(full, kind, make, chosen, turns, texts.frequent(head_tokens), start_from)
        copies = start_from is not None and "beside" in read_json(Path(start_from).expanduser() / CONFIG)
        if beside and not copies and not (work / CHECKPOINT).is_file():
            begin_copier(student, texts, seed)
        parent = read_json(Path(start_from).expanduser() / CARD) if start_from else None
        losses: Losses = Distillation(student, texts, schedule.prompt_weight)
        if objective == "draft_opd":
            losses = OnPolicy(student, texts, full, gamma, data.reply_tokens)
        training = Training(student, texts, schedule, seed, work, losses)
        prompts = [text.tokens[: text.prompt_length] for text in texts.held_out[:decode_prompts]]
        bench = partial(held_out_numbers, full, student, texts, prompts, gamma, decode_tokens)
        if training.resume():
            screen.print(f"going on after step {training.at.step}", style="dim", highlight=False)
        try:
            log.start(describe(full, name, rows, seed), identity)
            follow(training, bench, work, log, progress)
        except BaseException:
            log.close(failed=True)
            raise
        log.close()
    held_out = bench()
    save(output, student, training, texts, identity, held_out, parent)
    screen.print(
        f"{training.at.step} steps, {training.at.seconds:.0f} s; held out: "
        + ", ".join(f"{key} {value:.3f}" for key, value in held_out.items())
        + f"; wrote {output}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return output


def describe(full: Model, name: str, rows: Mapping[str, tuple[list[Any], DataSource]], seed: int) -> RunRecord:
    """The training's identity for a dashboard."""
    commit, dirty = git_state()
    return RunRecord(
        run_id=new_run_id(name),
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=full.name,
        temperature=0.0,
        seed=seed,
        arms=(),
        data={key: source for key, (_, source) in rows.items()},
        prompts_sha={},
        task_metrics={},
        git_commit=commit,
        git_dirty=dirty,
        env=environment(),
        status="running",
    )


def claim(work: Path, output: Path, identity: Mapping[str, Any], overwrite: bool) -> None:
    """Make ``work`` the folder of these settings, or find that it is.

    Raises:
        UserError: it, or a drafter of that name, was made with others, and may not be overwritten.
    """
    path = work / IDENTITY
    text = json.dumps(identity, indent=2) + "\n"
    if overwrite:
        for file in work.glob("*"):
            file.unlink()
    elif path.is_file() and path.read_text() != text:
        old = json.loads(path.read_text())
        differing = ", ".join(key for key in identity if old.get(key) != identity[key])
        raise UserError(
            f"{work} is a training with other settings ({differing}): choose another job.drafter_name=NAME, or begin "
            "anew with job.overwrite=true."
        )
    elif not path.is_file() and (output / CARD).is_file():
        raise UserError(f"{output} exists: choose another job.drafter_name=NAME, or replace it: job.overwrite=true.")
    write_atomic(path, text)


def write_texts(
    full: Model,
    tasks: Mapping[str, Task],
    rows: Mapping[str, tuple[list[Any], DataSource]],
    data: Recipe,
    seed: int,
    progress: Progress,
) -> TextData:
    """The texts of the recipe, read or written."""
    sources = [
        Source(
            name,
            tasks[name].template.split("{input}")[0],
            tuple(example.input for example in found),
            tuple(make_prompt(full, name, tasks[name], example).ids for example in found),
            tasks[name].template.split("{input}")[-1],
        )
        for name, (found, _) in rows.items()
    ]
    bar = progress.add_task("writing texts", total=data.held_out + data.sequences, said="")

    def show(done: int, count: int, speed: float) -> None:
        progress.update(bar, completed=done, total=count, said=f"{done}/{count}, {speed:.0f} tokens/s")

    described = {name: {"source": f"{s.kind}: {s.location}", "sha256": s.sha256} for name, (_, s) in rows.items()}
    return prepare(full, data, sources, described, seed, show)


def start_file(folder: Path) -> Path:
    """The weights of ``start_from``."""
    path = folder.expanduser() / WEIGHTS
    if not path.is_file():
        raise UserError(f"job.start_from={str(folder)!r}: {path} does not exist; want a drafter's folder.")
    return path


def make_student(
    full: Model,
    kind: str,
    make: Callable[[Borrowed, list[int], int], Any],
    layers: list[int],
    turns: int,
    head_tokens: Tensor,
    start_from: str | None,
) -> Any:
    """A student that begins with the verifier's layers, or where a drafter was left.

    Raises:
        UserError: a drafter that is not whole, or of another kind, verifier or number of layers.
    """
    if start_from is None:
        return make(borrow(full, head_tokens), layers, turns)
    folder = Path(start_from).expanduser()
    stored = read_tensors(start_file(folder))
    borrowed = borrow(full, stored[HEAD_TOKENS].long())
    student = made = make(borrowed, layers, turns)
    if isinstance(student, CopyingStudent) and "beside" not in read_json(folder / CONFIG):
        made = EagleStudent(borrowed, layers, turns)
    shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    found = load_drafter(folder, kind, full, lambda config, spec: shapes)
    weights = {name: found.tensors[name].float() for name in shapes}
    student.load_state_dict(weights if made is student else student.widened(weights))
    return student


def held_out_numbers(
    full: Model,
    student: Student,
    texts: TextData,
    prompts: Sequence[Sequence[int]],
    gamma: int,
    new_tokens: int,
) -> dict[str, float]:
    """Loss and acceptance at the positions of held-out texts, and how long the drafter's accepted runs are."""
    with drafter_folder(student) as folder:
        length = accept_length(full, student.kind, folder, prompts, gamma, new_tokens)
    return {**measure(student, texts), "mean_accept_length": length}


def follow(
    training: Training, bench: Callable[[], dict[str, float]], work: Path, log: Logger, progress: Progress
) -> None:
    """Run the training; its numbers to the screen, to ``log.jsonl`` and to the logger."""
    schedule = training.schedule
    path = work / LOG
    keep_until(path, training.at.step)
    bar = progress.add_task("training", total=1.0, said="")
    measured = training.at.seconds
    for numbers in training.run():
        at = training.at
        said = f"step {at.step}, loss {numbers['loss']:.3f}, lr {numbers['lr']:.1e}, {numbers['tokens_s']:.0f} tokens/s"
        progress.update(bar, completed=schedule.passed(at.step, at.seconds), said=said)
        line: dict[str, float] = {}
        if at.step % schedule.log_steps == 0:
            line |= numbers
        if at.seconds - measured >= 60 * schedule.eval_minutes:
            line |= bench()
            measured = at.seconds
        if line:
            line |= {"step": at.step, "epoch": at.epoch, "seconds": at.seconds, "tokens": at.tokens}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            log.numbers(at.step, line)
    progress.update(bar, completed=1.0)


def keep_until(path: Path, step: int) -> None:
    """Drop what a killed run logged behind its last checkpoint, and a half-written line."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    write_atomic(path, "".join(kept))


def save(
    output: Path,
    student: Student,
    training: Training,
    texts: TextData,
    identity: Mapping[str, Any],
    held_out: Mapping[str, float],
    parent: Mapping[str, Any] | None,
) -> None:
    """The drafter's folder with its card, in which stands the card of the drafter that it began with."""
    commit, dirty = git_state()
    recipe = texts.recipe
    card = {
        "command": f"python -m harness {shlex.join(sys.argv[1:])}",
        "data": (
            f"{len(texts.trained)} texts, {texts.tokens} tokens, written by the full verifier in {recipe['dtype']} "
            f"(digest {texts.digest}; harness/training/recipe.py; {json.dumps(identity['data'])}; calibration rows of "
            + ", ".join(f"{name}: {row['source']}" for name, row in recipe["rows"].items())
            + ")"
        ),
        "seed": identity["seed"],
        "seconds": round(training.at.seconds, 3),
        "held_out": {key: round(value, 4) for key, value in held_out.items()},
        "objective": identity["objective"],
        "verifier_layers": identity["layers"],
        "schedule": identity["schedule"],
        "turns": identity["turns"],
        **({"beside": identity["beside"]} if "beside" in identity else {}),
        "gamma": identity["gamma"],
        "start_from": identity["start_from"],
        **({"parent": parent} if parent else {}),
        "steps": training.at.step,
        "trained_tokens": training.at.tokens,
        "epochs": training.at.epoch + 1,
        "cpu": environment().get("cpu", ""),
        "threads": torch.get_num_threads(),
        "git_commit": commit,
        "git_dirty": dirty,
    }
    weights = {**student.state_dict(), HEAD_TOKENS: student.borrowed.head_tokens}
    save_drafter(output, student.kind, student.config, weights, card)
