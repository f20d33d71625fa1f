"""Prompt lookup: continue the last n-gram as it was continued before (apoorvumang/prompt-lookup-decoding)."""

from collections.abc import Sequence

from harness.drafters.base import Draft
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.model.transfer import to_device
from harness.sampling import Chooser, Sampling


class PromptLookup:
    """The longest n-gram (``max_ngram`` down to ``min_ngram``) that ends the text and stands earlier in it decides.

    Of several earlier places the latest wins. The draft is what follows there, so it can be shorter than asked, and
    empty where nothing matches.
    """

    tier = None
    has_probs = False

    def __init__(self, tiers: Tiers, sampling: Sampling, model: Model, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise UserError(f"prompt_lookup: want 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}.")
        self.name = "prompt_lookup"
        self.device = tiers.model.device
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        return Draft(to_device(self.continuation(tokens, count), self.device))

    def continuation(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that followed the longest match."""
        if count < 1:
            return ()
        end = len(tokens)
        best: tuple[int, int] = (self.min_ngram - 1, -1)  # matched length, where the continuation begins
        last = tokens[-1]
        for place in range(end - 1, 0, -1):  # latest first: a later, equally long match is never replaced
            if tokens[place - 1] != last:
                continue
            matched = 1
            while matched < self.max_ngram and matched < place and tokens[place - 1 - matched] == tokens[-1 - matched]:
                matched += 1
            if matched > best[0]:
                best = (matched, place)
                if matched == self.max_ngram:
                    break
        begin = best[1]
        return tokens[begin : begin + count] if begin > 0 else ()
