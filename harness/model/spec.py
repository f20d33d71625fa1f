"""The shape of a decoder-only transformer, read from a Hugging Face configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError

SUPPORTED = ("llama",)
"""Values of ``model_type`` whose architecture the transformer implements."""

NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the transformer must know besides its weights. Sizes are counts, angles in radians per position."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_head: bool

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str) -> "ModelSpec":
        """Read ``config.json`` of checkpoint ``name``.

        Raises:
            UserError: another architecture, or a Llama feature that is not implemented; never a silent approximation.
        """
        kind = config.get("model_type")
        if kind not in SUPPORTED:
            raise UserError(f"{name}: architecture {kind!r} is not supported; supported: {', '.join(SUPPORTED)}.")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        for key, got, want in (
            ("rope_type", rope_type, "default"),
            ("hidden_act", config.get("hidden_act", "silu"), "silu"),
            ("attention_bias", config.get("attention_bias", False), False),
            ("mlp_bias", config.get("mlp_bias", False), False),
        ):
            if got != want:
                raise UserError(f"{name}: {key}={got!r} is not supported; only {want!r} is.")
        absent = [key for key in NEEDED if key not in config]
        if absent:
            raise UserError(f"{name}: config.json has no {', '.join(absent)}.")
        heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
            max_positions=config["max_position_embeddings"],
            tied_head=bool(config.get("tie_word_embeddings", False)),
        )
