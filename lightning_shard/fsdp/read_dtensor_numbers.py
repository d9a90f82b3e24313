"""Reads numbers of sharded tensors as those of the whole.

`float(p.grad.norm())`, `.item()` and `if p.sum() > 1:` read what lies on this rank in torch 2.11 to
2.15: of a sum that is still a part on each rank, its part (torch.distributed.tensor,
`_sharding_prop.py`, which leaves `_local_scalar_dense` out). The whole takes all ranks, so they
meet first: a rank that reads alone would wait for ever.

A rank without rows has no extreme to begin with: torch raises on that rank alone.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from lightning_shard.fsdp.meeting import meet
from lightning_shard.processes.torch_private.internals import handle_dtensors, read_number

_aten = torch.ops.aten
_EXTREMES: dict[Any, str] = {_aten.max.default: "max", _aten.min.default: "min"}


def read_whole_numbers() -> None:
    """Let a number that is read from a DTensor be the same on all ranks, from now on."""
    handle_dtensors(read_number, _number)
    for operator in _EXTREMES:
        handle_dtensors(operator, _extreme)


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
