"""Heads on the verifier's features while they are trained: ``eagle``, ``mtp`` and ``medusa``.

Places as in ``drafters.heads``: row i has the feature of token i and the token behind it, i + 1; what is said is of
token i + 2, of which the verifier's own law follows from the feature of token i + 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from harness.drafters.weights import own_spec
from harness.model.transformer import AFTER_NORM
from harness.training.data import Batch
from harness.training.layers import Attention, Chains, FusedLayer, Layer, Norm, Rotary, Sized, Turns
from harness.training.replay import Replay
from harness.training.students import Predictions, SmallStudent, flat, layer_config
from harness.training.verifier import Borrowed, taken_layers

FADE = 0.8
"""Weight of what is said one token further ahead, as in Medusa-1 and EAGLE-3."""


class RecurrentStudent(nn.Module, ABC):
    """A head that is unrolled over ``turns`` of its own outputs, as EAGLE-3 is (training-time test).

    Reading, ours: the only loss is forward KL on what it says; features are not regressed.
    """

    kind: str
    taps: tuple[int, ...] = ()

    def __init__(self, borrowed: Borrowed, turns: int) -> None:
        super().__init__()
        self.borrowed = borrowed
        self.rows = borrowed.rows
        self.turns = turns
        self.config: Mapping[str, Any] = layer_config(borrowed, 1)
        self.spec = own_spec(self.config, borrowed.spec)
        self.rotary = Rotary(self.spec)

    @abstractmethod
    def advance(
        self, embedded: Tensor, states: Tensor, angles: tuple[Tensor, Tensor], past: Turns | Chains
    ) -> Float[Tensor, "B S E"]:
        """What stands in for the next features."""

    def given(self, batch: Batch) -> Float[Tensor, "B S F"]:
        """The verifier's features, or its states at ``taps``."""
        read = batch.states if self.taps else batch.features
        assert read is not None
        return read

    def enter(self, features: Float[Tensor, "B S F"]) -> Float[Tensor, "B S E"]:
        """What the verifier's features, or its states at ``taps``, become before they are read."""
        return features

    def read(self, states: Float[Tensor, "R E"]) -> Float[Tensor, "R E"]:
        """What its head reads of what stands in for features."""
        return states

    def head(self, states: Float[Tensor, "R E"]) -> Float[Tensor, "R N"]:
        """Logits of the head's own tokens."""
        return self.borrowed.capped(F.linear(states, self.rows))

    def predictions(self, batch: Batch) -> Iterator[Predictions]:
        """Turn by turn, each at every row that it has and whose token is there."""
        states, embedded = self.enter(self.given(batch)[:, :-1].float()), self.borrowed.scaled(batch.tokens[:, 1:])
        count = states.shape[1]
        row = torch.arange(count)
        past = Turns()
        for turn in range(1, self.turns + 1):
            states = self.advance(embedded, states, self.rotary.first(count), past)
            there = (row + 2 < batch.lengths[:, None]) & (row >= turn - 1)
            in_reply = (row + 2 >= batch.prompt_lengths[:, None])[there]
            places = flat(there, 1, count + 1)
            yield Predictions(
                f"turn{turn}", self.read(states[there]), self.head, batch, places, in_reply, FADE ** (turn - 1)
            )
            states = F.pad(states, (0, 0, 1, 0))[:, :count]  # row i reads what row i - 1 made

    def replayed(self, replay: Replay) -> list[Float[Tensor, "G N"]]:
        """Its features are the verifier's as far as the text goes, as in drafting; then each block reads itself."""
        assert replay.features is not None
        embedded = self.borrowed.scaled(torch.tensor([replay.tokens[1:]]))
        past = Turns()
        states = self.enter(replay.features[None].float())
        states = self.advance(embedded, states, self.rotary.first(states.shape[1]), past)
        begins = torch.tensor([block.start - 2 for block in replay.blocks])
        longest = max(len(block.drafts) for block in replay.blocks)
        drafts = torch.tensor([[*block.drafts, *[0] * (longest - len(block.drafts))] for block in replay.blocks])
        chains = Chains(past.kept[0], begins)
        states = states[:, begins]
        said = [states]
        for turn in range(1, longest):
            token = self.borrowed.scaled(drafts[None, :, turn - 1])
            states = self.advance(token, states, self.rotary.at(begins + turn), chains)
            said.append(states)
        logits = self.head(self.read(torch.cat(said).transpose(0, 1).flatten(0, 1))).view(len(begins), longest, -1)
        return [rows[: len(block.drafts)] for rows, block in zip(logits, replay.blocks, strict=True)]


