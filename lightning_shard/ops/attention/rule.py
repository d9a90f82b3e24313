"""Computes scaled dot-product attention over a split sequence, by one of three algorithms.

B batch, H heads, L queries, S keys, E features, D ranks: queries (B, H, l, E), keys and values
(B, H, s, E).

- all_to_all: queries, keys and values go from (B, H, l, E) to (B, h, L, E), or to a part of the
  batch; torch's own kernel attends; the output goes back (DeepSpeed-Ulysses, Jacobs et al., 2023).
- gather: every rank gets all keys and values; torch's own kernel attends with the rank's queries.
- ring: blocks of keys and values come by turns (ops/attention/ring.py).

Where features are split, as in attention over channels, the scores are sums over the ranks.

Bytes sent forward by each rank, of n bytes of its rows: 4 n (D - 1) / D by all_to_all, 2 n (D - 1)
by the others. Measured on 2 x AMD EPYC, gloo, torch 2.15.0, forward and
backward relative to gather (processor time; bytes; peak memory above the operands):

| S, H, E            | ranks | all_to_all       | ring, time and bytes |
| ------------------ | ----- | ---------------- | -------------------- |
| 512, 8, 32         | 2     | 1.07; 1.00; 0.91 | 2.30; 1.50           |
| 2048, 8, 32        | 2     | 0.98; 1.00; 1.24 | 2.33; 1.50           |
| 2048, 8, 32        | 4     | 1.00; 0.50; 0.97 | 2.62; 1.50           |
| 2048, 8, 32 causal | 2     | 0.56; 1.00; 0.89 | 2.40; 1.00           |
| 2048, 8, 32 causal | 4     | 0.57; 0.50; 0.49 | 2.34; 1.00           |
| 2048, 6, 32        | 4     | 1.27; 0.56; 0.99 | 2.59; 1.50           |
| 2048, 5, 32        | 2     | 1.19; 1.00; 1.07 | 2.19; 1.50           |
| 2048, 5, 32        | 4     | 1.44; 0.60; 0.71 | 2.95; 1.50           |
| 2048, 1, 256       | 4     | not split        | 0.95; 1.50           |

So all_to_all is chosen where a whole dim of heads or batches divides well enough, and it sends less
than a gather would, with the mask. Where both send the same, as on two ranks, a gather is chosen,
which takes half as many messages. Two cases of these are left to all_to_all: causal attention, of
which a gather computes what is masked, and keys that are too many to be gathered. Otherwise the
ring is chosen for keys and values that are too many to be gathered: it costs time, but a rank keeps
its own rows only. The ring cannot drop weights, so attention with dropout does not take it.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import (
    places_by_rank,
    rows_by_owner,
    split_moved,
    take_local,
    whole,
)
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.half import wide
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.attention.layout import (
    Operand,
    Operands,
    balance,
    bring,
    bring_all,
    with_last,
)
from lightning_shard.ops.attention.ring import Ring, ring_attention
from lightning_shard.ops.autocast import cast_for, without_autocast
from lightning_shard.ops.dense.linear import einsum
from lightning_shard.ops.elementwise.dropout import dropout
from lightning_shard.ops.elementwise.random import alike, draws_exactly, own_random_state
from lightning_shard.ops.registry import implements
from lightning_shard.processes.torch_private.internals import left_aligned

BALANCE = 0.75  # the least mean load of the ranks, relative to the greatest, for all_to_all
RING_BYTES = 2**27  # larger keys and values are not gathered


@implements(
    F.scaled_dot_product_attention,
    limits="no split features with grouped queries or with masks of split queries; no grouped "
    "queries with split heads",
)
def attention(
    func: Callable[..., Tensor],
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Operand:
    """Scaled dot-product attention; keys and values travel, by heads or around a ring."""
    if attn_mask is not None and is_causal:
        raise RuntimeError("attn_mask should not be set when is_causal=True")
    query, key, value = cast_for(func, query, key, value)  # before rows travel
    operands = Operands(query, key, value, attn_mask, enable_gqa, is_causal)
    decision = _decision(operands, with_dropout=dropout_p > 0)
    if decision is None:
        with without_autocast(operands.owner):
            return _across_features(operands, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    layout, chosen, inner = decision
    if chosen == "ring":
        local = _by_ring(operands, layout, is_causal=is_causal, scale=scale)
    else:
        local = _with_all_keys(
            func, operands, inner, is_causal=is_causal, scale=scale, dropout_p=dropout_p
        )
    result = operands.owner.like(local, inner)
    for dim in set(inner.split_dims) - set(layout.split_dims):
        rows = layout.ndim - 2
        split = layout.axes(rows)
        result = split_moved(result, dim, rows, layout.dims[rows]) if split else whole(result, dim)
    return result if layout.split_dims else result.local


# the layout of the output, the name of the algorithm, and the layout that it computes
_Decision = tuple[Layout, str, Layout]
_LIMIT = 4096
_decisions: dict[tuple[object, ...], _Decision | None] = {}


def _decision(operands: Operands, *, with_dropout: bool) -> _Decision | None:
    """Decide once for operands that are alike, since it takes longer than to start a kernel.

    Returns:
        None where features are split.
    """
    key = (*operands.described(), with_dropout)
    if key not in _decisions:
        if len(_decisions) >= _LIMIT:
            _decisions.clear()
        _decisions[key] = _decided(operands, with_dropout=with_dropout)
    return _decisions[key]


def _decided(operands: Operands, *, with_dropout: bool) -> _Decision | None:
    if operands.split_features():
        return None
    layout = operands.output()
    possible = _possible(operands, layout, with_dropout=with_dropout)
    chosen = choose(operands, possible)
    return layout, chosen, possible[chosen]


def _possible(operands: Operands, layout: Layout, *, with_dropout: bool) -> dict[str, Layout]:
    """The algorithms that serve, each with the layout of what it computes."""
    possible = {"gather": layout}
    by_heads = operands.by_heads(layout)
    if by_heads is not None:
        possible["all_to_all"] = by_heads
    if operands.key_axes() and not with_dropout:
        possible["ring"] = layout
    return possible


def choose(operands: Operands, possible: Mapping[str, Layout]) -> str:
    """Choose the algorithm of least cost: see the module's table."""
    layout, by_heads = possible["gather"], possible.get("all_to_all")
    many = operands.key_bytes() >= RING_BYTES
    if by_heads is not None:
        (dim,) = set(by_heads.split_dims) - set(layout.split_dims)
        ranks = layout.grid.parts(by_heads.axes(dim))
        sent, gathered = operands.sent(layout, by_heads), operands.sent(layout, layout)
        as_much = math.isclose(sent, gathered)
        cheap = operands.causal or many if as_much else sent < gathered
        if cheap and balance(layout.shape[dim], ranks) >= BALANCE:
            return "all_to_all"
    return "ring" if "ring" in possible and many else "gather"


