"""What tables and figures are made of: a run's numbers, computed once, and its lines, an arm on a task each.

Numbers come from ``harness.metrics``; here they get words.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from harness.compare import BASELINE
from harness.metrics import DIFFERENCE, rows
from harness.pairing import merged, remarks
from harness.positions import PositionRow, position_rows
from harness.quality import scorers
from harness.records import ArmRecord, Divergence, FidelityRecord, MetricRow, RunRecord, SampleRecord
from harness.report import pass_at_k
from harness.report.predicted import Prediction, beside, predictions
from harness.report.quality import signed
from harness.scoring import METRICS

DASH = "–"  # noqa: RUF001  an en dash, so that an undefined number is no minus sign


@dataclass(frozen=True)
class RunReport:
    """What the tables and the figure of one run are made of. ``settings`` is its ``config.yaml``.

    ``scorers``: who computed which quality, as ``harness.quality.scorers`` has it. ``programs``: those that passed.
    ``remarks``: how its times came about, as ``harness.pairing.remarks`` has it.
    """

    run: RunRecord
    rows: tuple[MetricRow, ...]
    positions: tuple[PositionRow, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    divergences: tuple[Divergence, ...] = ()
    scorers: Mapping[str, str] = field(default_factory=dict)
    programs: pass_at_k.Programs | None = None
    remarks: tuple[str, ...] = ()
    samples: Sequence[SampleRecord] = field(default=(), repr=False)

    @cached_property
    def predicted(self) -> list[Prediction]:
        """What costs and traces say of its speedups; made when it is read, which measuring does not wait for."""
        return predictions(self.run, self.samples, self.rows, self.settings)

    @cached_property
    def prediction(self) -> dict[tuple[str, str], Prediction]:
        """The same by task and arm."""
        return {(one.task, one.arm): one for one in self.predicted}

    @property
    def remark(self) -> str:
        """What the run's settings say that every table of it has to say."""
        return str(self.settings.get("note") or "")

    @property
    def not_run(self) -> dict[str, str]:
        """Rows that could not be run, with their reasons."""
        return {name: str(why) for name, why in (self.settings.get("not_run") or {}).items() if why}

    @property
    def faults(self) -> list[Divergence]:
        return [one for one in self.divergences if not one.near_tie]


@dataclass(frozen=True)
class Line:
    """One line of a table: an arm on a task, its metrics and the baseline's by name."""

    report: RunReport
    task: str
    arm: ArmRecord
    metrics: Mapping[str, MetricRow]
    baseline: Mapping[str, MetricRow]

    @property
    def run(self) -> RunRecord:
        return self.report.run

    @property
    def n(self) -> int:
        return next(iter(self.metrics.values())).n

    def value(self, metric: str, digits: int = 2) -> str:
        return number(self.metrics.get(metric), digits)

    def span(self, metric: str, digits: int = 2) -> str:
        """Value with its interval: ``2.31 [1.90, 2.70]``."""
        row = self.metrics.get(metric)
        if row is None or row.low is None or row.high is None:
            return number(row, digits)
        return f"{number(row, digits)} [{row.low:.{digits}f}, {row.high:.{digits}f}]"

    def speedup(self, metric: str) -> str:
        """As ``span``, and a word where method and baseline were not measured together."""
        text = self.span(metric)
        apart = self.run.pairing == "shared" and self.arm.arm != BASELINE and text != DASH
        return f"{text} unpaired" if apart else text

    def foretold(self) -> dict[str, str]:
        """What stands beside the measured speedup: the predicted one with its error, and the ceiling."""
        return beside(self.report.prediction.get((self.task, self.arm.arm)), DASH)

    def faults(self, loud: str) -> str:
        """Their number; one that is not 0 stands out in the template ``loud``."""
        text = self.value("faults", 0)
        return text if text in (DASH, "0") else loud.format(text)

    def quality(self, metrics: Sequence[str], interval: bool) -> str:
        cells = []
        for name in metrics:
            cell = self.span(name, 1) if interval else self.value(name, 1)
            unit = " %" if METRICS[name].unit == "%" and cell != DASH else ""
            apart = "" if interval or self.arm.arm == BASELINE else signed(self.metrics.get(name + DIFFERENCE))
            cells.append(f"{name} {cell}{unit}{apart}")
        return "; ".join(cells) or DASH


def number(row: MetricRow | None, digits: int) -> str:
    """A rounded value; a dash where there is none."""
    return DASH if row is None or row.value is None else f"{row.value:.{digits}f}"


def build(
    run: RunRecord,
    samples: Sequence[SampleRecord],
    settings: Mapping[str, Any] | None = None,
    note: str = "",
    divergences: Sequence[Divergence] = (),
    fidelity: Sequence[FidelityRecord] = (),
) -> RunReport:
    """Compute all metrics of a run once, for every table and figure."""
    found = tuple(rows(run, samples, divergences, fidelity))
    outputs = merged(samples)
    places, known = tuple(position_rows(run, samples)), scorers(run, outputs)
    written = pass_at_k.programs(run, outputs, settings or {})
    said = tuple(remarks(run, samples))
    return RunReport(run, found, places, settings or {}, note, tuple(divergences), known, written, said, samples)


def lines(reports: Sequence[RunReport]) -> Iterator[Line]:
    """Tasks and arms in each run's order."""
    for report in reports:
        cells: dict[tuple[str, str], dict[str, MetricRow]] = {}
        for row in report.rows:
            cells.setdefault((row.task, row.arm), {})[row.metric] = row
        arms = {arm.arm: arm for arm in report.run.arms}
        for (task, arm), metrics in cells.items():
            yield Line(report, task, arms[arm], metrics, cells.get((task, BASELINE), {}))
