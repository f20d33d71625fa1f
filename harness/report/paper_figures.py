"""The counterparts of the paper's Fig. 2, 4, 5, 6, 7, 8 and 9, from the runs of ``conf/experiment/paper``.

A figure is chosen by the run's name and drawn from its arms alone; the paper's points stand behind it, named by their
pair, where they are of the same set and temperature.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.compare import BASELINE, divide
from harness.metrics import DIFFERENCE
from harness.report.figures import RATES
from harness.report.lines import Line, RunReport, lines
from harness.report.paper_panels import Mark, Pane, Points, Series, by_task, mark, panels
from harness.report.paper_points import pair_of, paper_points

SOURCES = {"dimr": "DIMR's mask", "even": "evenly spaced", "random": "random"}
READINGS = ("strictness", "literal")
RELIANCE = ("escalate_share", "reject_rate", "full_rate", "block_full_rate")
"""What reliance on the full verifier may mean: the paper's Fig. 6 does not say."""
HEADS = {"eagle2+via_sd": "EAGLE-2", "eagle3+via_sd": "EAGLE-3"}
"""The paper's drafters of Fig. 5 that read the full verifier's states, as ours do."""
THIRD = "_via_sd"
"""Ends the name of an arm that has a slim tier where the arm without this ending has none."""

TWINS = {"fig7": "fig8", "fig8": "fig7"}
"""Figures of the paper with the same arms on two pairs: on any other model one run is a counterpart of both."""

ASIDE = 0.02
"""Between the paper's points of neighbouring alpha2 at one alpha1, on the axis of alpha1."""

BARS = "Bars: 95 % intervals over prompts. Every arm with a slim tier is lossy."
DIGITS = r"([\d.]*\d)"


def paper_figure(report: RunReport) -> Figure | None:
    """The figure of a run of such an experiment, by its name; None of other runs.

    An arm can be dropped from an experiment: where none is left that the figure is about, there is none either.
    """
    draw = DRAWN.get(str(report.settings.get("name")))
    return draw(report) if draw else None


def twin_figures(report: RunReport) -> dict[str, Figure]:
    """The same arms beside the points of another figure of the paper, which differs in its pair alone; by its name.

    None of a run of one of the paper's own pairs.
    """
    twin = TWINS.get(str(report.settings.get("name")))
    if twin is None or pair_of(report.settings) is not None or not (figure := thresholds_figure(report, twin)):
        return {}
    return {twin: figure}


def arms_of(report: RunReport) -> list[str]:
    return [arm.arm for arm in report.run.arms]


def points_of(known: pd.DataFrame, key: str) -> Points:
    """(x, value) by label; x is the number behind ``key`` in the name of the method."""
    x = known.method.str.extract(rf"{key}={DIGITS}")[0].astype(float)
    found: dict[str, list[tuple[float, float]]] = {}
    for name, place, value in zip(known.label, x, known.value, strict=True):
        found.setdefault(name, []).append((place, value))
    return found


# Fig. 2: the slim verifier beside an independent model between drafter and verifier.


def between_figure(report: RunReport) -> Figure | None:
    """Fig. 2: speedup by task of what stands between drafter and full verifier, and what quality it costs."""
    if not any(arm.startswith("via_sd") for arm in arms_of(report)):
        return None
    looks = {arm: index for index, arm in enumerate(arms_of(report))}
    kinds = {"slim_intermediate": "45 % skipped", "independent_12b": "12B between"}

    def series(metric: str) -> Callable[[Sequence[Line]], Iterator[Series]]:
        def made(task_lines: Sequence[Line]) -> Iterator[Series]:
            for line in (one for one in task_lines if one.arm.arm != BASELINE):
                chosen = line.run.task_metrics[line.task][0] + DIFFERENCE if metric == DIFFERENCE else metric
                found = mark(0, line.metrics.get(chosen), hollow=not line.arm.lossless)
                yield Series(named(line), looks[line.arm.arm], tuple(found))

        return made

    def paper(task: str) -> Points:
        known = paper_points("fig2", task, report)
        rows = zip(known.method, known.label, known.value, strict=True)
        return {
            label.replace("paper,", f"paper, {kinds[start]},"): [(0, value)]
            for method, label, value in rows
            for start in kinds
            if method.startswith(start)
        }

    speed = Pane("Decode speedup", series("speedup_decode"), paper, speed=True)
    quality = Pane("Quality minus the baseline's (points)", series(DIFFERENCE), zero=True)
    return by_task(report, [speed, quality], "Hollow: lossy. Bars: 95 % intervals over prompts.")


