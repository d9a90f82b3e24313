"""`out=` of a split tensor: each rank writes its rows of the result into its part."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import local_part
from lightning_shard.domain.empty_ranks import written_alike
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.view.write_back import after_write, refuse_lost_write
from lightning_shard.processes.narrow import is_list
from lightning_shard.tensor.gathering import split_in
from lightning_shard.tensor.part import part_of


def write_out(result: Any, out: Any, operands: Any, kind: type[Tensor]) -> Any:
    """Copy what a function gave into the tensors that are to take it.

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
    with torch.no_grad():
        writes = [_prepared(r, t, kind) for r, t in zip(results, targets, strict=True)]
        for target, rows in writes:  # when all of them can be written
            if isinstance(target, Subdomain):
                written_alike(target, partial(target.local.copy_, rows))
                after_write(target)
            else:
                target.copy_(rows)
    return type(result)(targets) if many else out


def _prepared(result: Any, target: Any, kind: type[Tensor]) -> tuple[Subdomain | Tensor, Tensor]:
    """This rank's part of `target`, and what it is to hold."""
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
    refuse_lost_write(part)
    rows = part_of(result).read() if isinstance(result, kind) else result
    return part, local_part(rows, part.layout)
