"""A checkpoint folder -> weights in our transformer, tokenizer, and the slim tier's layer mask."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.errors import UserError
from harness.model.embedded import NAME, embedded_folder
from harness.model.slim import LayerMask, read_mask
from harness.model.spec import ModelSpec
from harness.model.tokenizer import HFTokenizer, Tokenizer
from harness.model.transformer import LayerWeights, Transformer, Weights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Model:
    """A full verifier ready to run, with its tokenizer and the layers its slim tier keeps.

    ``name`` goes into every record, ``slug`` into file names; ``mask_name`` says where the mask came from.
    """

    name: str
    transformer: Transformer
    tokenizer: Tokenizer
    slim_mask: LayerMask | None
    mask_name: str | None
    slug: str = "model"


def load_model(
    full: str = "embedded",
    slim_mask: str | Sequence[int] | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    threads: int | None = None,
    notify: Callable[[str], None] | None = None,
) -> Model:
    """Load the full verifier.

    Args:
        full: ``embedded``, or the folder of a Llama-shaped checkpoint (config.json, safetensors, tokenizer.json).
        slim_mask: mask file or kept layers of the slim tier; None where no method needs one.
        threads: CPU threads; None leaves torch's choice.
        notify: called with a line for each slow step.

    Raises:
        UserError: anything missing, unsupported or mismatched.
    """
    if threads is not None:
        if threads < 1:
            raise UserError(f"model.threads={threads}: want at least 1, or null for torch's choice.")
        torch.set_num_threads(threads)
    folder = embedded_folder(notify) if full == "embedded" else Path(full).expanduser()
    transformer = load_transformer(folder, dtype, device)
    tokenizer = load_tokenizer(folder, transformer.spec)
    mask = None if slim_mask is None else read_mask(slim_mask, transformer.spec.layers)
    return Model(
        name=NAME if full == "embedded" else str(folder),
        transformer=transformer.with_vocabulary(tokenizer.vocab_size),
        tokenizer=tokenizer,
        slim_mask=mask,
        mask_name=None if mask is None else str(slim_mask),
        slug="embedded" if full == "embedded" else folder.resolve().name,
    )


def load_transformer(folder: Path, dtype: str, device: str = "auto") -> Transformer:
    """Read ``config.json`` and the safetensors of ``folder``; tensors go to the device one at a time.

    Raises:
        UserError: a missing file, a missing, extra or misshapen weight, an unknown dtype or device.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not known; one of {', '.join(DTYPES)}.")
    place = resolve_device(device)
    spec = ModelSpec.from_hf(read_json(folder / "config.json"), str(folder))
    tensors = read_tensors(folder, DTYPES[dtype], place)

    def take(name: str, *shape: int) -> Tensor:
        if name not in tensors:
            raise UserError(f"{folder}: weight {name!r} is missing from the safetensors files.")
        tensor = tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise UserError(f"{folder}: weight {name!r} has shape {tuple(tensor.shape)}, config.json says {shape}.")
        return tensor

    def layer(index: int) -> LayerWeights:
        base, width, inner = f"model.layers.{index}.", spec.hidden_size, spec.intermediate_size
        query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        return LayerWeights(
            attn_norm=take(base + "input_layernorm.weight", width),
            qkv=torch.cat(
                [take(f"{base}self_attn.{n}_proj.weight", r, width) for n, r in (("q", query), ("k", key), ("v", key))]
            ),
            out=take(base + "self_attn.o_proj.weight", width, query),
            mlp_norm=take(base + "post_attention_layernorm.weight", width),
            gate_up=torch.cat([take(f"{base}mlp.{n}_proj.weight", inner, width) for n in ("gate", "up")]),
            down=take(base + "mlp.down_proj.weight", width, inner),
        )

    embed = take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(layer(index) for index in range(spec.layers))
    norm = take("model.norm.weight", spec.hidden_size)
    if spec.tied_head:
        tensors.pop("lm_head.weight", None)
        head = embed
    else:
        head = take("lm_head.weight", spec.vocab_size, spec.hidden_size)
    extra = [name for name in tensors if not name.endswith("rotary_emb.inv_freq")]
    if extra:
        raise UserError(f"{folder}: {len(extra)} weights have no place in this architecture, first {extra[0]!r}.")
    return Transformer(spec, Weights(embed, layers, norm, head))


def resolve_device(device: str) -> torch.device:
    """``auto`` is the first CUDA device where there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise UserError(f"device {device!r} is not known; use auto, cpu, cuda or cuda:N.")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device!r} was asked for, but this machine has no usable CUDA device; use device=cpu.")
    return place


def read_tensors(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Every tensor of the checkpoint (one file or the shards of an index), cast and placed as it is read."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise UserError(f"{index} has no 'weight_map'; it is no safetensors index.")
        names = sorted(set(shards.values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} does not exist; only safetensors checkpoints are read.")
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    tensors[key] = file.get_tensor(key).to(device=device, dtype=dtype)
        except SafetensorError as error:
            raise UserError(f"{folder / name} cannot be read ({error}): not a whole safetensors file.") from error
    return tensors


def load_tokenizer(folder: Path, spec: ModelSpec) -> Tokenizer:
    """The folder's tokenizer, whose ids must all have a row in the embedding (rows may be padded beyond them)."""
    stop: int | list[int] | None = None
    for name in ("generation_config.json", "config.json"):
        if stop is None and (folder / name).is_file():
            stop = read_json(folder / name).get("eos_token_id")
    eos_ids = frozenset(stop if isinstance(stop, list) else [] if stop is None else [stop])
    tokenizer = HFTokenizer(folder, eos_ids)
    if tokenizer.vocab_size > spec.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {spec.vocab_size} rows."
        )
    return tokenizer


def read_json(path: Path) -> dict:
    if not path.is_file():
        raise UserError(f"{path} does not exist; want a checkpoint folder with config.json and *.safetensors.")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object; want what save_pretrained writes.")
    return found