def _with_all_keys(
    func: Callable[..., Tensor],
    operands: Operands,
    inner: Layout,
    *,
    is_causal: bool,
    dropout_p: float,
    **options: Any,
) -> Tensor:
    """This rank's part of an output of layout `inner`, by torch's own kernel."""
    q, k, v, *masks = bring_all(operands.shares(inner))
    mask = masks[0] if masks else None
    scores = with_last(inner, 1, k.shape[-2])
    if is_causal and inner.axes(inner.ndim - 2):
        mask, is_causal = _causal(scores, q.device), False
    weights = operands.owner.like(operands.owner.local, scores)
    is_empty = 0 in inner.local_shape
    if in_forward_mode() and dropout_p:
        raise UnsupportedOperationError("dropout in forward mode; take a dropout of 0")
    if in_forward_mode() and not is_empty:
        return _weights(q, k, mask, is_causal=is_causal, **options) @ _of_each_head(v, q)
    if dropout_p and draws_exactly(weights):
        return _dropped_as_one(weights, (q, k, v, mask), dropout_p, is_causal=is_causal, **options)
    with own_random_state(weights) if dropout_p else nullcontext():  # also on a rank without rows
        if is_empty:
            learned = mask is not None and mask.requires_grad
            return empty_attached(
                inner.local_shape, q, k, v, mask if learned else None, is_curved=True
            )
        grouped = operands.grouped
        return func(q, k, v, mask, dropout_p, is_causal, enable_gqa=grouped, **options)


def _across_features(
    operands: Operands, *, is_causal: bool, scale: float | None, dropout_p: float
) -> Operand:
    """Attend over split features, in float32 at least: ranks add up their parts of the scores."""
    q, k, v = (_wide(x) for x in (operands.query, operands.key, operands.value))
    mask = operands.mask
    if operands.grouped:
        raise UnsupportedOperationError(f"enable_gqa where {operands.split_features()}")
    scores = _product("...qe,...ke->...qk", q, k)
    is_split = isinstance(scores, Subdomain)
    by_rows = is_causal or mask is not None  # a part cannot tell its rows
    split_rows = is_split and (by_rows or scores.layout.axes(scores.ndim - 1))
    if isinstance(mask, Subdomain) or split_rows:
        raise UnsupportedOperationError(operands.split_features())
    local = scores.local if is_split else scores
    local = local * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    weights = _softmax(local, mask, is_causal=is_causal)
    if not is_split:
        with alike(operands.owner, None, weights.device) if dropout_p else nullcontext():
            weights = F.dropout(weights, dropout_p)
    else:
        weights = scores.like(weights)
        weights = dropout(F.dropout, weights, dropout_p) if dropout_p else weights
    found = _product("...qk,...kv->...qv", weights, v)
    dtype = operands.query.dtype
    return found.alike(found.local.to(dtype)) if isinstance(found, Subdomain) else found.to(dtype)


