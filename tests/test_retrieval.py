"""Retrieval: what it continues with, what it remembers and for how long, and which files it reads."""

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.decode.base import Decoder, StopRule
from harness.decode.speculative import Speculative
from harness.drafters.ngrams import ROOT, Trie
from harness.drafters.retrieval import Retrieval, calibration
from harness.drafters.texts import BUILTIN, read_texts
from harness.errors import UserError
from harness.records import BlockTrace
from harness.sampling import RandomChooser
from tests.toys import CPU, GREEDY, tiers_of, tiny_model

MODEL = tiny_model(0, kept=(0, 1))
TIERS = tiers_of(MODEL, 8)
Texts = Sequence[Sequence[int]]


def retrieval(**config) -> Retrieval:
    return Retrieval(TIERS, GREEDY, MODEL, **config)


def naive(memories: Sequence[Texts], tokens: Sequence[int], count: int, max_ngram: int, min_ngram: int) -> list[int]:
    """Every place of every text in turn, for each token anew."""
    text = list(tokens)
    while len(text) < len(tokens) + count:
        for size, memory in ((size, memory) for size in range(max_ngram, min_ngram - 1, -1) for memory in memories):
            followers = [
                known[end]
                for known in memory
                for end in range(size, len(known))
                if len(text) >= size and list(known[end - size : end]) == text[len(text) - size :]
            ]
            if followers:
                # The last of the most frequent: among equals the one whose last place is the latest.
                latest = max(range(len(followers)), key=lambda place: (followers.count(followers[place]), place))
                text.append(followers[latest])
                break
        else:
            break
    return text[len(tokens) :]


@pytest.mark.parametrize(
    ("tokens", "count", "ngrams", "want"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, (3, 1), [4, 1]),
        ([1, 2, 3, 4, 1, 2, 3], 9, (3, 1), [4, 1, 2, 3] * 2 + [4]),  # the draft lengthens the n-gram and goes on
        ([1, 7, 1, 8, 1, 7, 1], 1, (1, 1), [7]),  # the most frequent
        ([1, 7, 1, 8, 1], 1, (1, 1), [8]),  # of equals the latest
        ([2, 1, 7, 1, 8, 1, 8, 2, 1], 1, (2, 1), [7]),  # the longer match, though another token is more frequent
        ([2, 1, 7, 1, 8, 1, 8, 2, 1], 1, (1, 1), [8]),
        ([5, 6, 1, 6], 3, (3, 2), []),  # a match of one token is too short
        ([1, 2, 3], 4, (3, 1), []),
        ([1], 4, (3, 1), []),
        ([1, 1], 3, (3, 1), [1, 1, 1]),
        ([1, 2, 3, 4, 1, 2, 3], 0, (3, 1), []),
    ],
)
def test_by_hand(tokens: list[int], count: int, ngrams: tuple[int, int], want: list[int]) -> None:
    drafter = retrieval(max_ngram=ngrams[0], min_ngram=ngrams[1])
    draft = drafter.draft(tokens, count, RandomChooser(0, CPU))
    assert draft.tokens.tolist() == want and draft.probs is None
    assert naive([[tokens]], tokens, count, *ngrams) == want


@pytest.mark.parametrize("own_output", ["prompt", "run"])
def test_equals_a_naive_search(own_output: str, tmp_path: Path) -> None:
    """Texts that grow and texts that end, with tokens behind them that are not learnt."""
    rng = random.Random(0)
    lengths: set[int] = set()
    for case in range(150):
        symbols = range(65, 65 + rng.randint(2, 5))
        known = [rng.choices(symbols, k=rng.randint(0, 30)) for _ in range(2)]
        file = tmp_path / f"{case}.jsonl"
        file.write_text(json.dumps({"a": bytes(known[0]).decode(), "b": [bytes(known[1]).decode()]}) + "\n")
        high = rng.randint(1, 5)
        ngrams = (high, rng.randint(1, high))
        drafter = retrieval(text=[str(file)], own_output=own_output, max_ngram=ngrams[0], min_ngram=ngrams[1])
        past: list[list[int]] = []
        for _ in range(3):
            text = rng.choices(symbols, k=rng.randint(1, 8))
            for _ in range(4):
                behind, count = rng.choices(symbols, k=rng.choice((0, 0, 2))), rng.randint(0, 6)
                memories = [[text], *([past] if own_output == "run" else []), known]
                want = naive_behind(memories, text, behind, count, *ngrams)
                assert drafter.continuation(tuple(text), count, behind) == want
                lengths.add(len(want))
                text = text + rng.choices(symbols, k=rng.randint(1, 4))
            drafter.finish(tuple(text))
            past.append(text)
    assert lengths == set(range(7))


