"""Offers two ways out where no rule exists: to work on one part, and to allow a gather."""

import functools
import operator
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.elementwise.whole_gradients import as_part, local_gradients, ranks_of
from lightning_shard.processes.torch_private.internals import (
    storage_key,
    tree_leaves,
    tree_map_only,
)
from lightning_shard.tensor.gathering import gather_allowed
from lightning_shard.tensor.mapped_rows import WrittenSlice, side_by_side
from lightning_shard.tensor.tensor import DomainTensor

_MOST_GRAPHS = 62  # results whose graphs are compared: bits of one number


@contextmanager
def allow_gather() -> Generator[None, None, None]:
    """Run operations without a rule on gathered tensors; a warning for each says the cost.

    The result of such an operation is a plain tensor, the same on every rank, and exact; where it
    meets a split tensor again, each rank takes its rows of it. A custom autograd.Function runs on
    gathered tensors, too. What writes into a split tensor, in place or as `out=`, is still refused.
    """
    token = gather_allowed.set(True)
    try:
        yield
    finally:
        gather_allowed.reset(token)


def local_map(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `function` run on each rank's part, as a custom kernel that works row by row may.

    All ranks call it. While gradients are recorded they tell each other, in one small message,
    whether a result has a graph: on some ranks it may have none, as of a part without rows. There
    the backward pass then goes on with gradients of zero. They also tell each other whether the
    function has written into a slice, which is then written back.

    Args:
        function: Takes and returns plain tensors. Rows of split dims must not depend on other rows,
            and each returned tensor must keep the split dims of the first split argument; other
            dims may change their extent. Split arguments whose shapes broadcast are split alike.

    Returns:
        The function for split tensors. It raises ValueError if a split dim changed its extent, if
        arguments are split differently, or if it returned other numbers of tensors on some ranks.

    Example:
        >>> softplus = local_map(MyKernel.apply)
        >>> y = softplus(x)  # x, y: DomainTensor
    """

    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        split = [a for a in (*args, *kwargs.values()) if isinstance(a, DomainTensor)]
        if not split:
            return function(*args, **kwargs)
        parts = side_by_side([a.subdomain for a in split])
        part, part_of = parts[0], dict(zip(map(id, split), parts, strict=True))
        slices = [WrittenSlice(each) for each in parts if each.copied is not None]

        def local(value: Any) -> Any:
            return as_part(part_of[id(value)].local) if isinstance(value, DomainTensor) else value

        def wrapped(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(map(wrapped, value))
            if not isinstance(value, Tensor):
                return value
            layout = _layout_of(value, part.layout)
            owner = next((p for p in parts if storage_key(p.local) == storage_key(value)), None)
            if owner is not None or not part.is_in_order:
                copied = None if owner is None else owner.copied
                return DomainTensor(replace(part.like(value, layout), copied=copied))
            # a part of one row shows no other order, and no rank asks the others
            return DomainTensor(part.in_rows(value.contiguous(), layout))

        given = [local(a) for a in args], {k: local(v) for k, v in kwargs.items()}
        with local_gradients():
            found = _with_graphs_alike(function(*given[0], **given[1]), given, part)
        for each in slices:
            each.write_back()
        return wrapped(found)

    return mapped


def _with_graphs_alike(found: Any, given: Any, part: Subdomain) -> Any:
    """Give results a graph where they have one on some ranks only: all run the same backward."""
    results = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
    if not torch.is_grad_enabled() or ranks_of(part.domain) == 1:
        return found
    graphs = sum(x.requires_grad << i for i, x in enumerate(results[:_MOST_GRAPHS]))
    own = torch.tensor([len(results), graphs], device=part.local.device)
    of_ranks: list[list[int]] = part.domain.gathered(own).tolist()
    if any(count != len(results) for count, _ in of_ranks):
        numbers = [count for count, _ in of_ranks]
        raise ValueError(
            f"local_map: the function must return as many tensors on all ranks; it returned "
            f"{numbers} on the ranks of the domain."
        )
    if all(mask == graphs for _, mask in of_ranks):
        return found
    some = functools.reduce(operator.or_, (mask for _, mask in of_ranks))
    places = {id(x): i for i, x in enumerate(results)}
    sources = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]

    def attached(x: Tensor) -> Tensor:
        if not some >> places[id(x)] & 1:
            return x
        nothing = sum(s.flatten()[:0].sum() for s in sources or [_leaf_like(x)])
        return x + torch.as_tensor(nothing, dtype=x.dtype, device=x.device)

    return tree_map_only(Tensor, attached, found)


def _leaf_like(x: Tensor) -> Tensor:
    return x.new_zeros((), requires_grad=True)


def _layout_of(result: Tensor, layout: Layout) -> Layout:
    kept = result.ndim == layout.ndim and all(
        result.shape[d] == layout.local_shape[d] for d in layout.split_dims
    )
    if not kept:
        raise ValueError(
            f"local_map: the function must keep the split dims {list(layout.split_dims)} of its "
            f"first split argument, of local shape {layout.local_shape}; it returned "
            f"{tuple(result.shape)}."
        )
    for d in range(result.ndim):
        if d not in layout.split_dims:
            layout = layout.with_dim(d, result.shape[d])
    return layout
