"""The experiments of the paper's tables and figures: what they state, which runs they are, what is missing for them."""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose

from harness.config import called, check_calls, checked_plain
from harness.errors import UserError
from harness.help import CONF
from harness.model.slim import CHECKOUT
from harness.preflight import missing_of, named_search
from harness.report.load import load
from harness.report.paper_figures import paper_figure, reading_at, thresholds
from harness.report.paper_numbers import NUMBERS, PAPER
from harness.runs_of_sweep import runs_of, swept
from tests.runs import files, main

# Experiment -> runs as shipped, and with model=embedded.
RUNS = {
    **dict.fromkeys(("table1", "table6", "table7", "fig5", "fig9"), (2, 1)),
    **dict.fromkeys(("table3", "table9"), (4, 2)),
    **dict.fromkeys(("table4", "table8"), (6, 1)),
    **dict.fromkeys(("table5", "fig2", "fig4", "fig6", "fig7", "fig8"), (1, 1)),
}
BENCHES = sorted(set(RUNS) - {"table4"})

pytestmark = pytest.mark.usefixtures("offline")


def resolved(name: str, *overrides: str) -> dict[str, Any]:
    return checked_plain(compose("config", [f"+experiment=paper/{name}", *overrides]))[1]


def test_the_papers_numbers_are_whole() -> None:
    rows = list(csv.DictReader((PAPER / NUMBERS).read_text().splitlines()))
    assert len(rows) == 1255
    counts = Counter(row["source"] for row in rows)
    want = {"table8": 378, "table9": 252, "table3": 72, "fig7": 120, "fig8": 120, "fig9": 120}
    assert want.items() <= counts.items()
    assert Counter(row["origin"] for row in rows) == {"table": 864, "read_off_plot": 391}
    assert all(float(row["value"]) >= 0 for row in rows)


def test_every_table_and_figure_has_its_experiment() -> None:
    assert {path.stem for path in (CONF / "experiment" / "paper").glob("*.yaml")} == set(RUNS)


@pytest.mark.parametrize("name", sorted(RUNS))
def test_an_experiment_is_as_many_runs_as_it_has_pairs_and_one_on_the_embedded_model(conf: None, name: str) -> None:
    for given, count in zip(([], ["model=embedded"]), RUNS[name], strict=True):
        cfg = compose("config", [f"+experiment=paper/{name}", *given], return_hydra_config=True)
        assert (cfg.hydra.mode is None) == (RUNS[name][0] == 1)
        runs = runs_of(swept(cfg))
        assert len(runs) == count
        for run in runs if given else ():
            others = [item for item in run if not item.startswith("+experiment")]
            assert "model=embedded" in run and resolved(name, *others)["model"]["full"] == "embedded"


@pytest.mark.parametrize("name", BENCHES)
def test_an_experiment_states_what_a_reader_needs(conf: None, name: str) -> None:
    own = yaml.safe_load((CONF / "experiment" / "paper" / f"{name}.yaml").read_text())
    assert {"name", "note", "limit", "max_new_tokens", "temperature", "gamma"} <= set(own) and own["name"] == name
    cfg = resolved(name)
    assert "/" in cfg["model"]["full"] and cfg["model"]["dtype"] == "bfloat16" and "revision" in cfg["model"]
    assert cfg["tasks"] and all(cfg["pair"]["sizes"][full] for full in (cfg["model"]["full"], cfg["pair"]["small_lm"]))
    gates = [node["gate"] for node in cfg["methods"].values() if "gate" in node]
    assert gates and all({"alpha1", "alpha2"} <= set(gate) for gate in gates)
    drafters = {node["drafter"]["path"] for node in cfg["methods"].values() if "path" in node.get("drafter", {})}
    assert drafters == {cfg["pair"]["eagle" if name == "fig5" else "small_lm"]}


@pytest.mark.parametrize("name", BENCHES)
def test_an_experiment_fits_the_code_with_the_embedded_model(conf: None, name: str) -> None:
    cfg = compose("config", [f"+experiment=paper/{name}", "model=embedded", "limit=4"])
    raw, plain = checked_plain(cfg)
    check_calls(raw, plain)
    lines = [line for line in missing_of(plain) if "layer mask" not in line]
    assert lines == [], "nothing but masks may be missing"
    assert all(str(path).startswith("results/masks/embedded_skip") for path in masks(plain) if isinstance(path, str))


