"""``objective=draft_opd``: the numbers of its loss, the row that replays blocks, and that learning from them helps."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.speculative import Speculative
from harness.drafters.self_skip import SelfSkip
from harness.drafters.small_lm import SmallLM
from harness.errors import UserError
from harness.model.load import load_model
from harness.sampling import RandomChooser
from harness.training.decoding import rollout
from harness.training.objectives import draft_opd, forward_kl, reverse_kl
from harness.training.on_policy import replay_loss
from harness.training.replay import DraftedBlock, Replay, laid_out
from tests.toys import CPU, GREEDY, tiers_of, write_checkpoint
from tests.training import student, texts, train, verifier

VERIFIER = ((0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (0.7, 0.2, 0.1))
STUDENT = ((0.25, 0.5, 0.25), (0.5, 0.25, 0.25), (0.1, 0.2, 0.7))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


def kl(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))


def test_both_divergences_are_what_they_are_called() -> None:
    verifier_logits, student_logits = torch.tensor(VERIFIER).log() + 3, torch.tensor(STUDENT).log() - 1
    forward, reverse = forward_kl(verifier_logits, student_logits), reverse_kl(verifier_logits, student_logits)
    for place, (wanted, said) in enumerate(zip(VERIFIER, STUDENT, strict=True)):
        assert forward[place] == pytest.approx(kl(wanted, said), abs=1e-6)
        assert reverse[place] == pytest.approx(kl(said, wanted), abs=1e-6)
    assert forward[2] != pytest.approx(float(reverse[0]), abs=1e-3)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_the_loss_of_a_block_by_hand(kept: int) -> None:
    """Kept tokens forward, the rejected one reverse with weight 1, those behind it decayed."""
    wanted = 0.0
    for place in range(3):
        if place < kept:
            wanted += kl(VERIFIER[place], STUDENT[place])
        else:
            wanted += 0.8 ** (place - kept) * kl(STUDENT[place], VERIFIER[place])
    found = draft_opd(torch.tensor(VERIFIER).log(), torch.tensor(STUDENT).log(), kept)
    assert float(found) == pytest.approx(wanted, abs=1e-6)


def test_the_gradient_of_a_block_by_hand() -> None:
    """Of forward KL q - p; of reverse KL q (log q - log p - KL), with q the student's and p the verifier's."""
    logits = torch.tensor(STUDENT).log().requires_grad_()
    draft_opd(torch.tensor(VERIFIER).log(), logits, 1).backward()
    assert logits.grad is not None
    for place, weight in enumerate((1.0, 1.0, 0.8)):
        wanted, said = VERIFIER[place], STUDENT[place]
        for token, (p, q) in enumerate(zip(wanted, said, strict=True)):
            by_hand = q - p if place < 1 else weight * q * (math.log(q / p) - kl(said, wanted))
            assert float(logits.grad[place, token]) == pytest.approx(by_hand, abs=1e-6)


def test_a_rollout_writes_what_decoding_writes_and_notes_rejected_blocks(tmp_path: Path) -> None:
    model = verifier(tmp_path / "verifier")
    prompt, drafter = (3, 4, 5, 6), partial(SelfSkip, mask=[0, 1, 3])
    head = torch.arange(29)
    decoder = Decoder(Speculative(tiers_of(model), GREEDY, model, 4, drafter))
    decoder.prefill(prompt)
    made = decoder.decode(StopRule(24, model.tokenizer.eos_ids), RandomChooser(0, CPU))
    replay = rollout(model, drafter, prompt, 4, 24, head)
    assert replay.tokens[4 : 4 + len(made.token_ids)] == made.token_ids
    assert len(replay.blocks) > 0
    for block in replay.blocks:
        assert block.kept < len(block.drafts) == len(block.verifier) == 4
        right = block.verifier.argmax(-1).tolist()
        assert right[: block.kept] == list(block.drafts[: block.kept])
        assert right[block.kept] == replay.tokens[block.start + block.kept] != block.drafts[block.kept]
        assert replay.tokens[block.start : block.start + block.kept] == block.drafts[: block.kept]


def test_one_row_says_of_every_block_what_the_block_alone_says(tmp_path: Path) -> None:
    model = verifier(tmp_path / "verifier")
    own = student(model, texts(model), head=29)
    tokens = (3, 4, 5, 6, 7, 8, 9)
    laws = torch.randn(3, 29, generator=torch.Generator().manual_seed(0))
    blocks = (DraftedBlock(4, (7, 11, 12), 1, laws), DraftedBlock(6, (10, 13, 14), 0, laws))
    losses = replay_loss(own, Replay(tokens, blocks))
    for block, loss in zip(blocks, losses, strict=True):
        alone = torch.tensor([[*tokens[: block.start], *block.drafts[:-1]]])
        hidden = own.hidden(alone, own.rotary.first(alone.shape[1]))[0, block.start - 1 :]
        wanted = draft_opd(laws, own.logits(hidden), block.kept) / 3
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_the_row_of_a_replay_by_hand() -> None:
    block = DraftedBlock(2, (7, 8, 9), 1, torch.zeros(3, 4))
    tokens, positions, mask, places = laid_out(Replay((3, 4, 5), (block,)))
    assert tokens.tolist() == [3, 4, 5, 7, 8] and positions.tolist() == [0, 1, 2, 2, 3]
    assert places == [[1, 3, 4]]
    assert (mask == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_the_job_goes_on_from_a_drafter_and_learns_on_policy(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "verifier", num_hidden_layers=4, max_position_embeddings=256)
    first = train(tmp_path / "results", checkpoint)
    short = {"steps": 6, "batch_tokens": 64, "log_steps": 1}
    second = train(
        tmp_path / "results",
        checkpoint,
        objective="draft_opd",
        start_from=str(first),
        drafter_name="two",
        schedule=short,
    )
    cards = [json.loads((folder / "card.json").read_text()) for folder in (first, second)]
    assert "parent" not in cards[0] and cards[1]["parent"] == cards[0]
    one, two = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert torch.equal(one.pop("head_tokens"), two.pop("head_tokens"))
    assert all(tensor.isfinite().all() and not torch.equal(one[name], tensor) for name, tensor in two.items())
    model = load_model(str(checkpoint), dtype="float32", device="cpu")
    method = Speculative(tiers_of(model), GREEDY, model, 3, partial(SmallLM, path=str(second)))
    for prompt in ((3, 4, 5), (9, 8, 7, 6)):
        written = []
        for one_method in (method, Autoregressive(tiers_of(model), GREEDY)):
            decoder = Decoder(one_method)
            decoder.prefill(prompt)
            written.append(decoder.decode(StopRule(20, model.tokenizer.eos_ids), RandomChooser(0, CPU)).token_ids)
        assert written[0] == written[1]


def test_other_drafters_are_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "verifier", num_hidden_layers=4, max_position_embeddings=256)
    with pytest.raises(UserError, match=r"job\.start_from='nowhere': nowhere/model\.safetensors does not exist"):
        train(tmp_path / "results", checkpoint, start_from="nowhere")
    first = train(tmp_path / "results", checkpoint)
    with pytest.raises(UserError, match="weights have no place in this drafter"):
        train(tmp_path / "results", checkpoint, start_from=str(first), layers=[0], drafter_name="two")
