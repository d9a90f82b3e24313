"""Scaled dot-product attention: each rank attends with its own queries to all keys.

B batch, H heads, L queries, S keys, E features: queries (B, H, l, E) stay split; split keys and
values are gathered along the sequence, (B, H, s, E) -> (B, H, S, E). Split batch or head dims stay
split.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain import Subdomain
from lightning_shard.halo import empty_attached
from lightning_shard.layout import Factor, Layout
from lightning_shard.ops.align import common_layout, local_part, subdomains, take_local, whole
from lightning_shard.ops.random import own_generator
from lightning_shard.ops.registry import UnsupportedOperationError, implements

Operand = Subdomain | Tensor


@implements(F.scaled_dot_product_attention)
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
    if attn_mask is not None and is_causal:
        raise RuntimeError("attn_mask should not be set when is_causal=True")
    owner = subdomains([query, key, value, attn_mask])[0]
    layout = _output_layout(query, key, value, grouped=enable_gqa)
    sequence = _last(layout, 2, key.shape[-2])
    q = local_part(query, _last(layout, 1, query.shape[-1]))
    k = _keys(key, _last(sequence, 1, key.shape[-1]), grouped=enable_gqa)
    v = _keys(value, sequence, grouped=enable_gqa)
    scores = _last(layout, 1, key.shape[-2])
    mask = None if attn_mask is None else _mask(attn_mask, scores)
    if is_causal:
        mask = _causal(scores, q.device)
    if 0 in layout.local_shape:
        local = empty_attached(layout.local_shape, q, k, v, mask if _learned(mask) else None)
    elif dropout_p:
        local = _with_dropout(owner.like(owner.local, scores), q, k, v, mask, dropout_p, scale)
    else:
        local = func(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return owner.like(local, layout) if layout.split_dims else local


def _output_layout(query: Operand, key: Operand, value: Operand, *, grouped: bool) -> Layout:
    """Batch and head dims as in any of the operands, the rows of the query, the features whole."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if isinstance(x, Subdomain) and x.layout.axes(x.ndim - 1):
            raise UnsupportedOperationError(
                f"attention with the features of {name} split ({x.layout})"
            )
        if grouped and isinstance(x, Subdomain) and x.layout.axes(x.ndim - 3):
            raise UnsupportedOperationError(
                f"enable_gqa with the heads of {name} split ({x.layout})"
            )
    alike = 3 if grouped else 2
    stand_ins = [_shape_only(x, keep_rows=x is query, ones=alike) for x in (query, key, value)]
    layout = common_layout(stand_ins)
    if grouped:
        layout = _last(layout, 3, query.shape[-3])
    return _last(layout, 1, value.shape[-1])


def _last(layout: Layout, back: int, extent: int) -> Layout:
    """The layout with the dim `back` from the end whole and of another extent."""
    return layout.with_dim(layout.ndim - back, extent, ())


def _shape_only(x: Operand, *, keep_rows: bool, ones: int) -> Operand:
    """An operand like `x` in its batch dims (and rows); its last `ones` dims broadcast."""
    gone = [x.ndim - 1 - i for i in range(ones) if not (keep_rows and i == 1)]
    if isinstance(x, Subdomain):
        return x.like(x.local, x.layout.with_dims({d: (Factor(1),) for d in gone}))
    return x.new_empty(()).expand([1 if d in gone else n for d, n in enumerate(x.shape)])


def _keys(x: Operand, wanted: Layout, *, grouped: bool) -> Tensor:
    """All keys or values along the sequence, of this rank's batches and heads."""
    if isinstance(x, Subdomain) and x.layout.axes(x.ndim - 2):
        x = whole(x, x.ndim - 2)
    if grouped:
        wanted = _last(wanted, 3, x.shape[-3])
    return local_part(x, wanted)


def _mask(x: Operand, scores: Layout) -> Tensor:
    if isinstance(x, Subdomain) and x.layout.axes(x.ndim - 1):
        x = whole(x, x.ndim - 1)
    return local_part(x, scores)


def _causal(scores: Layout, device: torch.device) -> Tensor:
    """Query i attends to keys 0 to i, both counted in the whole sequence."""
    rows = torch.arange(scores.shape[-2], device=device)
    rows = take_local(rows, 0, scores.dims[-2], scores.grid)
    return torch.arange(scores.shape[-1], device=device) <= rows[:, None]


def _learned(mask: Tensor | None) -> bool:
    return mask is not None and mask.requires_grad


def _with_dropout(
    scores: Subdomain,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    scale: float | None,
) -> Tensor:
    """Attention written out, with weights dropped independently on each rank's rows."""
    if q.ndim > 2 and k.shape[-3] != q.shape[-3]:  # grouped queries
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    products = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        products = (
            products.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else products + mask
        )
    weights = products.softmax(-1)
    kept = torch.empty_like(weights).bernoulli_(1 - p, generator=own_generator(scores))
    return (weights * kept / (1 - p)) @ v
