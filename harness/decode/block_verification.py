"""Block verification (Sun et al., arXiv 2403.10444): lossless, and never keeps fewer drafts than token by token."""

import torch
from jaxtyping import Float
from torch import Tensor

from harness.decode.rule import Lossless, Verdict, drawn_from, ratios
from harness.drafters.base import Draft
from harness.sampling import Chooser


class BlockVerification(Lossless):
    """Decide on all prefixes of a block together and keep the longest accepted one.

    With X the G drafts, P_0 = 1 and P_i = min(1, P_{i-1} q(X_i)/p(X_i)), a prefix of i of them is accepted with
    probability

        h_i = S_i / (S_i + 1 - P_i),   S_i = sum over v of max(0, P_i q(v | X_1..i) - p(v | X_1..i)),   h_G = P_G.

    The token behind the longest accepted prefix i is drawn from norm(max(0, P_i q - p)), the bonus token from q. The
    output law is q's, and the expected number of kept drafts is never below that of the token-wise rule. 0/0
    stands for a prefix behind which the next draft is certain to be accepted: it decides nothing.

    Routes count as in the other methods, up to the first draft that is not kept. Greedy decoding: as token by token.
    """

    name = "block_verification"

    def judge(self, logits: Float[Tensor, "R V"], draft: Draft, chooser: Chooser) -> Verdict:
        if self.sampling.greedy:
            return super().judge(logits, draft, chooser)
        verified = self.sampling.warp(logits)
        drafted = drawn_from(draft, verified)
        reached = [verified.new_ones(())]
        for ratio in ratios(verified, drafted, draft.tokens):
            reached.append((reached[-1] * ratio).clamp(max=1.0))
        reach = torch.stack(reached)
        scaled = reach[:, None] * verified
        left = (scaled[1:-1] - drafted[1:]).clamp(min=0).sum(dim=-1)
        inner = (left / (left + 1 - reach[1:-1])).nan_to_num(nan=1.0)
        kept = chooser.accept(torch.cat((inner, reach[-1:])))
        lengths = torch.arange(1, len(draft) + 1, device=kept.device)
        stop = (kept * lengths).amax()
        return Verdict(stop, chooser.replace(scaled, drafted, draft.tokens, stop))
