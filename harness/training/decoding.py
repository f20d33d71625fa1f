"""The drafter at work: how long its accepted runs are, and what verification said of its blocks, for ``draft_opd``."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from jaxtyping import Int
from torch import Tensor

from harness.decode.accept import first_stop, keep_probability
from harness.decode.base import Decoder, StopRule
from harness.decode.speculative import Speculative
from harness.drafters.base import Drafter
from harness.drafters.eagle import Eagle
from harness.drafters.medusa import Medusa
from harness.drafters.mtp import Mtp
from harness.drafters.small_lm import SmallLM
from harness.drafters.weights import HEAD_TOKENS, save_drafter
from harness.model.load import Model
from harness.model.tiers import GRAPH_STEP, Tiers
from harness.model.transfer import to_host
from harness.sampling import RandomChooser, Sampling
from harness.training.replay import DraftedBlock, Replay
from harness.training.students import Student

FAMILIES: dict[str, Callable[..., Drafter]] = {
    "small_lm": SmallLM,
    "eagle": partial(Eagle, text_tokens=0),
    "mtp": partial(Mtp, text_tokens=0),
    "medusa": Medusa,
}
"""Who drafts with the folder of a kind; as in training, no token is said but those of its list."""


NO_CARD = {"command": "", "data": "", "seed": 0, "seconds": 0.0, "held_out": {}}
"""Of a drafter in the middle of its training."""


@contextmanager
def drafter_folder(student: Student) -> Iterator[Path]:
    """The student as it is now, as a folder that a drafter reads; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="harness-drafter-") as folder:
        weights = {**student.state_dict(), HEAD_TOKENS: student.borrowed.head_tokens}
        save_drafter(Path(folder), student.kind, student.config, weights, NO_CARD)
        yield Path(folder)


def new_tiers(model: Model, longest: int, room: int) -> Tiers:
    return Tiers(model.transformer, model.transformer.new_cache(longest + room + GRAPH_STEP))


def accept_length(
    model: Model, kind: str, folder: Path, prompts: Sequence[Sequence[int]], gamma: int, new_tokens: int
) -> float:
    """Tokens emitted per block, bonus included, over greedy decoding of all prompts with the drafter in ``folder``."""
    tiers = new_tiers(model, max(map(len, prompts)), new_tokens + gamma + 1)
    method = Speculative(tiers, Sampling(), model, gamma, partial(FAMILIES[kind], path=str(folder)))
    decoder = Decoder(method)
    tokens = blocks = 0
    for prompt in prompts:
        decoder.prefill(prompt)
        made = decoder.decode(StopRule(new_tokens, model.tokenizer.eos_ids), RandomChooser(0, model.transformer.device))
        tokens += len(made.token_ids)
        blocks += len(made.blocks)
    return tokens / blocks


def rollout(
    model: Model,
    drafter: Callable[[Tiers, Sampling, Model], Drafter],
    prompt: Sequence[int],
    gamma: int,
    new_tokens: int,
    head_tokens: Int[Tensor, "N"],
) -> Replay:
    """Greedy speculative decoding as in ``decode.speculative``, noting what the verifier said of rejected blocks."""
    tiers = new_tiers(model, len(prompt), new_tokens + gamma + 1)
    sampling, chooser = Sampling(), RandomChooser(0, model.transformer.device)
    proposer = drafter(tiers, sampling, model)
    tiers.prefill(prompt)
    tokens = list(prompt)
    blocks: list[DraftedBlock] = []
    while len(tokens) - len(prompt) < new_tokens and tokens[-1] not in model.tokenizer.eos_ids:
        draft = proposer.draft(tokens, gamma, chooser)
        logits = tiers.full.forward(tokens, len(draft) + 1, draft.tokens)
        law = sampling.law(logits)
        stop = first_stop(chooser.accept(keep_probability(law, draft)))
        *drafts, kept, last = to_host(draft.tokens, stop, law.replace(draft.probs, draft.tokens, stop, chooser))
        if kept < len(drafts):
            noted = logits[: len(drafts), head_tokens].float().clone()
            blocks.append(DraftedBlock(len(tokens), tuple(drafts), kept, noted))
        tokens += [*drafts[:kept], last]
        if ends := [place for place in range(len(prompt), len(tokens)) if tokens[place] in model.tokenizer.eos_ids]:
            del tokens[ends[0] + 1 :]
        tiers.rollback(len(tokens) - 1)
    features = tiers.full.features[: len(tokens) - 1].clone() if tiers.full.taps else None
    return Replay(tuple(tokens), tuple(blocks), features)
