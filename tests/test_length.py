"""How long blocks are: the rules, what they cost, whom they refuse; their laws are in ``test_laws``."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.decode import length as length_module
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.gate import AlwaysEscalate
from harness.decode.length import Adaptive, Confidence, Fixed
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Draft
from harness.drafters.graft import Graft
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.retrieval import Retrieval
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.records import Generation
from harness.sampling import Chooser, RandomChooser, Sampling
from harness.store import read
from tests.runs import main, refused, unreported
from tests.toys import CPU, GREEDY, DrafterFactory, drafted, scripted, tiers_of, tiny_model, whole

MODEL = tiny_model(1, kept=(0, 1, 3))
SKIPPING: DrafterFactory = partial(SelfSkip, mask=[0, 2])


def decode(method, prompt: Sequence[int], count: int = 30) -> Generation:
    decoder = Decoder(method)
    decoder.prefill(prompt)
    return decoder.decode(StopRule(count), RandomChooser(0, CPU))


@pytest.mark.parametrize("way", ["one by one", "whole"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8)], ids=["greedy", "sampled"])
def test_a_block_ends_with_its_first_unsure_token(
    sampling: Sampling, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "whole":
        monkeypatch.setattr(length_module, "pieces", whole)
    lengths: set[int] = set()
    for seed in range(30):
        tiers = tiers_of(MODEL)
        length = Confidence(SKIPPING(tiers, sampling, MODEL), 0.5)
        prompt = (seed, 2, 3)
        tiers.prefill(prompt)
        draft = length.draft(prompt, 4, RandomChooser(seed, CPU))
        tier = length.drafter.tier
        assert tier is not None and tier.forwards == (4 if way == "whole" else len(draft))
        again = tiers_of(MODEL)
        again.prefill(prompt)
        logits = again.provisional("draft", (0, 2)).forward(prompt, len(draft), draft.tokens[:-1])
        probs = (Sampling(1.0) if sampling.greedy else sampling).warp(logits)
        sure = (probs.gather(-1, draft.tokens[:, None])[:, 0] >= 0.5).tolist()
        assert all(sure[:-1]) and (len(draft) == 4 or not sure[-1])
        assert (draft.probs is None) == sampling.greedy
        lengths.add(len(draft))
    assert len(lengths) > 2


def test_both_ways_draft_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks() -> list[list[int]]:
        found = []
        for seed in range(10):
            tiers = tiers_of(MODEL)
            tiers.prefill((seed, 1))
            length = Confidence(SKIPPING(tiers, GREEDY, MODEL), 0.5)
            found.append(length.draft((seed, 1), 5, RandomChooser(0, CPU)).tokens.tolist())
        return found

    stepwise = blocks()
    monkeypatch.setattr(length_module, "pieces", whole)
    assert blocks() == stepwise


def test_a_block_of_no_tokens_stays_one() -> None:
    tiers = tiers_of(MODEL)
    assert len(Confidence(SKIPPING(tiers, GREEDY, MODEL)).draft((1, 2), 0, RandomChooser(0, CPU))) == 0


class Nothing:
    """A drafter that never has anything to say."""

    name = "nothing"
    tier = None
    has_probs = False

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        return drafted(())


@pytest.mark.parametrize(
    ("first", "up", "down", "blocks", "want"),
    [  # blocks: (drafted, kept); want: what is asked before each and at the end
        (None, 2, 1, [(5, 5), (5, 2), (4, 0), (3, 3), (5, 5)], [5, 5, 4, 3, 5, 5]),
        (None, 2, 1, [(5, 0), (4, 0), (3, 0), (2, 0), (1, 0), (1, 1)], [5, 4, 3, 2, 1, 1, 3]),
        (1, 2, 1, [(1, 1), (3, 3), (5, 4)], [1, 3, 5, 4]),
        (1, 1, 3, [(1, 1), (2, 2), (3, 0)], [1, 2, 3, 1]),
        (9, 2, 1, [(5, 4)], [5, 4]),  # gamma is the upper bound
        (3, 2, 1, [(0, 0), (2, 2), (2, 1)], [3, 3, 5, 4]),  # an empty block says nothing, a short one does
    ],
)
def test_the_adaptive_rule_by_hand(
    first: int | None, up: int, down: int, blocks: list[tuple[int, int]], want: list[int]
) -> None:
    length = Adaptive(Nothing(), first, up, down)
    for _ in range(2):  # the second prompt begins as the first
        asked = [length.ask(5)]
        for block in blocks:
            length.note(*block)
            asked.append(length.ask(5))
        assert asked == want
        length.finish(())


@pytest.mark.parametrize("method", ["speculative", "via_sd"])
def test_blocks_follow_the_adaptive_rule(method: str) -> None:
    """Half of the drafts are wrong; what each block asks for follows from the one before."""
    want = decode(Autoregressive(tiers_of(MODEL), GREEDY), (1, 2, 3), 40).token_ids
    drafter = scripted((1, 2, 3, *want), 0.3, 97, 0)
    made = method_of(method, drafter, partial(Adaptive, first=2))
    got = decode(made, (1, 2, 3), 40)
    assert got.token_ids == want
    ahead, current = int(method == "speculative"), 2
    for block in got.blocks:
        assert block.asked == min(current, 5, 40 - block.start - ahead)
        current = min(current, 5)
        if block.drafted:
            current = current + 2 if block.kept == block.drafted else max(1, current - 1)
    assert len({block.asked for block in got.blocks}) > 3


def method_of(name: str, drafter: DrafterFactory, length=Fixed, sampling: Sampling = GREEDY):
    tiers = tiers_of(MODEL)
    if name == "speculative":
        return Speculative(tiers, sampling, MODEL, 5, drafter, length)
    return ViaSD(tiers, sampling, MODEL, 5, drafter, AlwaysEscalate(), length=length)


@pytest.mark.parametrize("length", [Confidence, Adaptive])
@pytest.mark.parametrize("method", ["speculative", "via_sd"])
def test_every_rule_gives_the_greedy_tokens_and_carries_nothing_over(method: str, length) -> None:
    used = method_of(method, SKIPPING, length)
    drafts: set[int] = set()
    for seed in range(6):
        prompt = (seed, 2, 3)
        again, fresh = decode(used, prompt), decode(method_of(method, SKIPPING, length), prompt)
        assert (again.token_ids, again.blocks) == (fresh.token_ids, fresh.blocks)
        assert again.token_ids == decode(Autoregressive(tiers_of(MODEL), GREEDY), prompt).token_ids
        drafts |= {block.drafted for block in again.blocks}
        assert all(block.draft_forwards == block.drafted for block in again.blocks)
    assert len(drafts) > 3


@pytest.mark.parametrize("name", ["prompt_lookup", "retrieval", "graft"])
@pytest.mark.parametrize("method", ["speculative", "via_sd"])
def test_the_confidence_stop_refuses_drafters_without_probabilities_by_name(method: str, name: str) -> None:
    makers: dict[str, DrafterFactory] = {
        "prompt_lookup": PromptLookup,
        "retrieval": Retrieval,
        "graft": partial(Graft, inner=SKIPPING, retrieval=Retrieval),
    }
    with pytest.raises(
        UserError, match=rf"^length=confidence needs the drafter's probabilities, and {name}.* has none"
    ):
        method_of(method, makers[name], Confidence)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Confidence(SKIPPING(tiers_of(MODEL), GREEDY, MODEL), 0.0), r"length\.threshold=0\.0: want a prob"),
        (lambda: Confidence(SKIPPING(tiers_of(MODEL), GREEDY, MODEL), 1.5), r"length\.threshold=1\.5: want a prob"),
        (lambda: Adaptive(Nothing(), first=0), r"length\.first=0: want at least 1"),
        (lambda: Adaptive(Nothing(), up=0), r"length: up=0, down=1: want at least 1"),
        (lambda: Adaptive(Nothing(), down=-1), r"length: up=2, down=-1: want at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        make()


def test_records_say_which_rule_it_was() -> None:
    names = [method_of("speculative", SKIPPING, length).drafter_name for length in (Fixed, Confidence, Adaptive)]
    names.append(method_of("via_sd", SKIPPING, partial(Adaptive, first=2, up=1, down=3)).drafter_name)
    assert names == [
        "self_skip(0.5)",
        "self_skip(0.5), until below 0.4",
        "self_skip(0.5), adaptive(+2, -1)",
        "self_skip(0.5), adaptive(+1, -3, from 2)",
    ]


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    few = ("task=web_questions", "limit=1", "max_new_tokens=6", f"results_dir={tmp_path}")
    asked = ("drafter=graft", "length=adaptive", "length.first=2")
    with unreported():
        main(monkeypatch, *few, *asked, "method=speculative")
    (folder,) = (tmp_path / "runs").iterdir()
    want = "graft(self_skip(0.67), 0.4, retrieval(prompt)), adaptive(+2, -1, from 2)"
    assert [arm.drafter for arm in read(folder).run.arms] == [None, want]
    line = refused(monkeypatch, capsys, *few, "drafter=retrieval", "length=confidence")
    assert line.startswith("length=confidence needs the drafter's probabilities, and retrieval(prompt) has none")


def test_confidence_needs_no_second_look_at_greedy_drafts() -> None:
    """Their logits come with them; the softmax of the likeliest token is what ``distributions`` has for it."""
    tiers = tiers_of(MODEL)
    tiers.prefill((1, 2, 3))
    draft = SKIPPING(tiers, GREEDY, MODEL).draft((1, 2, 3), 3, RandomChooser(0, CPU))
    assert draft.logits is not None
    assert torch.equal(draft.distributions(), torch.softmax(draft.logits, dim=-1))
