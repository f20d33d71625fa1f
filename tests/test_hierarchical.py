"""Hierarchical speculation: the full verifier's law by enumeration, blocks by hand, and what is refused."""

from collections.abc import Sequence

import pytest
import torch

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, Method, StopRule
from harness.decode.hierarchical import Hierarchical
from harness.decode.length import Confidence
from harness.decode.nested import Reviewed
from harness.drafters.base import Draft
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.model.load import Model
from harness.records import BlockTrace
from harness.sampling import Chooser, RandomChooser, Sampling
from tests.arms import model_of as arms_model
from tests.arms import output, tiers_with
from tests.enumeration import output_law, total_variation
from tests.heads import head_drafter
from tests.toys import CPU, GREEDY, scripted, tiers_of, tiny_model

PROMPT = (1, 2, 0)


def skipping(tiers, sampling, model):
    return SelfSkip(tiers, sampling, model, mask=[0, 1])


def model_of(vocab_size: int) -> Model:
    return tiny_model(3, kept=(0, 1, 3), layer_scale=1.0, vocab_size=vocab_size, head_scale=1.0)


def made(model: Model, sampling: Sampling, gamma: int = 3, slim_gamma: int = 1, slim_blocks: int = 2) -> Hierarchical:
    return Hierarchical(tiers_of(model), sampling, model, gamma, skipping, slim_gamma, slim_blocks)


