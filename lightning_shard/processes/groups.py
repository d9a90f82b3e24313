"""Makes process groups one by one where torch could not split the first."""

from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_shard.processes.torch_internals import splits


@contextmanager
def making_groups() -> Generator[None, None, None]:
    """Let torch make the groups of a mesh one by one, while open, where it cannot split the first.

    torch 2.15 splits the default group, if that is bound to a device, for each new mesh; xccl
    cannot be split (https://github.com/pytorch/pytorch/issues/186548). Bound it must be: FSDP2
    would wait for ever in its first gather.
    """
    group = dist.group.WORLD
    bound = None if group is None else group.bound_device_id
    if group is None or bound is None or splits(group, bound):
        yield
        return
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = bound