def naive_behind(
    memories: Sequence[Texts], text: list[int], behind: list[int], count: int, max_ngram: int, min_ngram: int
) -> list[int]:
    return naive(memories, [*text, *behind], count, max_ngram, min_ngram)


def test_an_earlier_text_is_forgotten_also_where_nobody_said_that_it_was_done() -> None:
    drafter = retrieval()
    assert drafter.continuation((1, 2, 3, 1), 2) == [2, 3]
    assert drafter.continuation((1, 2, 4, 1), 2) == [2, 4]
    assert drafter.continuation((1,), 2) == []


def test_of_equally_long_matches_the_texts_own_decides_then_earlier_prompts_then_calibration(tmp_path: Path) -> None:
    file = tmp_path / "known.txt"
    file.write_text("ababab")
    a, b, c, d, x = b"abcdx"
    drafter = retrieval(text=[str(file)], own_output="run", max_ngram=2)
    assert drafter.continuation((x, a), 1) == [b]
    drafter.finish((x, a, c))
    assert drafter.continuation((a,), 1) == [c]
    assert drafter.continuation((a, d, a), 1) == [d]
    assert drafter.continuation((a, d, a, b, a), 1) == [b]  # calibration has the longer one


def test_a_full_memory_learns_nothing_new_and_goes_on_counting() -> None:
    rng = random.Random(1)
    text = rng.choices(range(6), k=400)
    whole = Trie(3, 10_000)
    whole.learn_all(text)
    for most in (1, 2, 10, 50, 200):
        trie = Trie(3, most)
        trie.learn_all(text[:200])
        known = dict(trie.children)
        trie.learn_all(text[200:])
        assert len(trie) == most == len(trie.tokens) - 1 and (trie.children == known or len(known) < most)
        # Whatever ends a known n-gram is known too, and everything known was counted as often as it occurs since.
        for path, node in paths(trie).items():
            assert path[1:] in paths(trie) or len(path) == 1
            assert 0 < trie.counts[node] <= whole.counts[paths(whole)[path]]
    trie = Trie(1, 4)
    for piece in ([7], [8], [7, 8], [7, 9, 7, 9]):
        trie.learn_all(piece)
    assert len(trie) == 4
    assert trie.continuation(trie.children[ROOT, 7]) == 8  # 7 9 is more frequent and came too late


def paths(trie: Trie) -> dict[tuple[int, ...], int]:
    """Every n-gram of a trie and its node."""
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    for (parent, token), node in trie.children.items():  # parents come first
        found[node] = (*found[parent], token)
    return {path: node for node, path in found.items() if path}


def test_a_full_memory_bounds_the_drafter_too() -> None:
    drafter = retrieval(own_output="run", max_nodes=20)
    rng = random.Random(2)
    for _ in range(5):
        text = tuple(rng.choices(range(40), k=50))
        drafter.continuation(text, 4)
        assert all(len(memory) <= 20 for memory in drafter.memories)
        drafter.finish(text)
    assert drafter.past is not None and len(drafter.past) == 20


