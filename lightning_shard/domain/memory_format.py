"""Memory formats: tensors lie row by row, or with the channels of each place side by side.

Each rank keeps the format of its own part. What travels is in the order of the rows, since the part
of another rank may lie in another format.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_shard.processes.torch_private.internals import is_view, storage_key

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def format_of(x: Tensor) -> torch.memory_format:
    """`channels_last` or `channels_last_3d` if `x`, or what it is a part of, lies so.

    Else `contiguous_format`, also of tensors that lie in no format.
    """
    last = _LAST.get(x.ndim)
    if last is None or x.is_contiguous():
        return torch.contiguous_format
    order = [0, *range(2, x.ndim)]
    strides = [x.stride(d) for d in order if x.shape[d] > 1]  # those of one row say nothing
    descending = all(a >= b for a, b in pairwise(strides))
    return last if descending and x.stride(1) == 1 < x.shape[1] else torch.contiguous_format


def dims_in_memory(steps: Sequence[int]) -> list[int]:
    """Return the dims of a tensor of these strides, the one with the longest step first."""
    return sorted(range(len(steps)), key=lambda d: -steps[d])


def empty(like: Tensor, shape: Sequence[int], stored: torch.memory_format) -> Tensor:
    """Memory for a tensor of another shape, in a format."""
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=stored)


def joined(pieces: Sequence[Tensor], dim: int, stored: torch.memory_format) -> Tensor:
    """`torch.cat` into a format, outside of autograd; of one piece that lies so, the piece."""
    if stored == torch.contiguous_format:
        return torch.cat([*pieces], dim) if len(pieces) > 1 else pieces[0]
    if len(pieces) == 1:
        return pieces[0].contiguous(memory_format=stored)
    shape = [*pieces[0].shape]
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    return torch.cat([*pieces], dim, out=empty(pieces[0], shape, stored))


def owned(result: Tensor, *given: Tensor) -> Tensor:
    """Return what an autograd.Function computed as a tensor that is no view.

    Torch forbids in-place functions after a Function that returned a view, such as a reshaped
    result. Memory of what the Function was given is copied.
    """
    if any(storage_key(result) == storage_key(x) for x in given):
        return result.clone()
    if not is_view(result):
        return result
    result = result.resolve_conj().resolve_neg()
    with torch.no_grad():
        # not new_empty, which MONAI's MetaTensor has with other arguments
        memory = torch.empty(0, dtype=result.dtype, device=result.device)
        return memory.set_(result)  # pyright: ignore[reportArgumentType]  torch takes tensors


def laid_by(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor whose dims lie in memory in the order that some strides have."""
    order = dims_in_memory(strides)
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])


def rows_from(x: Tensor, starts: Mapping[int, int], shape: Sequence[int]) -> Tensor:
    """Return what lies from `starts` on in some dims, as a new result of torch's would lie."""
    found = x
    for dim, start in starts.items():
        found = found.narrow(dim, start, shape[dim])
    return x if found.shape == x.shape else found.clone()


def selected(x: Tensor, dim: int, places: Tensor) -> Tensor:
    """`index_select` that keeps the format."""
    if format_of(x) == torch.contiguous_format:
        return x.index_select(dim, places)
    return x.movedim(1, -1).index_select(_moved(x, dim), places).movedim(-1, 1)


def _moved(x: Tensor, dim: int) -> int:
    """Where a dim is once the channels are last."""
    return dim if dim == 0 else x.ndim - 1 if dim == 1 else dim - 1
