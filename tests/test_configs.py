"""Every file of conf/ composes, says what it is, and fits the code it names; what was asked for last wins."""

import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from harness.config import GROUPS, RunSettings, Settings, check, check_call, check_values, plain
from harness.errors import UserError
from harness.help import CONF, comment, options

HYDRAS = "hydra/sweeper/checked.yaml"
"""Of a group of Hydra's own, which every sweep uses and nobody chooses."""
FILES = sorted({path.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml")} - {HYDRAS})
QUICK_FOUR = ["wmt14_de_en", "cnn_dailymail", "gsm8k", "web_questions"]
EXPERIMENTS = options(CONF, "experiment")
DEFAULTS = {item.name: item.default for item in fields(Settings) if "help" in item.metadata}


pytestmark = pytest.mark.usefixtures("conf")


def composed(*overrides: str) -> DictConfig:
    return compose("config", list(overrides))


def test_every_file_on_disk_is_checked_below() -> None:
    listed = [f"{group}/{name}.yaml" for group in GROUPS for name in options(CONF, group)]
    assert len([*FILES, HYDRAS]) == sum(1 for path in CONF.glob("**/*") if path.is_file())
    assert sorted(listed) == [name for name in FILES if "/" in name]
    assert [name for name in FILES if "/" not in name] == ["config.yaml"]
    assert len(EXPERIMENTS) == sum(1 for path in (CONF / "experiment").rglob("*") if path.is_file()) >= 1


@pytest.mark.parametrize("name", FILES)
def test_each_file_opens_with_a_line_that_says_what_it_is(name: str) -> None:
    lines = (CONF / name).read_text().splitlines()
    packages = [line for line in lines if re.match(r"\s*#\s*@package", line)]
    assert packages in ([], lines[:1]), "Hydra reads `# @package` on the first line only"
    assert lines[len(packages)].startswith("# ")
    assert 10 < len(comment(CONF / name)) <= 118


@pytest.mark.parametrize("group", ["method", "task"])
def test_files_of_a_listed_group_go_where_lists_collect_them(group: str) -> None:
    for name in options(CONF, group):
        first = (CONF / group / f"{name}.yaml").read_text().splitlines()[0]
        assert first in (f"# @package {group}s.{name}", "# @package _global_")


@pytest.mark.parametrize("name", [name for name in FILES if "/" in name and not name.startswith("experiment/")])
def test_each_choice_composes_and_fits_the_code_it_names(name: str) -> None:
    group, _, choice = name.removesuffix(".yaml").partition("/")
    if group == "launcher":
        if choice.startswith("ray") and find_spec("hydra_plugins.hydra_ray_launcher") is None:
            pytest.skip("the extra ray is not installed")
        alone, sent = (plain(one, resolve=False) for one in (composed(), composed(f"launcher={choice}")))
        assert alone.pop("cores") is None and sent.pop("cores") in (None, "auto")
        assert alone == sent, "it configures Hydra alone, and which cores a worker takes"
        return
    key = f"tasks.{choice}" if group == "task" else group
    extra = [f"{key}.path=somewhere"] if "path: ???" in (CONF / name).read_text() else []
    cfg = composed(f"{group}={choice}", *extra)
    node = cfg[f"{group}s"] if group in ("method", "task") else cfg[group]
    nodes = plain(node, resolve=True)
    if group == "pair":  # names of weights and masks, which other groups refer to
        assert set(nodes) <= {"small_lm", "eagle", "independent", "no_independent", "masks", "sizes"}
        return
    for key, value in (nodes if group in ("method", "task") else {group: nodes}).items():
        check_call(key, value, value)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_names_its_command_and_composes(name: str) -> None:
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    header = lines[: next(index for index, line in enumerate(lines) if not line.startswith("#"))]
    assert lines[0] == "# @package _global_"
    assert any(f"python -m harness +experiment={name}" in line for line in header)
    check(composed(f"+experiment={name}", "job=report"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_command_line_beats_experiment_beats_default(name: str) -> None:
    own = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
    settings = {key: value for key, value in own.items() if key in DEFAULTS}
    cfg = composed(f"+experiment={name}")
    for key, default in DEFAULTS.items():
        assert cfg[key] == settings.get(key, default)
    others = {key: f"{value}x" if isinstance(value, str) else value + 1 for key, value in settings.items()}
    given = [f"{key}='{other}'" if isinstance(other, str) else f"{key}={other}" for key, other in others.items()]
    groups = {"gate": "literal", "drafter": "self_skip", "model": "toy", "log": "none"}
    given += ["task=web_questions", *(f"{group}={choice}" for group, choice in groups.items())]
    for arguments in ((*given, f"+experiment={name}"), (f"+experiment={name}", *given)):
        cfg = composed(*arguments)
        assert {key: cfg[key] for key in others} == others
        for group, choice in groups.items():
            assert cfg[group] == OmegaConf.create((CONF / group / f"{choice}.yaml").read_text())
        assert list(cfg.tasks) == ["web_questions"]


def test_the_quickstart_is_what_its_header_promises() -> None:
    cfg = composed("+experiment=quickstart")
    assert list(cfg.methods) == ["autoregressive", "speculative", "via_sd"]
    assert list(cfg.tasks) == QUICK_FOUR
    assert (cfg.name, cfg.limit, cfg.max_new_tokens, cfg.temperature) == ("quickstart", 8, 64, 0.0)


def test_arms_with_a_drafter_of_their_own_stand_beside_the_plain_ones() -> None:
    cfg = composed("+experiment=two_drafters")
    methods = plain(cfg, resolve=True)["methods"]
    targets = {name: (node["_target_"], node.get("drafter", {}).get("_target_")) for name, node in methods.items()}
    decode, lookup, skip = (
        "harness.decode",
        "harness.drafters.prompt_lookup.PromptLookup",
        "harness.drafters.self_skip.SelfSkip",
    )
    assert targets == {
        "autoregressive": (f"{decode}.autoregressive.Autoregressive", None),
        "speculative": (f"{decode}.speculative.Speculative", lookup),
        "via_sd": (f"{decode}.via_sd.ViaSD", lookup),
        "speculative_self_skip": (f"{decode}.speculative.Speculative", skip),
        "via_sd_self_skip": (f"{decode}.via_sd.ViaSD", skip),
    }
    assert len(composed("+experiment=two_drafters", "~methods.via_sd_self_skip").methods) == 4


def test_an_arm_with_its_own_drafter_has_no_key_of_the_plain_one() -> None:
    cfg = composed("+experiment=two_drafters", "drafters.self_skip.skip_ratio=0.5", "drafter.max_ngram=4")
    assert "max_ngram" not in cfg.methods.via_sd_self_skip.drafter
    assert cfg.methods.via_sd_self_skip.drafter.skip_ratio == 0.5
    assert cfg.methods.via_sd.drafter.max_ngram == 4


def test_a_graft_has_any_drafter_inside_with_settings_of_its_own() -> None:
    cfg = composed("drafter=graft", "drafter@drafter.inner=early_exit", "drafter.inner.layers=3")
    assert cfg.drafter.inner._target_ == "harness.drafters.early_exit.EarlyExit" and cfg.drafter.inner.layers == 3
    assert "skip_ratio" not in cfg.drafter.inner
    assert cfg.drafter.retrieval == composed("drafter=retrieval").drafter
    beside = composed("+drafter@drafters.mine=graft", "drafters.mine.retrieval.own_output=run")
    assert (
        beside.drafters.mine.retrieval.own_output == "run" and beside.drafter._target_ != beside.drafters.mine._target_
    )


def test_lists_of_methods_and_tasks_can_be_replaced_whole() -> None:
    assert list(composed("method=via_sd").methods) == ["via_sd"]
    assert list(composed("method=[autoregressive,via_sd]").methods) == ["autoregressive", "via_sd"]
    assert list(composed("task=quick_four").tasks) == QUICK_FOUR
    assert list(composed("task=[web_questions,gsm8k]").tasks) == ["web_questions", "gsm8k"]
    assert list(composed("+method@methods.strict=via_sd", "methods.strict.gate_probs=warped").methods)[-1] == "strict"


def test_gamma_gate_drafter_and_length_reach_every_method() -> None:
    cfg = composed("gamma=3", "gate=literal", "gate.alpha1=0.2", "drafter=self_skip", "length=adaptive", "length.up=1")
    assert cfg.methods.via_sd.length == cfg.methods.speculative.length == cfg.length and cfg.length.up == 1
    assert (cfg.methods.speculative.gamma, cfg.methods.via_sd.gamma) == (3, 3)
    assert cfg.methods.via_sd.gate == cfg.gate and cfg.gate.alpha1 == 0.2
    assert cfg.methods.via_sd.drafter == cfg.methods.speculative.drafter == cfg.drafter


@pytest.mark.parametrize("override", ["gamma=2.5", "gamma=abc", "limit=true", "top_p=[1]", "seed=null", "gama=3"])
def test_the_schema_refuses_unknown_keys_and_other_types(override: str) -> None:
    with pytest.raises(ConfigCompositionException):
        composed(override)


@pytest.mark.parametrize("override", ["+gama=3", "++gama=3"])
def test_a_plus_does_not_make_an_unknown_root_key_known(override: str) -> None:
    with pytest.raises(UserError, match="unknown key 'gama': did you mean 'gamma'"):
        check(composed(override, "job=report"))


BAD_VALUES = {
    "gamma": (0, -1),
    "limit": (0, -5),
    "max_new_tokens": (0,),
    "temperature": (-0.1, float("nan"), float("inf")),
    "top_p": (0.0, -0.5, 1.01, float("nan")),
    "top_k": (-1,),
    "seed": (-1,),
    "source": ("hubb", ""),
    "name": ("", " "),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD_VALUES.items() for value in values])
def test_a_value_out_of_bounds_is_named(key: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        check_values(DEFAULTS | {key: value})
    assert str(caught.value).startswith((f"{key}={value}: want ", f"unknown {key} {value!r}: "))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [{}, {"gamma": 1, "limit": 1, "max_new_tokens": 1}, {"temperature": 1.0, "top_p": 0.9, "top_k": 50}, {"seed": 7}],
)
def test_values_inside_the_bounds_pass(values: dict[str, Any]) -> None:
    check_values(DEFAULTS | values)


def draft(tiers: object, gamma: int, ratio: float = 0.5, path: str | None = None, gate: Path | None = None) -> None: ...


def load(mask: list[int], gate: Path) -> None: ...


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("draft", {"_partial_": True, "gamma": 3, "gama": 1}, "unknown here key 'gama': did you mean 'gamma'"),
        ("draft", {"_partial_": True, "gamma": "3"}, "here.gamma is '3' (str): want int."),
        ("draft", {"_partial_": True, "gamma": True}, "here.gamma is True (bool): want int."),
        ("draft", {"_partial_": True, "gamma": None}, "here.gamma is null: want int."),
        ("draft", {"_partial_": True, "gamma": 3, "path": 4}, "here.path is 4 (int): want str or null."),
        ("draft", {"_partial_": True}, "here lacks gamma: add here.gamma=VALUE."),
        ("draft", {"gamma": 3}, "here lacks tiers: add here.tiers=VALUE."),
        ("load", {"mask": [1], "gate": None}, "here.gate is null: want Path."),
        ("nothing", {}, f"here._target_: {__name__!r} has no function or class 'nothing'."),
    ],
)
def test_a_call_that_cannot_work_is_refused_before_the_job(name: str, arguments: dict[str, Any], message: str) -> None:
    node = {"_target_": f"{__name__}.{name}", **arguments}
    with pytest.raises(UserError) as caught:
        check_call("here", node, node)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("draft", {"_partial_": True, "gamma": 3, "ratio": 1, "path": "x"}),
        ("draft", {"tiers": None, "gamma": 3, "path": None, "gate": None}),
        ("load", {"mask": "left to the code", "gate": "left to the code"}),
    ],
)
def test_a_call_that_can_work_is_let_through(name: str, arguments: dict[str, Any]) -> None:
    node = {"_target_": f"{__name__}.{name}", **arguments}
    check_call("here", node, node)


def test_the_bench_gets_every_setting_of_a_run() -> None:
    """One that is left out of the job's own node would keep its default whatever the command line says."""
    own = yaml.safe_load((CONF / "job" / "bench.yaml").read_text())["settings"]
    wanted = {field.name: f"${{{field.name}}}" for field in fields(RunSettings)}
    assert own == {"_target_": "harness.config.RunSettings", **wanted}
