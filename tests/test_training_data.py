"""Texts for drafters: what the verifier writes, of which prompts, and the same after an interruption."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tokenizer import ByteTokenizer
from harness.sampling import RandomChooser
from harness.training import data as data_module
from harness.training.batched import Batched
from harness.training.data import collate, grouped
from harness.training.recipe import Frame, Recipe, requests, split
from harness.training.write import draw
from tests.toys import CPU, GREEDY, tiers_of
from tests.training import RECIPE, SOURCES, texts, verifier


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return verifier(tmp_path / "verifier")


def test_a_batch_says_what_each_sequence_says_alone(model: Model) -> None:
    batched = Batched(model.transformer, slots=3, capacity=32)
    rows = torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5], [11, 2, 11, 2, 11]])
    features = torch.cat(
        (batched.step(rows[:, :2], torch.zeros(3, dtype=torch.long)), batched.step(rows[:, 2:], torch.full((3,), 2))), 1
    )
    for row, own in zip(rows, features, strict=True):
        alone = model.transformer.forward(row, model.transformer.new_cache(32), range(4), rows=5)
        assert torch.allclose(batched.head_logits(own), alone, atol=1e-4)


def test_sequences_of_different_lengths_do_not_see_each_other(model: Model) -> None:
    batched = Batched(model.transformer, slots=2, capacity=32)
    long, short = [3, 4, 5, 6, 7, 8], [9, 8]
    batched.step(torch.tensor([long]), torch.tensor([0]), first_slot=0)
    batched.step(torch.tensor([short]), torch.tensor([0]), first_slot=1)
    features = batched.step(torch.tensor([[10], [10]]), torch.tensor([6, 2]))
    for own, row in zip(features, ([*long, 10], [*short, 10]), strict=True):
        cache = model.transformer.new_cache(32)
        alone = model.transformer.forward(torch.tensor(row), cache, range(4), rows=1)
        assert torch.allclose(batched.head_logits(own), alone, atol=1e-4)


def test_continuations_are_the_verifiers_greedy_ones(model: Model) -> None:
    written = texts(model, sampled=0.0)
    for text in [*written.held_out, *written.trained][:8]:
        decoder = Decoder(Autoregressive(tiers_of(model), GREEDY))
        decoder.prefill(text.tokens[: text.prompt_length])
        made = decoder.decode(StopRule(RECIPE["reply_tokens"], model.tokenizer.eos_ids), RandomChooser(0, CPU))
        assert text.tokens[text.prompt_length :] == made.token_ids


def test_features_are_those_of_the_written_tokens(model: Model) -> None:
    for text in texts(model).trained[:4]:
        batched = Batched(model.transformer, 1, 64)
        own = batched.step(torch.tensor([text.tokens[:-1]]), torch.tensor([0]))[0]
        assert torch.allclose(own, text.features, atol=1e-4)


def test_held_out_texts_and_their_calibration_rows_are_not_trained_on(model: Model) -> None:
    written = texts(model)
    assert len(written.held_out) == RECIPE["held_out"] and len(written.trained) <= RECIPE["sequences"]
    held = {text.tokens[: text.prompt_length] for text in written.held_out}
    assert not held & {text.tokens[: text.prompt_length] for text in written.trained}
    kept, rest = split(SOURCES[0])
    assert set(kept.prompts) <= held and not set(kept.inputs) & set(rest.inputs)


def test_prompts_of_its_own_begin_with_the_instruction_and_a_calibration_input(model: Model) -> None:
    recipe = Recipe(**RECIPE | {"plain": 0.5, "sequences": 60})
    made = [one for one in requests(recipe, model.tokenizer, SOURCES, 0) if one.writes_prompt]
    stems = {one.given for one in made}
    instruction = tuple(model.tokenizer.encode("a b c"))
    inputs = [tuple(model.tokenizer.encode(text)) for text in SOURCES[0].inputs]
    allowed = {(1,)} | {(*instruction, *text[:count]) for text in inputs for count in range(len(text) + 1)}
    assert stems <= allowed and (1,) in stems and len(stems) > 3
    assert [one.index for one in requests(recipe, model.tokenizer, SOURCES, 0)] == list(range(66))


def test_a_prompt_written_behind_others_of_its_task_is_put_into_the_tasks_own(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of what was shown stays; the line is not empty and has no end in it; features are the prompt's."""
    ends = {4, 7, 9, 12}
    monkeypatch.setattr(data_module, "line_ends", lambda tokenizer, vocabulary: sorted(ends))
    written = texts(model, shown_tokens=20, plain=0.0, sequences=40)
    instruction = tuple(model.tokenizer.encode("a b c"))
    own = [text for text in written.trained if text.tokens[: text.prompt_length] not in SOURCES[0].prompts]
    lines = [text.tokens[len(instruction) : text.prompt_length] for text in own]
    assert len(own) > 20 and all(text.tokens[: len(instruction)] == instruction for text in own)
    assert all(line and not ends & set(line) for line in lines)
    assert {len(line) for line in lines} > {RECIPE["prompt_tokens"]}  # some ended before they had to
    for text in own[:4]:
        batched = Batched(model.transformer, 1, 64)
        assert torch.allclose(
            batched.step(torch.tensor([text.tokens[:-1]]), torch.tensor([0]))[0], text.features, atol=1e-4
        )


