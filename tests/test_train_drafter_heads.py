"""Training eagle, mtp and medusa: what a student says in training is what its drafter says in decoding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.model.load import Model
from harness.sampling import RandomChooser
from harness.training.data import TextData, collate
from harness.training.decoding import FAMILIES, accept_length, drafter_folder
from harness.training.distil import Distillation, measure
from harness.training.heads import STUDENTS, FusedStudent
from harness.training.loop import Schedule, Training
from harness.training.verifier import borrow
from harness.training.write import Text
from tests.toys import CPU, GREEDY, tiers_of
from tests.training import SCHEDULE, texts, train, verifier

KINDS = ("eagle", "fused", "mtp", "medusa")
TAPS = (0, 1, 2)
TURNS = 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return verifier(tmp_path / "verifier")


def made(kind: str, model: Model, data: TextData, head: int, layers: list[int]):
    borrowed = borrow(model, data.frequent(head))
    if kind == "fused":
        return FusedStudent(borrowed, layers, TURNS, TAPS, data.tap_sizes())
    return STUDENTS[kind](borrowed, layers, TURNS)


def written(kind: str, model: Model, **changed: Any) -> TextData:
    return texts(model, **changed, **({"taps": TAPS} if kind == "fused" else {}))


def shaken(kind: str, model: Model, data: TextData, head: int = 29):
    """A student with weights of no structure, which bfloat16 holds exactly."""
    own = made(kind, model, data, head, [0, 3])
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(parameter.bfloat16().float())
    return own


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", [29, 12])
def test_training_says_what_drafting_says(kind: str, head: int, model: Model) -> None:
    data = written(kind, model)
    own = shaken(kind, model, data, head)
    tokens = (3, 14, 5, 9, 20, 7, 11, 4)
    with drafter_folder(own) as folder:
        drafter = FAMILIES[own.kind](tiers_of(model), GREEDY, model, path=str(folder))
    for length in range(2, len(tokens) + 1):
        assert drafter.tier is not None
        tiers = drafter.tier.source.full  # type: ignore[attr-defined]
        for tier in (tiers, drafter.tier):
            tier.cache.rollback(0)
            tier.prefill(tokens[: length - 1])
        drafts = drafter.draft(tokens[:length], TURNS, RandomChooser(0, CPU)).tokens.tolist()
        whole = (*tokens[:length], *drafts, 0)
        read = torch.zeros(len(whole) - 1, tiers.features.shape[1])
        read[: length - 1] = tiers.features[: length - 1]
        text = Text(0, whole, 1, read) if kind != "fused" else Text(0, whole, 1, read[:, :24], read)
        said = list(own.predictions(collate([text])))
        assert len(drafts) == len(said) == TURNS
        for turn, one in enumerate(said):
            row = length - 2  # of medusa the last feature there is; of the others each turn's rows begin one later
            assert int(own.borrowed.head_tokens[one.logits[row].argmax()]) == drafts[turn]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_is_held_against_the_verifiers_law_of_that_token(kind: str, model: Model) -> None:
    """A greedy text: the law's likeliest token is the one that the text has there."""
    data = written(kind, model, sampled=0.0)
    text = max(data.trained, key=lambda text: len(text.tokens) - text.prompt_length)
    own = shaken(kind, model, data)
    count, prompt = len(text.tokens), text.prompt_length
    for turn, said in enumerate(own.predictions(collate([text, data.trained[0]]))):
        right = (said.features.float() @ own.borrowed.head.T).argmax(-1)
        first = 2 + turn  # the first token that this turn says something of
        own_rows = count - first
        wanted = torch.tensor(text.tokens[first:])
        reply = said.in_reply[:own_rows]
        assert reply.tolist() == [place >= prompt for place in range(first, count)]
        assert torch.equal(right[:own_rows][reply], wanted[reply])


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_learns(kind: str, model: Model, tmp_path: Path) -> None:
    data = written(kind, model, sequences=150, held_out=20, shard=170, batch=64)
    own = made(kind, model, data, 29, [3])
    before = measure(own, data)
    schedule = Schedule(**SCHEDULE | {"steps": 60, "batch_tokens": 1024, "lr": 1e-2, "checkpoint_minutes": 60.0})
    for _ in Training(own, data, schedule, 0, tmp_path / "work", Distillation(own, data, 0.2)).run():
        pass
    after = measure(own, data)
    losses = [key for key in before if key.endswith("/loss")]
    assert len(losses) == TURNS and all(after[key] < before[key] for key in losses)
    with drafter_folder(own) as folder:
        prompts = [text.tokens[: text.prompt_length] for text in data.held_out[:4]]
        assert 1.0 <= accept_length(model, own.kind, folder, prompts, TURNS, 12) <= TURNS + 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_job_trains_a_head(kind: str, tmp_path: Path, model: Model) -> None:
    assert model.folder is not None
    asked = {"kind": "eagle", "fused": True} if kind == "fused" else {"kind": kind}
    folder = train(tmp_path / "results", model.folder, **asked, schedule={"steps": 3})
    card = (folder / "README.md").read_text()
    assert f"`{asked['kind']}` drafter" in card and "mean_accept_length" in card
