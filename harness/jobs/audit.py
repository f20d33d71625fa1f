"""The worst case of a run: ``python -m harness job=audit``. Scores stored outputs again; measures no time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track

from harness.audit.figure import audit_figure
from harness.audit.judge import audited, decided
from harness.audit.page import page
from harness.audit.records import AuditedOutput
from harness.audit.tables import files, summary_frame
from harness.compare import BASELINE
from harness.config import FILE_NAME, called, check_call
from harness.decode.slim import Slim, masked, only
from harness.errors import UserError
from harness.jobs.report import WIDTH
from harness.metrics import complete_prompts
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.pairing import merged
from harness.prompts import Prompt, gone_on, make_prompts
from harness.records import SampleRecord
from harness.report.figures import save
from harness.report.tables import RunReport, console_table, identity
from harness.sampling import Sampling
from harness.store import RUN, RunData, check_writable, find_runs, read, read_config, write_atomic

MakeSlim = Callable[[Tiers, Model], Slim | Sequence[Slim]]


def audit(results_dir: str, run: str | None = None) -> list[Path]:
    """Write ``results/tables/<name>_audit.*``, ``results/figures/<name>_audit.*``; return the paths.

    The model and the prompts are made anew from the run's ``config.yaml``; every prompt must be the one it was.

    Args:
        run: a run's id or folder; None is the newest finished run.

    Raises:
        UserError: no such run, one without decisions of a slim verifier, or one that can no longer be made anew.
    """
    screen = Console(stderr=True)
    folder = Path(run) if run is not None and (Path(run) / RUN).is_file() else find_runs(results_dir, run and [run])[0]
    data, settings = read(folder), read_config(folder)
    name = f"{settings.get('name', 'run')}_audit"
    if not FILE_NAME.fullmatch(name):
        raise UserError(f"{folder}: config.yaml has name={settings.get('name')!r}, which is no plain file name.")
    tables, figures = Path(results_dir) / "tables", Path(results_dir) / "figures"
    for place in (tables, figures):
        check_writable(place)
    samples = samples_to_audit(data, settings)
    model: Model = made(settings, "model", folder)(notify=lambda line: screen.print(line, style="dim"))
    prompts = prompts_of(data, settings, model, samples, folder)
    makers = {arm: slim_of(settings, arm, folder) for arm in dict.fromkeys(one.arm for one in samples)}
    outputs = list(audit_all(data, settings, model, makers, prompts, samples, screen))
    facts = identity(RunReport(data.run, (), (), settings))
    texts = files(data.run, outputs, facts, name)
    paths = []
    for file, text in {**texts, f"{name}.html": page(data.run, outputs, facts)}.items():
        write_atomic(tables / file, text)
        paths.append(tables / file)
    paths += save(audit_figure(outputs), figures, name)
    frame = summary_frame(outputs)
    table = console_table("Tokens of the slim verifier that the full one would not have written", list(frame), "")
    for row in frame.itertuples(index=False):
        table.add_row(*map(escape, row))
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
    for path in paths:
        console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    return paths


def samples_to_audit(data: RunData, settings: Mapping[str, Any]) -> list[SampleRecord]:
    """Outputs in which one slim verifier decided something, of prompts that all arms decoded.

    Raises:
        UserError: there is none.
    """
    found = [
        one
        for one in merged(complete_prompts(data.run, data.samples))
        if "masks" not in (method_of(settings, one.arm).get("slim") or {})
        and any(any(decided(block)) for block in one.generation.blocks)
    ]
    if not found:
        raise UserError(
            f"run {data.run.run_id}: no arm has a token that its one slim verifier decided; audit a run with "
            "method=via_sd and without slim=several."
        )
    return found


def made(settings: Mapping[str, Any], key: str, folder: Path) -> Any:
    """What the node at ``key`` of a run's config makes.

    Raises:
        UserError: no such node, or one that this version does not take.
    """
    node: Any = settings
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise UserError(f"{folder}: its config.yaml has no {key}: audit needs the config that the run was made with.")
    check_call(key, node, node)
    return called(node)


def prompts_of(
    data: RunData, settings: Mapping[str, Any], model: Model, samples: list[SampleRecord], folder: Path
) -> dict[tuple[str, str], Prompt]:
    """The prompts of ``samples`` by task and example id.

    Raises:
        UserError: one that is missing or another than it was.
    """
    found: dict[tuple[str, str], Prompt] = {}
    said = {(one.task, one.example_id): one.text for one in data.samples if one.arm == BASELINE}
    answers: dict[tuple[str, str], tuple[Prompt, str]] = {}
    for name in dict.fromkeys(one.task for one in samples):
        task = made(settings, f"tasks.{name}", folder)
        examples, _ = task.load(int(settings["limit"]), data.run.seed)
        for waiting in make_prompts(model, name, task, examples):
            key = (name, waiting.example.id)
            found[key] = gone_on(model, waiting, answers, int(settings["max_new_tokens"]))
            if key in said:
                answers[key] = (found[key], said[key])
    for one in samples:
        prompt = found.get((one.task, one.example_id))
        if prompt is None or prompt.sha != one.prompt_sha:
            raise UserError(
                f"run {one.run_id}: the prompt of {one.task}, example {one.example_id} is no longer what it was: give "
                "audit the rows, the tokenizer and the version of the harness that the run had, or run it again."
            )
    return found


def slim_of(settings: Mapping[str, Any], arm: str, folder: Path) -> MakeSlim:
    """What made the slim verifier of an arm; the model's own mask where its config says nothing."""
    return made(settings, f"methods.{arm}.slim", folder) if "slim" in method_of(settings, arm) else masked


def method_of(settings: Mapping[str, Any], arm: str) -> Mapping[str, Any]:
    """The config of an arm; empty where it has none."""
    found: Mapping[str, Any] = settings.get("methods", {}).get(arm, {})
    return found


def audit_all(
    data: RunData,
    settings: Mapping[str, Any],
    model: Model,
    makers: Mapping[str, MakeSlim],
    prompts: Mapping[tuple[str, str], Prompt],
    samples: list[SampleRecord],
    screen: Console,
) -> Iterator[AuditedOutput]:
    """Every output in turn, over the tiers of its arm."""
    sampling = Sampling(data.run.temperature, float(settings.get("top_p", 1.0)), int(settings.get("top_k", 0)))
    baselines = {(one.task, one.example_id): one for one in data.samples if one.arm == BASELINE}
    longest = max(one.prompt_tokens + len(one.generation.token_ids) for one in samples)
    tiers = {arm: Tiers(model.transformer, model.transformer.new_cache(longest + 1)) for arm in makers}
    slims = {arm: only(make(tiers[arm], model), "job=audit").tier for arm, make in makers.items()}
    for one in track(samples, "scoring outputs again", console=screen):
        key = (one.task, one.example_id)
        tiers[one.arm].rollback(0)
        writes = method_of(settings, one.arm).get("ending", "slim") == "slim"
        over = (tiers[one.arm], slims[one.arm], model.tokenizer, prompts[key].ids)
        yield audited(*over, one, baselines[key], sampling, writes)
