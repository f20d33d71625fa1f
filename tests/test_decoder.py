"""The loop that every method shares: where it stops, what a block's trace counts, what is left for the next prompt."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Block, Decoder, Method, StopRule, clipped
from harness.decode.gate import AlwaysEscalate, Strictness
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Draft, Drafter
from harness.drafters.graft import Graft
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.retrieval import Retrieval
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.model.tokenizer import ByteTokenizer
from harness.records import BlockTrace, Generation, Route, StopReason
from harness.sampling import Chooser, RandomChooser, Sampling
from tests.toys import CPU, GREEDY, DrafterFactory, drafted, perturbed, scripted, small_lm, tiers_of, tiny_model

A, R, E = Route.ACCEPT, Route.REGENERATE, Route.ESCALATE
VOCAB = 97
METHODS = ("autoregressive", "speculative", "via_sd", "always_escalate")


def skipping(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
    return SelfSkip(tiers, sampling, model, mask=[0])


def method_of(
    name: str, model: Model, drafter: DrafterFactory, gamma: int = 4, sampling: Sampling = GREEDY, capacity: int = 256
) -> Method:
    tiers = tiers_of(model, capacity)
    if name == "autoregressive":
        return Autoregressive(tiers, sampling)
    if name == "speculative":
        return Speculative(tiers, sampling, model, gamma, drafter)
    gate = Strictness() if name == "via_sd" else AlwaysEscalate()
    return ViaSD(tiers, sampling, model, gamma, drafter, gate)


def decoded(method: Method, prompt: Sequence[int], stop: StopRule) -> Generation:
    decoder = Decoder(method)
    decoder.prefill(prompt)
    return decoder.decode(stop, RandomChooser(0, CPU))


class Dictated:
    """A method that emits given blocks whatever the model says, so that the stop rule can be tried on any text."""

    name = "dictated"
    lossless = False
    drafter_name = None
    gate_name = None

    def __init__(self, blocks: Sequence[Sequence[int]]) -> None:
        self.tiers = tiers_of(tiny_model(0, kept=(0,)), capacity=8)
        self.sampling = GREEDY
        self.blocks = list(blocks)

    def tier_roles(self) -> tuple[Tier | None, Tier | None]:
        return None, None

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        block = tuple(self.blocks.pop(0))
        return Block(block, asked=len(block), drafted=len(block), routes=(E,) * len(block), kept=len(block))

    def finish(self, text: Sequence[int]) -> None:
        pass


def dictated(blocks: Sequence[Sequence[int]], stop: StopRule) -> Generation:
    return decoded(Dictated(blocks), (1,), stop)


@pytest.mark.parametrize(
    ("blocks", "limit", "eos", "output", "reason"),
    [
        ([[5, 6, 7], [8, 9]], 4, (), (5, 6, 7, 8), StopReason.LENGTH),
        ([[5, 6, 7], [8, 9]], 5, (), (5, 6, 7, 8, 9), StopReason.LENGTH),
        ([[5, 6, 7]], 1, (), (5,), StopReason.LENGTH),
        ([[5, 6, 7]], 9, (5,), (5,), StopReason.EOS),
        ([[5, 6, 7], [8, 9]], 9, (6,), (5, 6), StopReason.EOS),
        ([[5, 6, 7], [8, 9]], 9, (7,), (5, 6, 7), StopReason.EOS),
        ([[5, 6, 7], [8, 9]], 9, (8,), (5, 6, 7, 8), StopReason.EOS),
        ([[5, 6, 7], [8, 6]], 9, (9, 7, 6), (5, 6), StopReason.EOS),
        ([[5, 5, 5]], 9, (5, 6), (5,), StopReason.EOS),
        ([[5, 6]], 2, (6,), (5, 6), StopReason.EOS),  # EOS at the limit is still an EOS
        ([[5, 6], [7]], 3, (9,), (5, 6, 7), StopReason.LENGTH),
    ],
)
def test_length_and_eos(
    blocks: list[list[int]], limit: int, eos: tuple[int, ...], output: tuple[int, ...], reason: StopReason
) -> None:
    got = dictated(blocks, StopRule(limit, frozenset(eos)))
    assert (got.token_ids, got.stop_reason) == (output, reason)
    assert sum(block.emitted for block in got.blocks) == len(output)


BYTES = ByteTokenizer()


def pieces(*texts: str) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


@pytest.mark.parametrize(
    ("blocks", "stops", "text"),
    [
        (pieces("ab\ncd"), ("\n",), "ab\n"),
        (pieces("ab", "c.", ".d"), ("..",), "abc.."),
        (pieces("xxEN", "D of", " it"), ("STOP", "END"), "xxEND"),
        (pieces("aSTOPb END"), ("END", "STOP"), "aSTOP"),
        (pieces("n\n\nQ: x"), ("\nQ:",), "n\n\nQ:"),
        (pieces("naïve"), ("ï",), "naï"),
        ([list("né".encode())[:2], list("né".encode())[2:], [1]], ("é",), "né"),
        ([[byte] for byte in "ab🙂c".encode()], ("🙂",), "ab🙂"),
        (pieces("日本語。次"), ("語。",), "日本語。"),
        (pieces("aaab"), ("aab",), "aaab"),
        (pieces("stop early"), ("s",), "s"),
        ([[97], [256] * 9, [98]], ("ab",), "ab"),  # tokens that are no text, as special ones are
    ],
)
def test_a_stop_string_ends_the_output_with_its_last_token(
    blocks: list[list[int]], stops: tuple[str, ...], text: str
) -> None:
    """Over several tokens, over blocks, over the bytes of one character; nothing after it is kept."""
    got = dictated(blocks, StopRule(99, frozenset(), stops, BYTES.decode))
    assert tuple(token for token in got.token_ids if token < 256) == tuple(text.encode())
    assert BYTES.decode(got.token_ids) == text
    assert got.stop_reason is StopReason.STOP_STRING


def test_every_text_stops_where_searching_all_of_it_would() -> None:
    generator = torch.Generator().manual_seed(0)
    alphabet = "ab🙂é\n"
    stops = ("ab\nb", "🙂a🙂", "ééb")
    ended = 0
    for _ in range(150):
        text = "".join(alphabet[int(i)] for i in torch.randint(0, 5, (40,), generator=generator))
        ids = list(text.encode())
        want = min((text.index(stop) + len(stop) for stop in stops if stop in text), default=None)
        ended += want is not None
        got = dictated([ids], StopRule(len(ids), frozenset(), stops, BYTES.decode))
        assert got.token_ids == tuple(text[:want].encode())
    assert 20 < ended < 150


def test_stop_strings_cost_a_bounded_look_back() -> None:
    seen: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return BYTES.decode(ids)

    dictated([[97] * 500], StopRule(500, frozenset(), ("xyz",), decode))
    assert len(seen) == 500 and max(seen) < 12


def test_stop_rules_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        StopRule(0)
    with pytest.raises(ValueError, match="stop strings need a decode function"):
        StopRule(3, stop_strings=("x",))


def test_an_empty_prompt_is_refused() -> None:
    for name in METHODS:
        decoder = Decoder(method_of(name, tiny_model(0, kept=(0, 1)), PromptLookup))
        with pytest.raises(ValueError, match="the prompt has no token"):
            decoder.prefill(())


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_of_one_token_needs_no_prefill(name: str) -> None:
    model = tiny_model(0, kept=(0, 1, 3))
    got = decoded(method_of(name, model, skipping), (7,), StopRule(12))
    assert len(got.token_ids) == 12


@pytest.mark.parametrize(
    ("block", "emitted", "want"),
    [  # want: examined routes, kept, bonus
        (Block((1, 2, 3, 9), 3, 3, (E, E, E), 3, True), 4, ((E, E, E), 3, 1)),
        (Block((1, 2, 3, 9), 3, 3, (E, E, E), 3, True), 3, ((E, E, E), 3, 0)),
        (Block((1, 2, 3, 9), 3, 3, (E, E, E), 3, True), 1, ((E,), 1, 0)),
        (Block((1, 9), 4, 4, (A, R), 1), 2, ((A, R), 1, 0)),
        (Block((1, 9), 4, 4, (A, R), 1), 1, ((A,), 1, 0)),  # the correction was cut, so nothing was rejected
        (Block((9,), 4, 4, (E,), 0), 1, ((E,), 0, 0)),
        (Block((1, 2, 3, 4), 4, 4, (A, A, E, A), 4), 3, ((A, A, E), 3, 0)),
        (Block((9,), 4), 1, ((), 0, 0)),
    ],
)
def test_what_the_stop_rule_cuts_was_never_rejected(
    block: Block, emitted: int, want: tuple[tuple[Route, ...], int, int]
) -> None:
    trace = clipped(block, 5, emitted, 3, 2, 1)
    assert (trace.routes, trace.kept, trace.bonus) == want
    assert (trace.start, trace.emitted, trace.asked, trace.drafted) == (5, emitted, block.asked, block.drafted)
    assert (trace.draft_forwards, trace.slim_forwards, trace.full_forwards) == (3, 2, 1)


@pytest.mark.parametrize("change", [{"emitted": 4}, {"kept": 3}, {"drafted": 1}, {"bonus": 1}, {"emitted": 0}])
def test_traces_that_cannot_be_are_refused(change: dict[str, int]) -> None:
    good = BlockTrace(0, 4, 3, (E, E), kept=1, emitted=2, bonus=0, draft_forwards=3, slim_forwards=0, full_forwards=1)
    with pytest.raises(ValueError, match=r"^want .* got|^a bonus token follows a fully kept block, got"):
        replace(good, **change)  # type: ignore[arg-type]


def test_a_generation_whose_blocks_do_not_add_up_is_refused() -> None:
    block = BlockTrace(0, 0, 0, (), 0, 1, 0, 0, 0, 1)
    with pytest.raises(ValueError, match="blocks emitted 1 tokens, the output has 2"):
        Generation((1, 2), (block,), StopReason.LENGTH)


def no_drafts(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
    return scripted((), 0.0, VOCAB, 0)(tiers, sampling, model)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", METHODS)
def test_empty_blocks_are_plain_steps_of_the_full_verifier(name: str, sampling: Sampling) -> None:
    """Token for token the baseline's, with the same random draws, and never a token of the slim verifier alone."""
    model = tiny_model(3, kept=(0, 1, 3))
    outputs = []
    for one in ("autoregressive", name):
        decoder = Decoder(method_of(one, model, no_drafts, sampling=sampling))
        decoder.prefill((1, 2, 3))
        outputs.append(decoder.decode(StopRule(12), RandomChooser(5, CPU)))
    assert outputs[1].token_ids == outputs[0].token_ids
    for block in outputs[1].blocks:
        assert (block.drafted, block.routes, block.kept, block.emitted, block.bonus) == (0, (), 0, 1, 0)
        assert (block.draft_forwards, block.slim_forwards, block.full_forwards) == (0, 0, 1)
    if name != "autoregressive":
        ahead = int(name == "speculative")  # that method asks for one draft less than there is room
        assert [block.asked for block in outputs[1].blocks] == [min(4, 12 - start - ahead) for start in range(12)]


