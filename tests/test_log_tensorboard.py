"""What TensorBoard reads of what we write."""

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from harness.log.content import summary
from harness.log.tensorboard import TensorBoardLogger
from harness.metrics import rows
from harness.report.figures import save, speed_quality_figure
from harness.report.lines import build
from harness.store import RunFolder
from tests.rows import run_record, two_arms
from tests.test_imports import ROOT

RUN, SAMPLES = run_record(), two_arms()
GATE = {"_target_": "harness.decode.gate.thresholds.Strictness", "alpha1": 0.5}
CONFIG = {"name": "mine", "methods": {"via_sd": {"gamma": 4, "gate": GATE}}}


def play(logger: TensorBoardLogger, folder: Path, failed: bool = False) -> None:
    figures = save(speed_quality_figure([build(RUN, SAMPLES, CONFIG)]), folder / "figures", "mine")
    (folder / "mine.md").write_text("# A table")
    logger.start(RUN, CONFIG)
    for sample in SAMPLES:
        logger.sample(sample)
    logger.summary(rows(RUN, SAMPLES))
    logger.files(folder, [folder / "mine.md", *figures])
    logger.close(failed)
    assert logger.ok()


def read(folder: Path) -> EventAccumulator:
    (file,) = folder.glob("*/events.out.tfevents.*")
    found = EventAccumulator(str(file))
    found.Reload()
    return found


def hparams(events: EventAccumulator, tag: str) -> HParamsPluginData:
    return HParamsPluginData.FromString(events.SummaryMetadata(tag).plugin_data.content)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    folder = tmp_path_factory.mktemp("tensorboard")
    for _ in range(2):  # the second replaces the first
        play(TensorBoardLogger(dir=str(folder / "logs"), live_s=0), folder)
    return read(folder / "logs")


def test_every_number_is_a_scalar(events: EventAccumulator) -> None:
    wanted = summary(RUN, rows(RUN, SAMPLES))
    assert {key: events.Scalars(key)[-1].value for key in wanted} == pytest.approx(wanted)
    assert events.Scalars("headline/speedup_decode")[0].step == len(SAMPLES)


def test_running_rates_are_there_once(events: EventAccumulator) -> None:
    steps = [point.step for point in events.Scalars("live/translation/via_sd/decode_tokens_per_s")]
    assert steps == sorted(steps) and set(steps) == {2, 3, 4}


def test_hyperparameters_are_typed(events: EventAccumulator) -> None:
    values = hparams(events, SESSION_START_INFO_TAG).session_start_info.hparams
    assert values["gate.alpha1"].number_value == 0.5 and values["gamma"].number_value == 4
    assert values["gate.name"].string_value == "strictness" and values["lossless"].HasField("bool_value")


@pytest.mark.parametrize(("failed", "status"), [(False, "STATUS_SUCCESS"), (True, "STATUS_FAILURE")])
def test_the_end_says_how_it_went(failed: bool, status: str, tmp_path: Path) -> None:
    play(TensorBoardLogger(dir=str(tmp_path / "logs")), tmp_path, failed)
    end = hparams(read(tmp_path / "logs"), SESSION_END_INFO_TAG).session_end_info
    assert end.DESCRIPTOR.fields_by_name["status"].enum_type.values_by_number[end.status].name == status


def test_outputs_tables_and_figures_can_be_looked_at(events: EventAccumulator) -> None:
    tags = set(events.Tags()["tensors"])
    assert {"samples/translation/via_sd/text_summary", "tables/mine/text_summary"} & tags or {
        "samples/translation/via_sd",
        "tables/mine",
    } <= tags
    outputs = events.Tensors("samples/translation/via_sd")
    assert len(outputs) == 2 and b"- score/exact_match: 0.0" in outputs[0].tensor_proto.string_val[0]
    (image,) = events.Images("figures/mine")
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.width > image.height / 10 > 10


def test_texts_stay_at_home_when_they_are_asked_to(tmp_path: Path) -> None:
    play(TensorBoardLogger(dir=str(tmp_path / "logs"), texts=False), tmp_path)
    assert not [tag for tag in read(tmp_path / "logs").Tags()["tensors"] if tag.startswith("samples/")]


def test_runs_are_sent_again_without_torch(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, RUN, CONFIG)
    for sample in SAMPLES:
        folder.append(sample)
    folder.finish({})
    script = (
        "import sys\n"
        "from harness.jobs.relog import relog\n"
        "from harness.log.tensorboard import TensorBoardLogger\n"
        "for _ in range(2):\n"
        "    assert relog(sys.argv[1], TensorBoardLogger(dir=sys.argv[1] + '/logs'), 'run') == ['run']\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "logs").Scalars("headline/speedup_decode")[0].value == 2.0
