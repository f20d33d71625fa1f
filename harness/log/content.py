"""What dashboards are told of a run, in plain values: numbers stay numbers. Knows no dashboard."""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from harness.compare import BASELINE, decode_seconds, output_tokens
from harness.records import MetricRow, Route, RunRecord, SampleRecord

Scalar = str | bool | int | float
ALL_TASKS, HEADLINE = "all_tasks", "headline"
QUALITY = "quality"
DIFFERENCE = "_difference"
"""Ends the name of a quality metric's difference from the baseline, as in the tables."""
SPEEDUPS = ("speedup_decode", "speedup_end_to_end")
RATES = ("reject_rate", "draft_waste", "full_rate", "block_full_rate", "slim_rate", "mean_accept_length")
ROUTES = ("accept_share", "regenerate_share", "escalate_share")
OVERALL = (*SPEEDUPS, "decode_tokens_per_s", "token_agreement", *RATES, *ROUTES)
"""Metrics that are also given over all tasks; quality and its difference besides."""

IDENTIFIER = re.compile(r"[\w.-]{1,64}")
SLOT = re.compile(r"(?<!^)(?<![A-Z_])(?=[A-Z])")


def identifier(run: RunRecord) -> str:
    """The same for every start of a cell, and for every sending of its files: the cell's hash, else the run's id."""
    known = str(getattr(run, "cell", None) or run.run_id)
    return known if IDENTIFIER.fullmatch(known) else hashlib.sha256(known.encode()).hexdigest()[:16]


def measured_arms(run: RunRecord) -> list[str]:
    """Arms beside the baseline; the baseline itself where it is alone."""
    return [arm.arm for arm in run.arms if arm.arm != BASELINE] or [arm.arm for arm in run.arms]


def headline_arm(run: RunRecord) -> str:
    """The arm that a run is shown by where it has one line: the last one listed, which has the most tiers."""
    return measured_arms(run)[-1]


def called(node: Any) -> str | None:
    """``SmallLM`` of ``harness.drafters.small_lm.SmallLM``, as ``small_lm``."""
    target = node.get("_target_") if isinstance(node, Mapping) else None
    return SLOT.sub("_", str(target).rpartition(".")[2]).lower() if target else None


def part(node: Any) -> dict[str, Scalar]:
    """Name and settings of a drafter, gate or slim verifier: what can be grouped by."""
    name = called(node)
    if name is None:
        return {}
    own = {key: value for key, value in node.items() if not key.startswith("_") and isinstance(value, Scalar)}
    return {"name": name, **own}


def layers_of(arm: str, text: str) -> str:
    """What ``slim_layers`` of a run's environment says of an arm: ``0 1 4``, or ``ARM: 0 1 4; OTHER: 0 3``."""
    for one in text.split("; "):
        name, colon, layers = one.rpartition(": ")
        if not colon or name == arm:
            return layers
    return ""


def skipped(layers: str, depth: str | None) -> float | None:
    """Share of layers that ``0 1 4a`` skips of ``depth``; a layer's half (``a`` or ``m``) counts half."""
    places = layers.split()
    if depth is None or not places or not all(re.fullmatch(r"\d+[am]?", place) for place in places):
        return None
    return 1 - sum(1.0 if place.isdigit() else 0.5 for place in places) / int(depth)


