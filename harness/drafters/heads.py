"""Drafting with a head on the verifier: hidden states, the *features*, in, tokens out.

With x the sequence and f its features, f[i] belongs to x[i]: from it the verifier says x[i + 1]. When a block begins
the last token x[n] is pending, and features end at f[n - 1]. Row i of a recurrent head takes f[i] and x[i + 1] and says
x[i + 2]; its output stands in for f[i + 1] in the next row where there is none yet.

A method that verifies every block with the full tier (``speculative``) leaves its features behind each time. One that
skips it (VIA-SD) leaves a backlog, and ``features`` says what a head reads there: ``slim``, the slim tier's hidden
states at the same places, until the full tier has been there; ``catch_up``, the full tier processes the backlog first,
which counts as a full forward. Where not even the slim tier has been, the full tier catches up in both.
"""

from collections.abc import Sequence
from functools import cached_property
from time import perf_counter
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from harness.drafters.base import Draft, draft_with
from harness.errors import UserError, unknown
from harness.model.linear import linear
from harness.model.sight import Sight
from harness.model.tiers import GRAPH_STEP, Pick, Tier, Tiers, chunk_of, scalar
from harness.model.transfer import to_device
from harness.model.transformer import PREFILL_CHUNK, Transformer, softcap_
from harness.sampling import Chooser, Sampling

SOURCES = ("slim", "catch_up")
TEXT_TOKENS = 128
"""Places of ``TextRows``: news articles of 500 tokens have up to 70 that are not among the 8,000 most frequent."""
Entries = Sequence[tuple[Tensor, Tensor]]


class Features:
    """The verifiers' hidden states at ``taps``, by position."""

    def __init__(self, tiers: Tiers, taps: Sequence[int], source: str) -> None:
        if source not in SOURCES:
            raise unknown("drafter.features", source, SOURCES)
        self.full = tiers.full
        self.slim = next((tier for tier in tiers.others if tier.name == "slim"), None) if source == "slim" else None
        if self.slim is not None and self.slim.model.weights.embed is not self.full.model.weights.embed:
            raise UserError(
                "drafter.features=slim: the slim verifier is another model, whose hidden states this head cannot read: "
                "set drafter.features=catch_up."
            )
        for tier in (self.full, self.slim):
            if tier is not None:
                tier.watch(taps)

    def reach(self, sequence: Sequence[int]) -> None:
        """See to it that there are features of ``sequence``, if need be by a forward of the full tier."""
        reached = max(self.full.length, self.slim.length if self.slim else 0)
        if reached < len(sequence):
            self.full.forward(sequence, rows=0)

    def rows(self, begin: int, end: int) -> Float[Tensor, "S F"]:
        """Those of positions ``begin`` to before ``end``, the full tier's as far as it has been."""
        if self.slim is None or end <= self.full.length:
            return self.full.features[begin:end]
        split = max(begin, self.full.length)
        return torch.cat((self.full.features[begin:split], self.slim.features[split:end]))


@runtime_checkable
class Head(Protocol):
    """The mathematics of a recurrent head, on plain tensors: nothing here is in inference mode.

    ``model`` has its layers, and the embedding and head that it uses; ``taps`` says which features it reads.
    """

    @property
    def model(self) -> Transformer: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def enter(self, features: Float[Tensor, "S F"]) -> Float[Tensor, "S E"]:
        """What the verifier's features become before they are read like the head's own outputs."""
        ...

    def advance(
        self, tokens: Int[Tensor, "S"], states: Float[Tensor, "S E"], entries: Entries, sights: Sequence[Sight]
    ) -> Float[Tensor, "S E"]:
        """Rows with the features ``states`` and the tokens behind them -> what stands in for the next features."""
        ...

    def read(self, states: Float[Tensor, "S F"]) -> Float[Tensor, "S E"]:
        """What rows of a vocabulary are multiplied with, of what ``advance`` returned."""
        ...


