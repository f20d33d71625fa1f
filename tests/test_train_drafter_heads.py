"""Training eagle, mtp and medusa: what a student says in training is what its drafter says in decoding."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.errors import UserError
from harness.model.load import Model
from harness.sampling import RandomChooser
from harness.training import copier, distil
from harness.training.data import TextData, collate
from harness.training.decoding import FAMILIES, accept_length, drafter_folder, rollout
from harness.training.distil import Distillation, measure
from harness.training.heads import STUDENTS, CopyingStudent, FusedStudent
from harness.training.layers import Sized
from harness.training.loop import Schedule, Training
from harness.training.objectives import forward_kl, reverse_kl
from harness.training.on_policy import replay_loss
from harness.training.replay import DraftedBlock, Replay
from harness.training.verifier import borrow
from harness.training.write import Text
from tests.toys import CPU, GREEDY, tiers_of
from tests.training import SCHEDULE, texts, train, verifier

KINDS = ("eagle", "copying", "fused", "mtp", "medusa")
TAPS = (0, 1, 2)
BESIDE = (0, 2)
ASKED: dict[str, dict[str, Any]] = {
    "copying": {"kind": "eagle", "beside": list(BESIDE), "data": {"taps": list(TAPS)}},
    "fused": {"kind": "eagle", "fused": True},
}
TURNS = 3
PROMPTS = ((3, 4, 5, 6), (9, 8, 7), (11, 2, 14, 20, 5))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(copier, "FIT_STEPS", 30)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return verifier(tmp_path / "verifier")


def made(kind: str, model: Model, data: TextData, head: int, layers: list[int]):
    borrowed = borrow(model, data.frequent(head))
    if kind == "copying":
        return CopyingStudent(borrowed, layers, TURNS, BESIDE, TAPS)
    if kind == "fused":
        return FusedStudent(borrowed, layers, TURNS, TAPS, data.tap_sizes())
    return STUDENTS[kind](borrowed, layers, TURNS)


def written(kind: str, model: Model, **changed: Any) -> TextData:
    return texts(model, **(changed | ({"taps": TAPS} if kind in ASKED else {})))


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
        text = Text(0, whole, 1, read)
        if kind == "copying":  # of the layer that it does not read nothing is known
            states = torch.cat((read[:, :24], torch.full((len(read), 24), 9.0), read[:, 24:48]), 1)
            text = Text(0, whole, 1, read[:, 48:], states)
        elif kind == "fused":
            text = Text(0, whole, 1, read[:, :24], read)
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
    asked = ASKED.get(kind, {"kind": kind})
    folder = train(tmp_path / "results", model.folder, **asked, schedule={"steps": 3})
    card = (folder / "README.md").read_text()
    assert f"`{asked['kind']}` drafter" in card and "mean_accept_length" in card


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_block_says_what_was_drafted(kind: str, model: Model) -> None:
    """The drafter was loaded from a folder and ran token by token; each draft is its likeliest token."""
    data = written(kind, model)
    own = shaken(kind, model, data, 12)
    with drafter_folder(own) as folder:
        drafter = partial(FAMILIES[own.kind], path=str(folder))
        replays = [rollout(model, drafter, prompt, TURNS, 16, own.borrowed.head_tokens) for prompt in PROMPTS]
    assert sum(len(replay.blocks) for replay in replays) > 4
    for replay in replays:
        for block, logits in zip(replay.blocks, own.replayed(replay), strict=True):
            assert tuple(own.borrowed.head_tokens[logits.argmax(-1)].tolist()) == block.drafts


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_replayed_blocks_reaches_the_head_alone(kind: str, model: Model) -> None:
    """Forward KL on what was kept, reverse KL behind it, of these very logits, per drafted token."""
    data = written(kind, model)
    own = shaken(kind, model, data)
    width = 24 * (len(TAPS) if kind in ASKED else 1)
    draws = torch.Generator().manual_seed(1)
    laws = torch.randn(2, TURNS, 29, generator=draws)
    blocks = (DraftedBlock(4, (7, 11, 12), 1, laws[0]), DraftedBlock(6, (10, 13), 0, laws[1, :2]))
    replay = Replay((3, 4, 5, 6, 7, 8, 9), blocks, torch.randn(6, width, generator=draws))
    losses = replay_loss(own, replay)
    for block, logits, loss in zip(blocks, own.replayed(replay), losses, strict=True):
        wanted = torch.zeros(())
        for place in range(len(block.drafts)):
            if place < block.kept:
                wanted = wanted + forward_kl(block.verifier, logits)[place]
            else:
                wanted = wanted + 0.8 ** (place - block.kept) * reverse_kl(block.verifier, logits)[place]
        assert loss.item() == pytest.approx(wanted.item() / len(block.drafts), rel=1e-5)
    losses.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in own.parameters())
    assert any(parameter.grad.abs().max() > 0 for parameter in own.parameters())
    assert not own.borrowed.embed.requires_grad and not own.rows.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_the_job_learns_on_policy(kind: str, tmp_path: Path, model: Model) -> None:
    assert model.folder is not None
    asked = ASKED.get(kind, {"kind": kind})
    schedule = {"steps": 2, "batch_tokens": 64}
    first = train(tmp_path / "results", model.folder, **asked, schedule=schedule)
    more: dict[str, Any] = {
        "objective": "draft_opd",
        "start_from": str(first),
        "drafter_name": "two",
        "schedule": schedule,
    }
    second = train(tmp_path / "results", model.folder, **asked, **more)
    one, two = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert torch.equal(one.pop("head_tokens"), two.pop("head_tokens"))
    assert all(tensor.isfinite().all() for tensor in two.values())
    assert any(not torch.equal(one[name], tensor) for name, tensor in two.items())


def test_all_chunks_of_the_loss_are_the_loss(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are those of forward KL over all logits at once, whatever a chunk has of rows."""
    data = texts(model)
    own = shaken("eagle", model, data, 12)
    batch = collate(data.trained[:5])
    total, weight = torch.zeros(()), torch.zeros(())
    for said in own.predictions(batch):
        each = said.weight * torch.where(said.in_reply, 1.0, 0.2)
        law = said.features.float() @ own.rows.T
        total = total + (forward_kl(law, said.logits) * each).sum()
        weight = weight + each.sum()
    wanted = torch.autograd.grad(total / weight, list(own.parameters()))
    for chunk in (1, 7, 1000):
        monkeypatch.setattr(distil, "CHUNK", chunk)
        loss = Distillation(own, data, 0.2)(range(5), 0)
        assert loss.item() == pytest.approx((total / weight).item(), rel=1e-5)
        for one, other in zip(torch.autograd.grad(loss, list(own.parameters())), wanted, strict=True):
            assert torch.allclose(one, other, atol=1e-6)