def test_only_whole_inputs_that_fit_are_shown(model: Model) -> None:
    """A held-out input is shown to no prompt that is trained on; a task of longer inputs has stems as before."""
    recipe = Recipe(**RECIPE | {"plain": 0.0, "shown_tokens": 5})
    own = [one for one in requests(recipe, model.tokenizer, SOURCES, 0) if one.writes_prompt]
    held, inputs = {"d e f"}, {tuple(model.tokenizer.encode(text)): text for text in SOURCES[0].inputs}
    shown = [one for one in own if one.index >= RECIPE["held_out"]]
    for one in shown:
        assert one.around == (tuple(model.tokenizer.encode("a b c")), ())
        assert len(one.given) <= 5 and not held & {text for ids, text in inputs.items() if ids == one.given[: len(ids)]}
    assert len({one.given for one in shown}) > 1
    none_fits = requests(Recipe(**RECIPE | {"plain": 0.0, "shown_tokens": 1}), model.tokenizer, SOURCES, 0)
    assert all(one.around is None for one in none_fits)


def test_a_lines_end_is_any_token_with_one_in_it() -> None:
    assert data_module.line_ends(ByteTokenizer(), 97) == [10]


def test_an_interrupted_writer_ends_with_the_same_texts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = texts(model)
    contents = {path.name: path.read_bytes() for path in whole.folder.iterdir()}
    for path in whole.folder.glob("*"):
        path.unlink()
    written = data_module.packed

    def failing(shard: list) -> bytes:
        if shard[0].index >= 12:
            raise KeyboardInterrupt
        return written(shard)

    monkeypatch.setattr(data_module, "packed", failing)
    with pytest.raises(KeyboardInterrupt):
        texts(model)
    assert [path.name for path in whole.folder.glob("shard*")] == ["shard-00000.safetensors"]
    first = (whole.folder / "shard-00000.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(data_module, "packed", written)
    again = texts(model)
    assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == contents
    assert (whole.folder / "shard-00000.safetensors").stat().st_mtime_ns == first


def test_a_damaged_file_is_written_again_and_another_recipe_has_another_folder(model: Model) -> None:
    whole = texts(model)
    path = whole.folder / "shard-00001.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert texts(model).folder == whole.folder and path.read_bytes() == good
    assert len({whole.folder, texts(model, seed=1).folder, texts(model, sampled=0.7).folder}) == 3


def test_texts_that_do_not_fit_are_refused(model: Model) -> None:
    with pytest.raises(UserError, match=r"texts of 314 positions are asked for, the model has 256: lower"):
        texts(model, reply_tokens=300)


def test_the_frame_of_a_chat_template_is_found(model: Model) -> None:
    class Chat:
        def chat(self, user: str) -> list[int]:
            return [7, 8, ord(user), 9]

    assert Frame.of(Chat()) == Frame((7, 8), (9,))  # type: ignore[arg-type]
    assert Frame.of(model.tokenizer) == Frame((), ())


def test_an_order_has_every_text_once_and_is_the_seeds(model: Model) -> None:
    written = texts(model)
    order = written.order(3, 1, 64)
    assert sorted(index for batch in order for index in batch) == list(range(len(written.trained)))
    assert order == written.order(3, 1, 64) and order != written.order(3, 2, 64) and order != written.order(4, 1, 64)
    assert list(grouped([5, 6, 7], [10, 20, 90], 40)) == [[5, 6], [7]]


def test_a_batch_is_padded_behind(model: Model) -> None:
    pair = texts(model).trained[:2]
    shorter = replace(pair[1], tokens=pair[1].tokens[:-1], features=pair[1].features[:-1])
    batch = collate([pair[0], shorter])
    for row, text in enumerate((pair[0], shorter)):
        count = len(text.tokens)
        assert tuple(batch.tokens[row, :count].tolist()) == text.tokens and not batch.tokens[row, count:].any()
        assert (
            torch.equal(batch.features[row, : count - 1], text.features) and not batch.features[row, count - 1 :].any()
        )


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.29, 1), (0.31, 2), (0.999, 3)])
def test_a_draw_is_where_the_running_sum_passes(uniform: float, token: int) -> None:
    assert draw(torch.tensor([0.0, 0.3, 0.3, 0.4]), uniform) == token


