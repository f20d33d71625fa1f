"""Many sequences in one forward of the full verifier, for writing training data quickly.

The decoder runs one sequence at a time. Here the sequences lie side by side in one cache, ``[K, B P, D]``, and the
transformer runs over the rows of all of them; only attention has to know where one ends.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from harness.errors import UserError
from harness.model.sight import Sight, causal_mask
from harness.model.transformer import Transformer


class Batched(Transformer):
    """``model`` over up to ``slots`` sequences of ``capacity`` positions.

    A step gives features, hidden states after the final norm; ``head_logits`` makes logits of those that are wanted.
    Behind the features, side by side, stand the hidden states behind the layers ``taps``.

    Raises:
        UserError: a model on several devices or with soft-capped attention, which torch's fused attention lacks.
    """

    def __init__(self, model: Transformer, slots: int, capacity: int, taps: Sequence[int] = ()) -> None:
        if model.spec.attn_softcap is not None or len(model.devices) > 1:
            raise UserError("data for a drafter is written by a model on one device without soft-capped attention.")
        self.__dict__.update(model.__dict__)
        self.capacity = capacity
        self.taps = tuple(taps)
        self.cache = model.new_cache(slots * capacity)

    @torch.inference_mode()
    def step(self, tokens: Int[Tensor, "B S"], starts: Int[Tensor, "B"], first_slot: int = 0) -> Float[Tensor, "B S F"]:
        """Append ``tokens`` to the B sequences from ``first_slot`` on, which have ``starts`` positions; the features.

        Whatever lies behind a sequence's positions is overwritten, so that an idle slot may be stepped along.
        """
        count, width = tokens.shape
        places = starts[:, None] + torch.arange(width, device=starts.device)  # [B, S]
        new = (places + self.capacity * torch.arange(count, device=starts.device)[:, None]).flatten()
        seen = int(places.max()) + 1
        begin = first_slot * self.capacity
        part = slice(begin, begin + count * self.capacity)
        entries = [(keys[:, part], values[:, part]) for keys, values in self.cache.layers]
        keys = torch.arange(seen, device=starts.device)
        sights = []
        for kind in self.kinds:
            mask = causal_mask(places.flatten(), keys, kind.window, self.dtype).view(count, width, seen)
            sights.append(Sight(new, slice(None), *kind.angles(places.flatten()), mask))
        hidden = self.embedded(tokens.flatten())
        states = []
        for index in range(self.spec.layers):
            hidden = self.layer(index, hidden, entries[index], sights[self.kind_of[index]])
            states.append(hidden)
        found = torch.cat((self.normed(hidden), *(states[tap] for tap in self.taps)), -1)
        return found.view(count, width, -1)

    def side_by_side(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention of each over its own keys: query [H, B S, D], keys and values [K, B P, D], mask [B, S, T]."""
        count, width, seen = mask.shape
        (heads, _, size), shared = query.shape, len(keys)
        own_keys, own_values = (
            x.view(shared, count, self.capacity, size)[:, :, :seen].transpose(0, 1) for x in (keys, values)
        )  # [B, K, T, D], views
        groups = heads // shared  # lie side by side as further rows: torch repeats keys for enable_gqa
        mixed = F.scaled_dot_product_attention(
            query.view(shared, groups, count, width, size).permute(2, 0, 1, 3, 4).reshape(count, shared, -1, size),
            own_keys,
            own_values,
            attn_mask=mask.repeat(1, groups, 1)[:, None],
            scale=self.attn_scale,
        )
        mixed = mixed.view(count, shared, groups, width, size).permute(1, 2, 0, 3, 4)
        return mixed.reshape(heads, count * width, size)

    fused = grouped = side_by_side  # type: ignore[assignment]
