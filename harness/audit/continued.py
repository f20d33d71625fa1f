"""What a wrong token cost: the text as it would be had the full verifier gone on in its place. Under no clock."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.audit.records import AuditedOutput, Continuation
from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.model.load import Model
from harness.model.tiers import Tiers
from harness.prompts import Prompt
from harness.sampling import RandomChooser, Sampling

Score = Callable[[Prompt, str], float | None]
"""The audited metric of a text as an answer to a prompt; None where it has no value, or may not be computed."""


def gone_on_by_full(tiers: Tiers, model: Model, prompt: Prompt, kept: Sequence[int], most: int) -> str:
    """The text of ``kept`` output tokens and what the full verifier writes greedily behind them, ``most`` in all.

    A stop string ends the text wherever it begins; one that began within ``kept`` does not end the writing.
    """
    decoder = Decoder(Autoregressive(tiers, Sampling()))
    decoder.prefill((*prompt.ids, *kept))
    stop = StopRule(most - len(kept), model.tokenizer.eos_ids, prompt.stop, model.tokenizer.decode)
    written = decoder.decode(stop, RandomChooser(0, model.transformer.device))
    text = model.tokenizer.decode((*kept, *written.token_ids))
    ends = [place for end in prompt.stop if (place := text.find(end)) >= 0]
    return text[: min(ends)] if ends else text


def with_continuations(
    output: AuditedOutput,
    tokens: Sequence[int],
    tiers: Tiers,
    model: Model,
    prompt: Prompt,
    score: Score,
    first: int,
    most: int,
) -> AuditedOutput:
    """``output``, whose ids are ``tokens``, with a continuation from before each of its ``first`` wrong tokens.

    ``most``: the output tokens that the run allowed.
    """
    found = []
    for token in output.wrong[:first]:
        text = gone_on_by_full(tiers, model, prompt, tokens[: token.position], most)
        found.append(Continuation(token.position, text, score(prompt, text)))
    return replace(output, continuations=tuple(found))
