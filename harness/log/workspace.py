"""The W&B workspace that compares cells: what each panel answers. Built here, saved by ``job=workspace``.

Its keys are those that ``harness.log.content`` sends. Needs the packages of the extra ``workspace``.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from harness.log.content import ALL_TASKS, HEADLINE, QUALITY

SPEED, LOSS = f"{HEADLINE}/speedup_decode", f"{HEADLINE}/{QUALITY}_difference"
THRESHOLDS = ("gate.alpha1", "gate.alpha2")
COLUMNS = ("drafter", "alpha1", "alpha2", "skip_ratio", "gamma", "task", "arm")
"""Axes that the table of runs shows, before these numbers."""
NUMBERS = tuple(
    f"{HEADLINE}/{name}"
    for name in ("speedup_decode", QUALITY, f"{QUALITY}_difference", "reject_rate", "full_rate", "mean_accept_length")
)


def build(entity: str, project: str, name: str, tasks: Sequence[str], arms: Sequence[str]) -> Any:
    """A ``wandb_workspaces`` workspace, not saved. ``tasks`` and ``arms`` get panels of their own.

    Asks no server.
    """
    import wandb_workspaces.workspaces as ws

    columns = [f"config:{axis}" for axis in COLUMNS] + [f"summary:{number}" for number in NUMBERS]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            ws.Section(name=title, panels=panels, is_open=True) for title, panels in sections(tasks, arms) if panels
        ],
        settings=ws.WorkspaceSettings(max_runs=100),
        runset_settings=ws.RunsetSettings(
            order=[ws.Ordering(ws.Summary(SPEED), ascending=False)], pinned_columns=columns
        ),
    )


def sections(tasks: Sequence[str], arms: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """Titles and panels, in the order of the page."""
    import wandb_workspaces.reports.v2 as wr

    def config(key: str) -> Any:
        return wr.Config(key)

    def number(key: str) -> Any:
        return wr.SummaryMetric(key)

    def scatter(title: str, x: Any, y: str, z: Any = None) -> Any:
        return wr.ScatterPlot(title=title, x=x, y=number(y), z=z)

    def bars(title: str, metrics: Sequence[str], by: str | None) -> Any:
        grouped = {"groupby": config(by), "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"} if by else {}
        return wr.BarPlot(title=title, metrics=[number(key) for key in metrics], max_bars_to_show=50, **grouped)

    rates = [f"{HEADLINE}/{name}" for name in ("reject_rate", "full_rate", "block_full_rate")]
    routes = [f"{HEADLINE}/{name}" for name in ("accept_share", "regenerate_share", "escalate_share")]
    yield (
        "Speedup against quality",
        [
            scatter("Speedup against quality lost", number(LOSS), SPEED),
            scatter("Speedup against quality", number(f"{HEADLINE}/{QUALITY}"), SPEED),
            scatter("Speedup, quality lost, alpha1", number(LOSS), SPEED, config("gate.alpha1")),
        ],
    )
    axes = [*THRESHOLDS, "skip_ratio", "gamma"]
    lines = [wr.ParallelCoordinatesPlotColumn(metric=config(axis)) for axis in axes]
    lines += [wr.ParallelCoordinatesPlotColumn(metric=number(key)) for key in (*rates[:2], SPEED, LOSS)]
    yield (
        "Thresholds",
        [
            wr.ParallelCoordinatesPlot(title="Thresholds to speedup and quality", columns=lines),
            *(scatter(f"Speedup by {axis}", config(axis), SPEED) for axis in THRESHOLDS),
            *(scatter(f"Quality lost by {axis}", config(axis), LOSS) for axis in THRESHOLDS),
            wr.ParameterImportancePlot(with_respect_to=SPEED),
        ],
    )
    yield (
        "Drafters",
        [
            bars("Speedup by drafter", [SPEED], "drafter"),
            bars("Tokens per block by drafter", [f"{HEADLINE}/mean_accept_length"], "drafter"),
            bars("Drafts rejected by drafter", [f"{HEADLINE}/reject_rate"], "drafter"),
            bars("Quality lost by drafter", [LOSS], "drafter"),
        ],
    )
    yield (
        "Routes",
        [
            bars("Routes of examined drafts, by drafter", routes, "drafter"),
            *(scatter(f"{key.split('/')[1]} by alpha1", config("gate.alpha1"), key) for key in routes),
        ],
    )
    yield (
        "Depth",
        [scatter(f"{key.split('/')[1]} by skip ratio", config("skip_ratio"), key) for key in (*rates, SPEED, LOSS)],
    )
    yield "Block length", [scatter(f"{key.split('/')[1]} by gamma", config("gamma"), key) for key in (SPEED, rates[0])]
    places = [ALL_TASKS, *tasks] if arms else []
    yield (
        "Arms, by task",
        [bars(f"Speedup, {task}", [f"{task}/{arm}/speedup_decode" for arm in arms], None) for task in places],
    )
    yield (
        "Runs",
        [
            wr.RunComparer(diff_only="split"),
            wr.WeavePanelSummaryTable(table_name="tables/metrics"),
            wr.WeavePanelSummaryTable(table_name="tables/samples"),
        ],
    )
    yield (
        "Running",
        [wr.LinePlot(title="Tokens per second so far", x="live/samples", metric_regex="live/.*/decode_tokens_per_s")],
    )


def definition(workspace: Any) -> dict[str, Any]:
    """What would be sent to W&B, as plain values."""
    spec: dict[str, Any] = workspace._to_model().spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return spec


def keys_of(node: Any) -> Iterator[str]:
    """Keys of config and summary that a definition's panels read, as ``config:gate.alpha1``, ``summary:a/b``."""
    if isinstance(node, dict):
        for value in node.values():
            yield from keys_of(value)
    elif isinstance(node, list):
        for value in node:
            yield from keys_of(value)
    elif isinstance(node, str):
        for prefix, kind in (("config:", "config"), ("summary:", "summary"), ("summary_metrics.", "summary")):
            if node.startswith(prefix):
                yield f"{kind}:{node.removeprefix(prefix).replace('.value', '')}"