def halves(width: int) -> Float[Tensor, "E E2"]:
    """The sum of both inputs: where a fusing matrix begins."""
    return torch.cat((torch.eye(width), torch.eye(width)), 1)


def only(layers: nn.Module) -> Layer:
    """The layer of a list of one."""
    (layer,) = layers.children()
    assert isinstance(layer, Layer)
    return layer


def normed(x: Float[Tensor, "*rows E"], eps: float) -> Float[Tensor, "*rows E"]:
    """At size 1, as a norm without a gain has it."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps)


class EagleStudent(RecurrentStudent):
    """f' = layer(W [e, f] + b), whose attention has no norm; logits = head f'.

    It begins as the sum of its inputs: what the verifier's layer would write is another size, which a norm that this
    head has not would take back. The layer's input gain, over the size of features, goes into what attention reads.
    """

    kind = "eagle"

    def __init__(self, borrowed: Borrowed, layers: list[int], turns: int) -> None:
        super().__init__(borrowed, turns)
        self.config = {**self.config, "bias": True, "fused": False}
        self.layers = nn.ModuleList([Layer(self.spec, input_norm=False)])
        self.fc = nn.Linear(2 * self.spec.hidden_size, self.spec.hidden_size)
        taken = taken_layers(borrowed.folder, layers[-1:])
        own = {name.removeprefix("model."): value for name, value in taken.items() if name.startswith("model.layers")}
        gain = own.pop("layers.0.input_layernorm.weight") / taken["model.norm.weight"].square().mean().sqrt()
        for name in ("q_proj", "k_proj", "v_proj"):
            own[f"layers.0.self_attn.{name}.weight"] = own[f"layers.0.self_attn.{name}.weight"] * gain
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            own[f"layers.0.{name}.weight"] = torch.zeros_like(own[f"layers.0.{name}.weight"])
        zero = torch.zeros(self.spec.hidden_size)
        self.load_state_dict({**own, "fc.weight": halves(self.spec.hidden_size), "fc.bias": zero})

    def advance(
        self, embedded: Tensor, states: Tensor, angles: tuple[Tensor, Tensor], past: Turns | Chains
    ) -> Float[Tensor, "B S E"]:
        return only(self.layers).unrolled(self.fc(torch.cat((embedded, states), -1)), angles, past)


class CopyingStudent(EagleStudent):
    """EAGLE-1 whose attention also reads the token and states ``beside``, as ``drafters.eagle.CopyingHead`` does.

    It begins as EAGLE-1 does, with a further key head and its query heads at zero, which ``training.copier`` sets.
    ``kept`` are the layers whose states the texts have.
    """

    def __init__(
        self, borrowed: Borrowed, layers: list[int], turns: int, beside: tuple[int, ...], kept: tuple[int, ...]
    ) -> None:
        super().__init__(borrowed, layers, turns)
        self.taps = (*beside, AFTER_NORM)
        self.places = [kept.index(tap) for tap in beside]
        heads, shared = self.spec.heads, self.spec.kv_heads
        self.config = {
            **self.config,
            "num_attention_heads": heads + heads // shared,
            "num_key_value_heads": shared + 1,
            "beside": list(beside),
        }
        plain = self.state_dict()
        self.spec = own_spec(self.config, borrowed.spec)
        only(self.layers).self_attn = Attention(self.spec, (2 + len(beside)) * self.spec.hidden_size)
        self.load_state_dict(self.widened(plain))

    def widened(self, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of EAGLE-1 as such a head has them, what is new at zero."""
        own = dict(plain)
        for name, wanted in self.state_dict().items():
            if wanted.dim() == 2:
                rows, columns = (new - old for new, old in zip(wanted.shape, plain[name].shape, strict=True))
                own[name] = F.pad(plain[name], (0, columns, 0, rows))
        return own

    def given(self, batch: Batch) -> Float[Tensor, "B S F"]:
        assert batch.states is not None
        kept = batch.states.split(self.spec.hidden_size, -1)
        return torch.cat((*(kept[place].float() for place in self.places), batch.features.float()), -1)

    def enter(self, features: Float[Tensor, "B S F"]) -> Float[Tensor, "B S F"]:
        *beside, feature = features.split(self.spec.hidden_size, -1)
        return torch.cat((feature, *(normed(state, self.spec.norm_eps) for state in beside)), -1)

    def advance(
        self, embedded: Tensor, states: Tensor, angles: tuple[Tensor, Tensor], past: Turns | Chains
    ) -> Float[Tensor, "B S F"]:
        fused, read = self.reading(embedded, states)
        layer = only(self.layers)
        x = fused + layer.self_attn.unrolled(read, angles, past)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.pad(x, (0, states.shape[-1] - x.shape[-1]))

    def reading(self, embedded: Float[Tensor, "B S E"], states: Float[Tensor, "B S F"]) -> tuple[Tensor, Tensor]:
        """What attention is added to, and what it reads."""
        feature, beside = states.tensor_split([self.spec.hidden_size], -1)
        fused = self.fc(torch.cat((embedded, feature), -1))
        return fused, torch.cat((fused, normed(embedded, self.spec.norm_eps), beside), -1)

    def read(self, states: Float[Tensor, "R F"]) -> Float[Tensor, "R E"]:
        return states[..., : self.spec.hidden_size]


