"""Seconds of each tier's forward by block size and context length, and the bytes that it must read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from harness.model.sublayers import SublayerTransformer
from harness.model.tiers import Tier, Tiers
from harness.model.transformer import Transformer
from harness.speed.records import ForwardTime
from harness.timing import Clock

WARM = 2
"""Forwards of each shape before the first that is timed."""


def forward_bytes(model: Transformer, layers: Sequence[int], block: int, context: int) -> int:
    """Bytes that a forward of ``block`` tokens over ``context`` cached ones must read, whoever computes it:

        the matrices, biases and norms of each attention and each MLP that runs
        + the keys and values it attends to: context + block positions, fewer behind a sliding window
        + the final norm, the head, and a row of the embedding for each token.

    Activations are not counted: they are small and stay in cache.
    """
    spec, size = model.spec, model.dtype.itemsize
    gain_size = model.compute_dtype.itemsize if spec.offset_norm else size
    width, inner = spec.hidden_size, spec.intermediate_size
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv, norms = query + 2 * key, width * (2 if spec.post_norms else 1)
    attention = (qkv * width + width * query + spec.qkv_bias * qkv + spec.out_bias * width) * size
    attention += (norms + spec.qk_norm * (query + key)) * gain_size
    mlp = (3 * inner * width + spec.mlp_bias * (2 * inner + width)) * size + norms * gain_size
    mask = model.mask if isinstance(model, SublayerTransformer) else None
    attending = [index for index in layers if mask is None or mask.attention[index]]
    feeding = [index for index in layers if mask is None or mask.mlp[index]]
    windows = [spec.window_of(index) for index in attending]
    seen = sum(context + block if w is None else min(context, w - 1) + block for w in windows)
    return (
        len(attending) * attention
        + len(feeding) * mlp
        + seen * 2 * key * size
        + width * (gain_size + (model.weights.head.shape[0] + block) * size)
    )


def first_layers(model: Transformer, count: int) -> Transformer:
    """A model of the first ``count`` layers of ``model``, its embedding, norm and head; no weight is copied."""
    layers = model.weights.layers[:count]
    return Transformer(replace(model.spec, layers=count), replace(model.weights, layers=layers))


def time_forwards(
    tiers: Tiers,
    timed: Mapping[str, Tier],
    contexts: Sequence[int],
    blocks: Sequence[int],
    repeats: int,
    clock: Clock,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[ForwardTime]:
    """Every tier at every shape. The context is filled once for each length, and rolled back to after each forward.

    A repeat goes through all block sizes, and at each through the tiers, whose order turns: a repeat's forwards of
    one shape stand next to each other, so that ratios are taken of neighbours. ``advance`` is called for each forward.
    """
    names = list(timed)
    for context in contexts:
        sequence = [index % tiers.model.spec.vocab_size for index in range(context + max(blocks))]
        tiers.prefill(sequence[: context + 1])
        seconds: dict[tuple[str, int], list[float]] = {(name, block): [] for name in names for block in blocks}
        for repeat in range(-WARM, repeats):
            for block in blocks:
                place = repeat % len(names)
                for name in names[place:] + names[:place]:
                    begun = clock()
                    timed[name].forward(sequence[: context + block], rows=block)
                    spent = clock() - begun
                    tiers.rollback(context)
                    advance()
                    if repeat >= 0:
                        seconds[name, block].append(spent)
        for name in names:
            for block in blocks:
                read = forward_bytes(timed[name].model, timed[name].layers, block, context)
                yield ForwardTime(name, block, context, read, tuple(seconds[name, block]))
    tiers.rollback(0)


def forwards_timed(tiers: int, contexts: int, blocks: int, repeats: int) -> int:
    """How often ``advance`` is called."""
    return tiers * contexts * blocks * (repeats + WARM)


def fitting(contexts: Sequence[int], blocks: Sequence[int], positions: int) -> tuple[list[int], list[int]]:
    """Context lengths that leave room for the largest block, and those that do not."""
    most = positions - max(blocks)
    return [length for length in contexts if length <= most], [length for length in contexts if length > most]
