"""The training job: what it learns, what it writes, and that a killed run ends as one that was left alone."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.errors import UserError
from harness.log import NullLogger
from harness.model.load import load_model
from harness.model.made import sha256
from harness.model.toy import toy_model
from harness.training.distil import Distillation, measure
from harness.training.loop import Schedule, Training
from harness.training.verifier import taken_layers
from tests.runs import refused
from tests.toys import write_checkpoint
from tests.training import SCHEDULE, student, texts, train, verifier


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "verifier", num_hidden_layers=4, max_position_embeddings=256)


def test_the_loss_falls_and_acceptance_rises(tmp_path: Path) -> None:
    model = verifier(tmp_path / "verifier")
    written = texts(model, sequences=200, held_out=30, shard=230, batch=64)
    own = student(model, written, head=29)
    before = measure(own, written, 512)
    schedule = Schedule(**SCHEDULE | {"steps": 120, "batch_tokens": 1024, "lr": 1e-2, "checkpoint_minutes": 60.0})
    training = Training(own, written, schedule, 0, tmp_path / "work", Distillation(own, written, 0.2))
    losses = [numbers["loss"] for numbers in training.run()]
    after = measure(own, written, 512)
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert after["next/loss"] < 0.8 * before["next/loss"]
    assert after["next/acceptance"] > before["next/acceptance"] + 0.05


def test_a_student_begins_with_the_chosen_layers(tmp_path: Path) -> None:
    model = verifier(tmp_path / "verifier")
    written = texts(model)
    own = student(model, written, layers=(0, 3))
    stored = load_file(tmp_path / "verifier" / "model.safetensors")
    found = own.state_dict()
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], stored["model.layers.3.mlp.up_proj.weight"].float())
    assert set(found) == set(taken_layers(tmp_path / "verifier", [0, 3]))


def test_a_student_of_all_layers_says_what_the_verifier_says(tmp_path: Path) -> None:
    """Its forward is the verifier's: the loss against the verifier's own law is nothing."""
    model = verifier(tmp_path / "verifier")
    written = texts(model)
    numbers = measure(student(model, written, layers=(0, 1, 2, 3), head=29), written, 256)
    assert numbers["next/loss"] < 1e-6 and numbers["next/acceptance"] == 1.0


def test_acceptance_counts_what_the_head_cannot_say_as_wrong(tmp_path: Path) -> None:
    model = verifier(tmp_path / "verifier")
    written = texts(model)
    few = student(model, written, layers=(0, 1, 2, 3), head=5)
    said = {int(token) for token in few.borrowed.head_tokens}
    wanted = [
        int((text.features[place].float() @ few.borrowed.head.T).argmax())
        for text in written.held_out
        for place in range(text.prompt_length - 1, len(text.features))
    ]
    share = sum(token in said for token in wanted) / len(wanted)
    assert 0 < share < 1
    assert measure(few, written, 256)["next/acceptance"] == pytest.approx(share)


def test_the_drafters_folder_is_whole(tmp_path: Path, checkpoint: Path) -> None:
    folder = train(tmp_path / "results", checkpoint)
    assert folder == tmp_path / "results" / "drafters" / "one"
    card, config = (json.loads((folder / name).read_text()) for name in ("card.json", "config.json"))
    weights = load_file(folder / "model.safetensors")
    assert card["sha256"] == sha256(folder / "model.safetensors")
    assert (config["kind"], config["num_hidden_layers"], config["model"]) == ("small_lm", 2, str(checkpoint))
    assert (card["seed"], card["steps"], card["verifier_layers"]) == (0, 12, [0, 3])
    assert card["command"].startswith("python -m harness ") and 0 < card["seconds"] < 60
    assert {"next/loss", "next/acceptance"} <= set(card["held_out"])
    assert weights["head_tokens"].dtype == torch.int32 and len(weights["head_tokens"]) == 20
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in weights.items() if name != "head_tokens")
    lines = logged(tmp_path / "results")
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert all({"loss", "lr", "tokens_s", "grad_norm"} <= set(line) for line in lines)


def logged(results: Path) -> list[dict[str, float]]:
    text = (results / "training" / "one" / "log.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


class Killed(NullLogger):
    """Dies at the first line that is logged at ``step`` or later."""

    def __init__(self, step: int) -> None:
        self.step = step

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimiser in full precision, as the last checkpoint has them."""
    state = torch.load(folder / "training" / "one" / "checkpoint.pt", weights_only=True)
    moments = {
        f"{index}/{key}": value for index, own in state["optimizer"]["state"].items() for key, value in own.items()
    }
    return state["weights"] | moments


