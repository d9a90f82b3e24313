"""`out=` of a split tensor: each rank writes its rows of the result into its part."""

from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import local_part
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.processes.typed import is_list
from lightning_shard.tensor.gathering import split_in
from lightning_shard.tensor.part import part_of


def write_out(result: Any, out: Any, operands: Any, kind: type[Tensor]) -> Any:
    """Copy what a function gave into the tensors that are to take it.

    Args:
        result: One tensor, or several.
        out: As many tensors, split or plain.
        operands: The other arguments of the function.
        kind: The class of split tensors.

    Returns:
        `out`, in the form of the result.

    Raises:
        RuntimeError: Gradients are wanted, which no function with `out=` has.
        UnsupportedOperationError: A tensor of `out` cannot hold its result.
    """
    many = is_list(result)
    results, targets = (list(result), list(out)) if many else ([result], [out])
    if torch.is_grad_enabled() and any(t.requires_grad for t in split_in([operands, out], Tensor)):
        raise RuntimeError(
            "functions with out=... arguments don't support automatic differentiation, but one of "
            "the arguments requires grad."
        )
    writes = [_prepared(r, t, kind) for r, t in zip(results, targets, strict=True)]
    with torch.no_grad():
        for target, rows in writes:  # when all of them can be written
            target.copy_(rows)
    return type(result)(targets) if many else out


def _prepared(result: Any, target: Any, kind: type[Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's plain tensor of `target`, and what it is to hold."""
    if tuple(result.shape) != tuple(target.shape) or result.dtype != target.dtype:
        raise UnsupportedOperationError(
            f"out= must have the shape and the dtype of the result, {tuple(result.shape)} and "
            f"{result.dtype}; it has {tuple(target.shape)} and {target.dtype}"
        )
    if not isinstance(target, kind):
        if isinstance(result, kind):
            raise UnsupportedOperationError("out= is a plain tensor and the result is split")
        return target, result
    part = part_of(target).read()
    if part.copied:
        raise UnsupportedOperationError("out= is a copy of rows that came from other ranks")
    rows = part_of(result).read() if isinstance(result, kind) else result
    return part.local, local_part(rows, part.layout)
