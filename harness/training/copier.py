"""How the copying heads of ``CopyingStudent`` begin: made by hand, then fitted to find what the texts repeat.

Left to the loss alone they would have to learn where to look and what to say of it at once.
"""

import random

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from harness.training.data import Batch, TextData, collate
from harness.training.heads import CopyingStudent, normed, only
from harness.training.layers import turned

GAIN, LOGIT = 4.0, 8.0
"""How sharply the sharpest query head looks, and what a token that was found adds to its logit."""
KNOWN_TEXTS = 200
"""Texts from whose states a row's own token is learnt to be read."""
FIT_STEPS, FIT_TEXTS, FIT_LR = 500, 6, 4e-3
PROMPT_WEIGHT, ABSENT_WEIGHT = 0.2, 0.5
"""Weights in the fit: of a row that says a prompt's token, and of one whose token stands nowhere before."""


def begin_copier(student: CopyingStudent, data: TextData, seed: int) -> None:
    """Set the last key head of ``student`` and its query heads."""
    draws = torch.Generator().manual_seed(seed)
    make_copier(student, data, draws)
    fit_copier(student, data, seed)


@torch.no_grad()
def make_copier(student: CopyingStudent, data: TextData, draws: torch.Generator) -> None:
    """Rows whose own token is the last one are looked for, and the token that followed is said.

    Tokens are told apart by random projections of their whitened embeddings, to the coordinates that rotary embedding
    turns slowest; a row's own token is read off its first state beside by least squares.
    """
    borrowed, spec, eps = student.borrowed, student.spec, student.spec.norm_eps
    width, size, groups = spec.hidden_size, spec.head_dim, spec.heads // spec.kv_heads
    slow = torch.cat((torch.arange(size // 4, size // 2), torch.arange(3 * size // 4, size)))
    known = normed(borrowed.scaled(borrowed.head_tokens), eps)
    white = whitening(known)
    asked, told = (torch.linalg.qr(torch.randn(width, n, generator=draws)).Q.T @ white for n in (len(slow), size))

    batch = collate(data.trained[:KNOWN_TEXTS])
    there = torch.arange(batch.tokens.shape[1]) + 1 < batch.lengths[:, None]
    states = student.enter(student.given(batch)[there])[:, width : 2 * width]
    own = normed(borrowed.scaled(batch.tokens[there]), eps) @ asked.T
    ridge = 1e-3 * len(states) * torch.eye(width)
    read = torch.linalg.solve(states.T @ states + ridge, states.T @ own).T

    attention = only(student.layers).self_attn
    query, key = (spec.heads - groups) * size, (spec.kv_heads - 1) * size
    attention.k_proj.weight[key + slow, 2 * width : 3 * width] = read
    attention.v_proj.weight[key:, width : 2 * width] = told
    some = known[:512]
    peak = ((borrowed.rows[:512] @ told.T) * (some @ told.T)).sum(-1).mean()
    for group in range(groups):
        begin = query + group * size
        attention.q_proj.weight[begin + slow, width : 2 * width] = GAIN * (1 + group) / groups * asked
        attention.o_proj.weight[:, begin : begin + size] = told.T * (LOGIT / groups / peak)


def whitening(rows: Float[Tensor, "N E"]) -> Float[Tensor, "E E"]:
    """Makes all directions of ``rows`` about as large, and drops that of their mean."""
    mean = rows.mean(0)
    values, vectors = torch.linalg.eigh((rows - mean).T @ (rows - mean) / len(rows))
    white = vectors @ torch.diag((values + 0.1 * values.mean()).rsqrt()) @ vectors.T
    return white @ (torch.eye(len(mean)) - torch.outer(mean, mean) / mean.square().sum())


def fit_copier(student: CopyingStudent, data: TextData, seed: int) -> None:
    """Teach the copying heads where to look: at rows that the right token followed, else at the first row."""
    spec = student.spec
    size, groups = spec.head_dim, spec.heads // spec.kv_heads
    attention = only(student.layers).self_attn
    query, key = attention.q_proj.weight, attention.k_proj.weight
    own = [part.detach()[-rows:].clone().requires_grad_() for part, rows in ((query, groups * size), (key, size))]
    optimizer = torch.optim.AdamW(own, lr=FIT_LR, betas=(0.9, 0.95), weight_decay=0.0)
    draw = random.Random(f"copier/{seed}")
    for step in range(FIT_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = FIT_LR * (1 - step / FIT_STEPS)
        batch = collate([draw.choice(data.trained) for _ in range(FIT_TEXTS)])
        optimizer.zero_grad()
        looked_wrong(student, batch, *own).backward()
        optimizer.step()
    with torch.no_grad():
        query[-groups * size :], key[-size:] = own


def looked_wrong(student: CopyingStudent, batch: Batch, query: Tensor, key: Tensor) -> Float[Tensor, ""]:
    """Mean cross-entropy of each query head's attention, by ``query`` and ``key``, against the rows that are right."""
    spec, tokens = student.spec, batch.tokens
    with torch.no_grad():
        states = student.enter(student.given(batch)[:, :-1])
        read = student.reading(student.borrowed.scaled(tokens[:, 1:]), states)[1]
    count = read.shape[1]
    asked, found = (
        turned((read @ part.T).view(len(read), count, -1, spec.head_dim).transpose(1, 2), *student.rotary.first(count))
        for part in (query, key)
    )
    scores = asked @ found.transpose(-1, -2) * spec.head_dim**-0.5  # [B, G, S, S]
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    said = F.pad(tokens, (0, 1))[:, 2:]
    right = (tokens[:, 1:][:, None, :] == said[:, :, None]) & seen
    absent = ~right.any(-1)
    right[..., 0] |= absent
    place = torch.arange(count) + 2
    weight = torch.where(place >= batch.prompt_lengths[:, None], 1.0, PROMPT_WEIGHT)
    weight = weight * torch.where(absent, ABSENT_WEIGHT, 1.0) * (place < batch.lengths[:, None])
    logs = torch.log_softmax(scores.masked_fill(~seen, float("-inf")), -1)
    mass = logs.masked_fill(~right[:, None], float("-inf")).logsumexp(-1)
    return -(mass * weight[:, None]).sum() / (weight.sum() * scores.shape[1])
