"""Retrieval: the text goes on as calibration text, or its own, did after the same n-gram (REST, SAM-Decoding)."""

from collections.abc import Sequence
from functools import lru_cache

from harness.drafters.base import Draft
from harness.drafters.ngrams import ROOT, Places, Trie
from harness.drafters.texts import read_texts
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.model.tokenizer import Tokenizer
from harness.model.transfer import to_device
from harness.sampling import Chooser, Sampling

OWN_OUTPUT = ("prompt", "run")


class Retrieval:
    """The longest n-gram (``max_ngram`` down to ``min_ngram``) that ends the text and is known decides each token.

    Of its continuations the most frequent wins, of equally frequent ones the latest; the token drafted so lengthens
    the n-gram for the next. N-grams are known from up to three memories, each of at most ``max_nodes`` nodes, which
    learns nothing new once it is full; of equally long n-grams the first memory's decides:

    - this prompt and its output so far;
    - with ``own_output=run``, all prompts this arm has finished, with their outputs;
    - the calibration text of the files ``text``, the same for all arms.

    With ``own_output=prompt`` drafts depend on nothing but the prompt's own text and the calibration text. With
    ``run`` they depend on which prompts came before, and so do speeds and the output of a lossy method; arms never
    learn from each other.
    """

    tier = None
    has_probs = False

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        text: Sequence[str] = (),
        own_output: str = "prompt",
        max_ngram: int = 4,
        min_ngram: int = 1,
        max_nodes: int = 500_000,
    ) -> None:
        if own_output not in OWN_OUTPUT:
            raise UserError(f"retrieval: own_output={own_output!r}: want one of {', '.join(OWN_OUTPUT)}.")
        if not 1 <= min_ngram <= max_ngram:
            raise UserError(f"retrieval: want 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}.")
        if max_nodes < 1:
            raise UserError(f"retrieval: max_nodes={max_nodes}: want at least 1.")
        self.name = f"retrieval({own_output})"
        self.device = tiers.model.device
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self.max_nodes = max_nodes
        self.past = Trie(max_ngram, max_nodes) if own_output == "run" else None
        # Hashed by identity, which the protocol does not say.
        self.known = calibration(tuple(text), model.tokenizer, max_ngram, max_nodes)  # type: ignore[arg-type]
        self.begin()

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        return Draft(to_device(self.continuation(tokens, count), self.device))

    def continuation(self, tokens: Sequence[int], count: int, behind: Sequence[int] = ()) -> list[int]:
        """Up to ``count`` tokens that follow ``tokens`` and ``behind``, of which ``tokens`` are learnt."""
        self.read(tokens)
        places = self.places
        for token in behind:
            places = self.walk(places, token)
        found: list[int] = []
        while len(found) < count and (following := self.next_token(places)) is not None:
            found.append(following)
            places = self.walk(places, following)
        return found

    def finish(self, text: Sequence[int]) -> None:
        """Learn a finished text where earlier ones count; the next one begins with nothing of its own known."""
        if self.past is not None:
            self.past.learn_all(text)
        self.begin()

    def begin(self) -> None:
        """Forget the present text."""
        past = [] if self.past is None else [self.past]
        self.memories = [Trie(self.max_ngram, self.max_nodes), *past, self.known]
        self.seen: list[int] = []
        self.places: list[Places] = [[ROOT] for _ in self.memories]

    def read(self, tokens: Sequence[int]) -> None:
        """Learn what ``tokens`` have more than before; begin anew where they are another text."""
        if list(tokens[: len(self.seen)]) != self.seen:
            self.begin()
        for token in tokens[len(self.seen) :]:
            present = self.memories[0].learn(self.places[0], token)
            self.places = [present, *self.walk(self.places, token)[1:]]
            self.seen.append(token)

    def walk(self, places: Sequence[Places], token: int) -> list[Places]:
        return [memory.walk(at, token) for memory, at in zip(self.memories, places, strict=True)]

    def next_token(self, places: Sequence[Places]) -> int | None:
        """The continuation of the longest n-gram, None where none is known."""
        for length in range(max(map(len, places)) - 1, self.min_ngram - 1, -1):
            for memory, at in zip(self.memories, places, strict=True):
                if length < len(at) and (token := memory.continuation(at[length])) is not None:
                    return token
        return None


@lru_cache(maxsize=2)
def calibration(files: tuple[str, ...], tokenizer: Tokenizer, max_ngram: int, max_nodes: int) -> Trie:
    """The n-grams of all texts in ``files``, read once for all arms."""
    known = Trie(max_ngram, max_nodes)
    for text in read_texts(files):
        known.learn_all(tokenizer.encode(text))
    return known
