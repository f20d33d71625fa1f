"""Caches: rollback then append equals fresh; tails of several tiers share one storage without seeing each other."""

import random

import pytest
import torch

from harness.decode.base import Decoder, StopRule
from harness.decode.gate import Strictness
from harness.decode.via_sd import ViaSD
from harness.drafters.self_skip import SelfSkip
from harness.model.cache import KVCache
from harness.model.tiers import Tiers
from harness.model.transformer import Transformer
from harness.sampling import RandomChooser, Sampling
from tests.toys import CPU, Scripted, tiers_of, tiny, tiny_model

LAYERS = {"slim": (0, 1, 3), "draft": (0, 3)}


def fresh_logits(model: Transformer, name: str, sequence: list[int], committed: int, rows: int) -> torch.Tensor:
    """What tier ``name`` says of ``sequence`` when the full verifier has processed ``committed`` of it."""
    tiers = tiers_of(model)
    tiers.full.prefill(sequence[:committed])
    tier = tiers.full if name == "full" else tiers.provisional(name, LAYERS[name])
    return tier.forward(sequence, rows)


@pytest.mark.parametrize("seed", range(30))
def test_any_history_of_three_tiers_equals_a_fresh_computation(seed: int) -> None:
    rng = random.Random(seed)
    model = tiny(seed)
    tiers = tiers_of(model, capacity=64)
    tier_of = {name: tiers.provisional(name, layers) for name, layers in LAYERS.items()} | {"full": tiers.full}
    tokens = [rng.randrange(97) for _ in range(8)]
    tiers.prefill(tokens)
    for _ in range(25):
        name = rng.choice(["full", "slim", "slim", "draft", "draft"])
        tier = tier_of[name]
        block = tokens + [rng.randrange(97) for _ in range(rng.randrange(0, 5))]
        if len(block) > 60:
            break
        committed = tiers.cache.length
        fresh = len(block) - tier.length
        if fresh > 0:
            rows = rng.randint(1, fresh)
            got = tier.forward(block, rows)
            assert torch.allclose(got, fresh_logits(model, name, block, committed, rows), atol=1e-10), name
        if rng.random() < 0.5:  # keep part of the block, as a decoder does after verification
            tokens = [*block[: rng.randint(len(tokens), len(block))], rng.randrange(97)]
            tiers.rollback(len(tokens) - 1)
        else:
            tiers.rollback(len(tokens) - 1)
        assert_committed_entries_are_fresh(tiers, tokens)


def assert_committed_entries_are_fresh(tiers: Tiers, tokens: list[int]) -> None:
    length = tiers.cache.length
    again = KVCache(tiers.model.spec, 64, tiers.model.dtype, CPU)
    tiers.model.prefill(torch.tensor(tokens[:length]), again, range(tiers.model.spec.layers))
    assert torch.allclose(tiers.cache.keys[:, :, :length], again.keys[:, :, :length], atol=1e-10)
    assert torch.allclose(tiers.cache.values[:, :, :length], again.values[:, :, :length], atol=1e-10)


def test_the_check_of_committed_entries_can_fail() -> None:
    tiers = tiers_of(tiny(0), capacity=64)
    tiers.prefill([1, 2, 3, 4])
    with pytest.raises(AssertionError):
        assert_committed_entries_are_fresh(tiers, [1, 2, 9, 4])


@pytest.mark.parametrize("seed", range(10))
def test_the_full_cache_is_fresh_after_every_block_of_via_sd(seed: int) -> None:
    model = tiny_model(seed, kept=(0, 1, 3))
    tiers = tiers_of(model, capacity=64)
    method = ViaSD(tiers, Sampling(), model, 4, lambda t, s, m: SelfSkip(t, s, m, mask=[0, 1]), Strictness())
    tokens = [5, 6, 7, 8, 9]
    tiers.prefill(tokens)
    while len(tokens) < 40:
        block = method.step(tuple(tokens), 99, RandomChooser(0, CPU))
        tokens += block.tokens
        tiers.rollback(len(tokens) - 1)
        assert_committed_entries_are_fresh(tiers, tokens)


@pytest.mark.parametrize("seed", range(10))
def test_slim_logits_do_not_depend_on_which_drafter_ran(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts, once from a table and once beside a tier that leaves a tail of its own in the storage."""
    model = tiny_model(seed, kept=(0, 1, 3))
    script = [random.Random(seed).randrange(97) for _ in range(60)]

    def decode(with_decoy: bool) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        class BesideDecoy(Scripted):
            decoy: SelfSkip

            def draft(self, tokens, count, chooser):
                if with_decoy:
                    self.decoy.draft(tokens, count, chooser)
                return super().draft(tokens, count, chooser)

        def drafter(tiers, sampling, model):
            made = BesideDecoy(script, 0.0, 97, seed)
            made.decoy = SelfSkip(tiers, sampling, model, mask=[0, 2])
            return made

        method = ViaSD(tiers_of(model), Sampling(), model, 4, drafter, Strictness())
        seen: list[torch.Tensor] = []
        forward = method.slims[0].forward

        def recording(*arguments):
            seen.append(forward(*arguments))
            return seen[-1]

        monkeypatch.setattr(method.slims[0], "forward", recording)
        decoder = Decoder(method)
        decoder.prefill(script[:6])
        return seen, decoder.decode(StopRule(40), RandomChooser(0, CPU)).token_ids

    plain, plain_tokens = decode(False)
    beside, beside_tokens = decode(True)
    assert plain_tokens == beside_tokens
    assert len(plain) == len(beside) > 0
    for one, other in zip(plain, beside, strict=True):
        assert torch.allclose(one, other, atol=1e-10)


def test_an_all_true_mask_is_the_full_verifier() -> None:
    model = tiny(4)
    tiers = tiers_of(model)
    every = tiers.provisional("slim", range(4))
    tiers.prefill([1, 2, 3])
    slim = every.forward([1, 2, 3, 4, 5], rows=3)
    assert torch.allclose(slim, tiers.full.forward([1, 2, 3, 4, 5], rows=3), atol=1e-12)


def test_rows_of_tokens_already_processed_are_refused() -> None:
    tiers = tiers_of(tiny(0))
    tiers.prefill([1, 2, 3])
    with pytest.raises(ValueError, match="full: 2 rows wanted, 1 tokens are new"):
        tiers.full.forward([1, 2, 3], rows=2)