@pytest.mark.parametrize("name", METHODS[1:])
def test_blocks_shorter_than_asked_and_empty_ones_mix(name: str) -> None:
    """Prompt lookup on a text with few symbols gives all kinds; every trace says what really ran."""
    model = tiny_model(1, kept=(0, 1, 3))
    got = decoded(method_of(name, model, PromptLookup), (1, 2, 3, 1, 2), StopRule(64))
    drafted = {block.drafted for block in got.blocks}
    assert 0 in drafted and len(drafted) > 2
    for block in got.blocks:
        slim = int(block.drafted > 0 and name != "speculative")
        assert (block.draft_forwards, block.slim_forwards) == (0, slim)
        assert block.full_forwards == int(name == "speculative" or not block.drafted or E in block.routes)


@pytest.mark.parametrize("family", ["self_skip", "small_lm"])
@pytest.mark.parametrize("name", METHODS[1:])
def test_forwards_are_counted_per_tier_and_block(name: str, family: str) -> None:
    """A draft forward for each draft; one slim forward a block; a full forward where something was escalated."""
    seen: set[int] = set()
    for seed in range(4):
        model = tiny_model(seed, kept=(0, 1, 3), head_scale=1.5)
        drafter = skipping if family == "self_skip" else small_lm(perturbed(model.transformer, seed, 0.3))
        method = method_of(name, model, drafter)
        got = decoded(method, (1, 2, 3), StopRule(40))
        for block in got.blocks:
            assert block.draft_forwards == block.drafted == block.asked
            assert block.slim_forwards == (0 if name == "speculative" else 1)
            assert block.full_forwards == int(name == "speculative" or E in block.routes)
            seen.add(block.full_forwards)
            assert block.emitted == block.kept + 1 or block.kept == block.drafted
            assert block.start == sum(before.emitted for before in got.blocks if before.start < block.start)
        draft, slim = method.tier_roles()
        assert draft is not None and draft.forwards == sum(block.draft_forwards for block in got.blocks)
        assert (0 if slim is None else slim.forwards) == sum(block.slim_forwards for block in got.blocks)
        assert method.tiers.full.forwards == sum(block.full_forwards for block in got.blocks)
        assert sum(block.emitted for block in got.blocks) == len(got.token_ids) == 40
    assert seen == ({0, 1} if name == "via_sd" else {1})


