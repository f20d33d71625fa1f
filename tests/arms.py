"""Every drafter with every method on one small model, for tests that compare ways of running them."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from harness.decode.base import Decoder, Method, StopRule
from harness.decode.block_verification import BlockVerification
from harness.decode.cascade import Cascade, TokenV3
from harness.decode.cascade_sd import CascadeSD
from harness.decode.clasp import CLaSp
from harness.decode.gate import AlwaysEscalate, Strictness
from harness.decode.hierarchical import Hierarchical
from harness.decode.self_slim import SelfSlim
from harness.decode.slim import masked
from harness.decode.speculative import Speculative
from harness.decode.swift import Plan, Swift
from harness.decode.via_sd import ViaSD
from harness.drafters.base import Drafter, TierDrafter
from harness.drafters.early_exit import EarlyExit
from harness.drafters.graft import Graft
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.retrieval import Retrieval
from harness.drafters.self_skip import SelfSkip
from harness.model.load import Model
from harness.model.random_weights import random_transformer
from harness.model.slim import LayerMask
from harness.model.tiers import Tiers
from harness.model.tokenizer import ByteTokenizer
from harness.model.toy import toy_spec
from harness.sampling import RandomChooser, Sampling
from tests.toys import CPU, DrafterFactory, scripted, small_lm

CAPACITY, VOCAB, PROMPT = 96, 97, (1, 2, 3, 1, 2)
DRAFTERS: dict[str, Callable[[Model, Sequence[int]], DrafterFactory]] = {
    "prompt_lookup": lambda model, script: lambda t, s, m: PromptLookup(t, s, m),
    "retrieval": lambda model, script: Retrieval,
    "graft": lambda model, script: partial(Graft, inner=partial(SelfSkip, mask=[0, 2]), retrieval=Retrieval),
    "self_skip": lambda model, script: partial(SelfSkip, mask=[0, 2]),
    "self_slim": lambda model, script: SelfSlim,
    "early_exit": lambda model, script: partial(EarlyExit, layers=2),
    "small_lm": lambda model, script: small_lm(random_transformer(model.transformer.spec, 5, model.transformer.dtype)),
    "scripted": lambda model, script: scripted(script, 0.3, VOCAB, 0),
}
METHODS: dict[str, Callable[[Tiers, Model, DrafterFactory, Sampling], Method]] = {
    "speculative": lambda tiers, model, drafter, sampling: Speculative(tiers, sampling, model, 5, drafter),
    "block_verification": lambda tiers, model, drafter, sampling: Speculative(
        tiers, sampling, model, 5, drafter, rule=BlockVerification
    ),
    "cascade_token_v3": lambda tiers, model, drafter, sampling: Speculative(
        tiers, sampling, model, 5, drafter, rule=partial(Cascade, deferral=TokenV3())
    ),
    "always_escalate": lambda tiers, model, drafter, sampling: ViaSD(
        tiers, sampling, model, 5, drafter, AlwaysEscalate()
    ),
    "via_sd": lambda tiers, model, drafter, sampling: ViaSD(tiers, sampling, model, 5, drafter, Strictness()),
}


def cascade(drafter: DrafterFactory) -> tuple[DrafterFactory, DrafterFactory]:
    """``drafter`` where a cascade has room for it, and something else in the other place."""

    def reviewer(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
        made = drafter(tiers, sampling, model)
        return made if isinstance(made, TierDrafter) else SelfSkip(tiers, sampling, model, mask=[0, 2])

    def innermost(tiers: Tiers, sampling: Sampling, model: Model) -> Drafter:
        made = drafter(tiers, sampling, model)
        return made if made.tier is None else PromptLookup(tiers, sampling, model)

    return reviewer, innermost


NESTED: dict[str, Callable[[Tiers, Model, DrafterFactory, Sampling], Method]] = {
    "hierarchical": lambda tiers, model, drafter, sampling: Hierarchical(
        tiers, sampling, model, 5, drafter, slim_gamma=2, slim_blocks=3
    ),
    # A model of its own reviews here, and whatever has none is the innermost drafter.
    "cascade_sd": lambda tiers, model, drafter, sampling: CascadeSD(
        tiers, sampling, model, 5, *cascade(drafter), lengths=[[3, 2, 2], [2, 2], [3]], slim=masked
    ),
    # These draft by themselves.
    "swift": lambda tiers, model, drafter, sampling: Swift(
        tiers, sampling, model, 5, Plan(skip_ratio=0.25, context=3, bayes_every=None, steps=12, enough=1.0)
    ),
    "clasp": lambda tiers, model, drafter, sampling: CLaSp(tiers, sampling, model, 5),
}
"""Lossless methods with a structure of their own, in blocks of up to 5 tokens as those of ``METHODS``."""


def model_of(seed: int, dtype: torch.dtype) -> Model:
    transformer = random_transformer(toy_spec(vocab_size=VOCAB, layers=4), seed, dtype, 0.5, 2.0)
    return Model("toy", transformer, ByteTokenizer(), LayerMask.of([0, 1, 3], 4), "test")


def tiers_with(model: Model, block: int | None, graphs: bool) -> Tiers:
    return Tiers(model.transformer, model.transformer.new_cache(CAPACITY), block, graphs)


def output(method: Method, seed: int = 0, length: int = 40) -> tuple[int, ...]:
    decoder = Decoder(method)
    decoder.prefill(PROMPT)
    return decoder.decode(StopRule(length), RandomChooser(seed, CPU)).token_ids
