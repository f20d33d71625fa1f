"""A tiny random model with a byte tokenizer: runs every experiment in seconds, says nothing about quality."""

from collections.abc import Callable, Sequence

from harness.model.load import Model, known_dtype
from harness.model.random_weights import random_transformer
from harness.model.slim import mask_or_evenly_spaced
from harness.model.spec import ModelSpec
from harness.model.tokenizer import ByteTokenizer


def toy_model(
    dtype: str = "float64",
    seed: int = 0,
    skip_ratio: float = 0.3,
    slim_mask: str | Sequence[int] | None = None,
    notify: Callable[[str], None] | None = None,
) -> Model:
    """A random six-layer model. Its slim tier keeps ``slim_mask``, or skips evenly spaced layers at ``skip_ratio``.

    ``notify`` is there for callers that load any model; making this one is too quick to report.
    """
    kind = known_dtype(dtype)
    tokenizer = ByteTokenizer()
    spec = toy_spec(vocab_size=tokenizer.vocab_size, layers=6, max_positions=8192)
    mask, mask_name = mask_or_evenly_spaced(slim_mask, spec.layers, skip_ratio)
    return Model("toy", random_transformer(spec, seed, kind), tokenizer, mask, mask_name, slug="toy")


def toy_spec(vocab_size: int = 97, layers: int = 4, max_positions: int = 512) -> ModelSpec:
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=32,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        max_positions=max_positions,
        tied_head=False,
    )
