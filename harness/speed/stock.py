"""Decoding by ``transformers``' own ``generate``, greedy: what ours is compared with.

Its side gets what ours has: the checkpoint in the same dtype on the same device and threads, the same prompts as token
ids, the same end-of-sequence ids and length limit, no stop strings. All else is as ``from_pretrained`` and ``generate``
choose it (attention, cache). Not covered: its static cache and its compiled forward.

Time: a stopping criterion, which ``generate`` calls once after every step with all tokens so far, reads the clock when
the first tokens are there. Prefill ends inside ``generate`` and nothing else of it is called once a step whatever the
method: a logits processor also runs in the assistant and on look-up candidates, and a streamer copies every token to
the host.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.timing import Clock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN, PROMPT_LOOKUP, ASSISTANT = "transformers", "transformers + prompt_lookup", "transformers + assistant_model"


class Stock:
    """A checkpoint as ``transformers`` runs it, with an assistant where ``assistant`` is a folder.

    ``gamma`` tokens are drafted a block, always: the assistant's number does not adapt and it stops for no confidence.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        eos_ids: frozenset[int],
        gamma: int,
        max_ngram: int,
        assistant: Path | None = None,
    ) -> None:
        self.model = load(folder, dtype, device)
        self.ends = {"eos_token_id": sorted(eos_ids), "pad_token_id": min(eos_ids)} if eos_ids else {"pad_token_id": 0}
        lookup = {"prompt_lookup_num_tokens": gamma, "max_matching_ngram_size": max_ngram}
        self.methods: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            PLAIN: ({}, {}),
            PROMPT_LOOKUP: (lookup, {}),
        }
        if assistant is not None:
            self.methods[ASSISTANT] = ({}, {"assistant_model": self.drafting(load(assistant, dtype, device), gamma)})

    @staticmethod
    def drafting(assistant: "PreTrainedModel", gamma: int) -> "PreTrainedModel":
        """How an assistant drafts stands in its own generation config."""
        from transformers import GenerationConfig

        assistant.generation_config = GenerationConfig(
            num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        return assistant

    def decode(
        self, method: str, prompt: Sequence[int], max_new_tokens: int, clock: Clock, first_only: bool = False
    ) -> tuple[tuple[int, ...], int, float, float]:
        """Token ids, how many came first, seconds until they were there, seconds from then to the end.

        ``first_only`` stops after the first forward, which has the length that it has in a whole decoding.
        """
        from transformers import GenerationConfig, StoppingCriteriaList

        settings, models = self.methods[method]
        chosen = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, **self.ends, **settings)
        watch = FirstTokens(clock, stop=first_only)
        ids = torch.tensor([list(prompt)], device=self.model.device)
        with quiet():
            begun = clock()
            found = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=chosen,
                stopping_criteria=StoppingCriteriaList([watch]),
                **models,
            )
            ended = clock()
        token_ids = tuple(found[0, len(prompt) :].tolist())
        assert watch.time is not None
        return token_ids, watch.length - len(prompt), watch.time - begun, ended - watch.time


class FirstTokens:
    """A stopping criterion that notes when it was first asked, and about how many tokens; stops then or never."""

    def __init__(self, clock: Clock, stop: bool) -> None:
        self.clock = clock
        self.stop = stop
        self.time: float | None = None
        self.length = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.time is None:
            self.time, self.length = self.clock(), input_ids.shape[1]
        return torch.full((input_ids.shape[0],), self.stop, device=input_ids.device)


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> "PreTrainedModel":
    """The model of a local folder, ready to generate. Its own generation config is set aside: ours decides all."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    model.generation_config = GenerationConfig()
    return model.to(device).eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the advice that ``generate`` logs on how its own assisted decoding calls it."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