class TextRows:
    """Tokens of the text for which a reduced head has no row, the newest ``count``, with the verifier's rows for them.

    So a head that copies can say the names in a text, which no list of frequent tokens has. Ours. The places are fixed,
    those not taken say -inf, so that a graph can hold them.
    """

    def __init__(self, verifier: Transformer, reduced: Transformer, count: int) -> None:
        head = verifier.weights.head
        self.reduced = reduced
        self.softcap = verifier.spec.logit_softcap
        self.dense = head.to_dense() if head.is_mkldnn else head
        self.tokens = torch.zeros(count, dtype=torch.long, device=head.device)
        self.rows = torch.zeros(count, head.shape[1], dtype=self.dense.dtype, device=head.device)
        self.free = torch.ones(count, dtype=torch.bool, device=head.device)
        self.clear()

    @cached_property
    def known(self) -> set[int]:
        """Tokens with a row in the head; not asked of weights that are shapes alone."""
        assert self.reduced.weights.head_tokens is not None
        return set(self.reduced.weights.head_tokens.tolist())

    def clear(self) -> None:
        self.places: dict[int, int] = {}  # by token, the oldest first
        self.seen = 0
        self.free.fill_(True)

    def note(self, sequence: Sequence[int]) -> None:
        """Take in what has joined the text; where there is no place left the oldest token goes."""
        changed: dict[int, int] = {}
        for token in sequence[self.seen :]:
            if token not in self.known and token not in self.places:
                place = len(self.places)
                if place == len(self.tokens):
                    place = self.places.pop(next(iter(self.places)))
                self.places[token] = place
                changed[place] = token
        self.seen = len(sequence)
        if changed:
            where, which = (to_device(list(ids), self.tokens.device) for ids in (changed, changed.values()))
            self.tokens[where], self.rows[where], self.free[where] = which, self.dense[which], False

    def added(self, logits: Float[Tensor, "R V"], read: Float[Tensor, "R E"]) -> Float[Tensor, "R V"]:
        """``logits`` with those of the noted tokens."""
        own = linear(read, self.rows)
        own = own if self.softcap is None else softcap_(own, self.softcap)
        own = own.masked_fill(self.free, float("-inf"))
        return logits.scatter_reduce(1, self.tokens.expand_as(own), own, "amax")  # free places change nothing