@pytest.mark.parametrize("every", [0.0, 60.0])
def test_a_killed_training_ends_as_one_left_alone(tmp_path: Path, checkpoint: Path, every: float) -> None:
    """Killed for good at step 8, with a checkpoint after every step, and with none at all."""
    schedule = {"checkpoint_minutes": every}
    script = (
        "import sys; from pathlib import Path; from tests.test_train_drafter import Killed; "
        "from tests.training import train; "
        f"train(Path(sys.argv[1]), Path(sys.argv[2]), Killed(8), schedule={schedule!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "killed"), str(checkpoint)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "killed" / "drafters").exists()
    resumed = train(tmp_path / "killed", checkpoint, schedule=schedule)
    whole = train(tmp_path / "whole", checkpoint, schedule=schedule)
    one, other = weights_of(tmp_path / "killed"), weights_of(tmp_path / "whole")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert sha256(resumed / "model.safetensors") == sha256(whole / "model.safetensors")
    logs = [logged(tmp_path / name) for name in ("killed", "whole")]
    steps, losses = ([[line[key] for line in log] for log in logs] for key in ("step", "loss"))
    assert steps == [[4, 8, 12]] * 2 and losses[0] == losses[1]


def test_the_same_seed_gives_the_same_drafter_and_another_does_not(tmp_path: Path, checkpoint: Path) -> None:
    made = [train(tmp_path / name, checkpoint, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    first, second, third = (sha256(folder / "model.safetensors") for folder in made)
    assert first == second != third


def test_a_finished_training_is_left_as_it_is_and_other_settings_need_another_name(
    tmp_path: Path, checkpoint: Path
) -> None:
    folder = train(tmp_path, checkpoint)
    before = sha256(folder / "model.safetensors")
    assert sha256(train(tmp_path, checkpoint) / "model.safetensors") == before
    with pytest.raises(UserError, match=r"is a training with other settings \(schedule\): choose another job\.drafter"):
        train(tmp_path, checkpoint, schedule={"lr": 1e-2})
    assert sha256(folder / "model.safetensors") == before
    train(tmp_path, checkpoint, schedule={"lr": 1e-2}, overwrite=True)
    assert sha256(folder / "model.safetensors") != before


def test_a_drafter_that_no_training_here_made_is_not_replaced(tmp_path: Path, checkpoint: Path) -> None:
    folder = train(tmp_path, checkpoint)
    for path in (tmp_path / "training" / "one").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"one exists: choose another job\.drafter_name=NAME, or replace it"):
        train(tmp_path, checkpoint)
    assert (folder / "card.json").is_file()


def test_a_broken_checkpoint_is_said_in_one_line(tmp_path: Path, checkpoint: Path) -> None:
    train(tmp_path, checkpoint)
    path = tmp_path / "training" / "one" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"checkpoint\.pt cannot be resumed from .*: delete it"):
        train(tmp_path, checkpoint)


def test_the_schedule_warms_up_and_falls_to_a_tenth() -> None:
    schedule = Schedule(steps=100, minutes=None, lr=1.0, warmup=0.1)
    rates = [schedule.rate(schedule.passed(step, 0.0)) for step in range(101)]
    assert rates[0] < 0.05 and max(rates) == rates[10] == pytest.approx(1.0) and rates[100] == pytest.approx(0.1)
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert Schedule(steps=None, minutes=2.0).passed(7, 60.0) == 0.5
    assert Schedule(steps=10, minutes=2.0).passed(9, 60.0) == 0.9


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "smal_lm"}, "unknown job.kind 'smal_lm': did you mean 'small_lm'?"),
    "objective": ({"objective": "kl"}, "unknown job.objective 'kl'"),
    "deeper": ({"layers": [0, 1, 2, 3]}, "job.layers has 4 layers, the verifier has 4: a drafter must have fewer"),
    "layer": ({"layers": [0, 4]}, "job.layers=[0, 4]: want indices of the verifier's layers, -4 to 3."),
    "none": ({"layers": []}, "job.layers=[]: want indices"),
    "head": ({"head_tokens": 0}, "job.head_tokens=0: want at least 1."),
    "task": ({"tasks": {}}, "no task is chosen"),
    "name": ({"drafter_name": "../x"}, "job.drafter_name='../x': want a plain file name"),
    "folder": ({"model": lambda **given: toy_model(notify=given["notify"])}, "model 'toy' has no checkpoint folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_before_anything_is_written(case: str, tmp_path: Path, checkpoint: Path) -> None:
    changed, line = BAD[case]
    with pytest.raises(UserError) as caught:
        train(tmp_path / "results", checkpoint, **changed)
    assert str(caught.value).startswith(line)
    assert not (tmp_path / "results").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changed", "line"),
    {
        "neither": ({"steps": None, "minutes": None}, "job.schedule.steps and job.schedule.minutes are both null"),
        "minutes": ({"minutes": 0.0}, "job.schedule.minutes=0.0: want more than 0, or null."),
        "lr": ({"lr": 0.0}, "job.schedule.lr=0.0: want more than 0."),
    }.values(),
)
def test_a_bad_schedule_is_refused(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        Schedule(**changed)
    assert str(caught.value).startswith(line)


def test_a_verifier_with_other_layers_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "biased", num_hidden_layers=4, max_position_embeddings=256, attention_bias=True
    )
    with pytest.raises(UserError, match="drafters are trained for plain Llama models; this one has biases"):
        train(tmp_path / "results", folder)


def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(monkeypatch, capsys, "job=train_drafter", "task=web_questions", f"results_dir={tmp_path}")
    assert line.startswith("model 'toy' has no checkpoint folder to take layers from: use model=embedded")
    line = refused(monkeypatch, capsys, "job=train_drafter", "job.data.sampled=2.0", f"results_dir={tmp_path}")
    assert "job.data.sampled=2.0: want a share" in line


@pytest.mark.slow
def test_the_embedded_model_teaches_a_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps: numbers are finite, and the first loss is far above the last."""
    monkeypatch.delenv("HARNESS_CACHE")  # the embedded model lies in the user's
    from harness.training import data

    monkeypatch.setattr(data, "cache_dir", lambda: tmp_path / "cache")
    tiny = {"sequences": 12, "held_out": 2, "calibration": 4, "prompt_tokens": 16, "reply_tokens": 16, "batch": 7}
    folder = train(
        tmp_path,
        tmp_path,
        model=lambda slim_mask, notify: load_model(dtype="float32", device="cpu"),
        layers=[0, -1],
        head_tokens=2048,
        data=tiny,
        schedule={"steps": 12, "batch_tokens": 512, "lr": 1e-3, "log_steps": 1},
    )
    losses = [line["loss"] for line in logged(tmp_path)]
    assert losses[-1] < 0.7 * losses[0]
    assert load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].shape == (1536, 576)
