"""What is wrong with a drawn figure: labels that cover each other, and labels beyond its edge. And runs to draw."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest.mock import patch

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Affine2D

from harness.compare import BASELINE
from harness.records import ArmRecord, BlockTrace, RunRecord, SampleRecord
from harness.report.figures import PAGE_WIDTH
from harness.report.lines import RunReport, build
from tests.rows import CHEAP, MIXED, REJECTED, plain, run_record, sample

THREE_TIERS = (MIXED, REJECTED, CHEAP, plain(7))
"""Blocks of eight tokens: five of eight examined drafts are kept."""


def drawn_texts(figure: Figure) -> list[Text]:
    """Texts that really are drawn: not those of hidden axes, nor labels of ticks outside."""
    found: list[Text] = []
    draw = Text.draw

    def kept(self: Text, *given: Any, **how: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            found.append(self)
        draw(self, *given, **how)

    with patch.object(Text, "draw", kept):
        figure.canvas.draw()
    return list(dict.fromkeys(found))


def outline(text: Text) -> Path:
    """The box around a text, half a pixel smaller on each side; turned with it where its anchor is what it turns on."""
    turned = text.get_rotation_mode() == "anchor" and text.get_rotation() % 90
    angle = text.get_rotation()
    if turned:
        text.set_rotation(0)
    left, bottom, right, top = text.get_window_extent().extents
    x0, y0, x1, y1 = left + 0.5, bottom + 0.5, right - 0.5, top - 0.5
    box = Path(np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)]), closed=True)
    if turned:
        text.set_rotation(angle)
        x, y = text.get_transform().transform(text.get_position())
        box = box.transformed(Affine2D().rotate_deg_around(x, y, angle))
    return box


def faults(figure: Figure) -> list[str]:
    """Pairs of labels that cover each other, labels beyond the figure's edge, and a figure too wide; in words."""
    assert isinstance(figure.canvas, FigureCanvasAgg)
    boxes = [(text.get_text(), outline(text)) for text in drawn_texts(figure)]
    assert boxes
    found = [
        f"{one!r} on {other!r}"
        for (one, mine), (other, theirs) in combinations(boxes, 2)
        if mine.intersects_path(theirs, filled=True)
    ]
    width, height = figure.bbox.size
    for words, box in boxes:
        (left, bottom), (right, top) = box.get_extents().get_points()
        if left < -2 or bottom < -2 or right > width + 2 or top > height + 2:
            found.append(f"{words!r} beyond the edge")
    return found + (["wider than a page"] if figure.get_figwidth() > PAGE_WIDTH else [])


def made_run(
    name: str,
    speeds: Mapping[str, float],
    tasks: Sequence[str] = ("gsm8k", "web_questions"),
    *,
    temperature: float = 1.0,
    methods: Mapping[str, Any] | None = None,
    full: str = "toy",
    tier_s: tuple[float, ...] | None = None,
    run_id: str = "run",
) -> RunReport:
    """A run of two prompts a task whose arms are so many times as fast as the baseline.

    ``speculative`` and the arms that it lends its name to are lossless, of two tiers; all others have three.
    """
    arms = {BASELINE: 1.0, **speeds}
    known = [ArmRecord(arm, arm, None, None, is_lossless(arm)) for arm in arms]
    run: RunRecord = replace(
        run_record(tuple(arms), temperature),
        run_id=run_id,
        arms=tuple(known),
        data={},
        task_metrics={task: ("exact_match",) for task in tasks},
        prompts_sha={},
    )
    samples = [
        made_sample(run_id, task, arm, str(example), 2.0 / speed, tier_s)
        for task in tasks
        for example in range(2)
        for arm, speed in arms.items()
    ]
    settings = {"name": name, "gamma": 5, "methods": dict(methods or {}), "model": {"full": full}}
    return build(run, samples, settings)


def is_lossless(arm: str) -> bool:
    return arm in (BASELINE, "speculative", "eagle")


def made_sample(
    run_id: str, task: str, arm: str, example: str, decode_s: float, tier_s: tuple[float, ...] | None
) -> SampleRecord:
    blocks: tuple[BlockTrace, ...] = tuple(plain(start) for start in range(8)) if is_lossless(arm) else THREE_TIERS
    right = is_lossless(arm) or example == "0"
    written: dict[str, Any] = {"prediction": "4" if right else "5", "scores": {"exact_match": 100.0 * right}}
    made = sample(blocks, example=example, arm=arm, task=task, decode_s=decode_s, **written)
    return replace(made, run_id=run_id, generation=replace(made.generation, tier_s=tier_s))
