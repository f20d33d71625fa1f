"""Cascade Speculative Drafting, lossless (Chen et al., arXiv 2312.11462): models review models, n-grams go first."""

from collections.abc import Callable, Sequence

from harness.decode.length import Fixed
from harness.decode.nested import InTurn, Reviewed
from harness.decode.slim import Slim, only
from harness.decode.speculative import Speculative, check_gamma
from harness.drafters.base import Drafter, TierDrafter
from harness.errors import UserError
from harness.model.load import Model
from harness.model.tiers import Tier, Tiers
from harness.sampling import Sampling


class CascadeSD(Speculative):
    """Vertical cascade: no model drafts token by token; each reviews what a weaker one proposes, and the weakest model
    what ``statistical`` finds without a model. Horizontal cascade: the first positions of a block come from the
    strongest drafter, later ones from weaker ones, the last from ``statistical`` alone.

    The chain is the full verifier, the slim one where there is one, the drafter, ``statistical``. Row i of ``lengths``
    is for the i-th of them: how many tokens it is given by each one behind it. So ``[[5, 5], [10]]`` has the full
    verifier score 5 tokens that the drafter made, by reviews of up to 10 looked-up ones, and 5 looked-up ones behind
    them.

    The last review is lossless. Inside, greedy drafting may use the source's ``lenience``; at 1 every link is exact,
    so that sampling has the full verifier's law too. The source (lfsszd/CS-Drafting) has greedy code alone; there a
    drafter may overshoot its number of tokens, and bigrams fill up what no n-gram continues (both reading: ours).

    Draft forwards are the drafter's, slim forwards the slim verifier's, though both only review here.

    Args:
        gamma: tokens that a review scores at once, at most, whatever ``lengths`` adds up to.
        lenience: 2 to 5 in the source; above 1, a review inside also keeps a token v with p_reviewer(v) >
            p_draft(v)/lenience.

    Raises:
        UserError: a drafter that is no model, sampling with lenience, or lengths that do not fit the chain.
    """

    reading = "no draft overshoots, no bigrams"

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        gamma: int,
        drafter: Callable[[Tiers, Sampling, Model], Drafter],
        statistical: Callable[[Tiers, Sampling, Model], Drafter],
        lengths: Sequence[Sequence[int]],
        slim: Callable[[Tiers, Model], Slim | Sequence[Slim]] | None = None,
        lenience: float = 1.0,
    ) -> None:
        check_gamma(gamma)
        check_lenience(lenience, sampling)
        check_lengths(lengths, 1 if slim is None else 2)
        self.slim_verifiers = () if slim is None else (only(slim(tiers, model), "cascade_sd"),)
        self.slim = self.slim_verifiers[0].tier if self.slim_verifiers else None
        made = drafter(tiers, sampling, model)
        if not isinstance(made, TierDrafter):
            raise UserError(
                f"cascade_sd: the drafter reviews, and {made.name} is no model that could: choose drafter=self_skip, "
                "self_slim, early_exit or small_lm; the one without a model is cascade_sd's statistical."
            )
        innermost = statistical(tiers, sampling, model)
        if innermost.tier is not None:
            raise UserError(f"cascade_sd: statistical={innermost.name} has a model: choose prompt_lookup or retrieval.")
        chain = [made.tier] if self.slim is None else [self.slim, made.tier]

        def proposer(place: int) -> InTurn:
            """What the tier before ``place`` in the chain is given to review."""
            *shares, last = lengths[place]
            members = [
                (
                    Reviewed(
                        tiers,
                        chain[behind],
                        sampling,
                        Fixed(proposer(behind + 1)),
                        min(gamma, sum(lengths[behind + 1])),
                        lenience=lenience,
                    ),
                    share,
                )
                for behind, share in enumerate(shares, start=place)
            ]
            return InTurn(members, innermost, last, tiers.model.device)

        super().__init__(tiers, sampling, model, min(gamma, sum(lengths[0])), lambda *_: proposer(0))
        self.name = "cascade_sd"
        self.weakest = made
        self.innermost = innermost

    @property
    def drafter_name(self) -> str:
        return f"{'' if self.slim is None else 'slim over '}{self.weakest.name} over {self.innermost.name}"

    def tier_roles(self) -> tuple[Tier | None, Tier | None]:
        return self.weakest.tier, self.slim


def check_lenience(lenience: float, sampling: Sampling) -> None:
    if lenience < 1:
        raise UserError(f"cascade_sd: lenience={lenience:g}: want 1 (exact) or more.")
    if lenience > 1 and not sampling.greedy:
        raise UserError(
            f"cascade_sd: lenience={lenience:g} is for greedy drafting, temperature={sampling.temperature:g}: set "
            "lenience=1, which is exact at every link, or temperature=0."
        )


def check_lengths(lengths: Sequence[Sequence[int]], models: int) -> None:
    """One row for the full verifier and each of ``models``, each one number shorter than the one before."""
    wanted = list(range(models + 1, 0, -1))
    if [len(row) for row in lengths] != wanted or any(number < 0 for row in lengths for number in row):
        raise UserError(
            f"cascade_sd: lengths={[list(row) for row in lengths]}: want rows of {', '.join(map(str, wanted))} numbers "
            "of tokens, 0 or more each."
        )
    if any(not sum(row) for row in lengths):
        raise UserError("cascade_sd: lengths: a row of zeros leaves its reviewer nothing to review.")
