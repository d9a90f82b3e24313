"""Reads numbers of sharded tensors as those of the whole.

`float(p.grad.norm())`, `.item()` and `if p.sum() > 1:` read what lies on this rank in torch 2.11 to
2.15: of a sum that is still a part on each rank, its part (torch.distributed.tensor,
`_sharding_prop.py`, which leaves `_local_scalar_dense` out). The whole takes all ranks, so they
meet first: a rank that reads alone would wait for ever.

Forward mode cannot take shards at all, and asks about their storage first: this is refused.

A rank without rows has no extreme to begin with: torch raises on that rank alone, and the others
wait. There all ranks gather the whole tensor, which has few rows.
"""

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_shard.fsdp.meeting import meet
from lightning_shard.processes.torch_private.internals import (
    handle_dtensors,
    handle_some_dtensors,
    maxima_of_list,
    norms_of_list,
    read_number,
    same_storage_numel,
    tree_map_only,
)

_aten = torch.ops.aten
_EXTREMES: dict[Any, str] = {_aten.max.default: "max", _aten.min.default: "min"}
_NORMS = (_aten.linalg_vector_norm.default, norms_of_list)
_WITHOUT_IDENTITY = (  # of no rows they have no value
    *_NORMS, _aten.amax.default, _aten.amin.default, _aten.argmax.default, _aten.argmin.default,
    maxima_of_list,
)  # fmt: skip


@functools.cache
def read_whole_numbers() -> None:
    """Let a number that is read from a DTensor be the same on all ranks, from now on."""
    handle_dtensors(read_number, _number)
    handle_dtensors(same_storage_numel, _refuse_dual)
    handle_dtensors(_aten.detach_.default, lambda _, args, __: args[0])  # torch 2.11 has no rule
    for operator in _EXTREMES:
        handle_dtensors(operator, _extreme)
    for operator in _WITHOUT_IDENTITY:
        handle_some_dtensors(operator, _of_few_rows)


@torch.no_grad()
def _number(operator: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
    (tensor,) = args
    meet(
        tuple(tensor.device_mesh.mesh.flatten().tolist()),
        "number",
        "reads a number of a sharded tensor, as float(p.grad.norm()) does",
        "all ranks must read it, so read it outside of what only one rank runs",
    )
    return operator(tensor.full_tensor())


def _refuse_dual(*_: Any) -> None:
    """Raise, as torch has no forward mode of shards: their tangents have no memory.

    Raises:
        RuntimeError: Always, on all ranks, before anything is computed.
    """
    raise RuntimeError(
        "forward mode, as torch.func.jvp and make_dual, was given a shard of a parameter or of a "
        "gradient, which torch cannot differentiate: call it with whole ones, inside `with "
        "lightning_shard.whole_parameters(module):` and by p.grad.full_tensor()."
    )


@torch.no_grad()
def _extreme(operator: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
    (tensor,) = args
    if any(p.is_partial() for p in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    local = tensor.to_local()
    kind, whole = _EXTREMES[operator], [p.is_replicate() for p in tensor.placements]
    if local.numel():
        value = operator(local)
    elif local.is_floating_point():
        value = local.new_tensor(-torch.inf if kind == "max" else torch.inf)
    else:
        numbers = torch.iinfo(torch.uint8 if local.dtype == torch.bool else local.dtype)
        value = local.new_tensor(numbers.min if kind == "max" else numbers.max)
    return DTensor.from_local(
        value, tensor.device_mesh, [Replicate() if w else Partial(kind) for w in whole]
    )


@torch.no_grad()
def _of_few_rows(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Reduce whole tensors where a rank has no rows of one of them."""
    if operator in _NORMS:
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        if 0 <= order < torch.inf:
            return NotImplemented
    tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    few = [t for t in tensors if isinstance(t, DTensor) and _is_empty_somewhere(t)]
    if not few:
        return NotImplemented
    mesh = few[0].device_mesh
    args, kwargs = tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))
    return tree_map_only(
        torch.Tensor,
        lambda t: DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False),
        operator(*args, **kwargs),
    )


def _is_empty_somewhere(tensor: DTensor) -> bool:
    """Return whether some rank has no rows of a tensor that has some; the same on all ranks."""
    if not tensor.numel():
        return False
    rows = dict(enumerate(tensor.shape))  # of the last rank, which has the fewest
    for ranks, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            of_first = -(-rows[placement.dim] // ranks)
            rows[placement.dim] = max(0, rows[placement.dim] - (ranks - 1) * of_first)
    return not all(rows.values())
