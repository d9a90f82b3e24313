"""Compares what the largest block of a module needs in a step with what sharding saves.

In backward a rank holds the whole parameters of a block, their gradients, and these once more where
FSDP2 lays them out for the ranks. With its own part of all parameters and gradients that may be as
much as one process holds.
"""

from torch import nn

from lightning_shard.fsdp.shard_block import class_name, sharded_modules
from lightning_shard.processes.torch_private.internals import gathered_by

WORTH_SAYING = 64 * 2**20  # bytes of parameters
_COPIES = 3  # a block's parameters, its gradients, and their layout for the ranks


def advice(module: nn.Module) -> str:
    """Say in a sentence that sharding saves nothing of a module's parameters; "" if it saves some.

    Args:
        module: The module that `parallelize` has sharded.
    """
    groups = [(block, gathered_by(block)) for block in sharded_modules(module)]
    sizes = {
        block: sum(r.sharded_param.numel() * r.sharded_param.element_size() for r in records)
        for block, records in groups
    }
    largest = max(sizes, key=lambda block: sizes[block], default=None)
    whole = sum(p.numel() * p.element_size() for p in module.parameters())
    if largest is None or whole < WORTH_SAYING:
        return ""
    ranks = dict(groups)[largest][0].sharded_param.device_mesh.size() if sizes[largest] else 1
    if _COPIES * sizes[largest] + 2 * whole / ranks < 2 * whole:
        return ""
    assert isinstance(largest, nn.Module)
    name = class_name(largest)
    return (
        f"{sizes[largest] >> 20} of {whole >> 20} MiB of parameters are gathered at once, by "
        f"{name}, and in backward so are their gradients: sharding over {ranks} ranks saves no "
        "memory of parameters. Name smaller blocks if there are any, such as "
        "ShardingOptions(min_num_params=1_000_000)."
    )
