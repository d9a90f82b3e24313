"""Offers two ways out where no rule exists: to work on one part, and to allow a gather."""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_shard.domain.layout import Layout
from lightning_shard.ops.elementwise.whole_gradients import local_gradients
from lightning_shard.processes.torch_private.internals import storage_key
from lightning_shard.tensor.gathering import gather_allowed
from lightning_shard.tensor.tensor import DomainTensor


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

    Args:
        function: Takes and returns plain tensors. Rows of split dims must not depend on other rows,
            and each returned tensor must keep the split dims of the first split argument; other
            dims may change their extent.

    Returns:
        The function for split tensors. It raises ValueError if a split dim changed its extent.

    Example:
        >>> softplus = local_map(MyKernel.apply)
        >>> y = softplus(x)  # x, y: DomainTensor
    """

    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, DomainTensor)), None)
        if first is None:
            return function(*args, **kwargs)
        part = first.subdomain

        def local(value: Any) -> Any:
            return value.to_local() if isinstance(value, DomainTensor) else value

        def wrapped(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(map(wrapped, value))
            if not isinstance(value, Tensor):
                return value
            layout = _layout_of(value, part.layout)
            if not part.is_in_order or storage_key(value) == storage_key(part.local):
                return DomainTensor(part.like(value, layout))
            # a part of one row shows no other order, and no rank asks the others
            return DomainTensor(part.in_rows(value.contiguous(), layout))

        with local_gradients():
            return wrapped(function(*map(local, args), **{k: local(v) for k, v in kwargs.items()}))

    return mapped


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
