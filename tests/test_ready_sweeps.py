"""The sweeps that are shipped: as many cells as their headers say, each whole, on the paper's sets."""

import re
from itertools import product
from typing import Any

import pytest
import yaml
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.config import called, checked_plain
from harness.help import CONF

SWEEPS = ("thresholds", "depth", "gamma", "tiers")


pytestmark = pytest.mark.usefixtures("conf")


def text_of(name: str) -> str:
    return (CONF / "experiment" / "sweep" / f"{name}.yaml").read_text()


def cells_of(name: str) -> list[dict[str, Any]]:
    """The resolved config of each cell, its keys and values checked."""
    params = yaml.safe_load(text_of(name))["hydra"]["sweeper"]["params"]
    swept = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
    choices = [[f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()] for one in swept]
    made = [compose("config", [f"+experiment=sweep/{name}", *chosen]) for chosen in product(*choices)]
    return [checked_plain(cfg)[1] for cfg in made]


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_is_what_its_header_says(name: str) -> None:
    header = " ".join(line.lstrip("# ") for line in text_of(name).splitlines() if line.startswith("#"))
    cells = cells_of(name)
    assert f" {len(cells)} cells" in header and re.search(r"about \d+ minutes on two cores", header)
    assert "?" in header, "the question that it answers"
    paper = list(compose("config", ["task=paper_four"]).tasks)
    assert all(list(cell["tasks"]) == paper for cell in cells)
    assert all(list(cell["methods"]) == ["autoregressive", "speculative", "via_sd"] for cell in cells)
    assert len({repr(cell["methods"]) for cell in cells}) == len(cells), "no cell twice"
    assert compose("config", [f"+experiment=sweep/{name}"], return_hydra_config=True).hydra.mode.name == "MULTIRUN"
    for cell in cells:
        called(cell["methods"]["via_sd"]["gate"])


def test_the_cells_are_at_the_swept_values() -> None:
    gates = [cell["methods"]["via_sd"]["gate"] for cell in cells_of("thresholds")]
    assert len({(gate["alpha1"], gate["alpha2"]) for gate in gates}) == 12
    assert [cell["methods"]["speculative"]["gamma"] for cell in cells_of("gamma")] == [1, 2, 3, 5, 7, 10]
    masks = [cell["methods"]["via_sd"]["slim"]["masks"] for cell in cells_of("tiers")]
    assert [len(one) for one in masks] == [1, 2, 3]
    for one in masks:
        ratios = [int(re.findall(r"skip(\d+)", mask)[0]) for mask in one]
        assert ratios == sorted(ratios, reverse=True), "by decreasing skip ratio"
    slims = [cell["methods"]["via_sd"]["slim"] for cell in cells_of("depth")]
    kinds = {(slim["_target_"].rpartition(".")[2], slim["skip_ratio"]) for slim in slims}
    assert kinds == set(product(("masked", "even", "at_random"), (0.2, 0.3, 0.45)))