def masks(cfg: dict[str, Any]) -> list[Any]:
    slims = [node["slim"] for node in cfg["methods"].values() if "slim" in node]
    return [mask for slim in slims if slim for mask in (slim.get("masks") or [slim.get("mask")])]


@pytest.mark.parametrize("name", ["fig6", "fig7", "fig8"])
def test_every_point_of_both_readings_is_measured_by_one_arm(conf: None, name: str) -> None:
    cfg = resolved(name)
    gates = {arm: node["gate"] for arm, node in cfg["methods"].items() if "gate" in node}
    for arm, gate in gates.items():  # what the figure believes of a gate is what the gate does
        made = called(gate)
        assert thresholds(cfg, arm) == (round(made.accept_at, 6), round(made.keep_at, 6))
    laws = [thresholds(cfg, arm) for arm in gates]
    assert len(set(laws)) == len(laws) == (9 if name == "fig6" else 21)
    alphas = ([0.5], range(10, 100, 10)) if name == "fig6" else ([0.3, 0.4, 0.5, 0.6, 0.7], (20, 30, 40, 50))
    points = [(one, other / 100) for one in alphas[0] for other in alphas[1]]
    wanted = {reading_at(reading, *point) for reading in ("strictness", "literal") for point in points}
    assert wanted == set(laws)


def test_an_arm_that_cannot_be_run_is_taken_out_and_keeps_its_reason(conf: None) -> None:
    assert "via_sd_independent" in resolved("table5")["methods"]
    cfg = resolved("table5", "model=embedded")
    assert "via_sd_independent" not in cfg["methods"] and "middle size" in cfg["not_run"]["via_sd_independent"]
    assert resolved("table5")["methods"]["via_sd_independent"]["slim"]["path"] == "google/gemma-2-9b"


def test_a_reason_can_be_taken_back(conf: None) -> None:
    given = ("+method@methods.bild=bild", "temperature=0")
    assert "bild" not in resolved("table9", *given)["methods"]
    assert "bild" in resolved("table9", *given, "not_run.bild=null")["methods"]


def test_the_last_override_of_a_key_counts_and_params_come_first() -> None:
    assert runs_of(["model=a,b", "gamma=1,2", "model=c"]) == [["model=c", "gamma=1"], ["model=c", "gamma=2"]]
    assert runs_of(["model=a", "model=b,c"]) == [["model=b"], ["model=c"]]


def test_references_in_the_overrides_of_a_sweep_are_left_to_its_runs(conf: None) -> None:
    given = ["+experiment=paper/fig5", "methods.eagle.drafter=${drafter}"]
    (first, *_) = runs_of(swept(compose("config", given, return_hydra_config=True)))
    assert first == ["model=gemma2_9b", *given]