class FusedStudent(RecurrentStudent):
    """EAGLE-3: f' = layer(f) whose attention reads [norm e, norm f], f = W [low, mid, high] at first; head norm f'.

    It begins with the verifier's layer on the highest state, the token unread, all at size 1: with the size of its
    inputs in W, the size of states that grow from layer to layer does not choose how fast a weight is learnt.
    """

    kind = "eagle"

    def __init__(
        self, borrowed: Borrowed, layers: list[int], turns: int, taps: tuple[int, ...], sizes: Float[Tensor, "F"]
    ) -> None:
        super().__init__(borrowed, turns)
        width = self.spec.hidden_size
        self.config = {**self.config, "fused": True, "taps": list(taps)}
        self.taps = taps
        self.midlayer = FusedLayer(self.spec)
        self.fc = Sized(sizes, width)
        self.norm = Norm(width, self.spec.norm_eps)
        taken = taken_layers(borrowed.folder, layers[-1:])
        own = {name.replace("model.layers.0.", "midlayer."): tensor for name, tensor in taken.items()}
        size = float(sizes[-width:].square().mean().sqrt())
        for part in ("q_proj", "k_proj", "v_proj"):
            name = f"midlayer.self_attn.{part}.weight"
            own[name] = torch.cat((torch.zeros_like(own[name]), own[name]), 1)
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            own[f"midlayer.{part}.weight"] = own[f"midlayer.{part}.weight"] / size
        own["midlayer.hidden_norm.weight"] = own["midlayer.input_layernorm.weight"].clone()
        own["midlayer.input_layernorm.weight"] = torch.full((width,), 1 / float(borrowed.embed.square().mean().sqrt()))
        own["norm.weight"] = own.pop("model.norm.weight")
        zeros = torch.zeros(width, (len(taps) - 1) * width)
        self.load_state_dict({**own, "fc.weight": torch.cat((zeros, torch.eye(width) / size), 1)})

    def enter(self, features: Float[Tensor, "B S F"]) -> Float[Tensor, "B S E"]:
        return self.fc(features)

    def advance(
        self, embedded: Tensor, states: Tensor, angles: tuple[Tensor, Tensor], past: Turns | Chains
    ) -> Float[Tensor, "B S E"]:
        return self.midlayer.unrolled(embedded, states, angles, past)

    def read(self, states: Float[Tensor, "R E"]) -> Float[Tensor, "R E"]:
        return self.norm(states)