@pytest.mark.parametrize(
    ("changed", "line"),
    {
        "sequences": ({"sequences": 0}, "job.data.sequences=0: want at least 1."),
        "share": ({"sampled": 1.5}, "job.data.sampled=1.5: want a share, 0 to 1."),
        "shown": ({"shown_tokens": -1}, "job.data.shown_tokens=-1: want 0 or more tokens."),
        "heat": ({"prompt_temperature": 0.0}, "job.data.opening=8, prompt_temperature=0.0: want"),
    }.values(),
)
def test_a_bad_recipe_is_refused(changed: dict, line: str) -> None:
    with pytest.raises(UserError) as caught:
        Recipe(**changed)
    assert str(caught.value).startswith(line)


def test_states_behind_the_taps_are_kept_with_the_texts(model: Model) -> None:
    """They are those of the tokens, also when read back; the texts are the same as without."""
    plain, kept = texts(model), texts(model, taps=(0, 2))
    assert [text.tokens for text in kept.trained] == [text.tokens for text in plain.trained]
    again = texts(model, taps=(0, 2))
    for text, read in zip(kept.trained, again.trained, strict=True):
        cache = model.transformer.new_cache(64)
        _, states = model.transformer.observe(torch.tensor(text.tokens[:-1]), cache, range(4), 1, (0, 2))
        assert states is not None and text.states is not None and read.states is not None
        assert torch.allclose(states, text.states.float(), atol=0.02) and torch.equal(text.states, read.states)
    sizes = torch.cat([text.states[1:].float() for text in kept.trained]).square().mean(0).sqrt()  # type: ignore[index]
    assert torch.allclose(kept.tap_sizes(), sizes, rtol=1e-4)
    batch = collate(kept.trained[:2])
    assert batch.states is not None and batch.states.shape == (*batch.tokens.shape, 48)


def test_skipped_texts_are_others_and_held_out_ones_stay(model: Model) -> None:
    first, later = texts(model), texts(model, skip=24)
    assert [text.tokens for text in later.held_out] == [text.tokens for text in first.held_out]
    own = {text.index for text in first.trained} & {text.index for text in later.trained}
    assert len(own) <= 3  # the calibration prompts, which lead
    assert {text.index for text in later.trained} - own == {text.index + 24 for text in first.trained if text.index > 8}