def named(line: Line) -> str:
    return line.arm.arm if line.arm.lossless else f"{line.arm.arm} (lossy)"


# Fig. 4: the skip ratio.


def by_skip(arm: str) -> tuple[str, int] | None:
    """Source of the mask and percent of layers skipped, of an arm that is named for them."""
    found = re.fullmatch(rf"({'|'.join(SOURCES)})_(\d+)", arm)
    return (found[1], int(found[2])) if found else None


def skip_figure(report: RunReport) -> Figure | None:
    """Fig. 4: speedup and rejection over the share of layers skipped, one line a source of masks."""
    if not any(map(by_skip, arms_of(report))):
        return None

    def pane(metric: str, label: str, published: str, **how: bool) -> Pane:
        def series(task_lines: Sequence[Line]) -> Iterator[Series]:
            placed = [(place, line) for line in task_lines if (place := by_skip(line.arm.arm))]
            for index, (source, name) in enumerate(SOURCES.items(), 1):
                mine = sorted(((at, line) for (kind, at), line in placed if kind == source), key=lambda pair: pair[0])
                yield Series(name, index, tuple(one for at, line in mine for one in mark(at, line.metrics[metric])))

        def paper(task: str) -> Points:
            known = paper_points("fig4", task, report)
            return points_of(known[known.metric == published], "skip")

        return Pane(label, series, paper, **how)

    speed = pane("speedup_decode", "Decode speedup", "speedup", speed=True)
    rejected = pane("reject_rate", "Examined drafts not kept", "reject_rate", whole=True)
    return panels(report, [speed, rejected], "Layers skipped (%)", BARS)


# Fig. 5: a head that drafts, with and without the slim tier.


def added_figure(report: RunReport) -> Figure | None:
    """Fig. 5: what the slim tier adds to a drafting head: speed and rejection of both, and their relative change."""
    arms = arms_of(report)
    added = {arm.removesuffix(THIRD): arm for arm in arms if arm.endswith(THIRD) and arm.removesuffix(THIRD) in arms}
    if not added:
        return None
    shown = [arm for pair in added.items() for arm in pair]
    looks = {arm: index for index, arm in enumerate(shown, 1)}

    def absolute(metric: str) -> Callable[[Sequence[Line]], Iterator[Series]]:
        def series(task_lines: Sequence[Line]) -> Iterator[Series]:
            for line in task_lines:
                if line.arm.arm in looks:
                    found = mark(0, line.metrics[metric], hollow=not line.arm.lossless)
                    yield Series(named(line), looks[line.arm.arm], tuple(found))

        return series

    def relative(metric: str, sign: int) -> Callable[[Sequence[Line]], Iterator[Series]]:
        def series(task_lines: Sequence[Line]) -> Iterator[Series]:
            known = {line.arm.arm: line.metrics[metric].value for line in task_lines}
            for two, three in added.items():
                ratio = change(known.get(two), known.get(three))
                marks = () if ratio is None else (Mark(0, 100 * sign * ratio, None, None, hollow=True),)
                yield Series(f"{three} over {two} (lossy)", len(arms) + looks[two], marks)

        return series

    def paper(metric: str) -> Callable[[str], Points]:
        def points(task: str) -> Points:
            known = paper_points("fig5", task, report)
            known = known[(known.metric == metric) & known.method.isin(HEADS)]
            rows = zip(known.method, known.label, known.value, strict=True)
            return {label.replace("paper,", f"paper, {HEADS[method]},"): [(0, value)] for method, label, value in rows}

        return points

    panes = [
        Pane("Decode speedup", absolute("speedup_decode"), speed=True),
        Pane("Examined drafts not kept", absolute("reject_rate"), whole=True),
        Pane("Speed gained (%)", relative("speedup_decode", 1), paper("speedup_gain_percent"), zero=True),
        Pane("Rejection cut (%)", relative("reject_rate", -1), paper("reject_rate_cut_percent"), zero=True),
    ]
    remark = (
        "Hollow: lossy. Bars: 95 % intervals over prompts; relative changes have none. The paper's heads draft trees."
    )
    return by_task(report, panes, remark)