def generations(
    own_output: str, prompts: Sequence[tuple[int, ...]]
) -> list[tuple[tuple[int, ...], tuple[BlockTrace, ...]]]:
    """Tokens and blocks of each prompt, decoded in turn."""
    model = tiny_model(4, kept=(0, 1, 3))
    method = Speculative(tiers_of(model), GREEDY, model, 4, lambda t, s, m: Retrieval(t, s, m, own_output=own_output))
    decoder, found = Decoder(method), []
    for prompt in prompts:
        decoder.prefill(prompt)
        got = decoder.decode(StopRule(20), RandomChooser(0, CPU))
        found.append((got.token_ids, got.blocks))
    return found


def test_only_with_run_does_a_prompt_learn_from_those_before() -> None:
    prompts = [(1, 2, 3), (1, 2, 3), (5, 6)]
    alone = [generations("prompt", [prompt])[0] for prompt in prompts]
    assert generations("prompt", prompts) == alone
    assert generations("prompt", prompts[::-1]) == alone[::-1]
    first, again, other = generations("run", prompts)
    assert first == alone[0]
    assert again[0] == first[0] and len(again[1]) < len(first[1])
    assert other[0] == alone[2][0]
    assert generations("run", prompts) == [first, again, other], "each drafter has a memory of its own"


def test_names_say_what_is_remembered() -> None:
    assert [retrieval(own_output=own).name for own in ("prompt", "run")] == ["retrieval(prompt)", "retrieval(run)"]


def test_calibration_text_is_read_once_for_all_arms(tmp_path: Path) -> None:
    calibration.cache_clear()
    file = tmp_path / "known.txt"
    file.write_text("abcabd")
    one, other = (retrieval(text=[str(file)]) for _ in range(2))
    assert one.known is other.known and one.memories[0] is not other.memories[0]
    assert one.continuation(tuple(b"xab"), 1) == [ord("d")]


def test_texts_of_files(tmp_path: Path) -> None:
    rows = tmp_path / "rows_train.jsonl"
    rows.write_text('\ufeff{"a": "one\\u2028", "b": {"c": ["two", 3, null, {"d": "three"}]}}\n\n{"a": ""}\n')
    plain = tmp_path / "plain.txt"
    plain.write_text("all\nof it\n")
    assert list(read_texts([str(rows), str(plain)])) == ["one\u2028", "two", "three", "", "all\nof it\n"]
    shipped = list(read_texts(["tasks/builtin/web_questions_calibration.jsonl"]))
    assert len(shipped) > 24 and "Mount Everest" in shipped


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "cannot be read"),
        ("bad.jsonl", '{"a": 1', "cannot be read"),
        ("gsm8k_test.jsonl", "{}", "holds test rows"),
        ("latin.txt", b"\xff\xfe\xfa", "cannot be read"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: str | bytes | None, message: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"^drafter\.text: .*{name}.*{message}"):
        retrieval(text=[str(file)])


def test_built_in_test_rows_are_refused() -> None:
    files = sorted(path.name for path in BUILTIN.glob("*.jsonl"))
    refused = []
    for name in files:
        try:
            list(read_texts([f"tasks/builtin/{name}"]))
        except UserError:
            refused.append(name)
    assert refused == [name for name in files if not name.endswith("_calibration.jsonl")] and len(refused) == 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"own_output": "all"}, "own_output='all': want one of prompt, run"),
        ({"max_ngram": 2, "min_ngram": 3}, "want 1 <= min_ngram <= max_ngram, got 3 and 2"),
        ({"min_ngram": 0}, "want 1 <= min_ngram <= max_ngram, got 0 and 4"),
        ({"max_nodes": 0}, "max_nodes=0: want at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(config: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^retrieval: {message}"):
        retrieval(**config)


def test_known_counts_are_those_of_the_texts() -> None:
    texts = [[1, 2, 1, 2], [2, 1]]
    trie = Trie(2, 1000)
    want: dict[tuple[int, ...], int] = defaultdict(int)
    for text in texts:
        trie.learn_all(text)
        for size in (1, 2, 3):
            for begin in range(len(text) - size + 1):
                want[tuple(text[begin : begin + size])] += 1
    assert {path: trie.counts[node] for path, node in paths(trie).items()} == want
