"""The full verifier writes: a batch of sequences in slots, each refilled when its sequence is done."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from harness.model.transformer import Transformer
from harness.sampling import top, widen
from harness.training.batched import Batched
from harness.training.recipe import Frame, Recipe, Request


@dataclass(frozen=True, slots=True)
class Text:
    """A written sequence. ``features``: the verifier's last hidden state, normed, at every token but the last.

    ``states``: where the recipe has taps, its hidden states behind those layers, side by side, at the same tokens.
    """

    index: int
    tokens: tuple[int, ...]
    prompt_length: int
    features: Float[Tensor, "S E"]
    states: Float[Tensor, "S F"] | None = None


@dataclass(slots=True)
class Slot:
    """A sequence in the making; ``done`` counts the tokens that the verifier has processed."""

    request: Request
    draws: random.Random
    tokens: list[int]
    prompt_length: int | None
    done: int = 0
    features: list[Tensor] = field(default_factory=list)

    @property
    def sampling(self) -> bool:
        return self.prompt_length is None or self.request.sampled

    @property
    def begins_line(self) -> bool:
        return self.prompt_length is None and bool(self.request.around) and len(self.tokens) == len(self.request.given)

    def ask(self, behind: Sequence[int]) -> None:
        """The prompt is written: what was shown goes."""
        if self.request.around is None:
            self.tokens += behind
        else:
            before, behind = self.request.around
            self.tokens = [*before, *self.tokens[len(self.request.given) :], *behind]
            self.done = 0
            self.features.clear()
        self.prompt_length = len(self.tokens)


class Writer:
    """Writes requests ``batch`` at a time."""

    def __init__(
        self,
        model: Transformer,
        recipe: Recipe,
        frame: Frame,
        eos_ids: frozenset[int],
        seed: int,
        longest: int,
        line_ends: frozenset[int] = frozenset(),
    ) -> None:
        """``longest``: tokens that stand before what is written, at most, over all requests.

        ``line_ends``: tokens that end a prompt which is a line.
        """
        self.recipe, self.frame, self.eos_ids, self.seed = recipe, frame, eos_ids, seed
        self.line_ends = line_ends | eos_ids
        capacity = longest + recipe.prompt_tokens + len(frame.behind) + recipe.reply_tokens
        self.batched = Batched(model, recipe.batch, capacity, recipe.taps)

    def write(self, requests: Sequence[Request]) -> Iterator[Text]:
        """The sequences in the order in which they are done."""
        waiting = sorted(
            requests, key=lambda request: request.longest, reverse=True
        )  # a step is as long as its longest
        slots: list[Slot | None] = [None] * min(self.recipe.batch, len(requests))
        while waiting or any(slot is not None for slot in slots):
            for place, slot in enumerate(slots):
                if slot is None and waiting:
                    slots[place] = slot = self.start(waiting.pop())
                if slot is not None:
                    self.catch_up(slot, place)
            while slots[-1] is None:
                slots.pop()  # nothing waits for the last places
            features = self.batched.step(
                torch.tensor([[slot.tokens[slot.done] if slot else 0] for slot in slots]),
                torch.tensor([slot.done if slot else 0 for slot in slots]),
            )[:, 0]
            chosen = self.choose(slots, self.batched.head_logits(features[:, : self.batched.spec.hidden_size]))
            for place, (slot, token) in enumerate(zip(list(slots), chosen, strict=True)):
                if slot is not None:
                    slot.features.append(features[place : place + 1])
                    slot.done += 1
                    if (text := self.take(slot, token)) is not None:
                        slots[place] = None
                        yield text

    def start(self, request: Request) -> Slot:
        prompt_length = None if request.writes_prompt else len(request.given)
        return Slot(request, request.random(self.seed), list(request.given), prompt_length)

    def catch_up(self, slot: Slot, place: int) -> None:
        """Process what was given, all but the last token."""
        if (count := len(slot.tokens) - 1 - slot.done) > 0:
            given = torch.tensor([slot.tokens[slot.done : slot.done + count]])
            slot.features.append(self.batched.step(given, torch.tensor([slot.done]), place)[0])
            slot.done += count

    def choose(self, slots: Sequence[Slot | None], logits: Float[Tensor, "B V"]) -> list[int]:
        """The next token of each: the largest, or a draw."""
        chosen: list[int] = top(logits).tolist()
        for place, slot in enumerate(slots):
            if slot is not None and slot.sampling:
                heat = self.recipe.prompt_temperature if slot.prompt_length is None else 1.0
                law = torch.softmax(widen(logits[place]) / heat, -1)
                if slot.begins_line:
                    law[list(self.line_ends)] = 0
                chosen[place] = draw(law, slot.draws.random())
        return chosen

    def take(self, slot: Slot, token: int) -> Text | None:
        """Add ``token``; the text, when it is the last one."""
        request, recipe = slot.request, self.recipe
        if slot.prompt_length is None:
            ended = token in (self.line_ends if request.around else (*self.eos_ids, *self.frame.behind[:1]))
            if not ended or not (request.around or self.frame.behind):
                slot.tokens.append(token)
            if ended or len(slot.tokens) - len(request.given) >= recipe.prompt_tokens:
                slot.ask(self.frame.behind)
            return None
        slot.tokens.append(token)
        done = token in self.eos_ids or len(slot.tokens) - slot.prompt_length >= recipe.reply_tokens
        return self.finished(slot) if done else None

    def finished(self, slot: Slot) -> Text:
        assert slot.prompt_length is not None
        features, states = torch.cat(slot.features).tensor_split([self.batched.spec.hidden_size], dim=-1)
        kept = states.bfloat16() if self.recipe.taps else None  # in float32 they would be large
        return Text(slot.request.index, tuple(slot.tokens), slot.prompt_length, features.clone(), kept)


def draw(probs: Float[Tensor, "V"], uniform: float) -> int:
    """The token at which the running sum passes ``uniform``."""
    return int((probs.cumsum(0) <= uniform * probs.sum()).sum().clamp(max=len(probs) - 1))
