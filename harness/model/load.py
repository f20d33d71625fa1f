"""A checkpoint folder -> weights in our transformer, tokenizer, and the slim tier's layer mask."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness.errors import UserError
from harness.model.checkpoint import HUB_ID, Checkpoint, hub_folder, local_folder, read_json, weight_files
from harness.model.embedded import NAME, embedded_folder
from harness.model.linear import pack
from harness.model.slim import Mask, read_mask
from harness.model.spec import ModelSpec
from harness.model.tokenizer import HFTokenizer, Tokenizer
from harness.model.transformer import LayerWeights, Transformer, Weights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

META = torch.device("meta")
"""Where tensors have a shape and no memory: a model there can be counted and built upon, and never run."""


@dataclass(frozen=True, slots=True)
class Model:
    """A full verifier ready to run, with its tokenizer and the layers its slim tier keeps.

    ``name`` goes into every record, ``slug`` into file names; ``mask_name`` says where the mask came from; ``folder``
    is the checkpoint's, None of a model that was made here.
    """

    name: str
    transformer: Transformer
    tokenizer: Tokenizer
    slim_mask: Mask | None
    mask_name: str | None
    slug: str = "model"
    folder: Path | None = None


def load_model(
    full: str = "embedded",
    slim_mask: str | Sequence[int] | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    threads: int | None = None,
    notify: Callable[[str], None] | None = None,
    revision: str | None = None,
    devices: Sequence[str] | None = None,
) -> Model:
    """Load the full verifier.

    Args:
        full: ``embedded``, a checkpoint folder (config.json, safetensors, tokenizer files), or a hub id (org/name).
        slim_mask: mask file or kept layers of the slim tier; None where no method needs one.
        device: where all of it lies; ``devices`` instead spreads the layers evenly over several, in order.
        threads: CPU threads; None leaves torch's choice.
        notify: called with a line for each slow step.
        revision: branch, tag or commit of a hub id; None is main.

    Raises:
        UserError: anything missing, unsupported or mismatched.
    """
    set_threads(threads)
    places = one_or_several(device, devices)
    folder, name = find_checkpoint(full, revision, notify)
    transformer = load_transformer(folder, dtype, places)
    tokenizer = load_tokenizer(folder, transformer.spec)
    mask = None if slim_mask is None else read_mask(slim_mask, transformer.spec.layers)
    return Model(
        name=name,
        transformer=transformer.with_vocabulary(tokenizer.vocab_size),
        tokenizer=tokenizer,
        slim_mask=mask,
        mask_name=None if mask is None else str(slim_mask),
        slug=slug_of(full),
        folder=folder,
    )


def slug_of(full: str) -> str:
    """What names files of the model ``full``: a folder's name, of a hub id what stands behind the organisation."""
    return "embedded" if full == "embedded" else Path(full).expanduser().resolve().name


def find_checkpoint(full: str, revision: str | None, notify: Callable[[str], None] | None) -> tuple[Path, str]:
    """The folder of ``full``, complete, and the name it goes by in records.

    Of a hub id the weights are fetched only when the configuration turns out to be of a supported model.
    """
    folder = None if full == "embedded" else local_folder(full)
    if revision is not None and (full == "embedded" or folder is not None):
        raise UserError(f"model.revision={revision} is for a hub id; model.full={full!r} has no revisions.")
    if full == "embedded":
        return embedded_folder(notify), NAME
    if folder is not None:
        return folder, str(folder)
    if not HUB_ID.fullmatch(full):
        raise UserError(
            f"{Path(full) / 'config.json'} does not exist: model.full={full!r} is neither embedded, nor a checkpoint "
            "folder, nor a hub id like org/name."
        )
    folder = hub_folder(full, revision or "main")
    commit = folder.name
    read_spec(folder)
    if notify is not None:
        notify(f"fetching the weights of {full}, commit {commit[:12]}, unless the hub's cache has them")
    return hub_folder(full, commit, tuple(weight_files(folder))), f"{full}@{commit[:12]}"


def read_spec(folder: Path) -> ModelSpec:
    return ModelSpec.from_hf(read_json(folder / "config.json"), str(folder))


def load_transformer(folder: Path, dtype: str, device: str | Sequence[str] = "auto") -> Transformer:
    """Read ``config.json`` and the safetensors of ``folder``, each tensor straight into its place.

    ``device`` is one, or several over which the layers are spread evenly; on ``meta`` the headers alone are read.

    Raises:
        UserError: a missing file, a missing, extra or misshapen weight, an unknown dtype or device.
    """
    kind = known_dtype(dtype)
    places = [META] if device == META.type else resolve_devices(device)
    spec = read_spec(folder)
    with Checkpoint(folder) as checkpoint:
        return Transformer(spec, WeightReader(spec, checkpoint, kind).read(places))


