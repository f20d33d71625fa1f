"""Heads in the layouts in which they are published, and in a drafter's folder: read by name, checked, and run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.drafters.base import Drafter
from harness.drafters.eagle import Eagle, renamed
from harness.drafters.medusa import Medusa
from harness.drafters.mtp import Mtp
from harness.drafters.weights import save_drafter
from harness.errors import UserError
from harness.model.load import Model, matrices
from harness.sampling import RandomChooser
from harness.timing import warm_up
from tests.heads import CONFIGS, SHAPE, head_drafter, naive_logits, naive_states, tensors_of
from tests.test_heads import FEW, TOKENS, features_of
from tests.toys import CPU, GREEDY, tiers_of, tiny_model

FAMILIES: dict[str, tuple[str, type]] = {
    "eagle": ("eagle", Eagle),
    "fused": ("eagle", Eagle),
    "mtp": ("mtp", Mtp),
    "medusa": ("medusa", Medusa),
}
MADE_BY = {"command": "", "data": "", "seed": 0, "seconds": 0.0, "held_out": {}}
WIDTH, VOCAB = 32, 97


@pytest.fixture
def model() -> Model:
    return tiny_model(0, kept=(0, 1, 3), layer_scale=0.4)


def drafts_of(drafter_class: type, model: Model, folder: Path, **options: Any) -> list[int]:
    tiers = tiers_of(model)
    drafter: Drafter = drafter_class(tiers, GREEDY, model, str(folder), **options)
    assert drafter.name.endswith(f"({folder.name})")
    tiers.prefill(TOKENS)
    return drafter.draft(TOKENS, 4, RandomChooser(0, CPU)).tokens.tolist()


def randoms(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """As EAGLE and Medusa are saved, in half precision; norms about 1."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    return {name: (1 + 0.1 * tensor if "norm" in name else tensor).half() for name, tensor in drawn.items()}


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
    return folder


HF = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "vocab_size": VOCAB},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "torch_dtype": "float16", **SHAPE},
}


def layer_names(model: Model, fused: bool) -> dict[str, tuple[int, ...]]:
    stacks = matrices(model.transformer.spec, 0, 2 * WIDTH if fused else None).values()
    names = {renamed(name, fused): shape for stack in stacks for name, shape in stack}
    return names | {renamed("model.layers.0.post_attention_layernorm.weight", fused): (WIDTH,)}


