"""Tells how the whole tensor lies in the memory of one process, which no rank of several can see.

From shapes and strides alone torch says which functions give views, and how results lie: it is
asked about tensors without memory. All ranks ask about the same whole, and get the same answer.
"""

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from lightning_shard.domain.layout import Layout

Strides = tuple[int, ...]
Shape = tuple[int, ...]


def _tensor(shape: Shape, strides: Strides) -> Tensor:
    return torch.empty_strided(shape, strides, device="meta")


@lru_cache(maxsize=4096)
def of_view(shape: Shape, strides: Strides, function: str, *args: object) -> Strides | None:
    """Strides of a view of a tensor.

    Args:
        shape: The shape of the tensor.
        strides: Its strides, in elements.
        function: The name of a method of `Tensor` that gives a view.
        args: Its arguments.

    Returns:
        The strides; None where torch gives no view.
    """
    try:
        return getattr(_tensor(shape, strides), function)(*args).stride()
    except (RuntimeError, ValueError):  # the latter while torch traces
        return None


@lru_cache(maxsize=4096)
def of_result(*operands: tuple[Shape, Strides]) -> Strides | None:
    """Strides of the result of an elementwise function of up to three tensors; of more, None."""
    tensors = [_tensor(*operand) for operand in operands]
    functions = {1: torch.neg, 2: torch.add, 3: torch.addcmul}
    function = functions.get(len(tensors))
    return None if function is None else function(*tensors).stride()


@lru_cache(maxsize=4096)
def of_copy(shape: Shape, strides: Strides) -> Strides:
    """Strides of new memory like a tensor, as of a clone."""
    return torch.empty_like(_tensor(shape, strides)).stride()


@lru_cache(maxsize=4096)
def of_joined(dim: int, *tensors: tuple[Shape, Strides]) -> Strides:
    """Strides of tensors joined along a dim by `torch.cat`."""
    return torch.cat([_tensor(*tensor) for tensor in tensors], dim).stride()


@lru_cache(maxsize=4096)
def in_format(shape: Shape, strides: Strides, stored: torch.memory_format) -> tuple[bool, Strides]:
    """Return whether a tensor is copied to lie in a format, and the strides that it has then."""
    x = _tensor(shape, strides)
    return not x.is_contiguous(memory_format=stored), x.contiguous(memory_format=stored).stride()


@lru_cache(maxsize=4096)
def are_in_order(shape: Shape, strides: Strides) -> bool:
    """Return True if no dim has a longer step than one before it; others may lie between rows.

    Rows that are one in memory, as `expand` shows them, have no order.
    """
    steps = [step for n, step in zip(shape, strides, strict=True) if n > 1]
    return 0 not in steps and all(a >= b for a, b in pairwise(steps))


@lru_cache(maxsize=4096)
def channels_last(shape: Shape) -> Strides | None:
    """Strides of a tensor in `torch.channels_last` or `torch.channels_last_3d`; None for others."""
    stored = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    if stored is None:
        return None
    return torch.empty(shape, device="meta", memory_format=stored).stride()


@lru_cache(maxsize=4096)
def shows_channels_last(layout: Layout) -> bool:
    """Return True if each part of a tensor shows whether its channels lie last.

    A part without rows does not, nor one that has one channel, or one place.
    """
    if layout.leaves_empty or layout.ndim not in (4, 5) or layout.shape[1] == 1:
        return False
    whole_places = [n for d, n in enumerate(layout.shape) if d > 1 and not layout.axes(d)]
    return not layout.leaves_one_row or (not layout.axes(1) and max(whole_places, default=1) > 1)


@lru_cache(maxsize=4096)
def are_dense(shape: Shape, strides: Strides) -> bool:
    """Return True if the elements fill their memory, in any order of dims."""
    step = 1
    for own, n in sorted((own, n) for n, own in zip(shape, strides, strict=True) if n != 1):
        if own != step:
            return False
        step *= n
    return True


@lru_cache(maxsize=4096)
def of_whole(shape: Shape, strides: Strides, layout: Layout) -> Strides | None:
    """Strides of the new tensor of which a part has these; None where not all parts show them.

    A dim of one row has any step, so that each part must have two rows of each split dim.
    """
    if shape != layout.local_shape or not are_dense(shape, strides):
        return None
    if layout.leaves_one_row or layout.leaves_empty:
        return None
    order = sorted(range(layout.ndim), key=lambda d: -strides[d])
    return torch.empty_permuted(layout.shape, order, device="meta").stride()


@lru_cache(maxsize=4096)
def joins_split(layout: Layout, strides: Strides, target: Shape) -> bool:
    """Return True if a view of shape `target` joins a split dim to one outside of it.

    Where other elements lie between the rows, a part has another number of them than the whole,
    so that it may not be seen in that shape.
    """
    apart = list(strides)
    for d in layout.split_dims:
        apart = [2 * s if step > strides[d] else s for s, step in zip(apart, strides, strict=True)]
    return of_view(layout.shape, tuple(apart), "view", target) is None
