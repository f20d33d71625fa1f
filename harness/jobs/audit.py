"""The worst case of a run: ``python -m harness job=audit``. Scores stored outputs again; measures no time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track

from harness.audit.continued import with_continuations
from harness.audit.figure import audit_figure
from harness.audit.judge import Writes, audited, decided
from harness.audit.page import page
from harness.audit.records import AuditedOutput, worst_first
from harness.audit.tables import files, summary_frame
from harness.compare import BASELINE
from harness.config import FILE_NAME, called, check_call
from harness.decode.slim import Slim, masked
from harness.errors import UserError
from harness.execution.programs import permit
from harness.jobs.report import WIDTH
from harness.measuring import scored
from harness.metrics import complete_prompts
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.pairing import merged
from harness.prompts import Prompt, gone_on, make_prompts
from harness.records import SampleRecord
from harness.report.figures import save
from harness.report.lines import RunReport
from harness.report.tables import console_table, identity
from harness.sampling import Sampling
from harness.scoring import METRICS
from harness.store import RUN, RunData, check_writable, find_runs, read, read_config, write_atomic, writing

MakeSlim = Callable[[Tiers, Model], Slim | Sequence[Slim]]


def audit(
    results_dir: str,
    run: str | None = None,
    continue_prompts: int = 5,
    continue_tokens: int = 8,
    allow_code_execution: bool = False,
) -> list[Path]:
    """Write ``results/tables/<name>_audit.*``, ``results/figures/<name>_audit.*``; return the paths.

    The model and the prompts are made anew from the run's ``config.yaml``; every prompt must be the one it was.

    Args:
        run: a run's id or folder; None is the newest finished run.
        continue_prompts: worst prompts for which the full verifier goes on from wrong tokens; 0: for none.
        continue_tokens: the first so many wrong tokens of each of them.
        allow_code_execution: run the programs that such a continuation may be; else they get no score.

    Raises:
        UserError: no such run, one without decisions of a slim verifier, or one that can no longer be made anew.
    """
    if continue_prompts < 0 or continue_tokens < 1:
        raise UserError(
            f"job.continue_prompts={continue_prompts}, job.continue_tokens={continue_tokens}: want 0 or more prompts "
            "and at least 1 token."
        )
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
    outputs = continued(
        *(outputs, samples, settings, model, prompts, continue_prompts, continue_tokens, allow_code_execution, screen)
    )
    facts = identity(RunReport(data.run, (), (), settings))
    texts = files(data.run, outputs, facts, name)
    paths = []
    with writing(tables):
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
    """Outputs in which a slim verifier decided something, of prompts that all arms decoded.

    Raises:
        UserError: there is none, or it is not known which one decided.
    """
    found = [
        one
        for one in merged(complete_prompts(data.run, data.samples))
        if any(any(decided(block, writes_of(settings, one.arm))) for block in one.generation.blocks)
    ]
    if not found:
        raise UserError(
            f"run {data.run.run_id}: no arm has a token that a slim verifier decided; audit a run with method=via_sd."
        )
    for one in found:
        several = len((method_of(settings, one.arm).get("slim") or {}).get("masks") or ()) > 1
        if several and any(block.drafted and not block.deciders for block in one.generation.blocks):
            raise UserError(
                f"run {data.run.run_id}: {one.arm} has several slim verifiers, and this older run does not say which "
                "one decided a token: run it again."
            )
    return found


def writes_of(settings: Mapping[str, Any], arm: str) -> Writes:
    """What the slim verifier of an arm writes itself."""
    method = method_of(settings, arm)
    return Writes(method.get("ending", "slim") == "slim", method.get("bonus", "none") == "slim")


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
    slims = {arm: tiers_of(make(tiers[arm], model)) for arm, make in makers.items()}
    for one in track(samples, "scoring outputs again", console=screen):
        key = (one.task, one.example_id)
        tiers[one.arm].rollback(0)
        over = (tiers[one.arm], slims[one.arm], model.tokenizer, prompts[key].ids)
        yield audited(*over, one, baselines[key], sampling, writes_of(settings, one.arm))


def tiers_of(made: Slim | Sequence[Slim]) -> list[Tier]:
    return [one.tier for one in ((made,) if isinstance(made, Slim) else made)]


def continued(
    outputs: list[AuditedOutput],
    samples: Sequence[SampleRecord],
    settings: Mapping[str, Any],
    model: Model,
    prompts: Mapping[tuple[str, str], Prompt],
    count: int,
    first: int,
    allow_code_execution: bool,
    screen: Console,
) -> list[AuditedOutput]:
    """``outputs``, in their order; the ``count`` worst ones with what the full verifier makes of them."""
    worst = worst_first(outputs)[:count]
    if not worst:
        return outputs
    tasks = {one.task: prompts[one.task, one.example_id].task for one in worst}
    running = {name: task.metrics for name, task in tasks.items() if allow_code_execution}
    permit(running, allow_code_execution)
    kept = {(one.task, one.example_id, one.arm): one.generation.token_ids for one in samples}
    most = int(settings["max_new_tokens"])
    tiers = Tiers(model.transformer, model.transformer.new_cache(max(len(one.ids) for one in prompts.values()) + most))
    found = {}
    for one in track(worst, "the full verifier goes on from wrong tokens", console=screen):
        executes = any(METRICS[name].executes for name in tasks[one.task].metrics)

        def score(prompt: Prompt, text: str, output: AuditedOutput = one, runs: bool = executes) -> float | None:
            return None if runs and not allow_code_execution else scored(prompt, text)[1].get(output.metric)

        key = (one.task, one.example_id)
        found[id(one)] = with_continuations(one, kept[*key, one.arm], tiers, model, prompts[key], score, first, most)
    return [found.get(id(one), one) for one in outputs]
