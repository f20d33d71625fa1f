"""Who may import whom; and results are read, scored and drawn without torch."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

DECODING = (
    *("harness.model", "harness.sampling", "harness.drafters", "harness.decode", "harness.dimr", "harness.timing"),
    *("harness.kernels", "harness.divergence", "harness.jobs.bench", "harness.jobs.search", "harness.jobs.speed"),
    "harness.prompts",
    *("harness.memory", "harness.speed.bandwidth", "harness.speed.decoding", "harness.speed.forwards"),
    *("harness.rescore", "harness.audit.judge", "harness.audit.continued", "harness.jobs.audit"),
    *("harness.plan", "harness.rehearsal", "harness.jobs.models", "harness.jobs.pareto"),
    *("harness.speed.stock", "harness.training", "harness.jobs.train_drafter", "harness.theory", "harness.measuring"),
    *("harness.slim_fidelity.measure", "harness.jobs.fidelity"),
)
"""Modules, and packages with all in them, that need torch. Everything else must do without."""

RING = (
    *("harness.records", "harness.errors", "harness.config", "harness.scoring", "harness.metrics", "harness.compare"),
    *("harness.pairing", "harness.occupancy", "harness.baselines", "harness.side_by_side"),
    *("harness.positions", "harness.quality", "harness.execution.sandbox", "harness.execution.programs"),
    *("harness.positions", "harness.fidelity", "harness.preflight", "harness.launch", "harness.jobs.preflight"),
    *("harness.environment", "harness.store", "harness.log", "harness.report", "harness.report.tables"),
    *("harness.cells", "harness.claims", "harness.resume", "harness.sweeps"),
    *("harness.live", "harness.jobs.status"),
    *("harness.report.figures", "harness.jobs.report", "harness.help", "harness.__main__"),
    *("harness.traces", "harness.report.predicted", "harness.jobs.scale"),
    *("harness.cost", "harness.report.plausibility", "harness.report.break_even", "harness.jobs.plausibility"),
    *("harness.log.wandb", "harness.log.tensorboard", "harness.log.workspace"),
    *("harness.jobs.relog", "harness.jobs.workspace"),
    *("harness.audit", "harness.audit.records", "harness.audit.tables", "harness.audit.page", "harness.audit.figure"),
    *("harness.speed.records", "harness.speed.numbers", "harness.speed.tables", "harness.speed.figure"),
    *("tasks", "tasks.base", "tasks.source", "tasks.hub"),
    *("tasks.wmt14", "tasks.cnn_dailymail", "tasks.gsm8k", "tasks.web_questions", "tasks.code", "tasks.mixed"),
)
"""What must never leave the torch-free part. A new module is held to it without being listed."""

HEAVY = ("torch", "transformers", "datasets", "safetensors", "tokenizers", "jaxtyping", "triton")

FOUNDATION = frozenset(("records", "errors", "scoring", "config", "sampling"))
READING = frozenset(("compare", "metrics", "store", "report"))
ALLOWED: dict[str, frozenset[str]] = {
    "harness": frozenset(),
    "records": frozenset(),
    "errors": frozenset(),
    "scoring": frozenset(("errors",)),
    "execution": frozenset(("errors", "records", "scoring")),
    "config": frozenset(("errors",)),
    "kernels": frozenset(),
    "sampling": frozenset(("errors", "kernels")),
    "hub": frozenset(("errors",)),
    "model": frozenset(("errors", "hub")),
    "drafters": frozenset(("errors", "records", "sampling", "model")),
    "decode": frozenset(("errors", "records", "kernels", "sampling", "model", "drafters", "timing", "proposals")),
    "slim_fidelity": frozenset(
        ("errors", "records", "sampling", "model", "drafters", "decode", "dimr", "theory", "compare", "store", "report")
    ),
    "theory": frozenset(("sampling",)),
    "proposals": frozenset(("errors", "model")),
    "dimr": frozenset(("errors", "records", "sampling", "model", "decode", "theory", "proposals")),
    "divergence": frozenset(("records", "model", "compare")),
    "rescore": frozenset(("records", "sampling", "model", "drafters", "decode")),
    "prompts": frozenset(("records", "model")),
    "timing": frozenset(("errors", "records", "model")),
    "environment": frozenset(("errors", "records")),
    "compare": frozenset(("errors", "records")),
    "cost": frozenset(("errors",)),
    "traces": frozenset(("records",)),
    "roofline": frozenset(("errors", "cost")),
    "quality": frozenset(("records", "scoring", "compare")),
    "fidelity": frozenset(("records", "compare")),
    "metrics": frozenset(("errors", "records", "scoring", "compare", "quality", "fidelity", "pairing")),
    "cells": frozenset(("environment", "model", "records", "store")),
    "claims": frozenset(("errors", "store")),
    "resume": frozenset(("errors", "records", "store", "pairing", "compare")),
    "sweeps": frozenset(("cells", "claims", "errors", "records", "store")),
    "positions": frozenset(("records", "compare", "metrics")),
    "store": frozenset(("errors", "records")),
    "log": frozenset(("errors", "records", "compare")),
    "report": frozenset(("errors", "records", "scoring", "compare", "quality", "fidelity", "metrics", "pairing"))
    | {"positions", "store", "cost", "traces", "roofline", "cells", "sweeps"},
    "training": frozenset(("errors", "records", "sampling", "model", "drafters", "decode", "store")),
    "help": frozenset(("errors", "config")),
    "measuring": frozenset(("records", "compare", "config", "sampling", "model", "decode", "divergence"))
    | {"execution", "prompts", "scoring", "timing", "pairing", "occupancy", "baselines", "environment"}
    | {"live", "sweeps", "cells"},
    "live": frozenset(("records",)),
    "baselines": frozenset(("errors", "records", "store")),
    "occupancy": frozenset(("errors",)),
    "pairing": frozenset(("errors", "records", "compare")),
    "side_by_side": frozenset(("records", "scoring", "compare", "metrics", "pairing", "quality", "cells", "report")),
    "memory": frozenset(),
    "speed": frozenset(
        ("errors", "records", "sampling", "model", "decode", "timing", "memory", "compare", "store", "report")
    ),
    "pareto": frozenset(("errors", "records", "compare", "metrics", "report", "store")),
    "audit": frozenset(("records", "sampling", "model", "divergence", "rescore", "compare", "report"))
    | {"decode", "prompts"},
    "jobs": FOUNDATION
    | READING
    | {
        "model",
        "drafters",
        "decode",
        "dimr",
        "divergence",
        "measuring",
        "pairing",
        "quality",
        "side_by_side",
        "prompts",
        "rescore",
        "timing",
        "environment",
        "log",
        "speed",
        "proposals",
        "slim_fidelity",
    }
    | {
        "training",
        "audit",
        "preflight",
        "execution",
        "cells",
        "claims",
        "resume",
        "sweeps",
        "pareto",
        "live",
        "cost",
        "roofline",
    },
    "rehearsal": frozenset(("errors", "config", "hub", "model", "decode", "sampling")),
    "preflight": frozenset(
        ("errors", "config", "hub", "environment", "store", "model", "drafters", "execution", "rehearsal")
    ),
    "plan": frozenset(("errors", "config", "compare", "report", "model", "decode", "memory", "sampling"))
    | {"preflight", "rehearsal", "pairing"},
    "launch": frozenset(
        ("errors", "config", "help", "preflight", "plan", "claims", "sweeps", "runs_of_sweep", "workers")
    ),
    "runs_of_sweep": frozenset(("errors", "config")),
    "sweeper": frozenset(("runs_of_sweep",)),
    "workers": frozenset(("errors", "help")),
    "__main__": frozenset(("harness", "errors", "config", "help", "launch", "sweeper", "workers")),
    "tasks": frozenset(("errors", "hub", "records", "scoring")),
}
"""Units (a module of the package, or a folder in it) and what each may import, itself besides."""


def modules() -> dict[str, Path]:
    """Every module of the program by dotted name; ``package/__init__.py`` goes by the package's."""
    found = {}
    for package in ("harness", "tasks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


LIGHT = [name for name in MODULES if not inside(name, DECODING)]


def imported(source: str, package: str = "") -> Iterator[str]:
    """Dotted names that a module imports anywhere in it, functions and ``TYPE_CHECKING`` included.

    ``from a import b`` gives ``a.b`` where that is one of our modules, else ``a``.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            base = node.module or ""
            yield from (f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names)


IMPORTS = {name: set(imported(path.read_text())) for name, path in MODULES.items()}


def unit(name: str) -> str:
    """``harness.model.load`` is in ``model``, ``tasks.gsm8k`` in ``tasks``."""
    parts = name.split(".")
    return parts[1] if parts[0] == "harness" and len(parts) > 1 else parts[0]


def ours(name: str) -> bool:
    return name.split(".")[0] in ("harness", "tasks", "tests", "notebooks", "conf")


def wrong_directions(imports: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {target}"
        for name, targets in imports.items()
        for target in sorted(targets)
        if ours(target) and unit(target) not in ALLOWED[unit(name)] | {unit(name)}
    ]


def loaded_after(names: list[str]) -> dict[str, list[str]]:
    """Import ``names`` in turn in a new process; the heavy packages that are loaded after each."""
    script = (
        "import importlib, json, sys\n"
        "names, heavy = json.loads(sys.argv[1])\n"
        "found = {}\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "    found[name] = [package for package in heavy if package in sys.modules]\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps([names, HEAVY])],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_what_reads_and_reports_loads_no_torch() -> None:
    found = loaded_after(LIGHT)
    assert list(found) == LIGHT and len(LIGHT) >= len(RING)
    assert {name: packages for name, packages in found.items() if packages} == {}


def test_the_check_for_torch_can_fail() -> None:
    found = loaded_after(["harness.records", "harness.model.load"])
    assert found["harness.records"] == []
    assert {"torch", "safetensors", "jaxtyping"} <= set(found["harness.model.load"])


def test_the_torch_free_part_is_what_it_was_meant_to_be() -> None:
    assert set(RING) <= set(LIGHT)
    files = sum(1 for package in ("harness", "tasks") for _ in (ROOT / package).rglob("*.py"))
    assert len(MODULES) == files == len(LIGHT) + sum(inside(name, DECODING) for name in MODULES)
    assert all(any(inside(name, (package,)) for name in MODULES) for package in DECODING), "DECODING names nothing gone"


def test_no_module_without_torch_imports_it_in_a_function() -> None:
    lazily = {"tasks.hub": {"datasets"}}
    found = {name: {target.split(".")[0] for target in IMPORTS[name]} & set(HEAVY) for name in LIGHT}
    assert {name: packages for name, packages in found.items() if packages} == lazily


def test_imports_go_one_way() -> None:
    assert {unit(name) for name in MODULES} == set(ALLOWED), "every unit has its line, and no line is left over"
    assert wrong_directions(IMPORTS) == []


@pytest.mark.parametrize(
    ("name", "source"),
    {
        "harness.records": "from harness.errors import UserError",
        "harness.model.load": "def f():\n    from harness.decode import base",
        "harness.drafters.base": "from harness.decode.accept import first_stop",
        "harness.decode.base": "from harness.store import read",
        "harness.kernels.gate": "from harness.decode import gate",
        "harness.dimr": "import harness.jobs.search",
        "harness.report.tables": "from harness import jobs",
        "harness.jobs.bench": "from tasks.web_questions import WebQuestions",
        "harness.config": "from tests.toys import tiny",
        "tasks.gsm8k": "from harness.metrics import rows",
    }.items(),
)
def test_the_check_of_directions_can_fail(name: str, source: str) -> None:
    assert len(wrong_directions({name: set(imported(source))})) == 1


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {name: {target for target in targets if ours(target)} for name, targets in IMPORTS.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_nobody_reaches_jobs_or_tasks_by_name() -> None:
    outside = {name for name in MODULES if unit(name) not in ("jobs", "tasks")}
    assert [name for name in outside if any(unit(target) in ("jobs", "tasks") for target in IMPORTS[name])] == []


def test_configuration_objects_stop_at_the_door() -> None:
    """What decodes, scores and reports takes plain arguments."""
    users = {
        name for name, targets in IMPORTS.items() if any(t.split(".")[0] in ("hydra", "omegaconf") for t in targets)
    }
    # store reads and writes YAML texts with it.
    known = {"__main__", "config", "help", "launch", "workers", "store", "runs_of_sweep", "sweeper"}
    assert users == {f"harness.{name}" for name in known}
    assert "DictConfig" not in MODULES["harness.store"].read_text()
