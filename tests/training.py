"""A tiny verifier on disk, texts that it wrote, and trainings on them."""

from pathlib import Path
from typing import Any

from harness.jobs.train_drafter import train_drafter
from harness.log import Logger, NullLogger
from harness.model.load import Model, load_model
from harness.records import DataSource, Example
from harness.training.data import TextData, prepare
from harness.training.loop import Schedule
from harness.training.recipe import Recipe, Source
from harness.training.students import SmallStudent
from harness.training.verifier import borrow
from tasks.web_questions import WebQuestions
from tests.toys import write_checkpoint

RECIPE: dict[str, Any] = {
    **{"sequences": 24, "held_out": 6, "calibration": 4, "prompt_tokens": 8, "reply_tokens": 10},
    **{"batch": 5, "shard": 12},
}
SCHEDULE: dict[str, Any] = {
    **{"steps": 12, "minutes": None, "batch_tokens": 256, "lr": 3e-3, "bfloat16": False, "checkpoint_minutes": 0.0},
    **{"log_steps": 4, "eval_minutes": 1000.0},
}
SOURCES = (
    Source("letters", "a b c ", ("d e f", "g h", "i j k", "l m"), ((3, 4, 5, 6), (3, 4, 5, 9), (3, 4, 5, 11), (3, 14))),
)


class CalibrationOnly(WebQuestions):
    """A task whose test rows nobody may read."""

    def load(self, limit: int, seed: int) -> tuple[list[Example], DataSource]:
        raise AssertionError("training reads no test row")


def verifier(folder: Path, **shape: Any) -> Model:
    """Four layers, 29 words, float32."""
    write_checkpoint(folder, num_hidden_layers=4, max_position_embeddings=256, **shape)
    return load_model(str(folder), dtype="float32", device="cpu")


def texts(model: Model, seed: int = 0, **changed: Any) -> TextData:
    return prepare(model, Recipe(**RECIPE | changed), SOURCES, {}, seed, lambda done, count, speed: None)


def student(model: Model, data: TextData, layers: tuple[int, ...] = (0, 3), head: int = 20) -> SmallStudent:
    return SmallStudent(borrow(model, data.frequent(head)), list(layers))


def train(results: Path, checkpoint: Path, log: Logger | None = None, **changed: Any) -> Path:
    """The job, on a task whose test rows are out of bounds."""
    data, schedule = changed.pop("data", {}), changed.pop("schedule", {})
    arguments: dict[str, Any] = {
        **{"model": lambda slim_mask, notify: load_model(str(checkpoint), dtype="float32", device="cpu")},
        **{"tasks": {"qa": CalibrationOnly(source="builtin")}, "log": log or NullLogger()},
        **{"results_dir": str(results), "seed": 0, "kind": "small_lm", "objective": "kd", "layers": [0, -1]},
        **{"turns": 2, "head_tokens": 20, "data": Recipe(**RECIPE | data), "schedule": Schedule(**SCHEDULE | schedule)},
        **{"gamma": 3, "decode_prompts": 3, "decode_tokens": 10},
        "drafter_name": "one",
    }
    return train_drafter(**arguments | changed)
