"""Predicts what a training step takes on a cluster: seconds and bytes of one rank, without it.

One rank of the mesh runs a step of the Trainer on fake tensors. Each operation takes as long as its
bytes or its floating-point operations at the rates of the device, whichever is longer, so kernels
count as perfect ones. Each collective takes what it sends at the rate of the slowest link among its
ranks; the other ranks come to it when this one does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_shard.data.split import ShardDims
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.lab.batches import Data, first_batches
from lightning_shard.lab.calibrate import measured_of
from lightning_shard.lab.course import samples_of
from lightning_shard.lab.fake_step import traced
from lightning_shard.lab.lone_steps import Training
from lightning_shard.lab.machine import Cluster
from lightning_shard.lab.timeline import Collective, Cost, Replay
from lightning_shard.processes.mesh import Sharding

MIB = 2**20
_OF_PARAMETERS = ("all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single")
_IN_ROUNDS = (*_OF_PARAMETERS, "all_reduce", "broadcast")  # of which each takes a latency


@dataclass(frozen=True)
class Prediction:
    """One training step of the rank that holds most; `print` it.

    Attributes:
        mesh: Data replicas, and the ranks along each split dim.
        cluster: Where it would run.
        seconds: Of the step.
        compute: Seconds of computation.
        exchange: Seconds of waiting for fields: halos, modes and sums.
        parameters_traffic: Seconds of waiting for parameters and their gradients.
        overlapped: Seconds of collectives that pass during computation.
        samples: Of all replicas.
        memory: The peak of bytes.
        peak_at: What computes there.
        bytes_by_cause: What holds the memory then.
        sent: Bytes that the rank sends.
    """

    mesh: tuple[int, ...]
    cluster: Cluster
    seconds: float
    compute: float
    exchange: float
    parameters_traffic: float
    overlapped: float
    samples: int
    memory: int
    peak_at: str
    bytes_by_cause: dict[str, int]
    sent: int

    def fits(self, cluster: Cluster) -> bool:
        """Whether a device has the memory."""
        return self.memory <= cluster.device.memory

    def __str__(self) -> str:
        rate = self.samples / self.seconds if self.seconds else math.inf
        rows = [
            ("step", f"{1e3 * self.seconds:.2f} ms", f"{rate:.3g} samples/s"),
            ("  compute", f"{1e3 * self.compute:.2f} ms", "kernels at the rates of the device"),
            ("  fields", f"{1e3 * self.exchange:.2f} ms", "waiting for halos, modes and sums"),
            ("  parameters", f"{1e3 * self.parameters_traffic:.2f} ms", "waiting for FSDP2"),
            ("hidden", f"{1e3 * self.overlapped:.2f} ms", "travels during computation"),
            ("sent", f"{self.sent / MIB:.1f} MiB", "by one rank"),
            ("peak memory", f"{self.memory / MIB:.1f} MiB", f"in {self.peak_at}"),
        ]
        causes = sorted(self.bytes_by_cause.items(), key=lambda pair: -pair[1])
        rows += [(f"  {cause}", f"{size / MIB:.1f} MiB", "") for cause, size in causes]
        title = f"{'x'.join(map(str, self.mesh))} ranks of {self.cluster}, as predicted:"
        return "\n".join([title, *(f"  {a:<16} {b:>12}   {c}".rstrip() for a, b, c in rows)])


def predict(
    module: LightningModule,
    data: Data,
    cluster: Cluster,
    mesh: tuple[int, ...],
    shard_dims: ShardDims = None,
    *,
    sharding: Sharding = "full",
    activation_checkpointing: bool = False,
    activation_offload: bool = False,
    **trainer: Any,
) -> Prediction:
    """Predict one training step of the rank of a mesh that holds and exchanges most.

    Args:
        module: An ordinary LightningModule, which stays as it is.
        data: A data module, or a DataLoader of training batches: those of one data replica. Only
            the shapes of the first batch matter; expanded tensors stand for large ones.
        cluster: Where it would run.
        mesh: Data replicas, and the ranks along each split dim.
        shard_dims: As for `HybridShardStrategy`.
        sharding: The mode of `ShardingOptions`.
        activation_checkpointing: Whether activations of blocks are computed again in backward.
        activation_offload: Whether they lie in the host's memory until backward.
        trainer: Arguments of the Trainer, such as `precision="bf16-mixed"`.

    Raises:
        ValueError: The cluster has another number of devices than the mesh.
        UnsupportedOperationError: The module uses an operation that cannot be split so.
    """
    processes = math.prod(mesh)
    if processes != cluster.devices:
        raise ValueError(
            f"the mesh {'x'.join(map(str, mesh))} has {processes} ranks, but the cluster has "
            f"{cluster.devices} devices; give a mesh of as many ranks."
        )
    (batch,) = first_batches(module, data, "fit")
    options: dict[str, Any] = {
        "shard_dims": shard_dims,
        "sharding": ShardingOptions(
            mode=sharding,
            shard_size=cluster.per_node if sharding == "hybrid" else None,
            activation_checkpointing=activation_checkpointing,
            activation_offload=activation_offload,
        ),
    }
    own = data if isinstance(data, LightningDataModule) else None
    training = Training(module, own, batch, mesh, options, trainer)
    found = traced(training, processes, rank_inside(mesh), cluster.device)
    (step,) = Replay([found.timeline], cost_on(cluster)).run()
    for_parameters = sum(s for (name, _), s in step.waited.items() if name in _OF_PARAMETERS)
    return Prediction(
        mesh=mesh,
        cluster=cluster,
        seconds=step.seconds,
        compute=step.computed,
        exchange=sum(step.waited.values()) - for_parameters,
        parameters_traffic=for_parameters,
        overlapped=step.hidden,
        samples=samples_of(batch) * mesh[0],
        memory=found.peak.bytes,
        peak_at=found.peak.place,
        bytes_by_cause=found.peak.causes,
        sent=sum(each.sent for each in found.timeline.collectives),
    )


def rank_inside(mesh: tuple[int, ...]) -> int:
    """A rank with neighbours on both sides, which holds as many rows as any other."""
    place = 0
    for size in mesh[1:]:
        place = place * size + min(1, size - 1)
    return place


def cost_on(cluster: Cluster) -> Callable[[Collective], Cost]:
    """What collectives take on the links of a cluster, whose ranks are numbered node by node.

    Those that were measured take what they took, on as many nodes.
    """
    inside, between = measured_of(cluster)

    def cost(collective: Collective) -> Cost:
        members = collective.members
        if len(members) == 1:
            return Cost(0.0, 0.0)
        ranks = max(members) - min(members) + 1
        measured = inside if ranks <= cluster.per_node else between
        if measured.knows(collective.name):
            return measured.cost(collective)
        link = cluster.link(ranks)
        rounds = math.ceil(math.log2(len(members))) if collective.name in _IN_ROUNDS else 1
        return Cost(0.0, rounds * link.latency + collective.sent / link.bandwidth)

    return cost
