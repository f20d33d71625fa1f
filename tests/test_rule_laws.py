"""Laws of the two-tier rules by enumeration of the real method over five tokens, jointly over a block."""

from collections.abc import Callable, Hashable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, Method, StopRule
from harness.decode.block_verification import BlockVerification
from harness.decode.cascade import Cascade, Chow, TokenV3
from harness.decode.length import Confidence
from harness.decode.lossy import Lossy
from harness.decode.rule import Lossless
from harness.decode.speculative import Speculative
from harness.decode.typical import Typical
from harness.drafters.base import Draft
from harness.drafters.self_skip import SelfSkip
from harness.kernels.residual import residual_weights
from harness.sampling import Law, Sampling
from tests.enumeration import BranchChooser, exact_law, total_variation
from tests.rules import CASES, READS_DRAFTER, Case, RuleFactory, positions, table, two_tiers
from tests.toys import shapes_unchecked, tiers_of, tiny_model

PROMPT = (0,)
SAMPLINGS = {"T=1": Sampling(1.0), "T=0.6": Sampling(0.6)}
TRUNCATING = Sampling(1.0, top_k=4)
Laws = list[list[float]]


def block_law(method: Speculative, of: Callable) -> dict[Hashable, float]:
    """The law of something about the first block; shapes are checked by the tests of the hand cases."""
    with shapes_unchecked():
        return exact_law(lambda chooser: of(method.step(PROMPT, 99, chooser)))


def completed(blocks: dict, laws: list[Laws]) -> dict[tuple[int, ...], float]:
    """The joint law of ``len(laws)`` tokens: what a block left open comes from ``laws``, given the token before."""
    joint: dict[tuple[int, ...], float] = {}
    vocabulary = range(len(laws[0]))
    for block, prob in blocks.items():
        for rest in product(vocabulary, repeat=len(laws) - len(block)):
            tokens, share = block, prob
            for token in rest:
                share *= laws[len(tokens)][tokens[-1]][token]
                tokens = (*tokens, token)
            joint[tokens] = joint.get(tokens, 0.0) + share
    return joint


def chained(laws: list[Laws]) -> dict[tuple[int, ...], float]:
    first = {(token,): prob for token, prob in enumerate(laws[0][PROMPT[-1]])}
    return completed(first, laws)


def error(case: Case, sampling: Sampling, seed: int, certain: bool = False, rule: RuleFactory | None = None) -> float:
    """Total variation of two drafts and a bonus token from the closed form."""
    small, large = table(seed, 1.2), table(seed + 100, 1.2)
    seen = positions(sampling, small, large, certain)
    laws = [[case.form(at) for at in seen]] * 2 + [[case.bonus(at) for at in seen]]
    method = two_tiers(rule or case.rule, sampling, small, large, certain=certain)
    got = completed(block_law(method, lambda block: block.tokens), laws)
    assert sum(got.values()) == pytest.approx(1.0)
    return total_variation(got, chained(laws))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", CASES)
def test_a_block_has_the_closed_form_of_its_rule(name: str, sampling: str) -> None:
    assert error(CASES[name], SAMPLINGS[sampling], 0 if sampling == "T=1" else 1) < 1e-12


@pytest.mark.parametrize("name", [name for name in CASES if name not in READS_DRAFTER])
def test_so_it_has_where_tokens_are_cut_off_and_where_drafts_are_certain(name: str) -> None:
    assert error(CASES[name], TRUNCATING, 2) < 1e-12
    assert error(CASES[name], SAMPLINGS["T=1"], 3, certain=True) < 1e-12


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].rule(Sampling(1.0)).lossless])
def test_the_closed_forms_tell_the_rule_from_drafter_and_verifier(name: str) -> None:
    """Otherwise a rule that keeps everything, or nothing, would pass."""
    from_p, from_q = 0.0, 0.0
    for seed in (0, 1):
        for at in positions(Sampling(1.0), table(seed, 1.2), table(seed + 100, 1.2)):
            law = CASES[name].form(at)
            assert sum(law) == pytest.approx(1.0) and min(law) >= 0
            from_p += sum(abs(a - b) for a, b in zip(law, at.p, strict=True))
            from_q += sum(abs(a - b) for a, b in zip(law, at.q, strict=True))
    assert from_p > 0.05 and from_q > 0.05


def no_residual(verifier: Tensor, draft: Tensor | None, tokens: Tensor, stop: Tensor) -> Tensor:
    return verifier[stop]


HAS_RESIDUAL = [name for name in CASES if name not in ("typical", "spec_cascade", "lossy, no residual")]


@pytest.mark.parametrize("name", HAS_RESIDUAL)
def test_replacing_from_the_target_itself_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BranchChooser, "residual", staticmethod(no_residual))
    assert any(error(CASES[name], SAMPLINGS["T=1"], seed) > 0.005 for seed in (0, 1))


