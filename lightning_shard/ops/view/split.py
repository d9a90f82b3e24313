"""Cuts a tensor into several along a dim; each piece is split canonically for its own extent."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.layout import partition
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements, name_of
from lightning_shard.ops.view.index import getitem, strided
from lightning_shard.processes.torch_private.typed import integers

_DIM_OF: dict[Callable[..., Any], int] = {
    torch.hsplit: 1, Tensor.hsplit: 1,
    torch.vsplit: 0, Tensor.vsplit: 0,
    torch.dsplit: 2, Tensor.dsplit: 2,
}  # fmt: skip


@implements(torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes,
            torch.unsafe_split, Tensor.unsafe_split)  # fmt: skip
def split(
    func: Callable[..., Any], x: Subdomain, split_size_or_sections: Any, dim: int = 0
) -> tuple[Subdomain, ...]:
    """Cut into pieces of given sizes; rows travel to the owners within each piece."""
    d, sizes = x.layout.dim(dim), split_size_or_sections
    if isinstance(sizes, int):
        starts = range(0, x.shape[d], max(sizes, 1))
        sizes = [min(sizes, x.shape[d] - start) for start in starts] or [0]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    if not ends or ends[-1] != x.shape[d]:
        raise RuntimeError(f"split sizes {sizes} do not add up to {x.shape[d]} (dim {dim})")
    return tuple(strided(x, d, range(e - n, e)) for n, e in zip(sizes, ends, strict=True))


@implements(torch.chunk, Tensor.chunk, torch.unsafe_chunk, Tensor.unsafe_chunk)
def chunk(
    func: Callable[..., Any], x: Subdomain, chunks: int, dim: int = 0
) -> tuple[Subdomain, ...]:
    """Cut into so many pieces; rows travel as for `split`."""
    extent = x.shape[x.layout.dim(dim)]
    return split(func, x, -(-extent // chunks) if extent else [0] * chunks, dim)


@implements(torch.unbind, Tensor.unbind)
def unbind(func: Callable[..., Any], x: Subdomain, dim: int = 0) -> Any:
    """Take each row along `dim`; every row travels to all ranks if it is split."""
    d = x.layout.dim(dim)
    return tuple(getitem(func, x, (slice(None),) * d + (i,)) for i in range(x.shape[d]))


@implements(torch.tensor_split, Tensor.tensor_split)
def tensor_split(
    func: Callable[..., Any],
    x: Subdomain,
    indices_or_sections: int | Sequence[int] | Tensor | None = None,
    dim: int = 0,
    **named: Any,
) -> tuple[Subdomain, ...]:
    """Cut at given places or into so many pieces; rows travel as for `split`."""
    d = x.layout.dim(dim)
    cuts: Any = next(iter(named.values())) if indices_or_sections is None else indices_or_sections
    cuts = integers(cuts) if isinstance(cuts, Tensor) else cuts
    if isinstance(cuts, int):
        offsets = partition(x.shape[d], cuts)
    else:
        offsets = (0, *(slice(c).indices(x.shape[d])[1] for c in cuts), x.shape[d])
    return tuple(strided(x, d, range(a, max(a, b))) for a, b in pairwise(offsets))


@implements(*_DIM_OF)
def split_by_name(
    func: Callable[..., Any], x: Subdomain, indices_or_sections: int | Sequence[int]
) -> tuple[Subdomain, ...]:
    """Cut along the dim that the function's name fixes; rows travel as for `split`."""
    d = min(_DIM_OF[func], x.ndim - 1)
    cuts = indices_or_sections
    if isinstance(cuts, int) and x.shape[d] % cuts:
        raise RuntimeError(
            f"{name_of(func)}: dim {d} of size {x.shape[d]} is not divisible by {cuts}"
        )
    return tensor_split(func, x, cuts, d)
