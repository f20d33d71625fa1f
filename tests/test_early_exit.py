"""Early exit: which layers run, and that drafts are what these layers say."""

import pytest
import torch

from harness.drafters.early_exit import EarlyExit
from harness.errors import UserError
from harness.sampling import RandomChooser
from tests.toys import CPU, GREEDY, tiers_of, tiny_model


@pytest.mark.parametrize(
    ("config", "layers"),
    [({"layers": 1}, 1), ({"layers": 4}, 4), ({"exit_ratio": 0.5}, 2), ({"exit_ratio": 0.01}, 1), ({}, 2)],
)
def test_the_first_layers_run(config: dict, layers: int) -> None:
    model = tiny_model(0, kept=(0, 1, 3))
    drafter = EarlyExit(tiers_of(model), GREEDY, model, **config)
    assert drafter.tier.layers == tuple(range(layers)) and drafter.name == f"early_exit({layers})"


def test_drafts_are_the_likeliest_tokens_of_these_layers() -> None:
    model = tiny_model(1, kept=(0, 1, 3))
    tiers = tiers_of(model)
    drafter = EarlyExit(tiers, GREEDY, model, layers=2)
    tiers.prefill((1, 2, 3))
    draft = drafter.draft((1, 2, 3), 4, RandomChooser(0, CPU))
    assert (tiers.full.forwards, drafter.tier.forwards) == (0, 4)
    again = tiers_of(model)
    again.prefill((1, 2, 3))
    logits = again.provisional("draft", (0, 1)).forward((1, 2, 3), 4, draft.tokens[:-1])
    assert torch.equal(logits.argmax(-1), draft.tokens)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layers": 0}, "layers=0: want 1 to 4"),
        ({"layers": 5}, "layers=5: want 1 to 4"),
        ({"exit_ratio": 0.0}, r"exit_ratio=0\.0: want a share"),
        ({"exit_ratio": 1.5}, r"exit_ratio=1\.5: want a share"),
    ],
)
def test_no_layer_and_more_than_there_are_are_refused(config: dict, message: str) -> None:
    model = tiny_model(0, kept=(0, 1, 3))
    with pytest.raises(UserError, match=f"^early_exit: {message}"):
        EarlyExit(tiers_of(model), GREEDY, model, **config)
