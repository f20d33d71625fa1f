"""Choosing a searched mask by ratio and cache mode, saying where it is of the other mode, both modes of a choice."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.decode import slim
from harness.decode.gate.thresholds import Strictness
from harness.decode.via_sd import ViaSD
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.jobs.search import search
from harness.model import slim as masks_module
from harness.model.load import Model
from harness.model.slim import mask_stem, searched_cache
from harness.model.toy import toy_model
from harness.store import find_runs, read
from tests.runs import main, unreported
from tests.test_search import SETTINGS, CalibrationOnly
from tests.toys import GREEDY, tiers_of


@pytest.fixture
def model() -> Model:
    return toy_model()


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of which only the masks count."""
    monkeypatch.setattr(masks_module, "CHECKOUT", tmp_path)
    return tmp_path / "results"


def write(folder: Path, name: str, kept: list[int], cache: str) -> None:
    (folder / "masks").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"layers": 6, "kept_layers": kept, "cache_mode": cache})
    (folder / "masks" / f"{name}.json").write_text(text)


def test_a_ratio_and_a_cache_mode_choose_the_file_of_the_search(model: Model, shipped: Path) -> None:
    write(shipped, "toy_skip45", [0, 1, 5], "shared")
    write(shipped, "toy_skip45_own", [0, 3, 5], "own")
    write(shipped, "toy_skip20", [0, 1, 2, 3, 5], "shared")
    choose = partial(slim.masked, tiers_of(model), model)
    assert (choose(skip_ratio=0.45).layers, choose(skip_ratio=0.45, cache="own").layers) == ("0 1 5", "0 3 5")
    assert choose(skip_ratio=0.2).source == "results/masks/toy_skip20.json"
    assert choose().layers == "0 1 3 5", "without a ratio it is the model's mask"


@pytest.mark.parametrize("units", ["layers", "sublayers"])
@pytest.mark.parametrize("cache", slim.CACHES)
def test_names_are_those_that_a_search_gives(shipped: Path, cache: str, units: str) -> None:
    settings: dict[str, Any] = SETTINGS | {"cache": cache, "units": units, "evaluations": 1}
    tasks = {"qa": CalibrationOnly(source="builtin", shots=0)}
    made = search(model=toy_model, tasks=tasks, results_dir=str(shipped), **settings)
    assert made.stem == mask_stem("toy", 0.3, cache, units) and searched_cache(made) == cache
    if units == "layers":
        model = toy_model()
        assert slim.masked(tiers_of(model), model, skip_ratio=0.3, cache=cache).searched == cache


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"skip_ratio": 0.45, "cache": "own"},
            r"slim\.skip_ratio=0\.45 with slim\.cache=own wants results/masks/toy_skip45_own\.json.*`python -m harness "
            r"job=search model=toy task=quick_four job\.skip_ratio=0\.45 job\.cache=own`",
        ),
        ({"skip_ratio": 0.45, "mask": [0, 5]}, r"slim\.mask=\[0, 5\] and slim\.skip_ratio=0\.45 both choose"),
        ({"skip_ratio": 0.45, "cache": "owned"}, "unknown slim cache 'owned': did you mean 'own'"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(
    model: Model, shipped: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        slim.masked(tiers_of(model), model, **arguments)


def via_sd(model: Model, source: Any) -> ViaSD:
    return ViaSD(tiers_of(model), GREEDY, model, 2, SelfSkip, Strictness(0.5, 0.3), slim=source)


@pytest.mark.parametrize(
    ("searched", "runs", "said"),
    [
        ("shared", "own", "own (mask searched in shared)"),
        ("own", "shared", "shared (mask searched in own)"),
        ("own", "own", "own"),
        (None, "own", "own"),
    ],
)
def test_a_mask_of_the_other_mode_is_said_to_be_one(
    model: Model, shipped: Path, searched: str | None, runs: str, said: str
) -> None:
    write(shipped, "some", [0, 1, 5], str(searched))
    file = str(shipped / "masks" / "some.json")
    source = partial(slim.masked, mask=file if searched else [0, 1, 5], cache=runs)
    method = via_sd(model, source)
    assert slim.slim_facts(model, {"via_sd": method})["slim_cache"] == said
    notes = slim.slim_notes({"via_sd": method})
    wanted = f"via_sd: {file} was searched in cache mode {searched} and runs in {runs}: "
    assert [note.startswith(wanted) for note in notes] == [True] * (said != runs)


def test_the_models_own_mask_and_several_masks_say_so_too(shipped: Path) -> None:
    write(shipped, "some", [0, 1, 5], "shared")
    file = str(shipped / "masks" / "some.json")
    model = toy_model(slim_mask=file)
    assert slim.masked(tiers_of(model), model, cache="own").searched == "shared"
    chain = slim.several(tiers_of(model), model, [file, [0, 1, 2, 5]], "own")
    assert [one.searched for one in chain] == ["shared", None]


@pytest.mark.parametrize("cache", slim.CACHES)
def test_both_modes_of_one_choice(model: Model, cache: str) -> None:
    for other in slim.CACHES:
        made = slim.in_cache(tiers_of(model), model, partial(slim.prefix, skip_ratio=0.5, cache=other), cache)
        assert isinstance(made, slim.Slim) and (made.layers, made.cache) == ("0 1 2", cache)


def test_a_model_of_its_own_has_no_choice_of_cache(model: Model) -> None:
    with pytest.raises(UserError, match=r"^cache mode own is asked of a slim verifier that is a model of its own"):
        slim.in_cache(tiers_of(model), model, partial(slim.checkpoint, path="x"), "own")


@pytest.mark.parametrize(
    ("arguments", "layers", "cache"),
    [
        (("+experiment=cache_modes", "slim=even", "slim.skip_ratio=0.5"), "0 2 5", "via_sd: shared; via_sd_own: own"),
        (("+experiment=quickstart", "drafter=self_skip", "slim.cache=own"), "0 1 3 5", "own"),
        (
            ("+experiment=cache_modes", "slim=even", "drafter=self_slim", "drafter.slim=${slims.own}"),
            "0 1 3 5",
            "speculative: own; via_sd: shared; via_sd_own: own",
        ),
    ],
)
def test_arms_of_an_experiment_follow_the_choice_and_the_record_says_their_modes(
    arguments: tuple[str, ...], layers: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unreported():
        short = ("task=web_questions", "limit=1", "max_new_tokens=3", "fidelity=false", f"results_dir={tmp_path}")
        main(monkeypatch, *arguments, *short)
    (folder,) = find_runs(tmp_path)
    env = read(folder).run.env
    assert (env["slim_layers"], env["slim_cache"]) == (layers, cache)