def eagle1(model: Model, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """As yuhuili/EAGLE-*: a layer without its first norm, the fusing matrix with a bias, and the embedding."""
    shapes = layer_names(model, False) | {"fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,)}
    tensors = randoms(shapes | {"embed_tokens.weight": (VOCAB, WIDTH)})
    return written(folder, HF, tensors), tensors


def eagle3(model: Model, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """As yuhuili/EAGLE3-*: a smaller vocabulary with a head of its own; d2t has what to add to a draft token's id."""
    norms: dict[str, tuple[int, ...]] = {
        f"midlayer.{name}.weight": (WIDTH,) for name in ("hidden_norm", "input_layernorm")
    }
    shapes = layer_names(model, True) | norms | {"fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,)}
    tensors = randoms(shapes | {"lm_head.weight": (20, WIDTH)})
    known = torch.arange(20) * 4 + 3
    tensors["d2t"] = known - torch.arange(20)
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), known)
    return written(folder, HF | {"draft_vocab_size": 20}, tensors), tensors


def medusa(model: Model, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """As FasterDecoding/medusa-*: three heads of one residual block and rows of their own."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        shapes |= {f"{head}.0.linear.weight": (WIDTH, WIDTH), f"{head}.0.linear.bias": (WIDTH,)}
        shapes[f"{head}.1.weight"] = (VOCAB, WIDTH)
    tensors = randoms(shapes)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    return written(folder, config, tensors, "medusa_lm_head.safetensors"), tensors


PUBLIC: dict[str, tuple[Callable[[Model, Path], tuple[Path, dict[str, Tensor]]], type]] = {
    "eagle1": (eagle1, Eagle),
    "eagle3": (eagle3, Eagle),
    "medusa": (medusa, Medusa),
}


@pytest.mark.parametrize("layout", ["eagle1", "eagle3"])
def test_a_public_eagle_drafts_as_written_out(layout: str, model: Model, tmp_path: Path) -> None:
    folder, stored = PUBLIC[layout][0](model, tmp_path / "public")
    drafts = drafts_of(Eagle, model, folder)
    tensors = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
    kind, taps = ("eagle", (-1,)) if layout == "eagle1" else ("fused", (1, 1, 0))  # entering layers 2, 4/2 and 4 - 3
    embed = tensors.get("embed_tokens.weight", model.transformer.weights.embed)
    head = tensors.get("lm_head.weight", model.transformer.weights.head)
    features = features_of(model, TOKENS[:-1], taps)
    for place, draft in enumerate(drafts):
        known = torch.tensor([*TOKENS[1:], *drafts[:place]])
        states = naive_states(kind, tensors, embed[known], features, len(TOKENS) - 1)
        best = int(naive_logits(kind, tensors, states[-1], head).argmax())
        assert draft == (best if layout == "eagle1" else best + int(tensors["d2t"][best]))


def test_a_public_medusa_drafts_as_written_out(model: Model, tmp_path: Path) -> None:
    folder, stored = medusa(model, tmp_path / "public")
    feature = features_of(model, TOKENS[:-1], (-1,))[-1]
    want = []
    for head in range(3):
        weight, bias, rows = (
            stored[f"{head}.{part}"].double() for part in ("0.linear.weight", "0.linear.bias", "1.weight")
        )
        want.append(int((rows @ (feature + torch.nn.functional.silu(weight @ feature + bias))).argmax()))
    assert drafts_of(Medusa, model, folder) == want


@pytest.mark.parametrize("layout", PUBLIC)
def test_a_missing_extra_or_misshapen_weight_is_named(layout: str, model: Model, tmp_path: Path) -> None:
    folder, tensors = PUBLIC[layout][0](model, tmp_path / "public")
    (file,) = folder.glob("*.safetensors")
    needed = [name for name in tensors if name != "embed_tokens.weight"]
    for name in needed:
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, file)
        with pytest.raises(UserError, match=rf"weight '{name}' is missing"):
            drafts_of(PUBLIC[layout][1], model, folder)
    save_file(tensors | {"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(UserError, match=r"1 weights have no place in this drafter, first 'layers\.1\.mlp"):
        drafts_of(PUBLIC[layout][1], model, folder)
    save_file(tensors | {needed[0]: torch.zeros(3, 5)}, file)
    with pytest.raises(UserError, match=rf"weight '{needed[0]}' has shape \(3, 5\)"):
        drafts_of(PUBLIC[layout][1], model, folder)


@pytest.mark.parametrize("layout", PUBLIC)
def test_pickled_weights_are_refused_with_what_to_do(layout: str, model: Model, tmp_path: Path) -> None:
    folder, _ = PUBLIC[layout][0](model, tmp_path / "public")
    (file,) = folder.glob("*.safetensors")
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"only safetensors are read; pytorch_model\.bin .* convert it"):
        drafts_of(PUBLIC[layout][1], model, folder)


def test_weights_in_several_files_are_read(model: Model, tmp_path: Path) -> None:
    folder, tensors = eagle1(model, tmp_path / "public")
    want = drafts_of(Eagle, model, folder)
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    halves = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert drafts_of(Eagle, model, folder) == want


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("eagle1", {"num_hidden_layers": 2}, "one layer, this one 2"),
        ("eagle1", {"hidden_size": 16}, "the drafter is 16 wide, the verifier 32"),
        ("medusa", {"medusa_num_heads": 0}, "medusa_num_heads=0; want a whole number of at least 1"),
    ],
)
def test_a_head_of_another_shape_is_refused(
    layout: str, change: dict, message: str, model: Model, tmp_path: Path
) -> None:
    folder, _ = PUBLIC[layout][0](model, tmp_path / "public")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        drafts_of(PUBLIC[layout][1], model, folder)


def test_draft_ids_must_be_distinct_tokens_of_the_verifier(model: Model, tmp_path: Path) -> None:
    folder, tensors = eagle3(model, tmp_path / "public")
    save_file(tensors | {"d2t": tensors["d2t"] + 60}, folder / "model.safetensors")
    with pytest.raises(UserError, match="must be distinct token ids from 0 to 96"):
        drafts_of(Eagle, model, folder)


@pytest.mark.parametrize("kept", [None, FEW], ids=["whole", "reduced"])
@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind in FAMILIES for text in (0, 128) if kind != "medusa" or not text]
)
def test_a_drafter_folder_gives_the_head_it_was_saved_from(
    kind: str, text: int, kept: Tensor | None, model: Model, tmp_path: Path
) -> None:
    """Of few rows, with the tokens of the text besides, or without where it is told so."""
    family, drafter_class = FAMILIES[kind]
    options = {} if text or kind == "medusa" else {"text_tokens": 0}
    tensors = tensors_of(kind, model.transformer, 3)
    stored = tensors if kept is None else tensors | {"head_tokens": kept}
    save_drafter(tmp_path / "one", family, CONFIGS[kind], stored, MADE_BY)
    held = load_file(tmp_path / "one" / "model.safetensors")
    assert all(tensor.dtype in (torch.bfloat16, torch.int32) for tensor in held.values())
    assert not any("embed" in name or "lm_head" in name for name in held)
    got = drafts_of(drafter_class, model, tmp_path / "one", features="catch_up", **options)
    rounded = {name: tensor.bfloat16().double() for name, tensor in tensors.items()}
    tiers = tiers_of(model)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.heads.tensors_of", lambda *_: rounded)
        drafter = head_drafter(kind, kept=kept, text=text)(tiers, GREEDY, model)
    tiers.prefill(TOKENS)
    assert got == drafter.draft(TOKENS, 4, RandomChooser(0, CPU)).tokens.tolist()
    assert kept is None or set(got) <= {*kept.tolist(), *(TOKENS if text else ())}


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_fewer_than_no_tokens_of_the_text_are_refused(kind: str, model: Model, tmp_path: Path) -> None:
    tensors = tensors_of(kind, model.transformer, 3) | {"head_tokens": FEW}
    save_drafter(tmp_path / "one", kind, CONFIGS[kind], tensors, MADE_BY)
    with pytest.raises(UserError, match=r"^drafter\.text_tokens=-1: want 0 or more\.$"):
        drafts_of(FAMILIES[kind][1], model, tmp_path / "one", text_tokens=-1)


def test_no_such_folder_is_an_error(model: Model, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^drafter\.path='.*nowhere' is not a folder"):
        drafts_of(Eagle, model, tmp_path / "nowhere")


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_head_can_be_warmed_up_as_any_tier(kind: str, model: Model) -> None:
    tiers = tiers_of(model)
    drafter = head_drafter(kind)(tiers, GREEDY, model)
    warm_up(tiers, 4, 3, lambda tokens, count: drafter.draft(tokens, count, RandomChooser(0, CPU)))
    assert tiers.full.length == 0
    tiers.prefill(TOKENS)
    cold = tiers_of(model)
    other = head_drafter(kind)(cold, GREEDY, model)
    cold.prefill(TOKENS)
    for one in ((1, 2, 3, 4), TOKENS):
        tiers.prefill(one)
        cold.prefill(one)
        found = [each.draft(one, 4, RandomChooser(0, CPU)).tokens.tolist() for each in (drafter, other)]
        assert found[0] == found[1]
