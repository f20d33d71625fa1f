"""Lossless methods made of nested parts write the greedy tokens, in every way of running them. CPU, float64."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

import pytest
import torch

from harness.decode import nested as nested_module
from harness.decode import rule as rule_module
from harness.decode.accept import first_stop
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.drafters.base import Draft
from harness.model.tiers import Tier
from harness.sampling import RandomChooser, Sampling
from tests.arms import DRAFTERS, NESTED, PROMPT, model_of, output, tiers_with
from tests.toys import CPU, drafted, shapes_unchecked

SEEDS = {"cascade_sd": range(18)}
"""Two of each drafter: a block of a cascade takes dozens of forwards. The others have 45 seeds."""

LENGTH = 20
NAMES = list(DRAFTERS)


def pair(method: str, seed: int, dtype: torch.dtype = torch.float64, block: int | None = None) -> tuple:
    """Greedy output of a method, whose drafter the seed chooses, and that of the baseline."""
    model = model_of(seed, dtype)
    with nullcontext() if seed < len(NAMES) else shapes_unchecked():
        want = output(Autoregressive(tiers_with(model, block, False), Sampling()), length=LENGTH)
        drafter = DRAFTERS[NAMES[seed % len(NAMES)]](model, (*PROMPT, *want))
        made = NESTED[method](tiers_with(model, block, False), model, drafter, Sampling())
        return output(made, length=LENGTH), want


@pytest.mark.parametrize("method", NESTED)
def test_greedy_tokens_are_the_baselines_whatever_drafts(method: str) -> None:
    unequal = [seed for seed in SEEDS.get(method, range(45)) if (both := pair(method, seed))[0] != both[1]]
    assert unequal == []


@pytest.mark.parametrize("method", NESTED)
def test_keeping_one_draft_too_many_breaks_equality(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(kept: torch.Tensor) -> torch.Tensor:
        return (first_stop(kept) + 1).clamp(max=len(kept))

    monkeypatch.setattr(rule_module, "first_stop", too_many)
    assert sum(one != other for one, other in (pair(method, seed) for seed in range(len(NAMES)))) > 4


@pytest.mark.parametrize("method", NESTED)
def test_one_shape_gives_the_greedy_tokens_in_bfloat16(method: str) -> None:
    for seed in range(len(NAMES)):
        got, want = pair(method, seed, torch.bfloat16, block=6)
        assert got == want


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.8)], ids=str)
@pytest.mark.parametrize(
    ("method", "drafter"),
    [
        *product(("hierarchical", "cascade_sd"), ("prompt_lookup", "self_skip", "small_lm")),
        *product(("swift", "clasp"), ("prompt_lookup",)),  # which draft by themselves
    ],
)
def test_tokens_are_the_same_with_and_without_graphs(
    method: str, drafter: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outputs() -> list[tuple[int, ...]]:
        models = [model_of(seed, torch.float64) for seed in range(2)]
        makes = [DRAFTERS[drafter](model, ()) for model in models]
        return [
            output(NESTED[method](tiers_with(model, None, False), model, make, sampling), seed, LENGTH)
            for seed, (model, make) in enumerate(zip(models, makes, strict=True))
        ]

    plain = outputs()
    build = Tier.__init__

    def pretending(self: Tier, *args: object, graphs: bool = False, **kwargs: object) -> None:
        build(self, *args, **kwargs)  # type: ignore[arg-type]
        self.graphs = True

    monkeypatch.setattr(Tier, "__init__", pretending)
    assert outputs() == plain


@pytest.mark.parametrize("method", NESTED)
def test_nothing_is_carried_from_one_prompt_to_the_next(method: str) -> None:
    model = model_of(3, torch.float64)
    drafter = DRAFTERS["self_skip"](model, ())
    used = Decoder(NESTED[method](tiers_with(model, None, False), model, drafter, Sampling()))
    for prompt in ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3), (9,)):
        fresh = Decoder(NESTED[method](tiers_with(model, None, False), model, drafter, Sampling()))
        outputs = []
        for decoder in (used, fresh):
            decoder.prefill(prompt)
            outputs.append(decoder.decode(StopRule(20), RandomChooser(0, CPU)))
        assert outputs[0].token_ids == outputs[1].token_ids
        if method != "swift":  # which searches on
            assert outputs[0].blocks == outputs[1].blocks


def reads_of(method: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, tuple]:
    """Tensor values that the host read, forwards of the slim tier, and the blocks."""
    reads = 0

    def counted(name: str) -> Callable[..., object]:
        read = getattr(torch.Tensor, name)

        def reading(self: torch.Tensor, *arguments: object) -> object:
            nonlocal reads
            reads += 1
            return read(self, *arguments)

        return reading

    model = model_of(0, torch.float64)
    made = NESTED[method](tiers_with(model, None, False), model, DRAFTERS["self_skip"](model, ()), sampling)
    decoder = Decoder(made)
    decoder.prefill(PROMPT)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__"):
            patch.setattr(torch.Tensor, name, counted(name))
        blocks = decoder.decode(StopRule(40), RandomChooser(0, CPU)).blocks
    return reads, sum(block.slim_forwards for block in blocks), blocks


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=str)
def test_a_review_reaches_the_host_by_one_read(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, reviews, blocks = reads_of("hierarchical", sampling, monkeypatch)
    assert reads == reviews + len(blocks) and reviews > len(blocks) > 3


@pytest.mark.parametrize(
    ("drafts", "tokens", "probs"),
    [
        ([], [], None),
        ([drafted([])], [], None),
        ([drafted([1, 2]), drafted([]), drafted([0])], [1, 2, 0], None),
        (
            [drafted([1], torch.tensor([[0.1, 0.7, 0.2]])), drafted([2])],
            [1, 2],
            [[0.1, 0.7, 0.2], [0.0, 0.0, 1.0]],
        ),
        ([drafted([2]), drafted([1], torch.tensor([[0.1, 0.7, 0.2]]))], [2, 1], [[0.0, 0.0, 1.0], [0.1, 0.7, 0.2]]),
    ],
)
def test_drafts_in_a_row_become_one(drafts: list[Draft], tokens: list[int], probs: list[list[float]] | None) -> None:
    got = nested_module.chained(drafts, CPU)
    assert got.tokens.tolist() == tokens
    assert (got.probs is None) == (probs is None)
    assert got.probs is None or torch.equal(got.probs, torch.tensor(probs))


def test_logits_stay_where_all_drafts_have_them() -> None:
    one, other = (Draft(torch.tensor([token]), None, torch.full((1, 3), float(token))) for token in (1, 2))
    both = nested_module.chained([one, other], CPU)
    assert both.logits is not None and both.logits.tolist() == [[1.0] * 3, [2.0] * 3]
    assert nested_module.chained([one, drafted([0])], CPU).logits is None
