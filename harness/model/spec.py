"""The shape of a decoder-only transformer, read from a Hugging Face configuration."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None, "attention_bias": False, "mlp_bias": False},
    "qwen2": {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {
        "head_dim": 128,
        "attention_bias": False,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "gemma2": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "mistral": {"head_dim": None, "sliding_window": 4096},
    "smollm3": {
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
}
"""For each ``model_type`` the keys that it reads beyond the common ones, with what holds where config.json is silent.

As the classes of ``transformers`` have it. A key of another family means nothing here and is not looked at.
"""

COMMON = {"tie_word_embeddings": False, "rope_theta": 10_000.0, "hidden_act": "silu"}
NEEDED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("rms_norm_eps", "max_position_embeddings"),
)
COUNTS = (*(key for key in NEEDED if key != "rms_norm_eps"), "num_key_value_heads", "head_dim")
"""Keys that hold a whole number of at least 1 wherever they hold anything."""

SUPPORTED = tuple(DEFAULTS)
"""Values of ``model_type`` whose architecture the transformer implements."""

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
NO_SUCH_FEATURE: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("quantization_config", (None,)),
    ("use_bidirectional_attention", (None, False)),
    ("partial_rotary_factor", (None, 1, 1.0)),
)
"""Keys that change the function in ways not implemented, each with the values that leave it as it is."""


SCALINGS = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
"""The ``rope_type`` values that are implemented and the parameters that each must have."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts.

    ``linear`` divides them all by ``factor``. ``llama3`` divides those that turn less than ``low_freq_factor`` times
    within ``original_positions``, leaves those that turn more than ``high_freq_factor`` times, and goes over from one
    to the other between.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding with base ``theta``."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the transformer must know besides its weights. Sizes are counts, angles in radians per position.

    ``window`` is how many keys a query of the ``sliding`` layers sees,
    its own included; ``local_rope_theta`` is the base of those layers where it is another. ``no_rope`` layers do not
    turn at all. ``offset_norm``: the gain of a norm is one plus its weight, applied before the cast. ``post_norms``:
    what a layer adds is normed too. ``attn_softcap`` c bounds attention scores by c tanh(x / c), ``logit_softcap``
    the logits. ``attn_scale`` multiplies the scores; None, head_dim ** -0.5.
    """

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
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    no_rope: frozenset[int] = frozenset()
    window: int | None = None
    sliding: frozenset[int] = frozenset()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    offset_norm: bool = False
    post_norms: bool = False
    activation: str = "silu"
    embed_scale: float | None = None
    attn_scale: float | None = None
    attn_softcap: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")
        if self.sliding and (self.window is None or self.window < 1):
            raise ValueError(f"sliding layers need a window of at least 1, got {self.window}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}")

    def rope_of(self, layer: int) -> Rope | None:
        """How the heads of ``layer`` turn; None, not at all."""
        if layer in self.no_rope:
            return None
        if layer in self.sliding and self.local_rope_theta is not None:
            return Rope(self.local_rope_theta)
        return Rope(self.rope_theta, self.rope_scaling)

    def window_of(self, layer: int) -> int | None:
        """How many keys a query of ``layer`` sees, its own included; None, all before it."""
        return self.window if layer in self.sliding else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str) -> "ModelSpec":
        """Read ``config.json`` of checkpoint ``name``.

        Raises:
            UserError: another architecture, a feature that is not implemented, or a size that is missing or makes no
                sense; never a silent approximation.
        """
        kind = config.get("model_type")
        if kind not in SUPPORTED:
            raise UserError(f"{name}: architecture {kind!r} is not supported; supported: {', '.join(SUPPORTED)}.")
        absent = [key for key in NEEDED if key not in config]
        if absent:
            raise UserError(f"{name}: config.json has no {', '.join(absent)}.")
        for key in COUNTS:
            if (got := config.get(key)) is not None and (type(got) is not int or got < 1):
                raise UserError(f"{name}: {key}={got!r} makes no sense: want a whole number of at least 1.")
        try:
            return _read(kind, {**COMMON, **DEFAULTS[kind], **config}, name)
        except KeyError as error:
            raise UserError(f"{name}: config.json has no {error.args[0]}.") from error
        except ValueError as error:
            raise UserError(f"{name}: {error}.") from error


def _read(kind: str, config: Mapping[str, Any], name: str) -> ModelSpec:
    """The spec of one of the supported families. ``config`` has the family's defaults filled in."""
    gemma = kind in ("gemma2", "gemma3_text")
    activation = "hidden_activation" if gemma else "hidden_act"
    for key, accepted in (*NO_SUCH_FEATURE, (activation, ACTIVATIONS)):
        _accept(name, key, config.get(key), accepted)
    if kind == "gemma2":  # transformers knows no other pattern
        _accept(name, "sliding_window_pattern", config["sliding_window_pattern"], (2,))
    if kind == "gemma3_text":  # transformers reads the key and does nothing with it
        _accept(name, "attn_logit_softcapping", config.get("attn_logit_softcapping"), (None,))
    layers, heads, width = config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]
    rope, local_theta = _ropes(kind, config, name)
    no_rope = _no_rope(kind, config, name)
    window, sliding = _windows(kind, config, no_rope, name)
    biased = "attention_bias" in DEFAULTS[kind] and bool(config["attention_bias"])
    return ModelSpec(
        vocab_size=config["vocab_size"],
        hidden_size=width,
        layers=layers,
        heads=heads,
        kv_heads=config["num_key_value_heads"] or heads,
        head_dim=config.get("head_dim") or width // heads,
        intermediate_size=config["intermediate_size"],
        norm_eps=float(config["rms_norm_eps"]),
        rope_theta=rope.theta,
        max_positions=config["max_position_embeddings"],
        tied_head=bool(config["tie_word_embeddings"]),
        rope_scaling=rope.scaling,
        local_rope_theta=local_theta,
        no_rope=no_rope,
        window=window,
        sliding=sliding,
        qkv_bias=biased or kind == "qwen2",
        out_bias=biased,
        mlp_bias="mlp_bias" in DEFAULTS[kind] and bool(config["mlp_bias"]),
        qk_norm=kind in ("qwen3", "gemma3_text"),
        offset_norm=gemma,
        post_norms=gemma,
        activation=config[activation],
        embed_scale=math.sqrt(width) if gemma else None,
        attn_scale=config["query_pre_attn_scalar"] ** -0.5 if gemma else None,
        attn_softcap=_softcap(config["attn_logit_softcapping"]) if kind == "gemma2" else None,
        logit_softcap=_softcap(config.get("final_logit_softcapping")) if gemma else None,
    )


