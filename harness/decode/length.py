"""How long a drafted block is: gamma at most, and shorter where drafting on does not pay.

A rule may look at what was drafted and at what became of earlier blocks, never at the verifier's answer to this one.
Whether a block goes on behind a token depends on that token and those before it alone, and the token that ends a block
is part of it: dropping it would select draws by their value, which changes the law they are verified against.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from harness.decode.accept import first_stop
from harness.drafters.base import Draft, Drafter, Remembering, check_probs, joined, pieces
from harness.errors import UserError
from harness.model.transfer import to_host
from harness.sampling import Chooser


@runtime_checkable
class Length(Protocol):
    """A drafter under a rule for the length of its blocks; ``name`` is that of both, for the records."""

    @property
    def name(self) -> str: ...

    def ask(self, gamma: int) -> int:
        """Tokens to ask for in the next block, 1 to ``gamma``."""
        ...

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        """A block of up to ``count`` tokens."""
        ...

    def note(self, drafted: int, kept: int) -> None:
        """Learn what became of a block."""
        ...

    def finish(self, text: Sequence[int]) -> None:
        """A prompt is done: nothing of its blocks is carried to the next. ``text`` is all of it with its output."""
        ...


class Fixed:
    """Always gamma, and whatever the drafter gives."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name = drafter.name

    def ask(self, gamma: int) -> int:
        return gamma

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        return self.drafter.draft(tokens, count, chooser)

    def note(self, drafted: int, kept: int) -> None:
        pass

    def finish(self, text: Sequence[int]) -> None:
        if isinstance(self.drafter, Remembering):
            self.drafter.finish(text)


class Confidence(Fixed):
    """The block ends with the first token that was drafted with a probability below ``threshold``.

    When sampling that is the probability it was drawn with, after temperature, top-k and top-p; when greedy, its
    softmax at temperature 1. On the CPU a tier is asked for one token at a time and drafts none in vain; elsewhere the
    whole block is drafted and cut, for which the host waits once more: it saves rows to verify and no drafting.
    """

    def __init__(self, drafter: Drafter, threshold: float = 0.4) -> None:
        super().__init__(drafter)
        if not 0 < threshold <= 1:
            raise UserError(f"length.threshold={threshold}: want a probability above 0, at most 1.")
        check_probs(drafter, "length=confidence")
        self.threshold = threshold
        self.name = f"{drafter.name}, until below {threshold:g}"

    def draft(self, tokens: Sequence[int], count: int, chooser: Chooser) -> Draft:
        drafts: list[Draft] = []
        for piece in pieces(self.drafter, tokens, count, chooser):
            drawn_with = piece.distributions().gather(-1, piece.tokens[:, None])[:, 0]
            (sure,) = to_host(first_stop(drawn_with >= self.threshold))
            drafts.append(piece.first(sure + 1))
            if sure < len(piece):
                break
        return joined(drafts) if drafts else self.drafter.draft(tokens, 0, chooser)


class Adaptive(Fixed):
    """``up`` tokens more after a block that was kept whole, ``down`` less after any other; at least 1, at most gamma.

    Every prompt begins with ``first`` tokens, null: gamma. An empty block changes nothing. With 2 and 1, the rule of
    the heuristic schedule of transformers' assisted generation, which has no upper bound.
    """

    def __init__(self, drafter: Drafter, first: int | None = None, up: int = 2, down: int = 1) -> None:
        super().__init__(drafter)
        if first is not None and first < 1:
            raise UserError(f"length.first={first}: want at least 1, or null for gamma.")
        if up < 1 or down < 1:
            raise UserError(f"length: up={up}, down={down}: want at least 1 each.")
        self.first = first
        self.up = up
        self.down = down
        self.current = first
        self.name = f"{drafter.name}, adaptive(+{up}, -{down}{f', from {first}' if first else ''})"

    def ask(self, gamma: int) -> int:
        self.current = gamma if self.current is None else min(self.current, gamma)
        return self.current

    def note(self, drafted: int, kept: int) -> None:
        if drafted and self.current is not None:
            self.current = self.current + self.up if kept == drafted else max(1, self.current - self.down)

    def finish(self, text: Sequence[int]) -> None:
        self.current = self.first
        super().finish(text)
