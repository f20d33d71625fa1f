"""Drafters whose head has a choice of tokens, and drafters that run between parts of the verifier."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, Method, StopRule
from harness.decode.gate import AlwaysEscalate
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Draft, Drafter
from harness.drafters.small_lm import SmallLM, shapes
from harness.drafters.weights import save_drafter
from harness.errors import UserError
from harness.model.load import Model, load_model
from harness.model.random_weights import random_transformer
from harness.model.tiers import Tiers
from harness.model.toy import toy_spec
from harness.sampling import Chooser, RandomChooser, Sampling
from tests.enumeration import exact_law, total_variation
from tests.toys import CPU, GREEDY, shapes_unchecked, tiers_of, tiny_model, write_checkpoint

MADE_BY = {"command": "python -m harness", "data": "none", "seed": 0, "seconds": 1.0, "held_out": {}}
PROMPT = (1, 2, 0)


def folder_for(model: Model, folder: Path, kept: Sequence[int] | None, seed: int = 0) -> Path:
    """A drafter of two random layers for ``model``."""
    config = {
        **{"model": model.name, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "intermediate_size": 40},
    }
    generator = torch.Generator().manual_seed(seed)
    wanted = shapes(config, model.transformer.spec)
    tensors = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in wanted.items()}
    tensors |= {name: 1 + 0.1 * tensor for name, tensor in tensors.items() if tensor.dim() == 1}
    if kept is not None:
        tensors["head_tokens"] = torch.tensor(kept)
    save_drafter(folder, "small_lm", config, tensors, MADE_BY)
    return folder


class ClaimsTheWholeHead(SmallLM):
    """Draws from the reduced head and says it drew from a law that is nowhere zero."""

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        draft = super().draft(tokens, count, chooser)
        if draft.probs is None:
            return draft
        return Draft(draft.tokens, 0.5 * draft.probs + 0.5 / draft.probs.shape[-1])


METHODS = {
    "speculative": lambda model, sampling, drafter: Speculative(tiers_of(model), sampling, model, 2, drafter),
    "always_escalate": lambda model, sampling, drafter: ViaSD(
        tiers_of(model), sampling, model, 2, drafter, AlwaysEscalate()
    ),
}


def law_of(method: Method) -> dict:
    decoder = Decoder(method)

    def run(chooser) -> tuple[int, ...]:
        decoder.prefill(PROMPT)
        return decoder.decode(StopRule(3), chooser).token_ids

    with shapes_unchecked():
        return exact_law(run)


@pytest.mark.parametrize("kept", [(0, 2), (1,)])
@pytest.mark.parametrize("sampling", [Sampling(2.0), Sampling(0.7), Sampling(1.0, top_p=0.6)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_what_the_drafter_cannot_say_keeps_its_probability(
    method: str, sampling: Sampling, kept: tuple[int, ...], tmp_path: Path
) -> None:
    """The full verifier's joint law over a block of two drafts and its bonus, three tokens of vocabulary."""
    model = tiny_model(3, kept=(0, 1, 3), layer_scale=1.0, vocab_size=3, head_scale=1.0)
    folder = folder_for(model, tmp_path / "d", kept)

    def drafter(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
        return SmallLM(tiers, sampling, model, str(folder))

    want = law_of(Autoregressive(tiers_of(model), sampling))
    got = law_of(METHODS[method](model, sampling, drafter))
    assert total_variation(got, want) < 1e-12
    assert any(set(tokens) - set(kept) for tokens in got)


@pytest.mark.parametrize("method", METHODS)
def test_a_reduced_head_that_claims_more_breaks_the_law(method: str, tmp_path: Path) -> None:
    model = tiny_model(3, kept=(0, 1, 3), layer_scale=1.0, vocab_size=3, head_scale=1.0)
    folder = folder_for(model, tmp_path / "d", (0, 2))

    def wrong(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
        return ClaimsTheWholeHead(tiers, sampling, model, str(folder))

    want = law_of(Autoregressive(tiers_of(model), Sampling(1.0)))
    assert total_variation(law_of(METHODS[method](model, Sampling(1.0), wrong)), want) > 0.01


@pytest.mark.parametrize("kept", [None, (5, 1, 70, 33)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_drafter_folder_runs_between_the_verifiers_embedding_and_head(
    tied: bool, dtype: torch.dtype, kept: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """Nothing of the verifier is copied but the rows that were chosen; in bfloat16 its head is packed."""
    spec = replace(toy_spec(vocab_size=97), tied_head=tied)
    full = random_transformer(spec, 1, dtype)
    model = replace(tiny_model(0, kept=(0, 1)), transformer=full)
    tiers = tiers_of(model)
    drafter = SmallLM(tiers, GREEDY, model, str(folder_for(model, tmp_path / "d", kept)))
    small = drafter.tier.model
    assert small.weights.embed is full.weights.embed and small.spec.layers == 2
    head = full.weights.head.to_dense() if full.weights.head.is_mkldnn else full.weights.head
    if kept is None:
        assert small.weights.head is full.weights.head
    else:
        rows = small.weights.head
        assert torch.equal(rows.to_dense() if rows.is_mkldnn else rows, head[list(kept)])
    tiers.prefill(PROMPT)
    tokens = drafter.draft(PROMPT, 4, RandomChooser(0, CPU)).tokens
    assert len(tokens) == 4 and (kept is None or set(tokens.tolist()) <= set(kept))


def checkpoint_drafter(tmp_path: Path, **options) -> tuple[SmallLM, Tiers]:
    full = write_checkpoint(tmp_path / "full", seed=0, vocab_size=40)
    model = load_model(str(full), dtype="float64", device="cpu")
    tiers = tiers_of(model, 64)
    return SmallLM(tiers, GREEDY, model, str(full), **options), tiers


def token_file(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_a_checkpoints_head_is_reduced_to_the_first_tokens_of_a_file(tmp_path: Path) -> None:
    file = token_file(tmp_path / "frequent.json", {"head_tokens": [7, 3, 20, 11]})
    drafter, tiers = checkpoint_drafter(tmp_path, head_tokens=file, head_size=3)
    tiers.prefill((1, 2, 3))
    draft = drafter.draft((1, 2, 3), 5, RandomChooser(0, CPU))
    assert set(draft.tokens.tolist()) <= {7, 3, 20}
    logits = tiers.full.forward((1, 2, 3), 5, draft.tokens[:-1])
    inside = logits[:, [7, 3, 20]].argmax(-1)
    assert torch.equal(torch.tensor([7, 3, 20])[inside], draft.tokens)
    assert len(checkpoint_drafter(tmp_path, head_tokens=file)[0].tier.model.weights.head) == 4


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        ({"head_tokens": [1, 1]}, None, "must be distinct token ids from 0 to 28"),
        ({"head_tokens": [29]}, None, "must be distinct"),
        ({"head_tokens": []}, None, "at least one"),
        ({"tokens": [1]}, None, "must be distinct"),
        ({"head_tokens": [1, 2]}, 3, "head_size=3: want 1 to 2"),
        ({"head_tokens": [1, 2]}, 0, "head_size=0: want 1 to 2"),
    ],
)
def test_a_wrong_list_of_tokens_is_refused(content: object, size: int | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        checkpoint_drafter(tmp_path, head_tokens=token_file(tmp_path / "f.json", content), head_size=size)


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"head_size=3 needs drafter\.head_tokens"):
        checkpoint_drafter(tmp_path, head_size=3)
    with pytest.raises(UserError, match="does not exist"):
        checkpoint_drafter(tmp_path, head_tokens=str(tmp_path / "nowhere.json"))
    model = tiny_model(0, kept=(0, 1))
    folder = folder_for(model, tmp_path / "d", (1, 2))
    with pytest.raises(UserError, match="dtype, head_tokens and head_size stay null"):
        SmallLM(tiers_of(model), GREEDY, model, str(folder), head_size=1)
