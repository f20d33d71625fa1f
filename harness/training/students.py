"""Drafters while they are trained: their weights, and what they say of a batch beside the verifier's features."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from harness.drafters.weights import own_spec
from harness.errors import UserError
from harness.model.spec import ModelSpec
from harness.training.data import Batch
from harness.training.layers import Layer, Norm, Rotary
from harness.training.replay import Replay, laid_out
from harness.training.verifier import Borrowed, taken_layers


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a student says at some positions of a batch.

    ``states`` is what its head reads, ``head`` makes logits of it. ``places``: positions of the batch, sequence behind
    sequence, from whose features the verifier's own law follows; ``in_reply`` is False where that law is of a prompt's
    token. ``weight`` is the prediction's share in the loss beside the student's others.
    """

    name: str
    states: Float[Tensor, "R E"]
    head: Callable[[Tensor], Tensor]
    batch: Batch
    places: Int[Tensor, "R"]
    in_reply: Bool[Tensor, "R"]
    weight: float = 1.0

    @property
    def logits(self) -> Float[Tensor, "R N"]:
        return self.head(self.states)

    @property
    def features(self) -> Float[Tensor, "R E"]:
        return self.batch.features.flatten(0, 1)[self.places]


def flat(there: Bool[Tensor, "B S"], ahead: int, width: int) -> Int[Tensor, "R"]:
    """Where ``there`` holds, the position ``ahead`` of it in a batch of ``width``, sequence behind sequence."""
    row, place = there.nonzero(as_tuple=True)
    return row * width + place + ahead


class Student(Protocol):
    """``weights`` are what a drafter's folder holds of it, under those names, but for the head's tokens."""

    kind: str
    config: Mapping[str, Any]
    rows: Tensor
    borrowed: Borrowed

    def predictions(self, batch: Batch) -> Iterator[Predictions]: ...

    def replayed(self, replay: Replay) -> list[Float[Tensor, "G N"]]:
        """Its logits where each token of each block was drafted."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Tensor]: ...


class Body(nn.Module):
    """``model.layers`` and ``model.norm`` of a checkpoint."""

    def __init__(self, layers: int, spec: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(spec) for _ in range(layers))
        self.norm = Norm(spec.hidden_size, spec.norm_eps)


def check_plain(spec: ModelSpec) -> None:
    """Raises UserError of a verifier whose layers ``Layer`` cannot be."""
    rope = spec.rope_of(0)
    has = [
        name
        for name, there in (
            ("biases", spec.qkv_bias or spec.out_bias or spec.mlp_bias),
            ("norms of heads", spec.qk_norm),
            ("norms on both sides", spec.post_norms),
            ("offset norms", spec.offset_norm),
            ("sliding windows", any(spec.window_of(index) is not None for index in range(spec.layers))),
            ("layers without rotary embedding", any(spec.rope_of(index) is None for index in range(spec.layers))),
            ("scaled rotary embedding", rope is not None and rope.scaling is not None),
            ("another activation than silu", spec.activation != "silu"),
        )
        if there
    ]
    if has:
        raise UserError(f"drafters are trained for plain Llama models; this one has {', '.join(has)}.")


def layer_config(borrowed: Borrowed, layers: int) -> dict[str, Any]:
    """What a drafter's folder says of ``layers`` layers in the verifier's shape."""
    spec = borrowed.spec
    return {
        "model": borrowed.name,
        "num_hidden_layers": layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
    }


class SmallStudent(nn.Module):
    """A few of the verifier's layers between its embedding and rows of its head, for ``small_lm``."""

    kind = "small_lm"

    def __init__(self, borrowed: Borrowed, layers: list[int]) -> None:
        super().__init__()
        spec = borrowed.spec
        self.config: Mapping[str, Any] = layer_config(borrowed, len(layers))
        self.borrowed = borrowed
        self.rows = borrowed.rows
        self.spec = own_spec(self.config, spec)
        self.rotary = Rotary(self.spec)
        self.model = Body(len(layers), self.spec)
        self.load_state_dict(taken_layers(borrowed.folder, layers))

    def hidden(
        self, tokens: Int[Tensor, "B S"], angles: tuple[Tensor, Tensor], mask: Float[Tensor, "S S"] | None = None
    ) -> Float[Tensor, "B S E"]:
        x = self.borrowed.scaled(tokens)
        for layer in self.model.layers:
            x = layer(x, angles, mask)
        return x

    def head(self, normed: Float[Tensor, "R E"]) -> Float[Tensor, "R N"]:
        return self.borrowed.capped(nn.functional.linear(normed, self.rows))

    def logits(self, hidden: Float[Tensor, "R E"]) -> Float[Tensor, "R N"]:
        return self.head(self.model.norm(hidden))

    def predictions(self, batch: Batch) -> Iterator[Predictions]:
        """At every token but the last, the law of the next one."""
        hidden = self.hidden(batch.tokens, self.rotary.first(batch.tokens.shape[1]))
        there, in_reply = places(batch, 1)
        normed = self.model.norm(hidden[there])
        yield Predictions("next", normed, self.head, batch, flat(there, 0, there.shape[1]), in_reply)

    def replayed(self, replay: Replay) -> list[Float[Tensor, "G N"]]:
        """One forward over a row of all blocks."""
        tokens, positions, mask, spots = laid_out(replay)
        hidden = self.hidden(tokens[None], self.rotary.at(positions), mask)[0]
        return [self.logits(hidden[where]) for where in spots]


def places(batch: Batch, ahead: int) -> tuple[Bool[Tensor, "B S"], Bool[Tensor, "R"]]:
    """Positions that have a token ``ahead`` of them, and of each whether that token is of the continuation."""
    target = torch.arange(batch.tokens.shape[1]) + ahead
    there = target < batch.lengths[:, None]
    return there, (target >= batch.prompt_lengths[:, None])[there]
