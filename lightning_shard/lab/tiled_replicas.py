"""Lets processes whose tiles take turns be data replicas of each other."""

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from lightning_shard.lab.simulated.replicas import Replicas
from lightning_shard.processes.device import carried
from lightning_shard.trainer.peers import Peers
from lightning_shard.trainer.process_mesh import ProcessMesh, start_group

_CPU = torch.device("cpu")


def join_replicas(environment: ClusterEnvironment, processes: ProcessMesh, peers: Peers) -> int:
    """Let this process join those of the other replicas, once; return their number.

    They exchange by gloo, in the host's memory, where what tiles exchange lies as well.

    Args:
        environment: The ranks and the address of the processes.
        processes: The sizes that the strategy was given.
        peers: Watches the other processes from now on.

    Raises:
        ValueError: `data_parallel_size` is another number.
        RuntimeError: The processes had a group before, which carries no tensors of the CPU.
    """
    count, wanted = environment.world_size(), processes.data_parallel_size
    if wanted not in ("auto", count):
        raise ValueError(
            f"data_parallel_size is {wanted}, but each process computes one replica in tiles, and "
            f"there {'is 1 process' if count == 1 else f'are {count} processes'}; use devices="
            f"{wanted}, or leave out data_parallel_size."
        )
    if count > 1:
        start_group(environment, _CPU, backend="gloo", timeout_s=processes.timeout_s)
        if carried() != "cpu" and "cpu" not in dist.get_backend_config():
            raise RuntimeError(
                "replicas exchange what their tiles hold in the host's memory, of which the "
                f"process group, made with '{dist.get_backend_config()}', knows no tensors; make "
                "it with 'gloo', or let the Trainer make it."
            )
        peers.watch(processes.timeout_s)
    return count


def most_tiles(tiles: int) -> int:
    """Return the largest number of tiles that a replica needs, so that all take it."""
    if not dist.is_initialized():
        return tiles
    most = torch.tensor(tiles)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def meeting_of(
    environment: ClusterEnvironment,
    processes: ProcessMesh,
    peers: Peers,
    local_processes: int,
) -> Replicas:
    """Compare the tiles of all replicas, and return how they meet.

    Args:
        environment: The ranks of the processes.
        processes: The number of tiles along each dim.
        peers: Watches the other processes.
        local_processes: The number of processes of this node.

    Raises:
        ValueError: Two replicas differ.
    """
    tiles = {"the number of tiles": "x".join(map(str, processes.domain_sizes))}
    # by the name under which other strategies compare, should one of them be on another process
    processes.compare("options", tiles, check=peers.check)
    return Replicas(
        processes.domain_size, environment.local_rank(), local_processes, environment.node_rank()
    )