def _softcap(given: float | None) -> float | None:
    return None if given is None else float(given)


def _accept(name: str, key: str, got: Any, accepted: tuple[Any, ...]) -> None:
    if got not in accepted:
        choice = " or ".join(repr(value) for value in accepted)
        raise UserError(f"{name}: {key}={got!r} is not supported; only {choice} is.")


def _ropes(kind: str, config: Mapping[str, Any], name: str) -> tuple[Rope, float | None]:
    """The rotary embedding, and the base of the sliding layers where they have their own.

    Written as ``rope_parameters`` (for Gemma3 one set for each type of layer) or, before transformers 5, as
    ``rope_theta`` and ``rope_scaling`` (for Gemma3 with ``rope_local_base_freq``).
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if kind != "gemma3_text":
        return _rope(given, config["rope_theta"], config, name), None
    nested = config.get("rope_parameters") or {}
    full = {**(nested.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    local = nested.get("sliding_attention") or {}
    turned = _rope(local, config["rope_local_base_freq"], config, name)
    _accept(name, "rope_scaling of sliding layers", turned.scaling, (None,))
    return _rope(full, config["rope_theta"], config, name), turned.theta


def _rope(given: Mapping[str, Any], theta: float, config: Mapping[str, Any], name: str) -> Rope:
    for key, value in given.items():
        if isinstance(value, Mapping):
            raise UserError(f"{name}: rope_parameters of {key!r} alone are not supported for this architecture.")
    kind = given.get("rope_type") or given.get("type") or "default"
    _accept(name, "rope_type", kind, tuple(SCALINGS))
    _accept(name, "partial_rotary_factor", given.get("partial_rotary_factor"), (None, 1, 1.0))
    theta = float(given.get("rope_theta") or theta)
    if kind == "default":
        return Rope(theta)
    original = 0
    if kind == "llama3":
        inner = given.get("original_max_position_embeddings") or config["max_position_embeddings"]
        original = int(config.get("original_max_position_embeddings") or inner)
    parameters = {key: float(given[key]) for key in SCALINGS[kind]}
    return Rope(theta, RopeScaling(kind, original_positions=original, **parameters))


def _no_rope(kind: str, config: Mapping[str, Any], name: str) -> frozenset[int]:
    """Layers of SmolLM3 that do not turn: ``no_rope_layers`` has a 0 where that is so, a 1 elsewhere."""
    if kind != "smollm3":
        return frozenset()
    layers, turns = config["num_hidden_layers"], config.get("no_rope_layers")
    if turns is None:
        interval = config["no_rope_layer_interval"]
        turns = [(index + 1) % interval for index in range(layers)]
    if len(turns) < layers:
        raise UserError(f"{name}: no_rope_layers has {len(turns)} entries for {layers} layers.")
    return frozenset(index for index in range(layers) if not turns[index])


def _windows(
    kind: str, config: Mapping[str, Any], no_rope: frozenset[int], name: str
) -> tuple[int | None, frozenset[int]]:
    """The sliding window and the layers that have it, from ``layer_types`` or from each family's own older keys."""
    layers = config["num_hidden_layers"]
    window = config["sliding_window"] if "sliding_window" in DEFAULTS[kind] else None
    if "use_sliding_window" in DEFAULTS[kind] and not config["use_sliding_window"]:
        window = None
    types = config.get("layer_types")
    if kind in ("llama", "mistral"):  # the classes of transformers do not look at it
        for got in types or ():
            _accept(name, "layer_types entry", got, ("full_attention",) if window is None else ("sliding_attention",))
        slides: Iterable[int] = () if window is None else range(layers)
    elif types is not None:
        for got in types:
            _accept(name, "layer_types entry", got, ("full_attention", "sliding_attention"))
        if len(types) < layers:
            raise UserError(f"{name}: layer_types has {len(types)} entries for {layers} layers.")
        slides = [index for index in range(layers) if types[index] == "sliding_attention"]
    elif kind in ("gemma2", "gemma3_text"):
        slides = [index for index in range(layers) if (index + 1) % config["sliding_window_pattern"]]
    elif window is None:
        slides = ()
    else:
        slides = no_rope if kind == "smollm3" else range(config["max_window_layers"], layers)
    sliding = frozenset(slides)
    if sliding and window is None:
        raise UserError(f"{name}: layer_types has sliding_attention, but no sliding window is set or used.")
    return (window if sliding else None), sliding
