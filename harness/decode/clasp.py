"""CLaSp, lossless (Chen et al., arXiv 2505.24196): self-speculation whose layers are chosen anew after verification."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from harness.decode.base import Block
from harness.decode.length import Fixed, Length
from harness.decode.speculative import Speculative
from harness.drafters.base import Drafter
from harness.drafters.self_skip import SelfSkip
from harness.errors import UserError
from harness.model.load import Model
from harness.model.sight import LayerKind, Sight
from harness.model.slim import evenly_spaced
from harness.model.tiers import Tiers
from harness.model.transfer import to_host
from harness.model.transformer import Transformer
from harness.sampling import Chooser, Sampling, widen


class CLaSp(Speculative):
    """The full verifier drafts with layers left out, the ones that matter least at the last token it verified.

    Verification leaves the hidden state h_i behind every layer i. With g(i, j) what the first i layers make of that
    token when j of them are skipped,

        g(i, j) = the more similar to h_i of  f_i(g(i - 1, j))  and  g(i - 1, j - 1),    g(0, 0) = h_0,

    where f_i is layer i over the full verifier's entries of the tokens before, and similarity is the cosine. The
    choices that lead to g(L, M) say which M layers are skipped. It is a greedy table: a state that is less similar now
    and would be more so later is dropped. All g(i, .) of a layer are one forward of M + 1 rows, so that choosing costs
    about as much as one pass of the full verifier over so many tokens.

    The output law is the full verifier's at any temperature: which layers draft depends on what is written already.

    From the abstract and from notes on the paper, whose text we have not read; that any layer may be skipped, the
    share of them, and one token as evidence are reading: ours.

    The states of all layers are kept for every position: positions x layers x width numbers. The draft tier runs
    without CUDA graphs, since a choice of layers seldom lasts as long as capturing it would take. Choosing has the host
    wait once.

    Args:
        skip_ratio: share of layers skipped.
        every: blocks after which the layers are chosen anew.

    Raises:
        UserError: a number below 1, or a ratio that leaves no layer.
    """

    reading = "the share and choice of layers to skip, one token as evidence (the paper's text is unread)"

    def __init__(
        self,
        tiers: Tiers,
        sampling: Sampling,
        model: Model,
        gamma: int,
        skip_ratio: float = 0.5,
        every: int = 1,
        length: Callable[[Drafter], Length] = Fixed,
    ) -> None:
        if every < 1:
            raise UserError(f"clasp: every={every}: want at least 1 block.")
        depth = model.transformer.spec.layers
        self.first = evenly_spaced(depth, skip_ratio).layers  # until there is a verified token
        self.skipped = depth - len(self.first)
        self.every = every
        self.blocks = 0
        self.skipping = SelfSkip(tiers, sampling, model, mask=list(self.first))
        self.skipping.tier.graphs = False
        tiers.full.watch(range(depth))
        super().__init__(tiers, sampling, model, gamma, lambda *_: self.skipping, length)
        self.name = "clasp"

    @property
    def drafter_name(self) -> str:
        return f"{self.length.name}, chosen every {self.every}"

    def step(self, tokens: Sequence[int], remaining: int, chooser: Chooser) -> Block:
        place = self.tiers.full.length - 1  # the last verified token
        if self.blocks % self.every == 0:
            self.skipping.tier.change_layers(self.first if place < 0 else self.chosen(tokens[place], place))
        self.blocks += 1
        return super().step(tokens, remaining, chooser)

    def chosen(self, token: int, place: int) -> list[int]:
        """The layers to keep, for what the full verifier made of ``token`` at ``place``."""
        model = self.tiers.model
        states = self.tiers.full.features[place].view(model.spec.layers, -1)
        skips = skip_table(model, self.tiers.cache.layers, token, place, states, self.skipped)
        return kept_by(skips)

    def finish(self, text: Sequence[int]) -> None:
        self.blocks = 0
        super().finish(text)


@torch.inference_mode()
def skip_table(
    model: Transformer,
    entries: Sequence[tuple[Tensor, Tensor]],
    token: int,
    place: int,
    states: Float[Tensor, "L E"],
    skipped: int,
) -> Bool[Tensor, "L M1"]:
    """Where the best way to skip j of the first i + 1 layers skips layer i: True at [i, j], j from 0 to ``skipped``.

    ``entries`` are those of every layer, of which the ones before ``place`` are read and none is written; ``states``
    are the full verifier's behind each layer at ``place``. Cells with j > i + 1 mean nothing.
    """
    rows = skipped + 1
    numbers = torch.arange(rows, device=model.device)
    sights = [side_by_side(kind, place, rows) for kind in model.kinds]
    first = model.embedded(torch.full((1,), token, dtype=torch.long, device=model.input_device))
    reached = first.to(model.device).expand(rows, -1)
    table: list[Tensor] = []
    for index, state in enumerate(states):
        begin, sight = sights[model.kind_of[index]]
        keys, values = (F.pad(part[:, begin:place], (0, 0, 0, rows)) for part in entries[index])  # [K, T + M1, D]
        run = model.layer(index, reached, (keys, values), sight).to(model.device)
        left = reached.roll(1, 0)
        better = similarity(left, state) > similarity(run, state)
        skip = ((better & (numbers <= index)) | (numbers == index + 1)) & (numbers > 0)
        reached = torch.where(skip[:, None], left, run)
        table.append(skip)
    return torch.stack(table)


def side_by_side(kind: LayerKind, place: int, rows: int) -> tuple[int, Sight]:
    """How ``rows`` versions of the token at ``place`` look at what is before it and at themselves, not at each other.

    Keys are the tokens from the position that is returned to before ``place``, then one for each version.
    """
    begin = 0 if kind.window is None else max(0, place + 1 - kind.window)
    seen = torch.cat((torch.ones(rows, place - begin, dtype=torch.bool), torch.eye(rows, dtype=torch.bool)), dim=-1)
    mask = torch.zeros(seen.shape, dtype=kind.dtype).masked_fill_(~seen, float("-inf")).to(kind.device)
    cos, sin = (angle if angle is None else angle.expand(rows, -1) for angle in kind.angles(slice(place, place + 1)))
    return begin, Sight(slice(-rows, None), slice(0, None), cos, sin, mask)


def similarity(states: Float[Tensor, "M1 E"], state: Float[Tensor, "E"]) -> Float[Tensor, "M1"]:
    return F.cosine_similarity(widen(states), widen(state)[None], dim=-1)


def kept_by(table: Bool[Tensor, "L M1"]) -> list[int]:
    """The layers that the best way to skip M of all of them keeps, ascending."""
    depth, columns = table.shape
    skips = to_host(table.long())
    kept = []
    left = columns - 1  # still to skip among the layers up to this one
    for index in reversed(range(depth)):
        if skips[index * columns + left]:
            left -= 1
        else:
            kept.append(index)
    return kept[::-1]
