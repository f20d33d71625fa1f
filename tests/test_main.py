"""The command line: what runs, what a mistake is answered with, and what is left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import __main__ as command
from harness.config import GROUPS, RunSettings
from harness.errors import UserError
from harness.help import CONF, help_text, options
from tests.runs import key_of

ROOT = CONF.parent
calls: list[dict[str, Any]] = []

JOBS = {
    "echo": {
        "settings": {"_target_": "harness.config.RunSettings", "gamma": "${gamma}", "limit": "${limit}"},
        "methods": "${methods}",
        "drafter": "${drafter}",
        "config": "${config_text:}",
    },
    "mistake": {},
    "bug": {},
    "interrupt": {},
}
FILES = {f"job/{name}.yaml": {"_target_": f"{__name__}.{name}", **values} for name, values in JOBS.items()} | {
    "method/plain.yaml": {"_target_": f"{__name__}.Plain", "_partial_": True, "gamma": "${gamma}"},
    "drafter/one.yaml": {"_target_": f"{__name__}.Drafter", "length": 1},
    "drafter/two.yaml": {"_target_": f"{__name__}.Drafter", "length": 2},
    "drafter/unset.yaml": {"_target_": f"{__name__}.Drafter", "length": "???"},
    "experiment/bad_key.yaml": {"gama": 3},
    "experiment/bad_type.yaml": {"gamma": "abc"},
    "experiment/few.yaml": {"limit": 2, "gamma": 2},
}


class Plain:
    def __init__(self, tiers: object, gamma: int) -> None: ...


class Drafter:
    def __init__(self, length: int) -> None:
        if length > 8:
            raise UserError(f"length={length}: want at most 8.")
        self.length = length


def echo(**arguments: Any) -> None:
    calls.append(arguments)


def mistake() -> None:
    raise UserError("a table is missing:\nlook for it")


def bug() -> None:
    raise ZeroDivisionError("a bug")


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config folder with small jobs, beside the shipped one."""
    for name, content in FILES.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        package = {"method": "# @package methods.plain\n", "experiment": "# @package _global_\n"}
        path.write_text(package.get(path.parent.name, "") + yaml.safe_dump(content))
    calls.clear()
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it; this puts it back afterwards
    monkeypatch.chdir(tmp_path)
    return tmp_path / "conf"


def main(monkeypatch: pytest.MonkeyPatch, extra: Path, *arguments: str) -> None:
    given = {key_of(item) for item in arguments}
    chosen = [item for item in ("job=echo", "method=plain", "drafter=one") if key_of(item) not in given]
    monkeypatch.setattr(sys, "argv", ["harness", "--config-dir", str(extra), *chosen, *arguments])
    command.main()


