"""A tiny random model with a byte tokenizer: runs every experiment in seconds, says nothing about quality."""

from collections.abc import Callable, Sequence

import torch

from harness.errors import UserError
from harness.model.load import DTYPES, Model
from harness.model.slim import evenly_spaced, read_mask
from harness.model.spec import ModelSpec
from harness.model.tokenizer import ByteTokenizer
from harness.model.transformer import LayerWeights, Transformer, Weights


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
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not known; one of {', '.join(DTYPES)}.")
    if not 0 <= seed < 2**63:
        raise UserError(f"model.seed={seed}: want 0 or more, below 2**63.")
    tokenizer = ByteTokenizer()
    spec = toy_spec(vocab_size=tokenizer.vocab_size, layers=6, max_positions=8192)
    return Model(
        name="toy",
        transformer=random_transformer(spec, seed, DTYPES[dtype]),
        tokenizer=tokenizer,
        slim_mask=evenly_spaced(spec.layers, skip_ratio) if slim_mask is None else read_mask(slim_mask, spec.layers),
        mask_name=f"evenly spaced, skip {skip_ratio}" if slim_mask is None else str(slim_mask),
        slug="toy",
    )


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


def random_transformer(
    spec: ModelSpec, seed: int, dtype: torch.dtype, layer_scale: float = 0.5, head_scale: float = 3.0
) -> Transformer:
    """Random weights. ``layer_scale`` is how much each layer moves the residual stream: small values make a model
    with skipped layers agree often with the whole one. ``head_scale`` is about the spread of the logits.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * scale * shape[-1] ** -0.5
        return drawn.to(dtype)

    def bias(rows: int, wanted: bool) -> torch.Tensor | None:
        return normal(rows, 1, scale=0.3)[:, 0] if wanted else None

    width, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    query, heads = spec.heads * head_dim, spec.heads + 2 * spec.kv_heads
    gain_dtype = torch.promote_types(dtype, torch.float32) if spec.offset_norm else dtype
    ones = torch.ones(width, dtype=gain_dtype)
    added = ones * layer_scale if spec.post_norms else None
    turned = torch.ones(spec.heads + spec.kv_heads, 1, head_dim, dtype=gain_dtype) if spec.qk_norm else None
    layers = tuple(
        LayerWeights(
            attn_norm=ones,
            qkv=normal(heads * head_dim, width, scale=2.0),
            out=normal(width, query, scale=layer_scale),
            mlp_norm=ones,
            gate_up=normal(2 * inner, width, scale=2.0),
            down=normal(width, inner, scale=layer_scale),
            qkv_bias=bias(heads * head_dim, spec.qkv_bias),
            out_bias=bias(width, spec.out_bias),
            gate_up_bias=bias(2 * inner, spec.mlp_bias),
            down_bias=bias(width, spec.mlp_bias),
            qk_norm=turned,
            post_attn_norm=added,
            post_mlp_norm=added,
        )
        for _ in range(spec.layers)
    )
    embed = normal(spec.vocab_size, width) * width**0.5 / (spec.embed_scale or 1.0)
    return Transformer(spec, Weights(embed, layers, ones, normal(spec.vocab_size, width, scale=head_scale)))
