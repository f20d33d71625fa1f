"""Tiny random Hugging Face models of every supported family, and their float64 computation made exact."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.smollm3 import modeling_smollm3

VOCAB = 101
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 640,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {"head_dim": 16, "sliding_window": 8}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_scaled": (
        "llama",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 40, "rope_theta": 500_000.0}},
    ),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_biases": (
        "qwen3",
        {"head_dim": 8, "attention_bias": True, "layer_types": ["full_attention", "sliding_attention"] * 2}
        | {"use_sliding_window": True, "sliding_window": 8, "tie_word_embeddings": True},
    ),
    "gemma2": (
        "gemma2",
        GEMMA | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2_plain": ("gemma2", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "gemma3_biases": ("gemma3_text", GEMMA | {"attention_bias": True, "final_logit_softcapping": 3.0}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral_sliding": ("mistral", {"sliding_window": 8}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "smollm3_sliding": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 8, "attention_bias": True, "mlp_bias": True},
    ),
}
SLIDING = [name for name in CASES if "sliding" in name or "gemma" in name or name == "qwen3_biases"]

LLAMA_LIKE = (
    (modeling_llama, "Llama"),
    (modeling_qwen2, "Qwen2"),
    (modeling_qwen3, "Qwen3"),
    (modeling_mistral, "Mistral"),
    (modeling_smollm3, "SmolLM3"),
)
GEMMA_LIKE = ((modeling_gemma2, "Gemma2"), (modeling_gemma3, "Gemma3"))


def write_reference(name: str, folder: Path) -> PreTrainedModel:
    """A random model of case ``name`` in float64, which has also been saved to ``folder`` in float32."""
    torch.manual_seed(0)
    kind, changes = CASES[name]
    config = AutoConfig.for_model(kind, **{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model.to(torch.float64)


def lift_float32_casts(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """Hugging Face rounds to float32 here and there even in a float64 model; compute that in float64 instead."""

    def norm(self: Any, hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))

    def offset_norm(self: Any, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)

    def rotary(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].to(torch.float64) * hf_frequencies(self, layer_type)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()

    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        assert x.dtype == torch.float64
        return torch.softmax(x, dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    for module, prefix in LLAMA_LIKE:
        monkeypatch.setattr(getattr(module, f"{prefix}RMSNorm"), "forward", norm)
        monkeypatch.setattr(getattr(module, f"{prefix}RotaryEmbedding"), "forward", rotary)
    for module, prefix in GEMMA_LIKE:
        monkeypatch.setattr(getattr(module, f"{prefix}RMSNorm"), "forward", offset_norm)
        monkeypatch.setattr(getattr(module, f"{prefix}RotaryEmbedding"), "forward", rotary)
    embed = model.get_input_embeddings()
    if hasattr(embed, "embed_scale"):
        embed.embed_scale = torch.tensor(model.config.hidden_size**0.5, dtype=torch.float64)


def hf_frequencies(rotary: Any, layer_type: str | None = None) -> Tensor:
    """The frequencies by the library's own functions, in which float32 is made float64."""
    parameters = rotary.config.rope_parameters
    kind = (parameters[layer_type] if layer_type else parameters)["rope_type"]
    function = rotary.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    with patch.object(torch, "float", torch.float64):
        found, scaling = function(rotary.config, layer_type=layer_type)
    assert found.dtype == torch.float64 and scaling == 1.0
    return found


def older_style(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration as releases before transformers 5 wrote it."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = 6
        rope = rope["full_attention"]
    old["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    old["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    if config["model_type"] == "qwen3":
        old["layer_types"] = config["layer_types"]
    return old