def test_a_job_gets_plain_values_and_what_was_configured(extra: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(monkeypatch, extra, "+experiment=few", "gamma=3", "+method@methods.again=plain")
    (call,) = calls
    assert call["settings"] == RunSettings(gamma=3, limit=2)
    assert type(call["methods"]) is dict and list(call["methods"]) == ["plain", "again"]
    assert isinstance(call["methods"]["again"](tiers=None), Plain)
    assert call["drafter"].length == 1
    config = yaml.safe_load(call["config"])
    assert config["methods"]["again"] == {"_target_": f"{__name__}.Plain", "_partial_": True, "gamma": 3}
    assert (config["gamma"], config["limit"], config["seed"]) == (3, 2, 0)
    assert config["job"] == {"_target_": f"{__name__}.echo"}
    assert "${" not in call["config"]


def test_multirun_runs_each_choice(extra: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(monkeypatch, extra, "-m", "drafter=one,two", "gamma=1,4")
    assert [(call["drafter"].length, call["settings"].gamma) for call in calls] == [(1, 1), (1, 4), (2, 1), (2, 4)]


MISTAKES = {
    "gama=3": "unknown key 'gama': did you mean 'gamma'",
    "+gama=3": "unknown key 'gama': did you mean 'gamma'",
    "method.plain.gamma=3": "unknown key 'method': did you mean 'methods'",
    "methods.plan.gamma=3": "unknown methods key 'plan': did you mean 'plain'? Available: plain.",
    "methods.plain.gama=3": "unknown methods.plain key 'gama': did you mean 'gamma'? Available: gamma.",
    "+methods.plain.gama=3": "unknown methods.plain key 'gama': did you mean 'gamma'",
    "drafter.lenght=3": "unknown drafter key 'lenght': did you mean 'length'",
    "hydra.swep.dir=x": "unknown hydra key 'swep': did you mean 'sweep'",
    "method=viasd": "unknown method 'viasd': did you mean 'via_sd' or 'via_sd_paper'?",
    "method=[plain,viasd]": "unknown method 'viasd': did you mean 'via_sd'",
    "task=translate": "unknown task 'translate': did you mean 'translation'",
    "+experiment=quickstar": "unknown experiment 'quickstar': did you mean 'quickstart'",
    "experiment=quickstart": "experiment is not set yet: write +experiment=quickstart (with the plus).",
    "hydra/launcher=slurm": "unknown hydra/launcher 'slurm': ",
    "+experiment=bad_key": "conf/experiment/bad_key.yaml: unknown key 'gama': did you mean 'gamma'",
    "+experiment=bad_type": "In 'experiment/bad_type': ValidationError raised while composing config: Value 'abc'",
    "drafter=unset": "drafter.length has no value: add drafter.length=LENGTH.",
    "gamma=abc": "gamma=abc: Value 'abc' of type 'str' could not be converted to Integer",
    "gamma=0": "gamma=0: want at least 1 drafted token a block.",
    "drafter.length=abc": "drafter.length is 'abc' (str): want int.",
    "drafter.length=9": "length=9: want at most 8.",
    "~drafter.length": "drafter lacks length: add drafter.length=VALUE.",
    "~methods.plain.gamma": "methods.plain lacks gamma: add methods.plain.gamma=VALUE.",
    "+methods.other.gamma=3": "methods.other is no complete choice (no _target_): drop it with ~methods.other.",
    "~nothing": "Could not delete from config. 'nothing' does not exist.",
    "~job": "no job is chosen: write job=bench",
    "job=null": "job=null: a group takes a name; see python -m harness --help.",
    "drafter._target_=harness.nowhere.Drafter": "drafter._target_: there is no module 'harness.nowhere'",
    "name=${nam}": "Interpolation key 'nam' not found (name)",
    "quickstart": "'quickstart' is not KEY=VALUE; an experiment is chosen with +experiment=NAME.",
    "method=[plain": "cannot read 'method=[plain' (",
    "gamma=1,2": "'gamma=1,2' has several values: write 'gamma=[1,2]' for a list, or add -m to run each.",
    "--nope": "unrecognized arguments: --nope; see python -m harness --help.",
    "--resolve": "The --resolve flag can only be used in conjunction with --cfg or --help",
    "--config-name=nope": "Cannot find primary config 'nope'.",
    "job=mistake": "a table is missing: look for it",
}


@pytest.mark.parametrize(("argument", "message"), MISTAKES.items())
def test_a_mistake_is_one_line_and_exit_code_2(
    argument: str, message: str, extra: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(monkeypatch, extra, argument)
    said = capsys.readouterr()
    assert (caught.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith(f"harness: error: {message}")
    assert not calls


def test_two_values_for_a_key_contradict_each_other(
    extra: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(monkeypatch, extra, "gamma=3", "+gamma=5")
    assert caught.value.code == 2 and not calls
    assert capsys.readouterr().err == (
        "harness: error: gamma=3 and +gamma=5 contradict each other: write gamma= once.\n"
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    {
        "gama=1,2": "unknown key 'gama': did you mean 'gamma'",
        "drafter=one,tow": "unknown drafter 'tow': did you mean 'two'",
        "gamma=0,1": "gamma=0: want at least 1",
    }.items(),
)
def test_a_mistake_in_a_sweep_ends_it(
    argument: str, message: str, extra: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(monkeypatch, extra, "-m", argument)
    said = capsys.readouterr().err
    assert (caught.value.code, said.count("\n")) == (2, 1)
    assert said.startswith(f"harness: error: {message}")
    assert not calls


@pytest.mark.parametrize(("job", "code"), [("mistake", 2), ("bug", 1)])
def test_a_job_of_a_sweep_that_fails_is_listed_at_the_end(
    job: str,
    code: int,
    extra: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(monkeypatch, extra, "-m", f"job={job},echo")
    said = capsys.readouterr().err
    assert caught.value.code == code and len(calls) == 1, "the other job was run"
    error = {"mistake": "a table is missing: look for it", "bug": "ZeroDivisionError: a bug"}[job]
    assert said.startswith(f"harness: cell 1 failed (method=plain drafter=one job={job})") or job == "bug"
    assert "1 failed" in said and error in said.splitlines()[-1] and f"job={job}" in said.splitlines()[-1]
    assert ("Traceback" in said) is (job == "bug")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf"], "nothing is left behind"


def test_a_bug_is_no_mistake_of_the_user(extra: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        main(monkeypatch, extra, "job=bug")


@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_an_interrupt_is_one_line(
    flags: list[str], extra: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(monkeypatch, extra, "job=interrupt", *flags)
    assert (caught.value.code, capsys.readouterr().err) == (130, "harness: interrupted\n")


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "TMPDIR": str(temporary)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=os.environ | paths, capture_output=True, text=True, timeout=120
    )


def test_a_sweep_leaves_nothing_behind(extra: Path, tmp_path: Path) -> None:
    done = python(
        tmp_path, "-m", "harness", "--config-dir", str(extra), "-m", "job=echo", "method=plain", "drafter=one,two"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "temporary"]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_bug_keeps_its_traceback_and_exit_code_1(extra: Path, tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "harness", "--config-dir", str(extra), "job=bug", "drafter=one")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ZeroDivisionError: a bug" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "temporary"]


def test_help_is_quick_and_reads_no_library_that_decodes(tmp_path: Path) -> None:
    script = (
        "import sys, runpy; sys.argv = ['harness', '--help']; runpy.run_module('harness', run_name='__main__');"
        "sys.exit([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules] or 0)"
    )
    start = time.perf_counter()
    done = python(tmp_path, "-c", script)
    took = time.perf_counter() - start
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == help_text()
    assert took < 5, "0.2 s on an idle machine"


def test_help_lists_every_choice_with_its_line_and_every_setting() -> None:
    text = help_text()
    parts = {part.partition(":")[0]: part for part in text.split("\n\n")}
    for group in GROUPS:
        assert options(CONF, group)
        for name in options(CONF, group):
            (line,) = [line for line in parts[group].splitlines() if line.startswith(f"  {name} ")]
            assert len(line.split(maxsplit=1)[1]) > 10
    for key in ("seed=0", "limit=8", "gamma=5", "run_name=null", "source=auto", "results_dir=results"):
        assert f"\n  {key} " in text


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_wins_over_everything_else(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["harness", "gama=3", flag])
    command.main()
    assert capsys.readouterr().out == help_text()


def test_version_is_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["harness", "--version"])
    command.main()
    assert capsys.readouterr().out.startswith("harness 0.")


def test_without_its_configs_the_package_says_where_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CONF", tmp_path / "conf")
    monkeypatch.setattr(sys, "argv", ["harness", "limit=1"])
    with pytest.raises(SystemExit):
        command.main()
    assert capsys.readouterr().err.endswith("conf does not exist: run from a checkout of the project.\n")