def test_sizes_of_inputs_change_how_a_map_learns_and_not_what_it_stores() -> None:
    sizes = torch.tensor([0.3, 1.0, 20.0])
    one, other = Sized(sizes, 2), Sized(sizes, 2)
    weight = torch.tensor([[1.0, -2.0, 0.1], [0.5, 0.25, 3.0]])
    one.load_state_dict({"weight": weight})
    x = torch.tensor([[0.2, 1.0, 30.0]])
    assert torch.allclose(one(x), x @ weight.T)
    assert torch.equal(one.state_dict()["weight"], weight)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.weight, one.weight)
    one(x).sum().backward()
    assert one.weight.grad is not None
    assert torch.allclose(one.weight.grad, (x / torch.tensor([0.25, 1.0, 16.0])).expand(2, 3))


def test_a_fused_head_of_other_drafters_or_taps_is_refused(tmp_path: Path, model: Model) -> None:
    assert model.folder is not None
    with pytest.raises(UserError, match=r"job\.fused=true is for eagle, not mtp"):
        train(tmp_path / "results", model.folder, kind="mtp", fused=True)
    for taps in ([0, 1], [0, 1, 4]):
        with pytest.raises(UserError, match=r"job\.data\.taps="):
            train(tmp_path / "results", model.folder, kind="eagle", fused=True, data={"taps": taps})


def test_states_beside_are_for_eagle_alone_and_must_be_kept(tmp_path: Path, model: Model) -> None:
    assert model.folder is not None
    for asked in ({"kind": "mtp"}, {"kind": "eagle", "fused": True}):
        with pytest.raises(UserError, match=r"job\.beside is for an eagle that is not fused"):
            train(tmp_path / "results", model.folder, **asked, beside=[0], data={"taps": TAPS})
    with pytest.raises(UserError, match=r"job\.beside has layers \[3\], whose states are not kept"):
        train(tmp_path / "results", model.folder, kind="eagle", beside=[0, 3], data={"taps": TAPS})


def test_a_copying_head_may_begin_with_a_plain_one(tmp_path: Path, model: Model) -> None:
    """Without its copier it says the same; the job gives it one, and not again where it goes on with such a head."""
    assert model.folder is not None
    data = texts(model, taps=TAPS)
    plain = shaken("eagle", model, data)
    wide = CopyingStudent(plain.borrowed, [3], TURNS, BESIDE, TAPS)
    wide.load_state_dict(wide.widened(plain.state_dict()))
    batch = collate(data.trained[:4])
    for one, other in zip(plain.predictions(batch), wide.predictions(batch), strict=True):
        assert torch.allclose(one.logits, other.logits, atol=1e-5)
    schedule = {"steps": 1, "lr": 1e-9}
    asked: dict[str, Any] = {"schedule": schedule, "kind": "eagle"}
    first = train(tmp_path, model.folder, **asked, drafter_name="first")
    more: dict[str, Any] = {**asked, "beside": list(BESIDE), "data": {"taps": list(TAPS)}}
    second = train(tmp_path, model.folder, **more, start_from=str(first), drafter_name="second")
    third = train(tmp_path, model.folder, **more, start_from=str(second), drafter_name="third")
    old, made, kept = (load_file(folder / "model.safetensors") for folder in (first, second, third))
    query = "layers.0.self_attn.q_proj.weight"
    rows, columns = old[query].shape
    assert torch.equal(made[query][:rows, :columns], old[query])
    assert made[query][:rows, columns:].abs().max() < 1e-8 < 1e-2 < made[query][rows:].abs().max()
    assert torch.allclose(made[query], kept[query], atol=1e-8)


def test_a_copier_learns_to_look_where_the_right_token_followed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    data = texts(model, taps=TAPS)
    own = shaken("copying", model, data)
    attention = own.layers[0].self_attn
    before = {name: weight.clone() for name, weight in own.state_dict().items()}
    batch, size = collate(data.trained[:8]), own.spec.head_dim
    groups = own.spec.heads // own.spec.kv_heads

    @torch.no_grad()
    def wrong() -> float:
        query, key = attention.q_proj.weight, attention.k_proj.weight
        return copier.looked_wrong(own, batch, query[-groups * size :], key[-size:]).item()

    copier.make_copier(own, data, torch.Generator().manual_seed(0))
    made = wrong()
    monkeypatch.setattr(copier, "FIT_STEPS", 100)
    copier.fit_copier(own, data, 0)
    assert wrong() < 0.95 * made
    changed = {name for name, weight in own.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        old = len(before[name]) - size * (groups if part == "q" else 1)
        assert torch.equal(own.state_dict()[name][:old], before[name][:old])