def test_a_dry_run_prints_all_runs_and_once_what_they_miss_without_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("harness.model.load.load_transformer", lambda *given: pytest.fail("weights were loaded"))
    main(
        monkeypatch, "+experiment=paper/table8", "model=gemma2_9b,llama2_13b", "dry_run=true", f"results_dir={tmp_path}"
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "run 1 of 2: model=gemma2_9b" in said and "run 2 of 2: model=llama2_13b" in said
    assert "not run: bild: it decodes greedily alone" in said and "Qwen2.5 in place of the first-generation" in said
    assert "about 17.2 GiB" in said and "about 24.2 GiB" in said and "about 4.86 GiB" in said
    for needed in ("google/gemma-2-9b", "google/gemma-2-2b", "meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-7b-hf"):
        assert said.count(f"get it by `hf download {needed}") == 1
    assert "job=search model.slim_mask=null model.full=google/gemma-2-9b job.skip_ratio=0.45`" in said
    assert said.count("nothing was run") == 1 and list(tmp_path.iterdir()) == []


def test_a_dry_run_of_the_search_says_what_it_would_score(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(monkeypatch, "+experiment=paper/table4", "model=toy,gemma2_9b", "dry_run=true", f"results_dir={tmp_path}")
    said = " ".join(capsys.readouterr().out.split())
    assert "run 2 of 2: model=gemma2_9b" in said and "at most 1000 masks on 3 prompts" in said
    assert "missing here: 1" in said and "layer mask" not in said, "a search needs no mask"


@pytest.mark.parametrize(
    ("mask", "command"),
    [
        ("results/masks/gemma-2-9b_skip45.json", " job.skip_ratio=0.45"),
        ("a_skip5_sublayers_own.json", " job.skip_ratio=0.05 job.units=sublayers job.cache=own"),
        ("a_skip20_own.json", " job.skip_ratio=0.2 job.cache=own"),
        ("mine.json", ""),
    ],
)
def test_the_name_of_a_missing_mask_says_which_search_makes_it(mask: str, command: str) -> None:
    assert named_search(mask) == command


def test_a_drafter_may_come_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from harness.drafters import weights

    snapshot = tmp_path / "models--org--small" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    asked: list[tuple[str, str]] = []

    def fetched(repo: str, revision: str, *patterns: Any, key: str = "") -> Path:
        asked.append((repo, revision))
        return snapshot

    monkeypatch.setattr(weights, "hub_folder", fetched)
    assert weights.drafter_folder("org/small") == weights.drafter_folder("org/small@v2") == snapshot
    assert asked == [
        ("org/small", "main"),
        ("org/small", snapshot.name),
        ("org/small", "v2"),
        ("org/small", snapshot.name),
    ]
    assert weights.folder_name(snapshot) == "small@0123456789ab" and weights.folder_name(tmp_path) == tmp_path.name
    with pytest.raises(UserError, match=r"is not a folder; give one"):
        weights.drafter_folder("no/such/folder")


def test_masks_of_the_embedded_models_pair_are_shipped_or_searched_here() -> None:
    pair = yaml.safe_load((CONF / "pair" / "embedded.yaml").read_text())
    for name, mask in pair["masks"].items():
        assert isinstance(mask, list) or (mask == f"results/masks/embedded_{name}.json")
        if isinstance(mask, list):
            assert 1 - len(mask) / 30 == pytest.approx(int(name.removeprefix("skip")) / 100, abs=1 / 60 + 1e-9)
    assert (CHECKOUT / pair["small_lm"]).is_dir() and (CHECKOUT / pair["eagle"]).is_dir()


SMALL = ("drafter=self_skip", "limit=1", "max_new_tokens=4")


def test_a_page_says_what_was_not_run_and_what_is_whose_reading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(
        monkeypatch,
        "+experiment=paper/fig5",
        *SMALL,
        "task=web_questions",
        "drafters.eagle=${drafter}",
        f"results_dir={tmp_path}",
    )
    page = (tmp_path / "tables" / "fig5.md").read_text()
    assert "Note: EAGLE drafts a chain in place of a tree." in page
    assert "Not run: pearl: it verifies while it drafts" in page
    assert any(line.split("|")[2].strip() == "pearl" and "not run" in line for line in page.splitlines() if "|" in line)
    said = capsys.readouterr().out
    assert "Not run: pearl" in said and "EAGLE drafts a chain" in said
    rows = list(csv.DictReader((tmp_path / "tables" / "fig5.csv").read_text().splitlines()))
    assert rows and all(row["note"].startswith("EAGLE drafts a chain") for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig4", "fig6", "fig7", "fig9"])
def test_a_figure_of_the_paper_is_drawn_from_its_run(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main(monkeypatch, f"+experiment=paper/{name}", *SMALL, "task=web_questions", f"results_dir={tmp_path}")
    assert {f"figures/{name}.pdf", f"figures/{name}.png"} <= set(files(tmp_path))
    (folder,) = (tmp_path / "runs").iterdir()
    report = load(folder)
    assert report is not None
    figure = paper_figure(report)
    assert figure is not None and len(figure.axes) == {"fig4": 2, "fig6": 4, "fig7": 4, "fig9": 1}[name]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    papers = [label for label in labels if label.startswith("paper, ")]
    assert len(papers) == {"fig4": 0, "fig6": 1, "fig7": 4, "fig9": 2}[name] and len(labels) == len(set(labels))
    ours = [label for label in labels if label not in (*papers, "two tiers")]
    assert len(ours) == {"fig4": 3, "fig6": 2, "fig7": 4, "fig9": 1}[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table1", "table5", "table7", "table8"])
def test_an_experiment_runs_with_the_toy(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    main(monkeypatch, f"+experiment=paper/{name}", *SMALL, "task=web_questions", f"results_dir={tmp_path}")
    assert f"tables/{name}.md" in files(tmp_path)