@pytest.mark.parametrize("name", METHODS)
def test_after_every_block_no_tier_is_ahead_of_the_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token is always pending: a tier that had processed it, or a rejected draft, would be wrong next time."""
    model = tiny_model(2, kept=(0, 1, 3))
    method = method_of(name, model, skipping)
    lengths: list[tuple[int, ...]] = []
    step = type(method).step

    def watched(self: Method, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        lengths.append((len(tokens), *(tier.length for tier in self.tiers.every)))
        return step(self, tokens, remaining, chooser)

    monkeypatch.setattr(type(method), "step", watched)
    got = decoded(method, (1, 2, 3), StopRule(30))
    lengths.append((3 + len(got.token_ids), *(tier.length for tier in method.tiers.every)))
    assert len(lengths) > 5
    for committed, full, *others in lengths:
        assert full <= committed - 1
        assert all(full <= length <= committed - 1 for length in others)
    if name != "via_sd":
        assert all(full == committed - 1 or full == committed - 2 for committed, full, *_ in lengths)


@pytest.mark.parametrize("family", ["prompt_lookup", "retrieval", "graft", "self_skip", "small_lm"])
@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_carried_from_one_prompt_to_the_next(name: str, family: str) -> None:
    model = tiny_model(4, kept=(0, 1, 3))
    factories: dict[str, DrafterFactory] = {
        "prompt_lookup": PromptLookup,
        "retrieval": Retrieval,
        "graft": partial(Graft, inner=skipping, retrieval=Retrieval),
        "self_skip": skipping,
        "small_lm": small_lm(perturbed(model.transformer, 4, 0.2)),
    }
    generator = torch.Generator().manual_seed(9)
    used = Decoder(method_of(name, model, factories[family]))
    # The second and third prompt begin as the first one does: a stale entry would fit in.
    longest = torch.randint(0, 9, (40,), generator=generator).tolist()
    for prompt in (longest, longest[:20], longest[:35], [3], [8, 8, 8]):
        used.prefill(prompt)
        again = used.decode(StopRule(20), RandomChooser(0, CPU))
        fresh = decoded(method_of(name, model, factories[family]), prompt, StopRule(20))
        assert again.token_ids == fresh.token_ids
        assert again.blocks == fresh.blocks


@pytest.mark.parametrize("name", METHODS)
def test_a_cache_of_prompt_and_output_is_large_enough(name: str) -> None:
    """No method writes beyond what the output may become, so a bound on the cache is known beforehand."""
    model = tiny_model(5, kept=(0, 1, 3))
    for length in (1, 2, 3, 9, 10):
        got = decoded(method_of(name, model, skipping, gamma=8, capacity=3 + length), (1, 2, 3), StopRule(length))
        assert len(got.token_ids) == length


@pytest.mark.parametrize("gamma", [0, -3])
def test_a_block_of_no_drafts_is_refused(gamma: int) -> None:
    model = tiny_model(0, kept=(0, 1, 3))
    for name in ("speculative", "via_sd"):
        with pytest.raises(UserError, match=f"gamma={gamma}: want at least 1"):
            method_of(name, model, PromptLookup, gamma=gamma)


def test_via_sd_without_a_slim_verifier_is_refused() -> None:
    made = tiny_model(0, kept=(0,))
    model = Model("bare", made.transformer, made.tokenizer, None, None)
    with pytest.raises(UserError, match=r"a slim verifier is needed.*set model\.slim_mask"):
        method_of("via_sd", model, PromptLookup)


def test_names_for_the_records() -> None:
    model = tiny_model(0, kept=(0, 1, 3))
    made = {name: method_of(name, model, PromptLookup) for name in METHODS}
    assert [made[name].lossless for name in METHODS] == [True, True, False, True]
    assert [made[name].drafter_name for name in METHODS] == [None, *["prompt_lookup"] * 3]
    assert [made[name].gate_name for name in METHODS] == [None, None, "strictness(0.5, 0.3)", "always_escalate"]
    assert [made[name].name for name in METHODS] == ["autoregressive", "speculative", "via_sd", "via_sd"]


class Ghost:
    """Drafts one token and refuses to be asked for none."""

    name = "ghost"
    tier: Tier | None = None
    has_probs = False

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        assert count >= 0
        return drafted((0,) if count else ())


def test_a_drafter_is_never_asked_for_less_than_nothing() -> None:
    model = tiny_model(0, kept=(0, 1, 3))
    for name in METHODS[1:]:
        for length in (1, 2, 3):
            got = decoded(method_of(name, model, lambda t, s, m: Ghost()), (1, 2), StopRule(length))
            assert len(got.token_ids) == length
