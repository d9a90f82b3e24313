"""Chooses for sharding "auto" whether each rank keeps whole parameters, by the bytes of states.

Most networks on fields are small beside their activations. Whole parameters train as under DDP: a
step does nothing else than in one process, but for the mean of the gradients. FSDP2 pays where
parameters, gradients and optimizer states take a large part of a device.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.memory.free import free_here
from lightning_shard.processes.process_info import process_info

TRAINABLE_BYTES, FROZEN_BYTES = 16, 4  # for each number: parameter, gradient, two states of Adam
SHARE, MOST_BYTES = 0.05, 4 * 2**30  # a share of the device's memory, and bytes in all
_GIB, _MIB = 2**30, 2**20


def bytes_of_states(module: nn.Module) -> int:
    """Return the bytes of parameters, gradients and Adam's states in float32 of a module."""

    def numbers() -> Iterator[int]:
        for p in module.parameters():
            each = TRAINABLE_BYTES if p.requires_grad else FROZEN_BYTES
            yield p.numel() * each * (2 if p.is_complex() else 1)

    return sum(numbers())


def memory_of_rank(device: torch.device) -> int:
    """Return the bytes of a device, or what is free on a machine for each of its processes."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    ranks = 1
    if dist.is_initialized():
        ranks = process_info().local_world_size or dist.get_world_size()
    return free_here()[0] // max(1, ranks)


def agreed_memory(device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Return the memory of the rank of `group` that has least; all of its ranks call this."""
    own = memory_of_rank(device)
    if group is None or dist.get_world_size(group) == 1:
        return own
    least = torch.tensor([own], dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return int(least)


def choose_sharding(
    options: ShardingOptions,
    module: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> tuple[ShardingOptions, str]:
    """Choose "none" or "full" for options whose mode is "auto".

    Args:
        options: The options; of another mode they stay as they are.
        module: The module, whose parameters may have no memory yet.
        device: The device of this rank.
        group: The ranks that choose alike; all of them call this.

    Returns:
        The options with the mode that was chosen, and a sentence about it; "" if nothing was
        chosen.
    """
    if options.mode != "auto":
        return options, ""
    if options.needs_shards:
        return replace(options, mode="full"), ""
    states, memory = bytes_of_states(module), agreed_memory(device, group)
    ranks = 1 if group is None else dist.get_world_size(group)
    of_memory = f"{_in_words(states)} of {memory / _GIB:.0f} GiB"
    if states <= min(SHARE * memory, MOST_BYTES):
        return (
            replace(options, mode="none"),
            f"parameters: whole on each rank, {of_memory}; sharding='full' shards them",
        )
    return (
        replace(options, mode="full"),
        f"parameters: sharded over {ranks} ranks, together {of_memory}; sharding='none' keeps them "
        "whole on each rank",
    )


def _in_words(size: int) -> str:
    return f"{size / _GIB:.1f}" if size >= 0.1 * _GIB else f"{max(0.1, size / _MIB):.1f} MiB"
