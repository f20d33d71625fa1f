"""Two-tier rules by hand: what is kept and what replaces it, greedy decoding, settings, names and configs."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import yaml
from hydra.utils import instantiate

from harness.decode.block_verification import BlockVerification
from harness.decode.cascade import Cascade, Chow, Diff, Opt, Renormalised, TokenV1, TokenV2, TokenV3
from harness.decode.lossy import Lossy
from harness.decode.rule import Lossless
from harness.decode.sets import Eta, MinP
from harness.decode.truncated import Truncated
from harness.decode.typical import Typical
from harness.errors import UserError
from harness.help import CONF
from harness.sampling import RandomChooser, Sampling
from tests.enumeration import BranchChooser
from tests.rules import CASES, READS_DRAFTER, RuleFactory, positions, table, two_tiers
from tests.toys import CPU, drafted, shapes_unchecked

HALF = Sampling(1.0)
Q = ((0.5, 0.3, 0.2), (0.1, 0.3, 0.6), (0.2, 0.2, 0.6))
P = ((0.2, 0.3, 0.5), (0.7, 0.2, 0.1))


class Noting(BranchChooser):
    """Takes given flips, and notes what was asked for."""

    def __init__(self, flips: Sequence[bool]) -> None:
        super().__init__([])
        self.flips = flips
        self.chances: list[float] = []
        self.weights: list[float] = []

    def accept(self, probability: torch.Tensor) -> torch.Tensor:
        self.chances = probability.tolist()
        return torch.tensor(self.flips)

    def replace(self, verifier, draft, tokens, stop):
        self.weights = self.residual(verifier, draft, tokens, stop).tolist()
        return torch.tensor([0])

    def draw(self, probs, uniform):
        self.weights = probs.tolist()
        return torch.tensor([0])


def judged(rule: RuleFactory, tokens: Sequence[int], flips: Sequence[bool]) -> tuple[int, list[float], list[float]]:
    """Kept drafts, chances of acceptance, and the weights that the token behind is drawn from."""
    chooser = Noting(flips)
    logits, probs = (torch.tensor(rows, dtype=torch.float64).log() for rows in (Q, P))
    verdict = rule(HALF).judge(logits, drafted(tokens, probs.exp()), chooser)
    return int(verdict.stop), chooser.chances, chooser.weights


# rule, drafts, flips, then: kept, chances of acceptance, weights behind
HAND: dict[str, tuple[RuleFactory, tuple[int, int], tuple[bool, bool], int, list[float], list[float]]] = {
    "lossless": (Lossless, (2, 0), (False, True), 0, [0.4, 1 / 7], [0.3, 0.0, 0.0]),
    "lossy: the chance doubles": (partial(Lossy, alpha=0.5), (2, 0), (True, False), 1, [0.8, 2 / 7], [0, 0.1, 0.5]),
    "lossy: beta scales q": (
        partial(Lossy, alpha=0.5, beta=0.5),
        (2, 0),
        (False, True),
        0,
        [0.8, 2 / 7],
        [0.8, 0.3, 0],
    ),
    "lossy: alpha 1 keeps all": (partial(Lossy, alpha=1.0), (2, 0), (True, True), 2, [1.0, 1.0], [0.2, 0.2, 0.6]),
    "chow keeps the second": (
        partial(Cascade, deferral=Chow(0.35)),
        (2, 0),
        (False, True),
        0,
        [0.4, 1.0],
        [0.3, 0.0, 0.0],
    ),
    "diff keeps both": (partial(Cascade, deferral=Diff(0.05)), (2, 0), (True, True), 2, [1.0, 1.0], [0.2, 0.2, 0.6]),
    "opt: 0.5 - 0.3 alpha, 0.6 - 0.6 alpha": (
        partial(Cascade, deferral=Opt(-0.1)),
        (2, 0),
        (False, True),
        0,
        [0.4, 1.0],
        [0.3, 0.0, 0.0],
    ),
    "v1: p at least 0.4, 0.5": (
        partial(Cascade, deferral=TokenV1(0.1)),
        (1, 1),
        (True, False),
        1,
        [0.5 * 0.3 / 0.3, 0.3 * 0.3 / 0.2],
        [0.03, 0.0, 0.08],
    ),
    "v2: q at least 0.25, 0.35": (
        partial(Cascade, deferral=TokenV2(0.25)),
        (2, 0),
        (False, True),
        0,
        [0.5 * 0.2 / 0.5, 0.9 * 0.1 / 0.7],
        [0.25, 0.15, 0.0],
    ),
    "v3: q at least 0.275, 0.33": (
        partial(Cascade, deferral=TokenV3(0.45)),
        (0, 0),
        (True, False),
        1,
        [1.0, 0.9 * 0.1 / 0.7],
        [0.0, 0.9 * 0.3 - 0.2, 0.9 * 0.6],
    ),
    "renormalised: all of p inside": (
        partial(Cascade, deferral=Renormalised(0.45)),
        (2, 2),
        (False, True),
        0,
        [0.0, 1.0],
        [0.4 - 0.2, 0.6 - 0.3, 0.0],
    ),
    "truncated at 0.275, 0.33": (
        partial(Truncated, kept=MinP(0.45)),
        (1, 0),
        (False, True),
        0,
        [1.0, 0.0],
        [0.625 - 0.2, 0.375 - 0.3, 0.0],
    ),
    "block verification": (
        BlockVerification,
        (2, 2),
        (False, True),
        2,
        # P_1 = 0.4, behind it 0.4 q - p = (-, -, 0.14), P_2 = 1
        [0.14 / (0.14 + 0.6), 1.0],
        [0.2, 0.2, 0.6],
    ),
    "block verification: nothing kept": (
        BlockVerification,
        (2, 0),
        (False, False),
        0,
        [0.14 / 0.74, 0.4 / 7],
        [0.3, 0, 0],
    ),
    "block verification: one kept": (
        BlockVerification,
        (2, 0),
        (True, False),
        1,
        [0.14 / 0.74, 0.4 / 7],
        [0.0, 0.0, 0.14],
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_hand_cases(name: str) -> None:
    rule, tokens, flips, kept, chances, weights = HAND[name]
    got = judged(rule, tokens, flips)
    assert got[0] == kept
    assert got[1] == pytest.approx(chances)
    assert got[2] == pytest.approx(weights)


def test_typical_acceptance_by_hand() -> None:
    """exp(-H) of the rows: 0.357, 0.407. With delta 0.6 the bounds are 0.214 and 0.244, with epsilon 0.15 both 0.15."""
    strict = partial(Typical, epsilon=0.9, delta=0.6)
    assert judged(strict, (1, 1), ()) == (2, [], pytest.approx([0.0, 0.0, 1.0]))
    assert judged(strict, (1, 0), ()) == (1, [], pytest.approx([0.0, 1 / 3, 2 / 3]))
    assert judged(strict, (2, 1), ()) == (0, [], pytest.approx([5 / 8, 3 / 8, 0.0]))
    assert judged(partial(Typical, epsilon=0.15, delta=0.6), (2, 1), ()) == (2, [], pytest.approx([0.2, 0.2, 0.6]))


@pytest.mark.parametrize("name", CASES)
def test_greedy_blocks_follow_the_closed_form(name: str) -> None:
    """p and q are one-hot, and rules that read probabilities read those at temperature 1."""
    case, greedy = CASES[name], Sampling()
    deviates = 0
    for seed in range(3):
        small, large = table(seed, 1.2), table(seed + 100, 1.2)
        seen = positions(greedy, small, large)
        method = two_tiers(case.rule, greedy, small, large)
        for start in range(len(small)):
            want, full = [start], [start]
            for _ in range(2):
                law = case.form(seen[want[-1]])
                drafts = seen[want[-1]].p.index(1.0)
                want.append(law.index(max(law)))
                if want[-1] != drafts:
                    break
            else:
                want.append(seen[want[-1]].q.index(1.0))
            block = method.step((start,), 99, RandomChooser(0, CPU))
            assert list(block.tokens) == want[1:]
            full += [seen[token].q.index(1.0) for token in want[:-1]]
            deviates += full[1:] != want[1:]
    assert (deviates == 0) == case.rule(greedy).lossless


@pytest.mark.parametrize("certain", [False, True])
def test_lossy_without_lenience_is_speculative_token_for_token(certain: bool) -> None:
    def text(rule: RuleFactory, seed: int) -> list[int]:
        method = two_tiers(rule, Sampling(0.8, top_p=0.9), table(seed), table(seed + 100), 4, certain)
        tokens, chooser = [0], RandomChooser(seed, CPU)
        with shapes_unchecked():
            while len(tokens) < 30:
                tokens += method.step(tokens, 99, chooser).tokens
        return tokens

    for seed in range(4):
        assert text(partial(Lossy, alpha=0.0, beta=1.0), seed) == text(Lossless, seed)
    assert any(text(partial(Lossy, alpha=0.5), seed) != text(Lossless, seed) for seed in range(4))


def test_a_token_behind_no_draft_comes_from_the_rules_own_law() -> None:
    for name in ("truncated", "typical", "cascade_token_v3"):
        case, chooser = CASES[name], Noting(())
        method = two_tiers(case.rule, HALF, table(0), table(100))
        block = method.step((0,), 1, chooser)
        assert (block.drafted, len(block.tokens)) == (0, 1)
        assert chooser.weights == pytest.approx(case.bonus(positions(HALF, table(0), table(100))[0]))


MADE: dict[str, tuple[RuleFactory, str, str | None, bool, bool]] = {
    # rule; name, settings, lossless when sampling, lossless when greedy
    "lossless": (Lossless, "speculative", None, True, True),
    "block": (BlockVerification, "block_verification", None, True, True),
    "lossy": (Lossy, "lossy", "alpha=0.5, beta=1", False, True),
    "lossy 0 1": (partial(Lossy, alpha=0.0), "lossy", "alpha=0, beta=1", True, True),
    "lossy 0 2": (partial(Lossy, alpha=0.0, beta=2.0), "lossy", "alpha=0, beta=2", False, True),
    "typical": (Typical, "typical", "eta(epsilon=0.09, delta=0.3)", False, True),
    "truncated": (
        partial(Truncated, kept=MinP(0.9)),
        "truncated",
        "lossless for q on min_p(alpha=0.9)",
        False,
        True,
    ),
    "truncated nowhere": (
        partial(Truncated, kept=MinP(1.0)),
        "truncated",
        "lossless for q on min_p(alpha=1)",
        True,
        True,
    ),
    "chow 0": (partial(Cascade, deferral=Chow(0.0)), "cascade_chow", "alpha=0", False, False),
    "diff": (partial(Cascade, deferral=Diff(-0.9)), "cascade_diff", "alpha=-0.9", False, False),
    "diff -1": (partial(Cascade, deferral=Diff(-1.0)), "cascade_diff", "alpha=-1", True, True),
    "opt": (partial(Cascade, deferral=Opt(-3.0)), "cascade_opt", "alpha=-3", False, False),
    "v1 -1": (partial(Cascade, deferral=TokenV1(-1.0)), "cascade_token_v1", "alpha=-1", True, True),
    "v2 0": (partial(Cascade, deferral=TokenV2(0.0)), "cascade_token_v2", "alpha=0", False, False),
    "v2 -0.1": (partial(Cascade, deferral=TokenV2(-0.1)), "cascade_token_v2", "alpha=-0.1", True, True),
    "v3": (partial(Cascade, deferral=TokenV3(0.0)), "cascade_token_v3", "alpha=0", False, False),
    "spec": (partial(Cascade, deferral=Renormalised()), "spec_cascade", "alpha=0.5", False, False),
}


@pytest.mark.parametrize("case", MADE)
def test_what_tables_are_told(case: str) -> None:
    rule, name, settings, sampled, greedy = MADE[case]
    for sampling, lossless in ((HALF, sampled), (Sampling(), greedy)):
        method = two_tiers(rule, sampling, table(0), table(100))
        assert (method.name, method.gate_name, method.lossless) == (name, settings, lossless)


@pytest.mark.parametrize("case", [case for case in MADE if MADE[case][3] and case != "block"])
def test_what_is_called_lossless_token_by_token_is_the_lossless_rule(case: str) -> None:
    for flips in ((False, True), (True, False), (True, True)):
        want, got = (judged(rule, (2, 0), flips) for rule in (Lossless, MADE[case][0]))
        assert got[0] == want[0]
        assert got[1:] == (pytest.approx(want[1]), pytest.approx(want[2]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lossy(HALF, alpha=1.1), "lossy: alpha=1.1: want a number from 0 to 1."),
        (lambda: Lossy(HALF, alpha=float("nan")), "lossy: alpha=nan: want a number from 0 to 1."),
        (lambda: Lossy(HALF, alpha=0.2, beta=0.7), "lossy: beta=0.7: want more than 0 and at least 1 - alpha = 0.8."),
        (lambda: Lossy(HALF, alpha=1.0, beta=0.0), "lossy: beta=0.0: want more than 0 and at least 1 - alpha = 0."),
        (lambda: Chow(-0.1), "cascade_chow: alpha=-0.1: want a number from 0 to 1."),
        (lambda: Diff(2.0), "cascade_diff: alpha=2.0: want a number from -1 to 1."),
        (lambda: Opt(float("inf")), "cascade_opt: alpha=inf: want a number from "),
        (lambda: TokenV1(-2.0), "cascade_token_v1: alpha=-2.0: want a number from -1 to 1."),
        (lambda: MinP(1.5), "min_p: alpha=1.5: want a number from 0 to 1."),
        (lambda: Eta(0.0), "eta: epsilon=0.0: want more than 0 and less than 1."),
        (lambda: Typical(HALF, delta=1.0), "eta: delta=1.0: want more than 0 and less than 1."),
    ],
)
def test_settings_out_of_bounds_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", CASES)
def test_rules_that_read_the_drafter_refuse_one_without_probabilities(name: str) -> None:
    make = partial(two_tiers, CASES[name].rule, HALF, table(0), table(100), certain=True)
    if name not in READS_DRAFTER:
        assert make().lossless == CASES[name].rule(HALF).lossless
        return
    with pytest.raises(UserError, match=f"{name} needs the drafter's probabilities, and table has none: choose"):
        make()


CONFIGS = {
    **{name: name for name in ("lossy", "block_verification", "typical", "truncated", "spec_cascade")},
    **{f"cascade_{name}": f"cascade_{name}" for name in ("chow", "diff", "opt", "token_v1", "token_v2", "token_v3")},
    "truncated_typical": "truncated",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_config_makes_its_rule(name: str) -> None:
    node = yaml.safe_load((CONF / "method" / f"{name}.yaml").read_text())
    assert node["_target_"] == "harness.decode.speculative.Speculative"
    rule = instantiate(node["rule"])(HALF)
    assert rule.name == CONFIGS[name]
    assert rule.reads_drafter == (name in READS_DRAFTER)


def test_the_fair_partners_truncate_as_their_rules_do() -> None:
    nodes = {name: yaml.safe_load((CONF / "method" / f"{name}.yaml").read_text())["rule"] for name in CONFIGS}
    alpha = nodes["truncated"]["kept"]["alpha"]
    assert nodes["cascade_token_v3"]["deferral"]["alpha"] == nodes["spec_cascade"]["deferral"]["alpha"] == alpha
    bounds = (nodes["typical"], nodes["truncated_typical"]["kept"])
    assert len({(bound["epsilon"], bound["delta"]) for bound in bounds}) == 1
