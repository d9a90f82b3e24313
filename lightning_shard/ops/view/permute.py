"""Rules that change the order of dims: each rank's part is permuted as the whole is."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.layout import Layout, layout_of
from lightning_shard.domain.strides import Strides
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements, listed
from lightning_shard.processes.torch_private.internals import accessors


def permuted(x: Subdomain, order: Sequence[int]) -> Subdomain:
    """Return the tensor with its dims in another order; nothing travels."""
    return x.view(x.local.permute(*order), *_turned(x.layout, x.strides, tuple(order)))


@lru_cache(maxsize=4096)
def _turned(
    layout: Layout, strides: Strides | None, order: tuple[int, ...]
) -> tuple[Layout, Strides | None]:
    """The layout and the strides with the dims in another order."""
    turned = layout_of(tuple([layout.dims[d] for d in order]), layout.grid)
    return turned, None if strides is None else tuple([strides[d] for d in order])


@implements(torch.permute, Tensor.permute)
def permute(func: Callable[..., Any], x: Subdomain, *dims: Any, **kwargs: Any) -> Subdomain:
    """Change the order of dims; nothing travels."""
    order = listed(dims or tuple(kwargs.values()))
    return permuted(x, [x.layout.dim(d) for d in order])


@implements(torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, torch.swapdims,
            Tensor.swapdims)  # fmt: skip
def transpose(func: Callable[..., Any], x: Subdomain, dim0: int, dim1: int) -> Subdomain:
    """Exchange two dims; nothing travels."""
    order = list(range(x.ndim))
    a, b = x.layout.dim(dim0), x.layout.dim(dim1)
    order[a], order[b] = b, a
    return permuted(x, order)


@implements(torch.t, Tensor.t, accessors("mT").__get__)
def matrix_transpose(func: Callable[..., Any], x: Subdomain) -> Subdomain:
    """Exchange the last two dims; nothing travels."""
    return transpose(func, x, -2, -1) if x.ndim > 1 else x


@implements(accessors("T").__get__)
def reverse_dims(func: Callable[..., Any], x: Subdomain) -> Subdomain:
    """Turn the order of all dims around, which of a matrix is its transpose."""
    return permuted(x, list(reversed(range(x.ndim))))


@implements(torch.adjoint, Tensor.adjoint, accessors("mH").__get__, accessors("H").__get__)
def adjoint(func: Callable[..., Any], x: Subdomain) -> Subdomain:
    """Exchange the last two dims and conjugate; nothing travels."""
    turned = transpose(func, x, -2, -1)
    return turned.view(turned.local.conj(), turned.layout, turned.strides)


@implements(torch.movedim, Tensor.movedim, torch.moveaxis, Tensor.moveaxis)
def movedim(func: Callable[..., Any], x: Subdomain, source: Any, destination: Any) -> Subdomain:
    """Move dims to other positions; nothing travels."""
    meta = torch.empty(tuple(range(x.ndim)), device="meta")  # extents that name the dims
    return permuted(x, torch.movedim(meta, source, destination).shape)
