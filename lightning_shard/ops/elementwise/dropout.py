"""Dropout, of single elements and of whole channels."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.layout import Factor
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.elementwise.random import Draw, drawn
from lightning_shard.ops.registry import implements

_ALPHA = 1.7580993408473766  # minus the value that a SELU saturates to
# dropout of whole channels: the number of dims of a batch; with fewer there is no batch dim
_BATCHED = {F.dropout1d: 3, F.dropout3d: 5}


@implements(F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
def dropout(
    func: Callable[..., Tensor],
    x: Subdomain,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **named: bool,
) -> Subdomain:
    """Drop single elements, or channels alike on ranks that share a sample; nothing travels."""
    return _dropped(x, p, named.get("train", training), inplace, dims=_own_dims(func, x))


@implements(torch.dropout_)
def dropout_in_place(func: Callable[..., Tensor], x: Subdomain, p: float, train: bool) -> Subdomain:
    """Drop single elements in place; nothing travels."""
    return _dropped(x, p, train, True, dims=range(x.ndim))


@implements(
    F.alpha_dropout, torch.alpha_dropout, F.feature_alpha_dropout, torch.feature_alpha_dropout
)
def alpha_dropout(
    func: Callable[..., Tensor],
    x: Subdomain,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    **named: bool,
) -> Subdomain:
    """Replace elements or channels so that mean and variance are kept; nothing travels."""
    return _alpha_dropped(x, p, named.get("train", training), inplace, dims=_own_dims(func, x))


def _own_dims(func: Callable[..., Tensor], x: Subdomain) -> range:
    """Return the first dims, for each index of which a number is drawn: all, or up to channels."""
    if func in (F.dropout, torch.dropout, F.alpha_dropout, torch.alpha_dropout):
        return range(x.ndim)
    alpha = func in (F.feature_alpha_dropout, torch.feature_alpha_dropout)
    return range(2 if alpha or x.ndim >= _BATCHED.get(func, 0) else 1)


def _dropped(x: Subdomain, p: float, training: bool, inplace: bool, *, dims: range) -> Subdomain:
    _check_probability(p)
    if not training or p == 0:
        return x  # the tensor itself, as in torch

    def draw(t: Tensor, own: torch.Generator | None) -> None:
        if own is None and not inplace and len(dims) == x.ndim:
            # one process: by a kernel with numbers of its own on some devices
            t.copy_(torch.dropout(torch.ones_like(t), p, True) != 0)
        else:
            t.bernoulli_(1 - p, generator=own)

    kept = _kept(x, p, dims, draw)
    factor = kept / (1 - p) if p < 1 else kept
    return x.alike(x.local.mul_(factor) if inplace else x.local * factor)


def _alpha_dropped(
    x: Subdomain, p: float, training: bool, inplace: bool, *, dims: range
) -> Subdomain:
    """Dropped elements get the value at which a SELU saturates; mean and variance are kept."""
    _check_probability(p)
    if not training or p == 0:
        return x  # the tensor itself, as in torch
    kept = _kept(x, p, dims, lambda t, own: t.bernoulli_(1 - p, generator=own))
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    shift = (kept - 1) * (_ALPHA * scale) + _ALPHA * scale * p
    factor = kept * scale
    return x.alike(x.local.mul_(factor).add_(shift) if inplace else x.local * factor + shift)


def _kept(x: Subdomain, p: float, dims: range, draw: Draw) -> Tensor:
    """One for what is kept, zero for what is dropped; one number for all dims after `dims`."""
    if p == 1:  # as torch: without drawing
        return x.local.new_zeros(())
    if len(dims) == x.ndim:
        return drawn(x.alike(x.local), draw)
    ones = x.layout.with_dims({d: (Factor(1),) for d in range(x.ndim) if d not in dims})
    return drawn(x.in_rows(x.local.new_empty(ones.local_shape), ones), draw)


def _check_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
