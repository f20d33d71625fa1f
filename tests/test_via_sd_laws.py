"""The law of one block of VIA-SD under each of its rules and any number of slim verifiers, by enumeration.

``block_law`` says it again in another form: position by position, on plain numbers, with no tensors of a whole block.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import pytest
import torch

from harness.decode.gate import AlwaysEscalate, Gate, Literal, Strictness, Tabled
from harness.decode.gate.constant import NeverEscalate
from harness.decode.gate.doubt import Entropy, Margin
from harness.decode.rules import CHOICES, Rules, mixture
from harness.decode.slim import several
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Drafter
from harness.drafters.self_skip import SelfSkip
from harness.kernels.gate import ACCEPT, ESCALATE, REGENERATE
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.sampling import Sampling
from tests.enumeration import exact_law, total_variation
from tests.toys import shapes_unchecked, tiers_of, tiny_model

PROMPT = (1, 2, 0)
DRAFT, SLIMS, FULL = (0, 1), ((0, 3), (0, 1, 3)), (0, 1, 2, 3)
GATE = Strictness(0.5, 0.2)
SAMPLED = Sampling(1.0)
Law = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class Case:
    """A model of which two tiers of the same layers agree wherever they are asked."""

    seed: int
    vocab: int

    @cache  # noqa: B019  a handful of cases, kept for the whole module
    def model(self):
        spread = (3.0, 0.3, 1.0)[self.seed % 3]
        return tiny_model(self.seed, kept=SLIMS[-1], layer_scale=1.0, vocab_size=self.vocab, head_scale=spread)

    @cache  # noqa: B019
    def probs(self, layers: tuple[int, ...], prefix: tuple[int, ...]) -> list[float]:
        """What follows PROMPT and ``prefix`` where PROMPT alone is committed."""
        tiers = tiers_of(self.model())
        tiers.prefill(PROMPT)
        tier = tiers.full if layers == FULL else tiers.provisional("tier", layers)
        return SAMPLED.warp(tier.forward((*PROMPT, *prefix), rows=1))[0].tolist()


def skipping(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
    return SelfSkip(tiers, sampling, model, mask=list(DRAFT))


def method_of(case: Case, gamma: int, gate: Gate, masks: Sequence[Sequence[int]], rules: dict[str, str]) -> ViaSD:
    model, chosen = case.model(), Rules(**rules)
    return ViaSD(
        tiers_of(model),
        SAMPLED,
        model,
        gamma,
        skipping,
        gate,
        ending=chosen.ending,
        escalate=chosen.escalate,
        escalated=chosen.escalated,
        bonus=chosen.bonus,
        slim=partial(several, masks=[list(mask) for mask in masks]),
    )


def decoded_law(case: Case, gamma: int, gate: Gate, masks: Sequence[Sequence[int]], rules: dict[str, str]) -> dict:
    """Of one step, its tokens; the bonus token is the last."""
    method = method_of(case, gamma, gate, masks, rules)

    def run(chooser) -> tuple[int, ...]:
        method.tiers.prefill(PROMPT)
        return method.step(PROMPT, 9, chooser).tokens

    with shapes_unchecked():
        return exact_law(run)


def block_law(case: Case, gamma: int, gate: Tabled, masks: Sequence[tuple[int, ...]], rules: Rules) -> Law:
    """What the docstrings of ``ViaSD`` and ``Rules`` say, as a walk over the positions of a block."""
    law: Law = defaultdict(float)

    def emit(prefix: tuple[int, ...], weight: float, probs: Sequence[float]) -> None:
        for token, prob in enumerate(probs):
            law[(*prefix, token)] += weight * prob

    def walk(prefix: tuple[int, ...], weight: float, first: int, asked: int) -> None:
        """``first``: the verifier that judges the next draft first; ``asked``: the highest slim one so far."""
        if weight == 0:
            return
        full = case.probs(FULL, prefix)
        if len(prefix) == gamma:
            if rules.bonus == "none":
                law[prefix] += weight
            else:
                emit(prefix, weight, full if rules.bonus == "full" else case.probs(masks[asked], prefix))
            return
        draft = case.probs(DRAFT, prefix)
        tables = [gate.table(torch.tensor([case.probs(mask, prefix)]).log())[0].tolist() for mask in masks]
        target = full
        if rules.escalated == "mixture" and first == 0:
            accepted, escalated = (
                sum(p for p, code in zip(draft, tables[0], strict=True) if code == want) for want in (ACCEPT, ESCALATE)
            )
            slim = case.probs(masks[0], prefix)
            inner = [(1 - accepted) * p + accepted * s for p, s in zip(draft, slim, strict=True)]
            target = [(1 - escalated) * i + escalated * q for i, q in zip(inner, full, strict=True)]
        left = [max(0.0, t - p) for t, p in zip(target, draft, strict=True)]
        for token, p in enumerate(draft):
            level = first
            while level < len(masks) and tables[level][token] == ESCALATE:
                level += 1
            heard = max(asked, min(level, len(masks) - 1))
            onward = level if rules.escalate == "rest" else 0
            if level == len(masks):
                keep = min(1.0, target[token] / p) if p else 0.0
                walk((*prefix, token), weight * p * keep, onward, heard)
                if keep < 1:
                    emit(prefix, weight * p * (1 - keep), [share / sum(left) for share in left])
            elif tables[level][token] == ACCEPT:
                walk((*prefix, token), weight * p, onward, heard)
            else:
                emit(prefix, weight * p, full if rules.ending == "full" else case.probs(masks[level], prefix))

    walk((), 1.0, 0, 0)
    return law


def every_rule(**fixed: Sequence[str]) -> list[dict[str, str]]:
    kinds = {**CHOICES, **fixed}
    return [dict(zip(kinds, values, strict=True)) for values in product(*kinds.values())]


def distance(case: Case, gamma: int, masks, one: dict[str, str], other: dict[str, str], gate=GATE) -> float:
    """Between what is decoded under one set of rules and what another set should give."""
    return total_variation(
        decoded_law(case, gamma, gate, masks, one), block_law(case, gamma, gate, masks, Rules(**other))
    )


ONE = Case(seed=2, vocab=5)
BLOCK = Case(seed=117, vocab=3)


def test_the_case_of_five_tokens_takes_every_route() -> None:
    for mask in SLIMS:
        table = GATE.table(torch.tensor([ONE.probs(mask, ())]).log())[0].tolist()
        assert set(table) == {ACCEPT, REGENERATE, ESCALATE}


@pytest.mark.parametrize("rules", every_rule(escalate=("token",)), ids=lambda rules: "-".join(rules.values()))
def test_one_position_has_the_stated_law(rules: dict[str, str]) -> None:
    got = decoded_law(ONE, 1, GATE, SLIMS[1:], rules)
    assert sum(got.values()) == pytest.approx(1.0)
    assert total_variation(got, block_law(ONE, 1, GATE, SLIMS[1:], Rules(**rules))) < 1e-12


@pytest.mark.parametrize(
    "gate", [Literal(0.4, 0.8), NeverEscalate(0.5), Entropy(0.6), Margin(0.2)], ids=lambda g: g.name
)
def test_one_position_has_the_stated_law_by_other_gates(gate: Tabled) -> None:
    rules = {"ending": "slim", "escalate": "token", "escalated": "mixture", "bonus": "none"}
    assert distance(ONE, 1, SLIMS[1:], rules, rules, gate) < 1e-12


@pytest.mark.parametrize(
    ("key", "wrong"), [(key, value) for key, values in CHOICES.items() if key != "escalate" for value in values[1:]]
)
def test_each_setting_has_a_law_of_its_own(key: str, wrong: str) -> None:
    """The wrong neighbours of one position: the law that another setting should give is not the one that is decoded."""
    right = {name: values[0] for name, values in CHOICES.items()}
    assert distance(ONE, 1, SLIMS[1:], right, {**right, key: wrong}) > 0.01
    assert distance(ONE, 1, SLIMS[1:], {**right, key: wrong}, right) > 0.01


JOINT = [
    {"ending": "slim", "escalate": "token", "escalated": "lossless", "bonus": "none"},
    {"ending": "slim", "escalate": "rest", "escalated": "lossless", "bonus": "none"},
    {"ending": "full", "escalate": "token", "escalated": "mixture", "bonus": "full"},
    {"ending": "full", "escalate": "rest", "escalated": "mixture", "bonus": "slim"},
]


@pytest.mark.parametrize("rules", JOINT, ids=lambda rules: "-".join(rules.values()))
def test_a_block_has_the_stated_joint_law(rules: dict[str, str]) -> None:
    assert distance(BLOCK, 2, SLIMS[1:], rules, rules) < 1e-12


SEVERAL = [
    {"ending": "slim", "escalate": "token", "escalated": "lossless", "bonus": "none"},
    {"ending": "slim", "escalate": "rest", "escalated": "lossless", "bonus": "slim"},
    {"ending": "full", "escalate": "token", "escalated": "lossless", "bonus": "full"},
]


@pytest.mark.parametrize("rules", SEVERAL, ids=lambda rules: "-".join(rules.values()))
def test_a_block_of_four_tiers_has_the_stated_joint_law(rules: dict[str, str]) -> None:
    assert distance(BLOCK, 2, SLIMS, rules, rules) < 1e-12


def test_judging_the_rest_and_another_tier_each_change_the_joint_law() -> None:
    token, rest, *_ = JOINT
    got = decoded_law(BLOCK, 2, GATE, SLIMS, token)
    for masks, rules in ((SLIMS, rest), (SLIMS[:1], token), (SLIMS[1:], token)):
        assert total_variation(got, block_law(BLOCK, 2, GATE, masks, Rules(**rules))) > 0.01


def autoregressive_law(case: Case, count: int) -> Law:
    law: Law = {(): 1.0}
    for _ in range(count):
        law = {(*text, v): p * q for text, p in law.items() for v, q in enumerate(case.probs(FULL, text))}
    return law


def continued(case: Case, law: Law, count: int) -> Law:
    """``law`` with shorter texts continued by the full verifier, as a lossless method goes on."""
    while any(len(text) < count for text in law):
        longer: Law = defaultdict(float)
        for text, p in law.items():
            if len(text) == count:
                longer[text] += p
            else:
                for v, q in enumerate(case.probs(FULL, text)):
                    longer[(*text, v)] += p * q
        law = longer
    return law


@pytest.mark.parametrize("masks", [SLIMS[1:], SLIMS], ids=["three tiers", "four tiers"])
@pytest.mark.parametrize("rules", every_rule(ending=("slim",), escalate=("token",)), ids=lambda r: "-".join(r.values()))
def test_lossless_is_said_where_it_is_true(rules: dict[str, str], masks: Sequence[tuple[int, ...]]) -> None:
    """Everything escalated: the full verifier's law, jointly over a block and its bonus, but for the slim bonus."""
    if rules["escalated"] == "mixture" and len(masks) > 1:
        pytest.skip("eq. 14 has one slim verifier")
    got = continued(ONE, decoded_law(ONE, 1, AlwaysEscalate(), masks, rules), 2)
    said = method_of(ONE, 1, AlwaysEscalate(), masks, rules).lossless
    gap = total_variation(got, autoregressive_law(ONE, 2))
    assert said == (gap < 1e-9)
    assert said or gap > 0.01


def test_the_mixture_by_hand() -> None:
    """Mass 0.6 accepted, 0.3 escalated: pi = 0.7 (0.4 p + 0.6 q') + 0.3 q."""
    draft, slim, full = (torch.tensor([row]) for row in ([0.6, 0.1, 0.3], [0.5, 0.4, 0.1], [0.2, 0.2, 0.6]))
    got = mixture(draft, slim, full, torch.tensor([[ACCEPT, REGENERATE, ESCALATE]]))[0].tolist()
    assert got == pytest.approx([0.168 + 0.21 + 0.06, 0.028 + 0.168 + 0.06, 0.084 + 0.042 + 0.18])
