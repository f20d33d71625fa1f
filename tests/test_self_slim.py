"""Self-speculation with the slim verifier: its layers draft, and without a mask it is refused."""

from functools import partial

import pytest

from harness.decode import slim
from harness.decode.self_slim import SelfSlim
from harness.decode.speculative import Speculative
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.model.load import Model
from harness.sampling import RandomChooser
from tests.toys import CPU, GREEDY, tiers_of, tiny_model

PROMPT = (1, 2, 3)


def test_the_slim_verifiers_layers_draft() -> None:
    model = tiny_model(1, kept=(0, 2, 3))
    drafts = []
    for drafter_of in (SelfSlim, lambda t, s, m: SelfSkip(t, s, m, mask=[0, 2, 3])):
        tiers = tiers_of(model)
        drafter = drafter_of(tiers, GREEDY, model)
        tiers.prefill(PROMPT)
        drafts.append(drafter.draft(PROMPT, 5, RandomChooser(0, CPU)).tokens.tolist())
        assert drafter.tier.layers == (0, 2, 3)
    assert drafts[0] == drafts[1]
    assert SelfSlim(tiers_of(model), GREEDY, model).name == "self_slim(0.25, shared)"


def test_a_model_without_a_mask_is_refused() -> None:
    made = tiny_model(0, kept=(0,))
    model = Model("bare", made.transformer, made.tokenizer, None, None)
    with pytest.raises(UserError, match=r"^a slim verifier is needed .*set model\.slim_mask"):
        SelfSlim(tiers_of(model), GREEDY, model)


def test_another_slim_verifier_drafts_in_its_own_cache() -> None:
    """The drafts are those of a verifier tier of the same layers and cache mode; the record says which it was."""
    model = tiny_model(1, kept=(0, 2, 3))
    prefix = partial(slim.prefix, skip_ratio=0.5, cache="own")
    tiers = tiers_of(model)
    method = Speculative(tiers, GREEDY, model, 3, partial(SelfSlim, slim=prefix))
    tier = method.drafter.tier
    assert tier is not None and tier in tiers.prefilled
    assert method.drafter_name == "self_slim(0.5, own)" and tier.layers == (0, 1)
    facts = slim.slim_facts(model, {"speculative": method})
    assert facts == {"slim_mask": "prefix, skip 0.5", "slim_layers": "0 1", "slim_cache": "own"}
    tiers.prefill(PROMPT)
    drafts = method.drafter.draft(PROMPT, 3, RandomChooser(0, CPU)).tokens.tolist()
    beside = tiers_of(model)
    tier = prefix(beside, model).tier
    beside.prefill(PROMPT)
    text = list(PROMPT)
    for _ in range(3):
        text.append(int(tier.forward(text, 1)[0].argmax()))
    assert drafts == text[len(PROMPT) :]


def test_several_slim_verifiers_draft_nothing() -> None:
    model = tiny_model(1, kept=(0, 2, 3))
    several = partial(slim.several, masks=[[0, 3], [0, 1, 3]])
    with pytest.raises(UserError, match=r"^self_slim takes one slim verifier, slim=several makes 2"):
        SelfSlim(tiers_of(model), GREEDY, model, several)
