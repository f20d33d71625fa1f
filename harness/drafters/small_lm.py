"""A smaller checkpoint with the same tokenizer drafts."""

from functools import lru_cache
from pathlib import Path

from harness.drafters.base import TierDrafter
from harness.errors import UserError
from harness.model.load import Model, load_tokenizer, load_transformer
from harness.model.tiers import Tiers
from harness.model.tokenizer import Tokenizer
from harness.model.transformer import Transformer
from harness.sampling import Sampling


class SmallLM(TierDrafter):
    """Any checkpoint folder of a supported architecture whose tokenizer is the full verifier's.

    Embedding and head may be padded to other sizes than the full verifier's: both heads end at the last token the
    tokenizer knows.

    Raises:
        UserError: no such folder, or another tokenizer.
    """

    def __init__(self, tiers: Tiers, sampling: Sampling, model: Model, path: str, dtype: str | None = None) -> None:
        folder = Path(path).expanduser()
        full = model.transformer
        if not folder.is_dir():
            raise UserError(
                f"drafter.path={path!r} is not a folder; give a checkpoint with config.json and *.safetensors."
            )
        small, tokenizer = load_small(folder, dtype or str(full.dtype).removeprefix("torch."), str(full.device))
        if tokenizer.digest != model.tokenizer.digest:
            raise UserError(
                f"drafter {path!r} has another tokenizer than {model.name!r} ({tokenizer.vocab_size} and "
                f"{model.tokenizer.vocab_size} tokens); token ids would not mean the same."
            )
        super().__init__(f"small_lm({folder.name})", tiers.independent("draft", small), sampling)


@lru_cache(maxsize=2)
def load_small(folder: Path, dtype: str, device: str) -> tuple[Transformer, Tokenizer]:
    """Weights and tokenizer, read once for all arms that draft with them."""
    transformer = load_transformer(folder, dtype, device)
    tokenizer = load_tokenizer(folder, transformer.spec)
    return transformer.with_vocabulary(tokenizer.vocab_size), tokenizer