def axes(run: RunRecord, config: Mapping[str, Any]) -> dict[str, Any]:
    """What runs are grouped, coloured and filtered by: one typed value a key, those of the headline arm.

    ``config`` is the resolved ``config.yaml``. What a run does not have, such as a gate, has no key.
    """
    if not run.arms:  # a training: its settings are its axes
        return {"model": run.model, "seed": run.seed} | {k: v for k, v in config.items() if isinstance(v, Scalar)}
    arm = headline_arm(run)
    methods = config.get("methods")
    method = methods.get(arm, {}) if isinstance(methods, Mapping) else {}
    record = next(one for one in run.arms if one.arm == arm)
    slim, gate = part(method.get("slim")), part(method.get("gate"))
    layers = layers_of(arm, run.env.get("slim_layers", ""))
    ratio = slim.get("skip_ratio", skipped(layers, run.env.get("layers")))
    found: dict[str, Any] = {
        "model": run.model,
        "task": "+".join(run.task_metrics),
        "arm": arm,
        "method": record.method,
        "lossless": record.lossless,
        "drafter": called(method.get("drafter")) or record.drafter,
        "drafter_settings": part(method.get("drafter")),
        "gate": gate,
        **{key: gate[key] for key in ("alpha1", "alpha2") if key in gate},
        "slim": slim,
        "skip_ratio": ratio if slim else None,
        "gamma": method.get("gamma", config.get("gamma")),
        "length": called(method.get("length")),
        "temperature": run.temperature,
        "seed": run.seed,
        "experiment": config.get("name"),
        **{key: config.get(key) for key in ("limit", "max_new_tokens", "numerics", "pairing", "shard")},
        **{key: run.env.get(key) for key in ("device", "dtype")},
        "threads": int(run.env["threads"]) if run.env.get("threads", "").isdigit() else None,
        "cell": identifier(run),
        "commit": run.git_commit,
    }
    return {key: value for key, value in found.items() if value is not None and value != {}}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Nested mappings by dotted keys, as dashboards show them: ``gate.alpha1``."""
    found: dict[str, Scalar] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, Scalar):
            found[f"{prefix}{key}"] = value
    return found


def summary(run: RunRecord, rows: Sequence[MetricRow]) -> dict[str, float]:
    """Every number by name; what is undefined has no key.

    ``<task>/<arm>/<metric>``  one number of the tables.
    ``all_tasks/<arm>/<metric>``  its unweighted mean over the tasks, of speedups the geometric one; ``quality`` is each
    task's first metric, ``quality_difference`` that minus the baseline's.
    ``headline/<metric>``  the same of the headline arm: a name that runs with other arms have too.
    """
    values = {(row.task, row.arm, row.metric): row.value for row in rows}
    found = {"/".join(key): value for key, value in values.items() if value is not None}
    tasks = list(dict.fromkeys(row.task for row in rows))
    for arm in dict.fromkeys(row.arm for row in rows):
        means: dict[str, float | None] = {
            name: mean([values.get((task, arm, name)) for task in tasks], geometric=name in SPEEDUPS)
            for name in OVERALL
        }
        for name, suffix in ((QUALITY, ""), (f"{QUALITY}{DIFFERENCE}", DIFFERENCE)):
            means[name] = mean([values.get((task, arm, f"{run.task_metrics[task][0]}{suffix}")) for task in tasks])
        known = {name: value for name, value in means.items() if value is not None}
        found |= {f"{ALL_TASKS}/{arm}/{name}": value for name, value in known.items()}
        if arm == headline_arm(run):
            found |= {f"{HEADLINE}/{name}": value for name, value in known.items()}
    return found


def mean(values: Sequence[float | None], geometric: bool = False) -> float | None:
    """None where any is missing: a mean over some of the tasks is another number."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    if geometric:
        return math.exp(sum(map(math.log, known)) / len(known)) if min(known) > 0 else None
    return sum(known) / len(known)


NUMBERS = ("prompt_tokens", "input_cut", "output_tokens", "prefill_s", "decode_s", "tokens_per_s", "blocks")
COUNTS = ("drafted", "examined", "kept", *(route.value for route in Route), "slim_forwards", "full_forwards")
ROUTED = ("examined", *(route.value for route in Route))
"""Those of the counts that are of routes; the others are of blocks."""
TEXTS = ("text", "prediction", "references")


def sample_columns(run: RunRecord, texts: bool) -> list[str]:
    """Columns of the table of samples."""
    scores = dict.fromkeys(f"score/{name}" for names in run.task_metrics.values() for name in names)
    return ["task", "example", "arm", *scores, "stop", *NUMBERS, *COUNTS, *(TEXTS if texts else ())]


def sample_row(record: SampleRecord, columns: Sequence[str]) -> list[Any]:
    """One sample under ``columns``; None where it has no value."""
    made = record.generation
    tokens, seconds = output_tokens(record), decode_seconds(record)
    routes = [route for block in made.blocks for route in block.routes]
    cells: dict[str, Any] = {
        "task": record.task,
        "example": record.example_id,
        "arm": record.arm,
        **{f"score/{name}": value for name, value in record.scores.items()},
        "stop": made.stop_reason.value,
        "prompt_tokens": record.prompt_tokens,
        "input_cut": record.input_cut,
        "output_tokens": tokens,
        "prefill_s": record.prefill_s,
        "decode_s": record.decode_s,
        "tokens_per_s": tokens / seconds if seconds else None,
        "blocks": len(made.blocks),
        "examined": len(routes),
        **{name: sum(getattr(block, name) for block in made.blocks) for name in COUNTS if name not in ROUTED},
        **{route.value: routes.count(route) for route in Route},
        "text": record.text,
        "prediction": record.prediction,
        "references": "\n".join(record.references),
    }
    return [cells.get(name) for name in columns]


class Live:
    """Running rates of a run while it is measured: all that has been decoded, not only the last sample."""

    def __init__(self) -> None:
        self.samples = 0
        self._tokens: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)

    def add(self, record: SampleRecord) -> None:
        self.samples += 1
        key = f"{record.task}/{record.arm}"
        self._tokens[key] += output_tokens(record)
        self._seconds[key] += decode_seconds(record)

    def values(self) -> dict[str, float]:
        """``live/samples``, and ``live/<task>/<arm>/decode_tokens_per_s`` so far."""
        rates = {
            f"live/{key}/decode_tokens_per_s": tokens / self._seconds[key]
            for key, tokens in self._tokens.items()
            if self._seconds[key]
        }
        return {"live/samples": self.samples, **rates}
