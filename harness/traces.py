"""What every forward of a decoded prompt was given, replayed from its trace: rows, and cached positions before them.

A trace says how many forwards a block had and what became of its drafts; with the settings of the arm that is enough,
because a tier processes in one call whatever it has not seen of the text, its backlog, and the drafts behind it:

* the full verifier of a two-tier method scores its backlog, one token as a rule, and all drafts;
* a slim verifier scores its backlog and all drafts but the last, which needs a successor only where there is a bonus;
* the full verifier of three tiers has as backlog every token since its last pass;
* a tier with entries of its own lags by what was committed without it; one that shares the full verifier's continues
  its own tail as long as the full one does not run, and then starts again where that ends.

What a trace leaves open is refused, never guessed: methods that draft with reviews inside, and layers that change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.records import BlockTrace, Route

DRAFT, SLIM, FULL = "draft", "slim", "full"

METHODS = {
    "autoregressive.Autoregressive": "plain",
    "speculative.Speculative": "two_tiers",
    "bild.BiLD": "two_tiers",
    "via_sd.ViaSD": "three_tiers",
}
DRAFTERS = {
    "prompt_lookup.PromptLookup": "none",
    "retrieval.Retrieval": "none",
    "small_lm.SmallLM": "own",
    "self_skip.SelfSkip": "shared",
    "early_exit.EarlyExit": "shared",
    "eagle.Eagle": "head",
    "mtp.Mtp": "head",
    "medusa.Medusa": "heads",
}
"""By the end of its target: without a model, a tier with entries of its own or of the full verifier's, a recurrent head
that reads the verifiers' hidden states, or heads that all draft in one forward."""
UNTRACED = {
    "hierarchical.Hierarchical": "its reviews inside a block are not in the trace",
    "cascade_sd.CascadeSD": "its reviews inside a block are not in the trace",
    "swift.Swift": "the layers that it drafts with change and are not in the trace",
    "clasp.CLaSp": "the layers that it drafts with change and are not in the trace",
}


class Untraced(Exception):
    """The rows of an arm's forwards do not follow from its trace; the text says why."""


