"""Reads numbers of sharded tensors as those of the whole.

`float(p.grad.norm())`, `.item()` and `if p.sum() > 1:` read what lies on this rank in torch 2.11 to
2.15: of a sum that is still a part on each rank, its part (torch.distributed.tensor,
`_sharding_prop.py`, which leaves `_local_scalar_dense` out). The whole takes all ranks, so they
meet first: a rank that reads alone would wait for ever.
"""

from typing import Any

import torch

from lightning_shard.fsdp.meeting import meet
from lightning_shard.processes.torch_private.internals import read_numbers_of_dtensors


def read_whole_numbers() -> None:
    """Let a number that is read from a DTensor be the same on all ranks, from now on."""
    read_numbers_of_dtensors(_number)


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
