"""Rows of forwards replayed from a trace: by hand, and against what every tier was given while it decoded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from harness.decode.base import Decoder, Method, StopRule
from harness.decode.bild import BiLD
from harness.decode.gate import Strictness
from harness.decode.length import Adaptive, Confidence
from harness.decode.self_slim import SelfSlim
from harness.decode.slim import masked, several
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.heads import HeadTier
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.records import BlockTrace
from harness.sampling import RandomChooser, Sampling
from harness.store import read_config
from harness.traces import DRAFT, FULL, SLIM, Forward, Layout, Untraced, faultless, forwards, layout
from tests.arms import DRAFTERS, PROMPT, model_of, tiers_with
from tests.heads import head_drafter
from tests.rows import A, E, R, plain
from tests.toys import CPU, DrafterFactory, shapes_unchecked

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    **{"prompt_lookup": "none", "retrieval": "none", "scripted": "none"},
    **{"graft": "shared", "self_skip": "shared", "self_slim": "shared", "early_exit": "shared", "small_lm": "own"},
}


def shapes(found: Sequence[Sequence[Forward]]) -> list[tuple[str, int, int]]:
    return [(one.tier, one.rows, one.context) for block in found for one in block]


@contextmanager
def noted(tiers: Tiers) -> Iterator[list[tuple[str, int, int]]]:
    """Every forward of ``tiers`` inside, in order; of a recurrent head the first of each block alone."""
    found: list[tuple[str, int, int]] = []
    plain_forward, take_in = Tier.plain_forward, HeadTier.take_in
    slims = [tier for tier in tiers.others if tier.name.startswith("slim")]

    def name_of(tier: Tier) -> str:
        place = slims.index(tier) if tier in slims else 0
        return f"{SLIM} {place + 1}" if place else SLIM if tier in slims else tier.name

    def forward(self: Tier, tokens: Any, rows: int) -> Any:
        found.append((name_of(self), len(tokens), self.length))
        return plain_forward(self, tokens, rows)

    def taken(self: HeadTier, sequence: Sequence[int], keep: int = 0) -> Any:
        states = take_in(self, sequence, keep)
        found.append((self.name, len(states), self.cache.length - len(states)))
        return states

    with patch.object(Tier, "plain_forward", forward), patch.object(HeadTier, "take_in", taken):
        yield found


def decoded(method: Method, prompt: Sequence[int], length: int, seed: int) -> tuple[Any, list[tuple[str, int, int]]]:
    decoder = Decoder(method)
    with shapes_unchecked():
        decoder.prefill(prompt)
        with noted(method.tiers) as found:
            made = decoder.decode(StopRule(length), RandomChooser(seed, CPU))
    return made, found


def via_sd(tiers: Tiers, model: Model, drafter: DrafterFactory, sampling: Sampling, **settings: Any) -> ViaSD:
    return ViaSD(tiers, sampling, model, 4, drafter, Strictness(), **settings)


OWN = {"slim": partial(masked, cache="own")}
SEVERAL = {"slim": partial(several, masks=[[0, 3], [0, 1, 3]])}
WAYS: dict[str, tuple[dict[str, Any], Layout]] = {
    "shared": ({}, Layout("three_tiers")),
    "own": (OWN, Layout("three_tiers", shared=False)),
    "ending=full": ({"ending": "full"}, Layout("three_tiers")),
    "bonus=slim": ({"bonus": "slim"}, Layout("three_tiers", bonus="slim")),
    "bonus=full, own": ({"bonus": "full", **OWN}, Layout("three_tiers", shared=False, bonus="full")),
    "escalate=rest": ({"escalate": "rest"}, Layout("three_tiers")),
    "several": (SEVERAL, Layout("three_tiers")),
}


def with_drafter(kind: Layout, drafter: str, catches_up: bool = False) -> Layout:
    return Layout(kind.method, drafter, kind.shared, catches_up, kind.bonus)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_three_tiers_were_given_what_the_replay_says(name: str, way: str) -> None:
    model, (settings, kind) = model_of(3, torch.float64), WAYS[way]
    script = [(7 * place) % 97 for place in range(96)]
    sampling = Sampling(1.0) if way in ("own", "ending=full", "several") else Sampling()
    method = via_sd(tiers_with(model, None, False), model, DRAFTERS[name](model, script), sampling, **settings)
    made, given = decoded(method, PROMPT, 24, 1)
    blocks = made.blocks[:-1]  # what the stop rule cut of the last one is not in the trace
    replayed = shapes(forwards(with_drafter(kind, KINDS[name]), len(PROMPT), blocks))
    assert replayed == given[: len(replayed)]
    assert {tier for tier, _, _ in replayed} >= {SLIM}


@pytest.mark.parametrize(
    ("name", "length"),
    [
        *((name, length) for name in KINDS for length in (None, Adaptive)),
        *((name, Confidence) for name in ("self_skip", "self_slim", "early_exit", "small_lm")),
    ],
)
def test_two_tiers_were_given_what_the_replay_says(name: str, length: Any) -> None:
    model = model_of(4, torch.float64)
    script = [(7 * place) % 97 for place in range(96)]
    settings = {} if length is None else {"length": length}
    method = Speculative(
        tiers_with(model, None, False), Sampling(1.0), model, 4, DRAFTERS[name](model, script), **settings
    )
    made, given = decoded(method, PROMPT, 30, 1)
    assert shapes(forwards(Layout("two_tiers", KINDS[name]), len(PROMPT), made.blocks)) == given


def test_bild_drafts_a_token_more_than_it_hands_over() -> None:
    model = model_of(5, torch.float64)
    drafter = DRAFTERS["small_lm"](model, [])
    method = BiLD(tiers_with(model, None, False), Sampling(), model, 4, drafter, fallback=0.3)
    made, given = decoded(method, PROMPT, 30, 0)
    assert any(block.draft_forwards > block.drafted for block in made.blocks)
    assert shapes(forwards(Layout("two_tiers", "own"), len(PROMPT), made.blocks)) == given


@pytest.mark.parametrize("source", ["slim", "catch_up"])
@pytest.mark.parametrize("kind", ["eagle", "mtp", "medusa"])
def test_heads_were_given_what_the_replay_says(kind: str, source: str) -> None:
    model = model_of(6, torch.float64)
    heads = kind == "medusa"
    tiers = tiers_with(model, None, False)
    method = via_sd(tiers, model, head_drafter(kind, 1, source), Sampling(1.0))
    made, given = decoded(method, PROMPT, 30, 2)
    known = Layout("three_tiers", "heads" if heads else "head", catches_up=source == "catch_up")
    found = []
    for block in forwards(known, len(PROMPT), made.blocks[:-1]):
        drafting = [one for one in block if one.tier == DRAFT]
        kept = [] if heads else drafting[:1]
        # a full forward that catches up is before the draft
        found += shapes([[one for one in block if one.tier != DRAFT or one in kept]])
    assert found == given[: len(found)]
    assert any(tier == DRAFT for tier, _, _ in given) != heads


def test_a_backlog_by_hand() -> None:
    """Ten prompt tokens, nine processed. All four drafts accepted: the slim tier has seen 13, the full one 9."""
    cheap = BlockTrace(0, 4, 4, (A, A, A, A), 4, 4, 0, 4, 1, 0)
    escalated = BlockTrace(4, 4, 4, (A, E), 1, 2, 0, 4, 1, 1)
    after = BlockTrace(6, 4, 4, (R,), 0, 1, 0, 4, 1, 0)
    shared = shapes(forwards(Layout("three_tiers", "own"), 10, [cheap, escalated, after]))
    drafts = [one for one in shared if one[0] == DRAFT]
    assert [rows for _, rows, _ in drafts] == [1, 1, 1, 1] * 3
    assert [one for one in shared if one[0] != DRAFT] == [
        *((SLIM, 4, 9), (SLIM, 4, 13)),
        (FULL, 8, 9),  # four tokens that it never saw, the pending one, three drafts
        (SLIM, 4, 15),
    ]


def test_an_own_cache_lags_by_plain_steps_and_a_shared_one_does_not() -> None:
    blocks = [plain(0), plain(1), BlockTrace(2, 2, 2, (A, A), 2, 2, 0, 2, 1, 0)]
    for shared, rows in ((True, 2), (False, 4)):
        kind = Layout("three_tiers", "own", shared=shared)
        assert [one.rows for one in forwards(kind, 10, blocks)[2] if one.tier == SLIM] == [rows]


def test_the_first_draft_behind_a_bonus_processes_two_tokens() -> None:
    block = BlockTrace(0, 3, 3, (E, E, E), 3, 4, 1, 3, 0, 1)
    again = BlockTrace(4, 3, 3, (E,), 0, 1, 0, 3, 0, 1)
    found = forwards(Layout("two_tiers", "own"), 10, [block, again, again])
    assert [one.rows for one in found[1]] == [2, 1, 1, 4]


def test_without_mistakes_every_block_is_kept_whole_and_no_full_pass_is_left() -> None:
    blocks = [BlockTrace(0, 4, 4, (A, E), 1, 2, 0, 4, 1, 1), plain(2), BlockTrace(3, 4, 2, (R,), 0, 1, 0, 2, 1, 0)]
    tokens, found = faultless(Layout("three_tiers", "own"), 10, blocks)
    assert tokens == 4 + 1 + 2
    assert [one.tier for block in found for one in block].count(FULL) == 1  # the plain step
    tokens, found = faultless(Layout("two_tiers", "own"), 10, blocks)
    assert tokens == 5 + 1 + 3
    assert [one.rows for block in found for one in block if one.tier == FULL] == [5, 1, 3]


def test_a_trace_that_its_settings_do_not_explain_is_refused() -> None:
    with pytest.raises(Untraced, match="numbers of forwards"):
        forwards(Layout("two_tiers", "own"), 10, [BlockTrace(0, 2, 2, (E,), 0, 1, 0, 2, 0, 2)])
    with pytest.raises(Untraced, match="without a model"):
        forwards(Layout("two_tiers", "none"), 10, [BlockTrace(0, 2, 2, (E,), 0, 1, 0, 2, 0, 1)])


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("harness.decode.hierarchical.Hierarchical", "reviews"),
        ("harness.decode.cascade_sd.CascadeSD", "reviews"),
        ("harness.decode.swift.Swift", "layers"),
        ("harness.decode.clasp.CLaSp", "layers"),
        ("somewhere.Else", "no replay of somewhere.Else"),
    ],
)
def test_what_a_trace_leaves_open_is_said_not_guessed(target: str, why: str) -> None:
    with pytest.raises(Untraced, match=why):
        layout({"_target_": target})


def test_settings_of_stored_runs_give_their_layouts() -> None:
    (folder,) = (ROOT / "results" / "reference" / "drafters" / "runs").iterdir()
    found = {name: layout(node) for name, node in read_config(folder)["methods"].items()}
    assert {name: kind.drafter for name, kind in found.items() if name.startswith("speculative_")} == {
        "speculative_prompt_lookup": "none",
        "speculative_retrieval": "none",
        "speculative_graft": "own",
        "speculative_self_skip": "shared",
        "speculative_early_exit": "shared",
        "speculative_eagle": "head",
        "speculative_medusa": "heads",
    }
    assert all(kind.shared for name, kind in found.items() if name.startswith("via_sd"))


def test_self_slim_shares_the_cache_that_it_says() -> None:
    node = {"_target_": "harness.decode.speculative.Speculative"}
    for cache, kind in (("shared", "shared"), ("own", "own")):
        drafter = {"_target_": f"{SelfSlim.__module__}.SelfSlim", "slim": {"cache": cache}}
        assert layout({**node, "drafter": drafter}).drafter == kind