class MtpStudent(RecurrentStudent):
    """h' = layer(W [norm e, norm h]); logits = head norm h'."""

    kind = "mtp"

    def __init__(self, borrowed: Borrowed, layers: list[int], turns: int) -> None:
        super().__init__(borrowed, turns)
        width, eps = self.spec.hidden_size, self.spec.norm_eps
        self.model = nn.ModuleDict({"layers": nn.ModuleList([Layer(self.spec)])})
        self.enorm, self.hnorm = Norm(width, eps), Norm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = Norm(width, eps)
        own = taken_layers(borrowed.folder, layers[-1:])
        own["shared_head.norm.weight"] = own.pop("model.norm.weight")
        ones = torch.ones(width)
        extra = {"eh_proj.weight": halves(width), "enorm.weight": ones, "hnorm.weight": ones}
        self.load_state_dict({**own, **extra})

    def advance(
        self, embedded: Tensor, states: Tensor, angles: tuple[Tensor, Tensor], past: Turns | Chains
    ) -> Float[Tensor, "B S E"]:
        normed = torch.cat((self.enorm(embedded), self.hnorm(states)), -1)
        return only(self.model["layers"]).unrolled(self.eh_proj(normed), angles, past)

    def read(self, states: Float[Tensor, "R E"]) -> Float[Tensor, "R E"]:
        return self.shared_head.norm(states)  # type: ignore[operator]


class MedusaStudent(nn.Module):
    """``turns`` heads of one residual block each, on the feature alone: head i says token i + 2 behind it."""

    kind = "medusa"

    def __init__(self, borrowed: Borrowed, layers: list[int], turns: int) -> None:
        super().__init__()
        self.borrowed = borrowed
        self.rows = borrowed.rows
        self.config: Mapping[str, Any] = {**{"model": borrowed.name, "medusa_num_heads": turns, "medusa_num_layers": 1}}
        width = borrowed.spec.hidden_size
        for head in range(turns):
            block = nn.Module()
            block.linear = nn.Linear(width, width)
            nn.init.zeros_(block.linear.weight)
            nn.init.zeros_(block.linear.bias)
            self.add_module(str(head), nn.ModuleList([block]))

    def predictions(self, batch: Batch) -> Iterator[Predictions]:
        place = torch.arange(batch.tokens.shape[1])
        features = batch.features.float()
        for head, blocks in enumerate(self.children()):
            ahead = head + 2
            there = place + ahead < batch.lengths[:, None]
            x = features[there]
            (block,) = blocks.children()
            x = x + F.silu(block.linear(x))  # type: ignore[operator]
            in_reply = (place + ahead >= batch.prompt_lengths[:, None])[there]
            places = flat(there, ahead - 1, there.shape[1])
            yield Predictions(f"head{head + 1}", x, self.head, batch, places, in_reply, FADE**head)

    def head(self, states: Float[Tensor, "R E"]) -> Float[Tensor, "R N"]:
        return self.borrowed.capped(F.linear(states, self.rows))

    def replayed(self, replay: Replay) -> list[Float[Tensor, "G N"]]:
        """Each head on the last feature before the block."""
        assert replay.features is not None
        begins = torch.tensor([block.start - 2 for block in replay.blocks])
        features = replay.features[begins].float()
        said = []
        for blocks in self.children():
            (block,) = blocks.children()
            said.append(self.head(features + F.silu(block.linear(features))))  # type: ignore[operator]
        return [rows[: len(one.drafts)] for rows, one in zip(torch.stack(said, 1), replay.blocks, strict=True)]


def small(borrowed: Borrowed, layers: list[int], turns: int) -> SmallStudent:
    """As it is: a model of its own has no turns."""
    return SmallStudent(borrowed, layers)


STUDENTS: Mapping[str, Callable[[Borrowed, list[int], int], Any]] = {
    "small_lm": small,
    "eagle": EagleStudent,
    "mtp": MtpStudent,
    "medusa": MedusaStudent,
}
"""By drafter family: made of what is borrowed, the verifier's layers to begin with, and turns or heads."""