def change(before: float | None, after: float | None) -> float | None:
    """after / before - 1; None where either is undefined or there is nothing to change."""
    ratio = None if before is None or after is None else divide(after, before)
    return None if ratio is None else ratio - 1


# Fig. 6, 7 and 8: the thresholds.


def thresholds(settings: Mapping[str, Any], arm: str) -> tuple[float, float] | None:
    """From which ratio an arm's gate accepts, and below which it escalates; None without such a gate."""
    gate = (settings.get("methods") or {}).get(arm, {}).get("gate") or {}
    name = str(gate.get("_target_", "")).rpartition(".")[2].lower()
    return reading_at(name, gate["alpha1"], gate["alpha2"]) if name in READINGS else None


def reading_at(reading: str, alpha1: float, alpha2: float) -> tuple[float, float]:
    """(accept from, escalate below) of a reading, as ``harness.decode.gate.thresholds``: escalation is asked first."""
    accept, keep = (alpha1, alpha2) if reading == "strictness" else (1 - alpha1, 1 - alpha2)
    return round(max(accept, keep), 6), round(keep, 6)


def grid(report: RunReport) -> tuple[list[float], list[float]]:
    """All alpha1 and all alpha2 of the run's gates."""
    methods = report.settings.get("methods") or {}
    gates = [node["gate"] for arm, node in methods.items() if thresholds(report.settings, arm) is not None]
    return sorted({gate["alpha1"] for gate in gates}), sorted({gate["alpha2"] for gate in gates})


def at_points(
    report: RunReport, task_lines: Sequence[Line], reading: str, points: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float, Line, bool]]:
    """The line that measured each point (alpha1, alpha2) of a reading, and whether it leaves nothing to regenerate.

    Points with the same thresholds share an arm, also across readings.
    """
    measured = {thresholds(report.settings, line.arm.arm): line for line in task_lines}
    for alpha1, alpha2 in points:
        accept, keep = reading_at(reading, alpha1, alpha2)
        if line := measured.get((accept, keep)):
            yield alpha1, alpha2, line, accept == keep


def reliance_figure(report: RunReport) -> Figure | None:
    """Fig. 6: the rates that reliance on the full verifier may mean, over alpha2, one line a reading."""
    alphas1, alphas2 = grid(report)
    if not alphas1:
        return None

    def pane(metric: str, label: str) -> Pane:
        def series(task_lines: Sequence[Line]) -> Iterator[Series]:
            for index, reading in enumerate(READINGS, 1):
                for place, alpha1 in enumerate(alphas1):
                    points = at_points(report, task_lines, reading, [(alpha1, alpha2) for alpha2 in alphas2])
                    marks = [one for _, x, line, bare in points for one in mark(x, line.metrics[metric], bare)]
                    yield Series(f"{reading}, alpha1 {alpha1:g}", index + len(READINGS) * place, tuple(marks))

        return Pane(label, series, lambda task: points_of(paper_points("fig6", None, report), "alpha2"), whole=True)

    remark = f"Hollow: no token can be regenerated. The paper states neither set nor rate of its points. {BARS}"
    return panels(report, [pane(rate, RATES[rate]) for rate in RELIANCE], "alpha2", remark)


