"""Rules of two-tier acceptance: what becomes of a drafted block once the full verifier has scored it.

In all of them p is the drafter's law and q the full verifier's, as in VIA-SD. Leviathan et al., Faster Cascades and
most papers on lossy verification write the two letters the other way round.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from harness.decode.accept import first_stop, keep_probability
from harness.drafters.base import Draft
from harness.sampling import Chooser, Law, Sampling


class Verdict(NamedTuple):
    """How many drafts are kept, and the token behind them: in place of the refused one, or the bonus token."""

    stop: Int[Tensor, ""]
    last: Int[Tensor, "1"]


@runtime_checkable
class Rule(Protocol):
    """A rule bound to how tokens are sampled. Nothing in it waits for the device.

    ``name`` is the method's in tables and ``settings`` what stands beside it there, None where nothing can be set.
    ``lossless`` is true only if the output law is the full verifier's under this sampling. ``reads_drafter``: the rule
    compares the drafter's probabilities with a bound, and makes no sense where every draft is certain.
    """

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> str | None: ...

    @property
    def lossless(self) -> bool: ...

    @property
    def reads_drafter(self) -> bool: ...

    def law(self, logits: Float[Tensor, "R V"]) -> Law:
        """What a token is drawn from where nothing was drafted."""
        ...

    def judge(self, logits: Float[Tensor, "R V"], draft: Draft, chooser: Chooser) -> Verdict:
        """``logits`` are the full verifier's, a row for each of the G drafts and one for the bonus token."""
        ...


class Lossless:
    """Keep v with probability min(1, q(v)/p(v)), else draw from norm(max(0, q - p)); the bonus token comes from q.

    The output law is q's (Leviathan et al., arXiv 2211.17192).
    """

    name = "speculative"
    settings = None
    lossless = True
    reads_drafter = False

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    def law(self, logits: Float[Tensor, "R V"]) -> Law:
        return self.sampling.law(logits)

    def judge(self, logits: Float[Tensor, "R V"], draft: Draft, chooser: Chooser) -> Verdict:
        return held_to(self.law(logits), draft, chooser)


def held_to(law: Law, draft: Draft, chooser: Chooser) -> Verdict:
    """The lossless rule with any law in the verifier's place: each kept or replaced token is distributed by it."""
    stop = first_stop(chooser.accept(keep_probability(law, draft)))
    return Verdict(stop, law.replace(draft.probs, draft.tokens, stop, chooser))


def drawn_from(draft: Draft, like: Float[Tensor, "R V"]) -> Float[Tensor, "G V"]:
    """The law of each draft as a table of the width and type of ``like``; one-hot where drafts are certain."""
    if draft.probs is not None:
        return draft.probs
    return like.new_zeros(len(draft), like.shape[-1]).scatter_(-1, draft.tokens[:, None], 1.0)


def ratios(
    verifier: Float[Tensor, "R V"], drafter: Float[Tensor, "G V"], tokens: Int[Tensor, "G"]
) -> Float[Tensor, "G"]:
    """q(v)/p(v) of each drafted token v, which may exceed 1."""
    full, small = (table[: len(tokens)].gather(-1, tokens[:, None])[:, 0] for table in (verifier, drafter))
    return full / small
