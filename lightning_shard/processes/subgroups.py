"""Makes process groups: those of a mesh where torch could not split the first, and one for writing.

Each is made once for the processes that there are, also where a script has several Trainers. They
stay when a Trainer ends: sharded parameters need them, to be tested, saved, or trained further.
"""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache

import torch.distributed as dist

from lightning_shard.processes.torch_private.internals import splits


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


def writing_group(timeout_s: float) -> dist.ProcessGroup:
    """Return the group of all ranks in which a thread writes while training goes on."""
    return _writing_group(timeout_s, dist.group.WORLD)


@lru_cache(maxsize=8)
def _writing_group(timeout_s: float, _: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Make a gloo group of all processes, once for each default group, as meshes in mesh.py."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


PROCESS_STATE = {"_writing_group": _writing_group}
