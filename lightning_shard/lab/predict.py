"""Predicts what one rank of a mesh holds and sends in a training step, and how long it takes.

The rank runs a step of the Trainer on fake tensors; the other ranks need not be here. On a cluster
each operation takes as long as its bytes or its floating-point operations at the rates of the
device, whichever is longer, so kernels count as perfect ones. Each collective takes its bytes at
the rate of the slowest link among its ranks; the other ranks come to it when this one does.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_shard.data.split import ShardDims
from lightning_shard.fsdp import choose_sharding
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.lab.batches import Data, Stage, first_batches, pins_batches
from lightning_shard.lab.clusters import read_cluster
from lightning_shard.lab.extents import extents_of, refuse_empty_parts
from lightning_shard.lab.fake_trainer import Traced, replaced, traced
from lightning_shard.lab.machine import Cluster, Device
from lightning_shard.lab.own_kernels import OwnKernels, own_kernels
from lightning_shard.lab.prediction import Prediction
from lightning_shard.lab.replay import Replay
from lightning_shard.lab.run import Mesh, Task, as_mesh, samples_of, trainer_options
from lightning_shard.lightning import LightningDataModule, LightningModule
from lightning_shard.memory.in_tiles import refuse_to_offload, sizes_of_tiles
from lightning_shard.memory.sizes import bytes_of
from lightning_shard.processes.mesh import Sharding

Tiles = int | str | Sequence[int]
_OF_PARAMETERS = (
    "all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single",
    "mean_of_gradients",
)  # fmt: skip


def plan(
    module: LightningModule,
    data: Data,
    mesh: int | str | Mesh = 1,
    shard_dims: ShardDims = None,
    *,
    tiles: Tiles | None = None,
    tile_budget: str | None = None,
    cluster: Cluster | str | None = None,
    measure: bool = False,
    sharding: Sharding | ShardingOptions = "auto",
    activation_checkpointing: bool = False,
    activation_offload: bool | str = False,
    **trainer: Any,
) -> Prediction:
    """Predict one training step of a mesh, and the memory of the same step in one process.

    Args:
        module: An ordinary LightningModule, which stays as it is.
        data: A data module, or a DataLoader of training batches: those of one data replica.
        mesh: The number of ranks that share each sample; or data replicas, and the ranks along
            each split dim, as `(4, 2)` or "4x2".
        shard_dims: The dims that are split; see `HybridShardStrategy`.
        cluster: The machines, such as "8x8xH100", whose time is predicted, too.
        tiles: The number of tiles of `TiledStrategy`, in place of a mesh; or one for each split
            dim, as `(2, 4)` or "2x4".
        tile_budget: Bytes that tiles may keep on the device, such as "8GB". By default half of what
            the cluster's device has beside the parameters, as in a run; without a cluster, none.
        measure: If true, this machine has such a device as the cluster, and runs each kernel of the
            step alone on it, in about the time of ten steps. Else kernels take the device's rates.
        sharding: The mode of `ShardingOptions`, or such options, which then also have what follows;
            "auto" goes by the memory of the cluster's device, or by that of this machine.
        activation_checkpointing: If true, activations of blocks are computed again in backward.
        activation_offload: If true, those for which the device of the cluster has no room lie in
            the host's memory until backward; without a cluster all do. Or the bytes that stay on
            the device, such as "8GB".
        trainer: Arguments of the Trainer, such as `precision="bf16-mixed"`.

    Raises:
        ValueError: It is no mesh, or the cluster has another number of devices; or this machine has
            none of them, and `measure` is true.
        UnsupportedOperationError: The module uses an operation that cannot be split so.

    Example:
        >>> print(lightning_shard.plan(module, data, "4x2"))
    """
    options: dict[str, Any] = {
        "sharding": sharding,
        "activation_checkpointing": activation_checkpointing,
        "activation_offload": activation_offload,
        **trainer_options(plan, trainer),
    }
    kernels = own_kernels(cluster) if measure else None
    cluster = cluster if kernels is None else kernels.cluster
    tiled: dict[str, Any] = {"tiles": tiles, "tile_budget": tile_budget}
    found = predict(module, data, mesh, cluster, shard_dims, kernels=kernels, **tiled, **options)
    if found.is_measured:  # one step here is enough
        return found
    is_whole = math.prod(found.mesh) == 1 and not found.in_turns
    alone = found if is_whole else predict(module, data, (1, 1), **options)
    return replace(found, alone=None if alone.is_measured else alone.memory)


def predict(
    module: LightningModule,
    data: Data,
    mesh: int | str | Mesh = 1,
    cluster: Cluster | str | None = None,
    shard_dims: ShardDims = None,
    *,
    kernels: OwnKernels | None = None,
    tiles: Tiles | None = None,
    tile_budget: str | None = None,
    sharding: Sharding | ShardingOptions = "auto",
    activation_checkpointing: bool = False,
    activation_offload: bool | str = False,
    stage: Stage = "fit",
    **trainer: Any,
) -> Prediction:
    """Predict one training step of the rank of a mesh that holds and exchanges most.

    The arguments are those of `plan`, and two more. `kernels` tells what kernels take on a device
    of this machine, in place of the rates of the cluster. `stage` names another step than that of
    training. Only the shapes of the first batch matter; expanded tensors stand for large ones.

    Raises:
        ValueError: It is no mesh, the cluster has another number of devices, or the mesh has more
            ranks along a dim than the field has rows.
        UnsupportedOperationError: The module uses an operation that cannot be split so.
    """
    sizes, where = as_mesh(mesh), read_cluster(cluster) if isinstance(cluster, str) else cluster
    in_turns = tiles is not None
    if not isinstance(sharding, ShardingOptions):
        sharding = ShardingOptions(
            sharding, activation_checkpointing=activation_checkpointing,
            activation_offload=activation_offload,
        )  # fmt: skip
    if tiles is not None:
        devices = 1 if where is None else where.devices
        if math.prod(sizes) * devices > 1:
            raise ValueError(
                f"tiles take turns on one device, so they do not go with a mesh of "
                f"{math.prod(sizes)} ranks or a cluster of {devices} devices; leave the mesh out, "
                "and give a cluster of one device, such as 1xH100."
            )
        sizes = (1, *sizes_of_tiles(tiles))
        refuse_to_offload(sharding.activation_offload)
    elif where is not None and math.prod(sizes) != where.devices:
        raise ValueError(
            f"the mesh {'x'.join(map(str, sizes))} has {math.prod(sizes)} ranks, but the cluster "
            f"has {where.devices} devices; give a mesh of as many ranks."
        )
    is_hybrid = sharding.mode == "hybrid" and not in_turns
    options = replace(
        sharding,
        mode="none" if in_turns else sharding.mode,  # tiles share the module's own parameters
        shard_size=where.per_node if is_hybrid and where is not None else None,
    )
    batch = first_batches(module, data, stage)[0]
    refuse_empty_parts(sizes, extents_of(batch, shard_dims), "tiles" if in_turns else "ranks")
    task = Task(
        module, data if isinstance(data, LightningDataModule) else None, [batch], sizes, stage,
        strategy={"shard_dims": shard_dims, "sharding": options},
        trainer=trainer_options(predict, trainer),
    )  # fmt: skip
    device = None if where is None else where.device
    if device is not None and device.is_beside_host and stage == "fit" and pins_batches(data):
        device = replace(device, batch_rate=device.host_rate)
    here = choose_sharding.memory_of_rank(torch.device("cpu"))
    memory = here if device is None else int(device.memory)
    with replaced(choose_sharding, "agreed_memory", lambda *_: memory):
        budget = _budget_of(module, device, tile_budget)
        trace = partial(
            traced, task, rank_inside(sizes), device, in_turns=in_turns, budget=budget,
            costs=kernels,
        )  # fmt: skip
        found = trace()
        if kernels is not None and kernels.run():
            found = trace()
    sent = dict.fromkeys(("parameters", "fields"), 0)
    for each in found.timeline.collectives:
        sent["parameters" if each.name in _OF_PARAMETERS else "fields"] += each.sent
    count = math.prod(sizes) if in_turns else 1
    return Prediction(
        sizes, where, found.split, samples_of(batch) * sizes[0], found.peak.bytes, found.peak.place,
        found.peak.causes, found.activations, sent["parameters"], sent["fields"], found.is_measured,
        None, in_turns, count * found.on_host, count * found.out, count * found.back,
        **(_times_in_turns if in_turns else _times)(found, count, where),
        by_rates=() if kernels is None else tuple(sorted(kernels.not_run)),
    )  # fmt: skip


def _budget_of(module: LightningModule, device: Device | None, tile_budget: str | None) -> int:
    """Return the bytes that tiles keep on a device between their turns."""
    if tile_budget is not None:
        return bytes_of(tile_budget, "tile_budget")
    if device is None:
        return 0
    own = sum(x.nbytes for x in (*module.parameters(), *module.buffers()))
    return max(0, int(device.memory) - own) // 2


def _times_in_turns(found: Traced, tiles: int, cluster: Cluster | None) -> dict[str, Any]:
    """Return the times of tiles: the host exchanges fields, and no copy is hidden."""
    if cluster is None:
        return {}
    computed = tiles * found.timeline.computed
    link = tiles * (found.out + found.back) / cluster.device.host_rate
    return {
        "seconds": computed + link, "compute": computed, "exchange": 0.0, "link": link,
        "parameters_traffic": 0.0, "overlapped": 0.0,
    }  # fmt: skip


def _times(found: Traced, _: int, cluster: Cluster | None) -> dict[str, Any]:
    """Return the times of a `Prediction`; none without a cluster."""
    if cluster is None:
        return {}
    (step,) = Replay([found.timeline], cluster.cost).run()
    for_parameters = sum(s for (name, _), s in step.waited.items() if name in _OF_PARAMETERS)
    copied = (found.out + found.back) / cluster.device.host_rate + found.received
    return {
        "seconds": step.seconds,
        "compute": step.computed - found.waited,
        "exchange": sum(step.waited.values()) - for_parameters,
        "link": found.waited,
        "parameters_traffic": for_parameters,
        "overlapped": step.hidden + max(0.0, copied - found.waited),
    }


def rank_inside(mesh: Mesh) -> int:
    """Return a rank with neighbours on both sides, which holds as many rows as any other."""
    place = 0
    for size in mesh[1:]:
        place = place * size + min(1, size - 1)
    return place