class HeadTier(Tier):
    """A recurrent head with a cache of its own, one row a token from the second on.

    Rows of drafts are made of the head's own outputs and leave the cache when a block is drafted. Rows made of the slim
    tier's features, those from ``solid`` on, are made again once the full tier has been there. So the cache always is
    what it would be if it were filled now.

    A head that has rows for some tokens only may say ``text_tokens`` of the text besides, by the full verifier's rows.
    """

    def __init__(self, tiers: Tiers, head: Head, source: str, text_tokens: int = 0) -> None:
        if text_tokens < 0:
            raise UserError(f"drafter.text_tokens={text_tokens}: want 0 or more.")
        reduced = head.model.weights.head_tokens is not None
        cache = head.model.new_cache(tiers.cache.capacity)
        super().__init__("draft", head.model, cache, range(head.model.spec.layers), graphs=tiers.graphs)
        self.head = head
        self.text = TextRows(tiers.full.model, head.model, text_tokens) if reduced and text_tokens else None
        self.source = Features(tiers, head.taps, source)
        self.solid = 0
        tiers.others.append(self)

    @property
    def length(self) -> int:
        """Tokens taken in; the first has no row."""
        return self.cache.length + 1

    def rollback(self, length: int) -> None:
        self.cache.rollback(max(0, length - 1))
        self.solid = min(self.solid, self.cache.length)
        if self.text is not None:
            self.text.seen = min(self.text.seen, length)

    def prefill(self, sequence: Sequence[int]) -> None:
        for end in range(min(self.length, len(sequence)), len(sequence), PREFILL_CHUNK):
            self.take_in(sequence[: end + PREFILL_CHUNK])

    def forward(
        self, sequence: Sequence[int], rows: int, drafts: Int[Tensor, "G"] | None = None
    ) -> Float[Tensor, "R V"]:
        """As any tier's, of a sequence alone: drafts have no features."""
        if drafts is not None:
            raise ValueError(f"{self.name}: a head takes in what it drafts by itself")
        self.source.reach(sequence[:-1])
        begun = perf_counter()
        with torch.inference_mode():
            states = self.take_in(sequence)
            logits = self.logits(states[len(states) - rows :])
        self.forwards += 1
        self.seconds += perf_counter() - begun
        return logits

    def logits(self, states: Float[Tensor, "S F"]) -> Float[Tensor, "S V"]:
        """Of the token that follows the row's token, from what ``advance`` returned."""
        read = self.head.read(states)
        logits = self.model.full_logits(read)
        return logits if self.text is None else self.text.added(logits, read)

    @torch.inference_mode()
    def take_in(self, sequence: Sequence[int], keep: int = 0) -> Float[Tensor, "S E"]:
        """Fill the cache with the rows of ``sequence``, but the last ``keep``; the features must be there."""
        tokens, features = self.pending(sequence)
        count = len(tokens) - keep
        start = self.cache.begin(count)
        self.model.check_positions(start + count)
        sights = [kind.sight(start, count) for kind in self.model.kinds]
        states = self.head.advance(tokens[:count], self.head.enter(features[:count]), self.cache.layers, sights)
        self.cache.append(count)
        self.solid = min(self.source.full.length, self.cache.length)
        return states

    def pending(self, sequence: Sequence[int]) -> tuple[Int[Tensor, "S"], Float[Tensor, "S F"]]:
        """Tokens and features of the rows that are missing or can be made of the full tier's features now."""
        if self.source.full.length > self.solid:
            self.cache.rollback(self.solid)
        if self.text is not None:
            if not self.cache.length:
                self.text.clear()
            self.text.note(sequence)
        return self.fresh(sequence, None), self.source.rows(self.cache.length, len(sequence) - 1)

    @torch.inference_mode()
    def extend(
        self, sequence: Sequence[int], count: int, pick: Pick, uniforms: Float[Tensor, "G"]
    ) -> tuple[Int[Tensor, "G"], Float[Tensor, "G V"]]:
        """Draft ``count`` tokens, at least 1, behind a sequence of at least 2."""
        self.source.reach(sequence[:-1])
        self.rollback(len(sequence) - 1)  # so that there is a row to begin with, also when asked a second time
        begun = perf_counter()
        extend = self.extend_by_graph if self.graphs else self.extend_row_by_row
        drafts, probs = extend(sequence, count, pick, uniforms)
        self.forwards += count
        self.seconds += perf_counter() - begun
        return drafts, probs

    def extend_row_by_row(
        self, sequence: Sequence[int], count: int, pick: Pick, uniforms: Float[Tensor, "G"]
    ) -> tuple[Int[Tensor, "G"], Float[Tensor, "G V"]]:
        states = self.take_in(sequence)[-1:]
        start = self.cache.begin(count)
        self.model.check_positions(start + count)
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        for turn, uniform in enumerate(uniforms[:count]):
            if drafts:
                sights = [kind.sight(start + turn - 1, 1) for kind in self.model.kinds]
                states = self.head.advance(drafts[-1], states, self.cache.layers, sights)
            token, drawn_from = pick(self.logits(states), uniform)
            drafts.append(token)
            probs.append(drawn_from)
        return torch.cat(drafts), torch.cat(probs)

    def extend_by_graph(
        self, sequence: Sequence[int], count: int, pick: Pick, uniforms: Float[Tensor, "G"]
    ) -> tuple[Int[Tensor, "G"], Float[Tensor, "G V"]]:
        """As row by row, in one graph for each ``count``; the rows that begin it are padded to ``GRAPH_STEP``."""
        tokens, features = self.pending(sequence)
        if len(tokens) > GRAPH_STEP:
            self.take_in(sequence, keep=GRAPH_STEP)
            tokens, features = self.pending(sequence)
        behind = len(tokens)
        start = self.cache.begin(max(GRAPH_STEP, behind + count))
        self.model.check_positions(start + behind + count)

        def whole(
            tokens: Int[Tensor, "S"],
            features: Float[Tensor, "S F"],
            behind: Int[Tensor, ""],
            start: Int[Tensor, ""],
            uniforms: Float[Tensor, "G"],
        ) -> tuple[Int[Tensor, "G"], Float[Tensor, "G V"]]:
            entries = self.cache.layers
            sights = self.model.fixed_sights(start, len(tokens), entries)
            states = self.head.advance(tokens, self.head.enter(features), entries, sights)
            states = states.index_select(0, behind[None] - 1)
            start = start + behind
            drafts: list[Tensor] = []
            probs: list[Tensor] = []
            for uniform in uniforms:
                if drafts:
                    sights = self.model.fixed_sights(start + len(drafts) - 1, 1, entries)
                    states = self.head.advance(drafts[-1], states, entries, sights)
                token, drawn_from = pick(self.logits(states), uniform)
                drafts.append(token)
                probs.append(drawn_from)
            return torch.cat(drafts), torch.cat(probs)

        padded = torch.zeros(GRAPH_STEP, features.shape[1], dtype=features.dtype, device=features.device)
        padded[:behind] = features
        places = scalar(behind, tokens.device), scalar(start, tokens.device)
        found = self.replayed((count,), whole, chunk_of(tokens, GRAPH_STEP), padded, *places, uniforms[:count])
        self.cache.append(behind)
        self.solid = min(self.source.full.length, self.cache.length)
        return found


class HeadDrafter:
    """What the families of recurrent heads share: the sequence needs two tokens before there is a feature to read."""

    has_probs = True

    def __init__(self, name: str, tier: Tier, sampling: Sampling, longest: int | None = None) -> None:
        self.name = name
        self.tier = tier
        self.sampling = sampling
        self.longest = longest

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        count = count if self.longest is None else min(count, self.longest)
        return draft_with(self.tier, self.sampling, tokens, count if len(tokens) > 1 else 0, chooser)