class UntruncatedReplacement(Typical):
    def law(self, logits: Tensor) -> Law:
        return self.sampling.law(logits)


class ReadsWhatIsSampledFrom(Cascade):
    def raw(self, draft: Draft, drafted: Tensor) -> Tensor:
        return drafted


WRONG: dict[str, tuple[str, Sampling, RuleFactory]] = {
    "typical, replaced from all of q": (
        "typical",
        Sampling(1.0),
        partial(UntruncatedReplacement, epsilon=0.3, delta=0.6),
    ),
    "chow, at the temperature of sampling": (
        "cascade_chow",
        Sampling(0.6),
        partial(ReadsWhatIsSampledFrom, deferral=Chow(0.55)),
    ),
    "spec_cascade, the rest spread as TokenV3 does": (
        "spec_cascade",
        Sampling(1.0),
        partial(Cascade, deferral=TokenV3(0.6)),
    ),
    "lossy, the residual of q": ("lossy, no residual", Sampling(1.0), partial(Lossy, alpha=0.1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_neighbours_fail(name: str) -> None:
    case, sampling, rule = WRONG[name]
    assert any(error(CASES[case], sampling, seed, rule=rule) > 0.005 for seed in (0, 1))


def token_wise(verifier: Tensor, draft: Tensor | None, tokens: Tensor, stop: Tensor) -> Tensor:
    """The residual of one position, whatever the probability of getting there."""
    return residual_weights(verifier / verifier.sum(dim=-1, keepdim=True), draft, tokens, stop)


def test_block_verification_with_the_token_wise_residual_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BranchChooser, "residual", staticmethod(token_wise))
    assert error(CASES["speculative"], Sampling(1.0), 0) < 1e-12
    assert any(error(CASES["block_verification"], Sampling(1.0), seed) > 0.005 for seed in (0, 1))


def expected_kept(rule: RuleFactory, small: Tensor, large: Tensor, gamma: int) -> float:
    law = block_law(two_tiers(rule, Sampling(1.0), small, large, gamma), lambda block: block.kept)
    return sum(kept * prob for kept, prob in law.items() if isinstance(kept, int))


def test_block_verification_keeps_no_fewer_drafts_than_token_by_token() -> None:
    gains = []
    for seed in range(2):
        small, large = table(seed, 1.2), table(seed + 100, 1.2)
        gains.append(expected_kept(BlockVerification, small, large, 2) - expected_kept(Lossless, small, large, 2))
    assert min(gains) > -1e-12 and max(gains) > 0.01


def test_block_verification_on_the_papers_example() -> None:
    """Two tokens, q = (1/3, 2/3) and p = (2/3, 1/3) everywhere: of two drafts, 10/9 are kept singly, 11/9 jointly."""
    small, large = (torch.tensor([odds, odds], dtype=torch.float64).log() for odds in ((2 / 3, 1 / 3), (1 / 3, 2 / 3)))
    assert expected_kept(Lossless, small, large, 2) == pytest.approx(10 / 9)
    assert expected_kept(BlockVerification, small, large, 2) == pytest.approx(11 / 9)


def test_block_verification_keeps_the_joint_law_of_three_drafts_and_of_blocks_cut_short() -> None:
    small, large = table(0, 1.2)[:3, :3], table(100, 1.2)[:3, :3]
    laws = [[at.q for at in positions(Sampling(1.0), small, large)]] * 4
    want = chained(laws)
    for length in (None, partial(Confidence, threshold=0.4)):
        cut = {} if length is None else {"length": length}
        method = two_tiers(BlockVerification, Sampling(1.0), small, large, gamma=3, **cut)
        blocks = block_law(method, lambda block: block.tokens)
        assert total_variation(completed(blocks, laws), want) < 1e-12
        drafts = block_law(method, lambda block: block.drafted)
        assert drafts == {3: pytest.approx(1.0)} if length is None else len(drafts) > 1


def test_block_verification_on_a_real_model_has_the_full_verifiers_joint_law() -> None:
    """Caches and rollbacks too: all decisions of three tokens, over a vocabulary of three."""
    model, sampling = tiny_model(3, kept=(0, 1, 3), layer_scale=1.0, vocab_size=3), Sampling(1.0)

    def law(method: Method) -> dict:
        decoder = Decoder(method)

        def run(chooser: BranchChooser) -> tuple[int, ...]:
            decoder.prefill((1, 2, 0))
            return decoder.decode(StopRule(3), chooser).token_ids

        with shapes_unchecked():
            return exact_law(run)

    drafter = partial(SelfSkip, mask=[0, 1])
    got = law(Speculative(tiers_of(model), sampling, model, 2, drafter, rule=BlockVerification))
    assert total_variation(got, law(Autoregressive(tiers_of(model), sampling))) < 1e-12