def bare_transformer(spec: ModelSpec, dtype: torch.dtype) -> Transformer:
    """A model of this shape without weights, on the meta device."""
    table = torch.empty((spec.vocab_size, spec.hidden_size), dtype=dtype, device=META)

    def layer(index: int) -> LayerWeights:
        shapes = dict(part for stack in matrices(spec, index).values() for part in stack)
        shapes |= dict(norms(spec, index).values())
        return layer_weights(spec, index, lambda name: torch.empty(shapes[name], device=META), dtype, META)

    layers = tuple(map(layer, range(spec.layers)))
    head = table if spec.tied_head else torch.empty_like(table)
    return Transformer(spec, Weights(table, layers, torch.empty(spec.hidden_size, dtype=dtype, device=META), head))


Shape = tuple[int, ...]
Stack = list[tuple[str, Shape]]
"""Tensors of a checkpoint, by name and shape, that make one of ours when put below each other."""

Read = Callable[[str], Tensor]
"""A tensor of a checkpoint by its name."""

NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
NORMS_BOTH_SIDES = {
    "attn_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
"""Checkpoint names of a layer's norms; with norms on both sides ``post_attention_layernorm`` is another one."""

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def matrices(spec: ModelSpec, index: int, read_width: int | None = None) -> dict[str, Stack]:
    """What each field of ``LayerWeights`` but the norms is made of; attention reads ``read_width`` values, None: E."""
    base, width, inner = f"model.layers.{index}.", spec.hidden_size, spec.intermediate_size
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    fused: dict[str, tuple[bool, int, dict[str, int]]] = {  # field -> has a bias, columns, rows of each part
        "qkv": (
            spec.qkv_bias,
            read_width or width,
            {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key},
        ),
        "out": (spec.out_bias, query, {"self_attn.o_proj": width}),
        "gate_up": (spec.mlp_bias, width, {"mlp.gate_proj": inner, "mlp.up_proj": inner}),
        "down": (spec.mlp_bias, inner, {"mlp.down_proj": width}),
    }
    found: dict[str, Stack] = {}
    for field, (biased, columns, parts) in fused.items():
        found[field] = [(f"{base}{part}.weight", (rows, columns)) for part, rows in parts.items()]
        if biased:
            found[f"{field}_bias"] = [(f"{base}{part}.bias", (rows,)) for part, rows in parts.items()]
    return found


def norms(spec: ModelSpec, index: int) -> dict[str, tuple[str, Shape]]:
    """The norms of a layer by field; those of query and key heads as ``q_norm`` and ``k_norm``."""
    base = f"model.layers.{index}."
    names = NORMS_BOTH_SIDES if spec.post_norms else NORMS
    found: dict[str, tuple[str, Shape]] = {
        field: (f"{base}{name}.weight", (spec.hidden_size,)) for field, name in names.items()
    }
    if spec.qk_norm:
        for head in ("q_norm", "k_norm"):
            found[head] = (f"{base}self_attn.{head}.weight", (spec.head_dim,))
    return found


class WeightReader:
    """Fills our weights from a checkpoint. Its names and shapes are checked before any tensor is read."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.spec = spec
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.check()

    def check(self) -> None:
        """Raises UserError on a missing, extra or misshapen weight."""
        spec, folder, have = self.spec, self.checkpoint.folder, self.checkpoint.shapes
        table = (spec.vocab_size, spec.hidden_size)
        wanted: Stack = [(EMBED, table), (NORM, (spec.hidden_size,))]
        for index in range(spec.layers):
            wanted += [part for stack in matrices(spec, index).values() for part in stack]
            wanted += norms(spec, index).values()
        if not spec.tied_head:
            wanted.append((HEAD, table))
        for name, shape in wanted:
            if name not in have:
                raise UserError(f"{folder}: weight {name!r} is missing from the safetensors files.")
            if have[name] != shape:
                raise UserError(f"{folder}: weight {name!r} has shape {have[name]}, config.json says {shape}.")
        known = {name for name, _ in wanted} | {HEAD}  # a tied head may be there a second time
        extra = [name for name in have if name not in known and not name.endswith("rotary_emb.inv_freq")]
        if extra:
            raise UserError(f"{folder}: {len(extra)} weights have no place in this architecture, first {extra[0]!r}.")

    def read(self, places: Sequence[torch.device]) -> Weights:
        """All weights: embedding on the first place, layers spread evenly in order, norm and head on the last.

        On the meta device there is nothing to read.
        """
        if places[0] == META:
            return bare_transformer(self.spec, self.dtype).weights
        spec = self.spec
        owners = spread(spec.layers, places)
        embed = self.fill([(EMBED, (spec.vocab_size, spec.hidden_size))], places[0])
        layers = tuple(self.layer(index, place) for index, place in enumerate(owners))
        norm = self.gain((NORM, (spec.hidden_size,)), places[-1])
        if spec.tied_head:
            head = embed.to(places[-1])
        else:
            head = self.fill([(HEAD, (spec.vocab_size, spec.hidden_size))], places[-1])
        return Weights(embed, layers, norm, head)

    def layer(self, index: int, place: torch.device) -> LayerWeights:
        return layer_weights(self.spec, index, self.checkpoint.read, self.dtype, place)

    def fill(self, stack: Stack, place: torch.device) -> Tensor:
        return fill(stack, self.checkpoint.read, self.dtype, place)

    def gain(self, part: tuple[str, Shape], place: torch.device) -> Tensor:
        return gain(part, self.checkpoint.read, self.dtype, place, self.spec.offset_norm)


def layer_weights(
    spec: ModelSpec, index: int, read: Read, dtype: torch.dtype, place: torch.device, read_width: int | None = None
) -> LayerWeights:
    """One layer from the tensors that ``matrices`` and ``norms`` name, its matrices packed."""
    parts = {field: fill(stack, read, dtype, place) for field, stack in matrices(spec, index, read_width).items()}
    parts |= {field: pack(part) for field, part in parts.items() if part.dim() == 2}
    gains = {field: gain(part, read, dtype, place, spec.offset_norm) for field, part in norms(spec, index).items()}
    if spec.qk_norm:
        heads = (spec.heads, spec.kv_heads)
        each = [gains.pop(name).expand(n, 1, -1) for name, n in zip(("q_norm", "k_norm"), heads, strict=True)]
        gains["qk_norm"] = torch.cat(each)
    return LayerWeights(**parts, **gains)


def fill(stack: Stack, read: Read, dtype: torch.dtype, place: torch.device) -> Tensor:
    """One tensor of ours, cast and moved part by part: at no time is a second copy of the whole in memory."""
    rows = sum(shape[0] for _, shape in stack)
    filled = torch.empty((rows, *stack[0][1][1:]), dtype=dtype, device=place)
    begin = 0
    for name, shape in stack:
        filled[begin : begin + shape[0]].copy_(read(name))
        begin += shape[0]
    return filled


def gain(part: tuple[str, Shape], read: Read, dtype: torch.dtype, place: torch.device, offset: bool) -> Tensor:
    """What a norm multiplies by, as ``LayerWeights`` has it."""
    weight = fill([part], read, dtype, place)
    return 1 + weight.to(torch.promote_types(dtype, torch.float32)) if offset else weight


def spread(layers: int, places: Sequence[torch.device]) -> list[torch.device]:
    """The place of each layer: as many on each, in order. Raises UserError where a place would stay empty."""
    if not 0 < len(places) <= layers:
        raise UserError(f"model.devices names {len(places)} devices: want 1 to {layers}, one for each layer at most.")
    return [places[index * len(places) // layers] for index in range(layers)]


OWN_THREADS = torch.get_num_threads()
"""Torch's choice, which a later cell of the same process may want back."""
_threads_set = False


def set_threads(threads: int | None) -> None:
    """CPU threads of this process; None is torch's choice, also behind a model that asked for another number."""
    global _threads_set
    if threads is not None:
        if threads < 1:
            raise UserError(f"model.threads={threads}: want at least 1, or null for torch's choice.")
        torch.set_num_threads(threads)
        _threads_set = True
    elif _threads_set:
        torch.set_num_threads(OWN_THREADS)
        _threads_set = False


def known_dtype(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not known; one of {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def one_or_several(device: str, devices: Sequence[str] | None) -> str | Sequence[str]:
    """``devices`` where it is given, in which case ``device`` must have been left alone."""
    if devices is None:
        return device
    if device != "auto":
        raise UserError(f"model.device={device} and model.devices={list(devices)}: set one of them alone.")
    return devices


def resolve_devices(device: str | Sequence[str]) -> list[torch.device]:
    """The device of each name."""
    return [resolve_device(name) for name in ([device] if isinstance(device, str) else device)]


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