def thresholds_figure(report: RunReport, source: str | None = None) -> Figure | None:
    """Fig. 7 and 8: speedup and quality over alpha1, one line an alpha2, each reading in columns of its own.

    ``source``: whose points of the paper stand behind; None: those of the figure that the run is named after.
    """
    own = str(report.settings["name"])
    alphas1, alphas2 = grid(report)
    if not alphas1:
        return None

    def pane(metric: str, label: str, reading: str) -> Pane:
        def series(task_lines: Sequence[Line]) -> Iterator[Series]:
            chosen = metric or task_lines[0].run.task_metrics[task_lines[0].task][0]
            for index, alpha2 in enumerate(alphas2, 1):
                points = at_points(report, task_lines, reading, [(alpha1, alpha2) for alpha1 in alphas1])
                marks = [one for x, _, line, bare in points for one in mark(x, line.metrics[chosen], bare)]
                yield Series(f"alpha2 {alpha2:g}", index, tuple(marks))

        def paper(task: str) -> Points:
            known = paper_points(source or own, task, report)
            return by_alpha2(known) if metric else {}

        return Pane(label.format(reading), series, paper, speed=bool(metric))

    kinds = {"speedup_decode": "Speedup,\n{}", "": "Quality,\n{}\n"}
    panes = [pane(metric, label, reading) for metric, label in kinds.items() for reading in READINGS]
    remark = f"Hollow: no token can be regenerated, so that alpha1 does not matter. {BARS}"
    remark += " The paper's points of an alpha1 stand side by side."
    if source is not None:
        remark += f" Ours are those of the run {own}: the paper's {source} has its arms on another pair."
    figure = panels(report, panes, "alpha1", remark)
    figure.axes[0].set_xticks(alphas1[:: 1 + len(alphas1) // 4])  # shared by all panels
    return figure


def by_alpha2(known: pd.DataFrame) -> Points:
    """The paper's points over alpha1, those of each alpha2 by themselves and a little aside: else they hide another."""
    alphas2 = known.method.str.extract(rf"alpha2={DIGITS}")[0]
    found: dict[str, list[tuple[float, float]]] = {}
    every = sorted(set(alphas2))
    for place, alpha2 in enumerate(every):
        aside = ASIDE * (place - (len(every) - 1) / 2)
        for label, points in points_of(known[alphas2 == alpha2], "alpha1").items():
            named = label.replace("paper,", f"paper, alpha2 {alpha2},")
            found[named] = [(x + aside, y) for x, y in points]
    return found


# Fig. 9: gamma.


def gamma_of(arm: str) -> int | None:
    """The block length of an arm that is named for it."""
    found = re.fullmatch(r"gamma_(\d+)", arm)
    return int(found[1]) if found else None


def gamma_figure(report: RunReport) -> Figure | None:
    """Fig. 9: speedup over gamma, a panel a task."""
    if not any(map(gamma_of, arms_of(report))):
        return None

    def series(task_lines: Sequence[Line]) -> Iterator[Series]:
        placed = sorted((place, line.arm.arm, line) for line in task_lines if (place := gamma_of(line.arm.arm)))
        marks = [one for place, _, line in placed for one in mark(place, line.metrics["speedup_decode"])]
        yield Series("via_sd (lossy)", 1, tuple(marks))

    pane = Pane(
        "Decode speedup", series, lambda task: points_of(paper_points("fig9", task, report), "gamma"), speed=True
    )
    speculative = [line.arm.arm for line in lines([report]) if line.arm.arm == "speculative"]
    gamma = report.settings.get("gamma")
    remark = f"Two tiers: at gamma {gamma}. {BARS}" if speculative else BARS
    figure = panels(report, [pane], "gamma", remark)
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))  # shared by all panels
    return figure


DRAWN: dict[str, Callable[[RunReport], Figure | None]] = {
    "fig2": between_figure,
    "fig4": skip_figure,
    "fig5": added_figure,
    "fig6": reliance_figure,
    "fig7": thresholds_figure,
    "fig8": thresholds_figure,
    "fig9": gamma_figure,
}
