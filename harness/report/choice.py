"""Which figures a run gets: one that says what it is about, and those beside it that its arms have numbers for."""

import re
from collections.abc import Sequence

from matplotlib.figure import Figure

from harness.report.by_arm import rates_figure, routes_figure, time_figure
from harness.report.drafters import compares_drafters, drafters_figure
from harness.report.figures import speed_quality_figure
from harness.report.lines import RunReport
from harness.report.paper_figures import TWINS, paper_figure, twin_figures
from harness.report.predicted_figure import predicted_figure

TWIN = "as_{}"
"""Of another figure of the paper that a run is a counterpart of too."""
ENDINGS = ("", *map(TWIN.format, TWINS), "quality", "rates", "routes", "time", "predicted")
"""What the names of figures' files end in, in the order of a page; nothing for the main one."""
MOST_RUNS = 12
"""Runs of which a figure can be read: its legend names the arms of each."""


def main_figure(reports: Sequence[RunReport]) -> Figure:
    """Of a run the figure that its experiment is made for, where there is one; else speed beside quality."""
    return own_figure(reports) or speed_quality_figure(reports)


def own_figure(reports: Sequence[RunReport]) -> Figure | None:
    """The counterpart of a figure of the paper, or a row for each drafter; None of a table of the paper, or several."""
    if len(reports) == 1 and (figure := paper_figure(reports[0])):
        return figure
    papers = re.fullmatch(r"(table|fig)\d+", str(reports[0].settings.get("name")))
    return drafters_figure(reports[0]) if compares_drafters(reports) and not papers else None


def figures_of(reports: Sequence[RunReport], further: bool = True) -> dict[str, Figure]:
    """All figures of a run, or of several, by what their files' names end in: nothing for the main one.

    Without ``further`` the main one and ``predicted``; of more runs than a legend can name, ``predicted`` alone.

    ``as_fig8``: of a run that is a counterpart of that figure of the paper too. ``quality``: speed beside quality with
    its front, where the main one is another. ``rates``: where an arm drafts. ``routes``: where a gate had a choice.
    ``time``: where the clock was read within tiers. ``predicted``: predicted beside measured speedups, where any was.
    """
    drawn: dict[str, Figure | None] = dict.fromkeys(ENDINGS)
    if len(reports) <= MOST_RUNS:
        own = own_figure(reports)
        drawn[""] = own or speed_quality_figure(reports)
        if further:
            if len(reports) == 1:
                drawn |= {TWIN.format(name): figure for name, figure in twin_figures(reports[0]).items()}
            drawn["quality"] = speed_quality_figure(reports) if own else None
            drawn |= {"rates": rates_figure(reports), "routes": routes_figure(reports), "time": time_figure(reports)}
    drawn["predicted"] = predicted_figure([one for report in reports for one in report.predicted])
    return {name: figure for name, figure in drawn.items() if figure}
