"""Compares the modules of all ranks before they are sharded together.

A rank whose module differs would send other numbers of bytes, or call other collectives.
"""

import hashlib

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_shard.domain.local_group import gathered_objects
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.processes.agreement import DisagreementError


def check_same_module(
    module: nn.Module, options: ShardingOptions, group: dist.ProcessGroup
) -> None:
    """Compare names, shapes and dtypes of the module, and how it is to be sharded.

    Raises:
        DisagreementError: Two ranks differ; raised on all of them.
        ValueError: A parameter has no shape yet.
    """
    refuse_without_shape(module)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = {f"'{name}'": f"{tuple(t.shape)} {t.dtype}" for name, t in tensors.items()}
    own |= {f"the option {name}": value for name, value in options.described().items()}
    sums = gathered_objects(hashlib.sha256(repr(own).encode()).hexdigest(), group)
    if len(set(sums)) == 1:
        return
    first, *others = gathered_objects(own, group)
    other = next((o for o in others if o != first), first)
    ranks = dist.get_process_group_ranks(group)
    number = ranks[1 + others.index(other)] if other in others else ranks[0]
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    what = names[0] if names else "the order of its parameters"
    raise DisagreementError(
        f"the ranks' modules differ in {what}: {first.get(what, 'missing')} on rank {ranks[0]}, "
        f"{other.get(what, 'missing')} on rank {number}; build and shard the same module on all "
        "ranks."
    )


def refuse_without_shape(module: nn.Module) -> None:
    """Refuse lazy modules, whose first values each rank would draw itself.

    Raises:
        ValueError: A parameter has no shape yet.
    """
    for name, p in module.named_parameters():
        if isinstance(p, UninitializedParameter):
            raise ValueError(
                f"the parameter {name} of a lazy module has no shape yet: run the module once on a "
                "batch in __init__ or configure_model, or give its layers their number of inputs."
            )