CASES = {
    "T=1": (Sampling(1.0), 3, 3),
    "5 tokens": (Sampling(1.0), 5, 2),
    "5 tokens, top-k": (Sampling(1.3, top_k=2), 5, 3),
    "5 tokens, top-p": (Sampling(1.0, top_p=0.6), 5, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_the_joint_law_is_the_full_verifiers(case: str) -> None:
    sampling, vocab_size, new_tokens = CASES[case]
    model = model_of(vocab_size)
    want = output_law(lambda: Autoregressive(tiers_of(model), sampling), PROMPT, new_tokens)
    assert sum(want.values()) == pytest.approx(1.0)
    assert total_variation(output_law(lambda: made(model, sampling), PROMPT, new_tokens), want) < 1e-12


class OthersBelieved(Reviewed):
    """Wrong: the slim verifier's tokens go on with other distributions than they were drawn from."""

    def review(self, text: Sequence[int], room: int, chooser: Chooser) -> tuple[Draft, list[int]]:
        draft, ids = super().review(text, room, chooser)
        assert draft.probs is not None
        return Draft(draft.tokens, draft.probs.roll(1, dims=-1) * 0.5 + draft.probs * 0.5), ids


def test_another_distribution_than_the_slim_verifiers_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.decode.hierarchical.Reviewed", OthersBelieved)
    sampling, model = Sampling(1.0), model_of(3)
    want = output_law(lambda: Autoregressive(tiers_of(model), sampling), PROMPT, 2)
    assert total_variation(output_law(lambda: made(model, sampling), PROMPT, 2), want) > 0.01


def test_reviewing_greedily_what_is_sampled_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner link must be exact too: a slim verifier that keeps every draft has not the law that it states."""
    monkeypatch.setattr(Reviewed, "kept", lambda self, law, logits, proposed, chooser: proposed.tokens >= 0)
    sampling, model = Sampling(1.0), model_of(3)
    want = output_law(lambda: Autoregressive(tiers_of(model), sampling), PROMPT, 3)
    assert total_variation(output_law(lambda: made(model, sampling), PROMPT, 3), want) > 0.01


def test_a_rule_for_the_length_of_inner_blocks_keeps_the_joint_law() -> None:
    sampling, model = Sampling(1.0), model_of(3)

    def make() -> Method:
        length = lambda drafter: Confidence(drafter, 0.4)  # noqa: E731
        return Hierarchical(tiers_of(model), sampling, model, 3, skipping, 2, 1, length)

    want = output_law(lambda: Autoregressive(tiers_of(model), sampling), PROMPT, 3)
    assert total_variation(output_law(make, PROMPT, 3), want) < 1e-12


def traces(blocks: Sequence[BlockTrace]) -> list[tuple[int, ...]]:
    return [(b.asked, b.drafted, b.kept, b.emitted, b.bonus, b.slim_forwards, b.full_forwards) for b in blocks]


def test_blocks_by_hand_where_all_three_tiers_agree() -> None:
    """A slim verifier of all layers and an oracle as drafter: 2 slim blocks of 2 + 1 tokens, then the full one's."""
    model = tiny_model(1, kept=range(4))
    baseline = Decoder(Autoregressive(tiers_of(model), GREEDY))
    baseline.prefill(PROMPT)
    want = baseline.decode(StopRule(20), RandomChooser(0, CPU)).token_ids
    oracle = scripted((*PROMPT, *want), 0.0, 97, 0)
    for gamma, slim_blocks, drafts, slim_forwards in ((12, 2, 6, 2), (12, 1, 3, 1), (4, 3, 4, 2), (1, 2, 1, 1)):
        decoder = Decoder(Hierarchical(tiers_of(model), GREEDY, model, gamma, oracle, 2, slim_blocks))
        decoder.prefill(PROMPT)
        got = decoder.decode(StopRule(2 * (drafts + 1)), RandomChooser(0, CPU))
        assert got.token_ids == want[: 2 * (drafts + 1)]
        first = (min(gamma, 2 * drafts + 1), drafts, drafts, drafts + 1, 1, slim_forwards, 1)
        assert traces(got.blocks)[0] == first


def test_a_refusal_of_the_full_verifier_ends_the_block() -> None:
    """A slim verifier of one layer is wrong soon; what it kept of the drafter's counts for nothing then."""
    model = tiny_model(2, kept=(0,))
    decoder = Decoder(made(model, GREEDY, gamma=6, slim_gamma=2, slim_blocks=2))
    decoder.prefill(PROMPT)
    blocks = decoder.decode(StopRule(30), RandomChooser(0, CPU)).blocks
    refused = [block for block in blocks if block.kept < block.drafted]
    assert refused and all(block.emitted == block.kept + 1 and not block.bonus for block in refused[:-1])
    assert all(block.full_forwards == 1 for block in blocks)
    assert all(block.slim_forwards <= 2 for block in blocks)


def test_where_the_drafter_is_silent_the_slim_verifier_drafts_alone() -> None:
    model = tiny_model(4, kept=(0, 1, 3))
    method = Hierarchical(tiers_of(model), GREEDY, model, 4, PromptLookup, 3, 2)
    decoder = Decoder(method)
    decoder.prefill((5, 6, 7))
    block = decoder.decode(StopRule(4), RandomChooser(0, CPU)).blocks[0]
    assert (block.drafted, block.slim_forwards, block.full_forwards, block.draft_forwards) == (2, 2, 1, 0)


@pytest.mark.parametrize("source", ["slim", "catch_up"])
@pytest.mark.parametrize("kind", ["eagle", "mtp", "medusa"])
def test_heads_draft_for_the_slim_verifier(kind: str, source: str) -> None:
    """Where the full verifier has to process drafts for a head's sake, it forgets them again."""
    for seed in range(4):
        model = arms_model(seed, torch.float64)
        want = output(Autoregressive(tiers_with(model, None, False), Sampling()))
        method = Hierarchical(tiers_with(model, None, False), GREEDY, model, 5, head_drafter(kind, seed, source), 2, 2)
        assert output(method) == want


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 2, 2), "gamma=0: want at least 1"),
        ((4, 0, 2), "slim_gamma=0, slim_blocks=2: want at least 1"),
        ((4, 2, 0), "slim_gamma=2, slim_blocks=0: want at least 1"),
    ],
)
def test_no_blocks_are_refused(numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(model_of(5), GREEDY, *numbers)


def test_a_model_without_a_slim_verifier_is_refused() -> None:
    bare = model_of(5)
    model = Model("bare", bare.transformer, bare.tokenizer, None, None)
    with pytest.raises(UserError, match=r"a slim verifier is needed.*set model\.slim_mask"):
        made(model, GREEDY)


def test_names_for_the_records() -> None:
    method = made(model_of(5), GREEDY)
    assert (method.name, method.lossless, method.gate_name) == ("hierarchical", True, None)
    assert method.drafter_name == "slim over self_skip(0.5)"
    assert method.tier_roles() == (method.inner.tier, method.slim)