def _wide(x: Operand) -> Operand:
    return x.alike(wide(x.local)) if isinstance(x, Subdomain) else wide(x)


def _product(equation: str, a: Operand, b: Operand) -> Operand:
    is_split = isinstance(a, Subdomain) or isinstance(b, Subdomain)
    return einsum(torch.einsum, equation, a, b) if is_split else torch.einsum(equation, a, b)


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Weights of the values, in functions that carry tangents, as torch's kernels do not."""
    k = _of_each_head(k, q)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return _softmax(scores, mask, is_causal=is_causal)


def _softmax(scores: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor:
    """Softmax over the keys, with weights of zero where a query sees none."""
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        is_kept = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_kept else scores + mask
    if scores.shape[-1]:
        top = scores.detach().amax(-1, keepdim=True)
        scores = scores - torch.where(top.isinf(), 0, top)
    powers = scores.exp()
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total == 0, 1, total)


def _of_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys, or values, of each head of queries, of which a group shares one head of keys."""
    grouped = q.ndim > 2 and q.shape[-3] > x.shape[-3]
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if grouped else x


def _dropped_as_one(
    like: Subdomain,
    parts: tuple[Tensor, Tensor, Tensor, Tensor | None],
    dropout_p: float,
    *,
    is_causal: bool,
    scale: float | None = None,
) -> Tensor:
    """Attend by torch's plain formula, which draws for all weights in the order of their memory."""
    q, k, v, mask = parts
    if q.device.type != "cpu":
        raise UnsupportedOperationError(
            "its kernels for this device draw dropout in orders of their own, which "
            "use_exact_random cannot follow; compare on the CPU, or without dropout in attention"
        )
    weights = _weights(q, k, mask, is_causal=is_causal, scale=scale)
    weights = weights.expand(like.layout.local_shape).contiguous()
    kept = dropout(F.dropout, like.like(weights, like.layout), dropout_p)
    return (kept.local @ _of_each_head(v, q)).to(q.dtype)


def _causal(scores: Layout, device: torch.device) -> Tensor:
    """Query i attends to keys 0 to i, both counted in the whole sequence."""
    rows = torch.arange(scores.shape[-2], device=device)
    rows = take_local(rows, 0, scores.dims[-2], scores.grid)
    return torch.arange(scores.shape[-1], device=device) <= rows[:, None]


def _by_ring(operands: Operands, layout: Layout, *, is_causal: bool, scale: float | None) -> Tensor:
    """This rank's part of the output, with blocks of keys and values that come by turns."""
    axes, grid, split = operands.key_axes(), layout.grid, operands.keys()
    (query, of_query), *keys_and_values = operands.shares(layout)[:3]
    q = bring(query, of_query)
    k, v = bring_all([(x, w.with_dims({w.ndim - 2: split})) for x, w in keys_and_values])
    mask = bring(*operands.shares(layout)[3]) if operands.mask is not None else None
    counts, order = rows_by_owner(split, grid)
    if mask is not None and order is not None and mask.shape[-1] > 1:
        mask = mask.index_select(-1, order.to(mask.device))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    ring = Ring(counts, operands.owner.domain.group(axes), scale)
    if is_causal:
        keys = torch.arange(sum(counts), device="cpu") if order is None else order
        ring = replace(ring, queries=places_by_rank(layout.dims[-2], axes, grid), keys=keys)
    return ring_attention(q, k, v, mask, ring)


@implements(left_aligned, limits="no nested tensors")
def padded_rows(func: Callable[..., bool], x: Operand, mask: Operand) -> bool:
    """nn.TransformerEncoder asks; if so and in inference it drops the padded rows: zeros remain."""
    rows_first = mask[:, 1:] <= mask[:, :-1] if isinstance(mask, Tensor) else None
    if not torch.is_grad_enabled() and (rows_first is None or bool(rows_first.all())):
        raise UnsupportedOperationError(
            "nested tensors cannot be split; make the encoder with enable_nested_tensor=False"
        )
    return False
