"""Makes process groups: those of a mesh where torch could not split the first, and on the host.

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


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks that carries memory of the host; all of them must call."""
    if "gloo" in dist.get_backend_config(group):
        return group
    return _host_group(tuple(dist.get_process_group_ranks(group)), dist.group.WORLD)


@lru_cache(maxsize=8)
def _host_group(ranks: tuple[int, ...], _: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Make a gloo group of some ranks, which alone take part."""
    group = dist.new_group([*ranks], backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


PROCESS_STATE = {"_host_group": _host_group, "_writing_group": _writing_group}
