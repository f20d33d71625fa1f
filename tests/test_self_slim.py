"""Self-speculation with the slim verifier: its layers draft, and without a mask it is refused."""

import pytest

from harness.drafters.self_skip import SelfSkip
from harness.drafters.self_slim import SelfSlim
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
    assert SelfSlim(tiers_of(model), GREEDY, model).name == "self_slim(0.25)"


def test_a_model_without_a_mask_is_refused() -> None:
    made = tiny_model(0, kept=(0,))
    model = Model("bare", made.transformer, made.tokenizer, None, None)
    with pytest.raises(UserError, match=r"^self_slim drafts with .*set model\.slim_mask.*or use drafter=self_skip"):
        SelfSlim(tiers_of(model), GREEDY, model)