@dataclass(frozen=True, slots=True)
class Forward:
    """``tier`` is ``draft``, ``slim`` (further ones ``slim 2``, ...) or ``full``; ``context`` what it had processed."""

    tier: str
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What of an arm's settings decides how its forwards follow from its trace.

    ``method`` and ``drafter`` are values of ``METHODS`` and ``DRAFTERS``. ``shared``: the slim verifiers read the full
    one's entries. ``catches_up``: a head waits for the full verifier's hidden states, and does not read the slim one's.
    ``bonus`` is that of three tiers: ``none``, ``slim`` or ``full``; ``slims`` identifies their slim verifiers.
    """

    method: str
    drafter: str = "none"
    shared: bool = True
    catches_up: bool = False
    bonus: str = "none"
    slims: str = ""


def layout(settings: Mapping[str, Any]) -> Layout:
    """The layout of an arm from its node of ``config.yaml``.

    Raises:
        Untraced: the rows of its forwards do not follow from the trace.
    """
    target = _end(settings)
    if target in UNTRACED:
        raise Untraced(UNTRACED[target])
    if target not in METHODS:
        raise Untraced(f"no replay of {target or 'a method without settings'}")
    method = METHODS[target]
    if method == "plain":
        return Layout(method)
    drafter = settings.get("drafter") or {}
    while _end(drafter) == "graft.Graft":  # cut back to a token that its tier drafted: nothing else changes
        drafter = drafter.get("inner") or {}
    kind, slim = DRAFTERS.get(_end(drafter)), settings.get("slim") or {}
    if _end(drafter) == "self_slim.SelfSlim":
        kind = "shared" if _shares(drafter.get("slim") or {}) else "own"
    if kind is None:
        raise Untraced(f"no replay of the drafter {_end(drafter) or 'without settings'}")
    catches_up = drafter.get("features") == "catch_up"
    if method == "two_tiers":
        return Layout(method, kind, catches_up=catches_up)
    return Layout(method, kind, _shares(slim), catches_up, str(settings.get("bonus", "none")), repr(slim))


def _end(node: Mapping[str, Any]) -> str:
    """The last two parts of a target."""
    return ".".join(str(node.get("_target_", "")).split(".")[-2:])


def _shares(slim: Mapping[str, Any]) -> bool:
    return slim.get("cache", "own") == "shared"  # a checkpoint has no such key: its entries are its own


class _Tiers:
    """How far each tier has come in the text, and what it was given on the way."""

    def __init__(self, layout: Layout, prompt_tokens: int) -> None:
        self.layout = layout
        self.begin = prompt_tokens - 1  # the last token of a prompt is pending
        self.full = self.begin
        self.others: dict[str, int] = {}
        self.tails = {SLIM} if layout.shared else set[str]()
        if layout.drafter == "shared":
            self.tails.add(DRAFT)
        self.row_end = self.solid = max(0, prompt_tokens - 2)  # of a recurrent head, whose first token has no row
        self.forwards: list[Forward] = []

    def is_tail(self, tier: str) -> bool:
        return tier.split()[0] in self.tails

    def reached(self, tier: str) -> int:
        if tier == FULL:
            return self.full
        return self.others.get(tier, self.full if self.is_tail(tier) else self.begin)

    def run(self, tier: str, end: int) -> None:
        """Process everything up to before ``end``."""
        begin = self.reached(tier)
        if end <= begin:
            raise Untraced(f"its trace has a forward of the {tier} tier with nothing new to process")
        self.forwards.append(Forward(tier, end - begin, begin))
        if tier == FULL:
            self.full = end
            self.others = {name: length for name, length in self.others.items() if not self.is_tail(name)}
        else:
            self.others[tier] = end

    def rollback(self, length: int) -> None:
        self.full = min(self.full, length)
        self.others = {
            name: max(self.full, min(reached, length)) if self.is_tail(name) else min(reached, length)
            for name, reached in self.others.items()
        }
        self.row_end = min(self.row_end, max(0, length - 1))
        self.solid = min(self.solid, self.row_end)

    def draft(self, text: int, block: BlockTrace) -> None:
        count = block.draft_forwards
        if not count:
            return
        if self.layout.drafter in ("own", "shared"):
            for place in range(count):
                self.run(DRAFT, text + place)
            if block.looked_up:  # other tokens stand behind the last one that the tier drafted
                self.others[DRAFT] = min(self.others[DRAFT], text + block.drafted - block.looked_up)
            return
        if self.layout.drafter not in ("head", "heads"):
            raise Untraced("its trace has forwards of a drafter without a model")
        slim = self.full if self.layout.catches_up or self.layout.method != "three_tiers" else self.reached(SLIM)
        if max(self.full, slim) < text - 1:
            self.run(FULL, text - 1)
        if self.layout.drafter == "heads":  # one product over the heads that are asked, whatever the backlog
            self.forwards.append(Forward(DRAFT, block.drafted, text))
            return
        self.row_end = min(self.row_end, text - 2)
        self.solid = min(self.solid, self.row_end)
        if self.full > self.solid:  # rows made of the slim tier's states are made again
            self.row_end = self.solid
        self.forwards.append(Forward(DRAFT, text - 1 - self.row_end, self.row_end))
        self.row_end = text - 1
        self.solid = min(self.full, self.row_end)
        self.forwards += [Forward(DRAFT, 1, text - 1 + place) for place in range(count - 1)]

    def verify(self, text: int, block: BlockTrace) -> None:
        if not block.drafted:
            self.run(FULL, text)
        elif self.layout.method == "two_tiers":
            self.run(FULL, text + block.drafted)
        else:
            for place in range(block.slim_forwards):
                name = SLIM if place == 0 else f"{SLIM} {place + 1}"
                self.run(name, text + block.drafted - 1 + (self.layout.bonus == "slim"))
            if block.full_forwards > sum(one.tier == FULL for one in self.forwards):
                self.run(FULL, text + scored(block, self.layout.bonus))


def scored(block: BlockTrace, bonus: str) -> int:
    """Drafts that the full pass of a three-tier block processes.

    All but the last where it scores the block, the last too where it adds the bonus token; only those kept where it
    ends a block in which nothing was escalated. Of a block that the stop rule cut, the routes that are left decide.
    """
    if Route.ESCALATE in block.routes or len(block.routes) < min(block.kept + 1, block.drafted):
        return block.drafted - 1 + (bonus == "full")
    return block.kept


def forwards(layout: Layout, prompt_tokens: int, blocks: Sequence[BlockTrace]) -> list[list[Forward]]:
    """The forwards of each block, in the order of the tiers.

    Raises:
        Untraced: the trace has another number of forwards of some tier than this replay.
    """
    tiers = _Tiers(layout, prompt_tokens)
    found = []
    text = prompt_tokens
    for block in blocks:
        tiers.forwards = []
        tiers.draft(text, block)
        tiers.verify(text, block)
        text += block.emitted
        tiers.rollback(text - 1)
        counts = [sum(one.tier.split()[0] == tier for one in tiers.forwards) for tier in (DRAFT, SLIM, FULL)]
        if counts != [block.draft_forwards, block.slim_forwards, block.full_forwards]:
            raise Untraced("its trace has other numbers of forwards than its settings explain")
        found.append(tiers.forwards)
    return found


def faultless(layout: Layout, prompt_tokens: int, blocks: Sequence[BlockTrace]) -> tuple[int, list[list[Forward]]]:
    """Tokens and forwards if every draft were accepted without a full pass: the same blocks, each kept whole.

    Block lengths are the trace's; a block without a draft stays a plain step. Contexts stay those of the trace, so that
    the longer text does not make forwards dearer. Two tiers always pay their full pass, and add a bonus token.
    """
    bonus = int(layout.method == "two_tiers" or layout.bonus == "slim")
    tokens, found = 0, []
    backlog, made_before, text = 1, 1, prompt_tokens
    for block in blocks:
        drafted = block.drafted
        unseen = made_before if layout.drafter == "head" else backlog
        made = [Forward(DRAFT, *shape) for shape in _drafting(layout, block, text, unseen)]
        if not drafted:
            made.append(Forward(FULL, 1, text - 1))
            made_before, backlog = 1, 1
        elif layout.method == "two_tiers":
            made.append(Forward(FULL, 1 + drafted, text - 1))
            made_before, backlog = drafted + 1, 2
        else:
            made.append(Forward(SLIM, drafted + bonus, text - 1))
            made_before, backlog = drafted + bonus, 1 + bonus
        tokens += made_before
        found.append(made)
        text += block.emitted
    return tokens, found


def _drafting(layout: Layout, block: BlockTrace, text: int, unseen: int) -> list[tuple[int, int]]:
    """(rows, context) of the draft forwards of a block behind one that was kept whole and left ``unseen`` tokens."""
    if not block.draft_forwards:
        return []
    if layout.drafter == "heads":
        return [(block.drafted, text)]
    first = 1 if layout.drafter == "shared" and layout.method == "two_tiers" else unseen
    return [(first, text - first), *((1, text + place) for place in range(block.draft_forwards - 1))]
