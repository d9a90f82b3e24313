"""Holds what the strategies of the Trainer and of Fabric share: options, mesh, collectives."""

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.data.split import split_dims
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.lightning import (
    CheckpointIO,
    ClusterEnvironment,
    FabricAccelerator,
    FabricPrecision,
)
from lightning_shard.processes.mesh import Sharding
from lightning_shard.tensor.placement import is_field, pack, unpack
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer import process_mesh
from lightning_shard.trainer import sharding as parameters
from lightning_shard.trainer.checkpoint_io import Format, complete_io
from lightning_shard.trainer.environment import environment_of_launcher
from lightning_shard.trainer.explain import explain
from lightning_shard.trainer.peers import Peers
from lightning_shard.trainer.precision import use_device
from lightning_shard.trainer.process_mesh import ProcessMesh
from lightning_shard.trainer.saving import Saver
from lightning_shard.trainer.split_summary import Announcements
from lightning_shard.trainer.steps import Steps

if TYPE_CHECKING:
    from lightning_shard.data.split import ShardDims


class ShardStrategy:
    """Mixin of a strategy: its processes are data replicas x domain ranks.

    An option that there is not is refused by Python in the name of this class.
    """

    # each of Lightning's strategies has these
    global_rank: Any
    local_rank: Any
    world_size: Any
    num_nodes: Any
    parallel_devices: Any
    _environment: ClusterEnvironment | None
    _checkpoint_io: CheckpointIO | None

    strategy_name = "hybrid_shard"  # the Trainer and Fabric know ours by it
    _PRECISION = "precision_plugin"  # the name of this argument of Lightning's strategy

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        domain_parallel_size: int | Literal["auto"] | Sequence[int] = 1,
        shard_dims: int | Sequence[int] | dict[str, int | Sequence[int] | None] | None = None,
        exact_random: bool | None = None,
        sharding: Sharding | ShardingOptions = "auto",
        checkpoint_format: Format = "auto",
        init_weights_from: str | Path | dict[str, str] | None = None,
        timeout_s: float = 1800.0,
        process_group_backend: str | None = None,
        accelerator: FabricAccelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: FabricPrecision | None = None,
    ) -> None:
        """Describe the mesh.

        Args:
            data_parallel_size: Number of data replicas; "auto": all processes divided by the
                domain.
            domain_parallel_size: Processes that share each sample: a number, or one for each split
                dim, such as `[2, 2]`; "auto": all processes divided by the data replicas, of which
                there is then one unless given. So the domain shrinks and grows with an elastic
                launcher's nodes.
            shard_dims: Tensor dims that the domain splits. By default the first spatial dims of
                every floating-point batch entry ``(B, C, *spatial)``, and of every map of these
                samples with the same spatial extents, such as integer classes ``(B, *spatial)``. An
                int or a list: these dims instead. A dict: for each batch entry its dims; entries
                that are not named stay whole. A run says what it splits.
            exact_random: True if dropout of split tensors draws the numbers of one process, at the
                cost of drawing those of the whole tensor on each rank; None leaves what
                `use_exact_random` chose. It holds until the fit, test or prediction ends.
            sharding: The mode by which parameters are spread over the processes: "none" (whole on
                each), "full", "gradients", "hybrid", or "auto": whole where they are small beside
                the device. Or `ShardingOptions`, which hold the mode and all other options of
                parameters.
            checkpoint_format: "single": Lightning's file, whole. "sharded": a directory, to which
                each process writes its part. "async": such a directory, written while training
                goes on. "auto": a file up to 16 GiB of weights and optimizer state, then a
                directory.
            init_weights_from: A file of weights to begin with (safetensors, or of torch.save), read
                shard by shard; or one for each submodule: `{"network": "t5/model.safetensors"}`.
            timeout_s: Seconds after which a collective that does not end fails.
            process_group_backend: By default the device's: nccl, xccl or gloo.
            accelerator: Set by the Trainer, or by Fabric.
            parallel_devices: Set by them.
            cluster_environment: Set by them.
            checkpoint_io: The plug-in that writes files; by default Lightning's.
            precision_plugin: Set by them.

        Raises:
            ValueError: A size is smaller than 1, or two arguments exclude each other.
        """
        options = sharding if isinstance(sharding, ShardingOptions) else ShardingOptions(sharding)
        self.sharding_options = options
        self.processes = ProcessMesh(
            data_parallel_size,
            domain_parallel_size,
            shard_size=(options.shard_size or "node") if options.mode == "hybrid" else None,
            timeout_s=timeout_s,
            backend=process_group_backend,
        )
        self.peers = Peers(self._is_interrupted, self._explain)
        self.saver = Saver(checkpoint_format, timeout_s=timeout_s)
        self.steps = Steps()
        split_dims(shard_dims)  # refuses what are no dims
        self.shard_dims: ShardDims = shard_dims
        self.exact_random = exact_random
        self.first_weights = (
            {"": str(init_weights_from)}
            if isinstance(init_weights_from, str | Path)
            else init_weights_from or {}
        )
        if not isinstance(self.first_weights, Mapping):
            raise ValueError(
                "init_weights_from must be the path of a file, or a dict with one for each "
                f"submodule; got {init_weights_from!r}."
            )
        # new parameters by old ones, whose memory belongs to those who still hold them
        self._moved: MutableMapping[nn.Parameter, nn.Parameter] = WeakTensorKeyDictionary()
        self.announced = Announcements(by_default=shard_dims is None)
        given = {
            "accelerator": accelerator,
            "parallel_devices": parallel_devices,
            "cluster_environment": cluster_environment,
            "checkpoint_io": checkpoint_io,
            self._PRECISION: precision_plugin,
        }
        super().__init__(**given)  # pyright: ignore[reportCallIssue] - the mixin's strategy
        self._complete()

    def _complete(self) -> None:
        """Make what only one of the two strategies has."""

    def _is_interrupted(self) -> bool:
        """Return whether an exception on this rank ends the run."""
        return False

    def _explain(self, error: BaseException) -> None:
        """Add the remedy to an error, if one is known."""
        explain(error)

    @property
    def device_mesh(self) -> Any:
        """All processes, as data replicas x domain ranks; None before they have joined."""
        return self.processes.mesh

    @property
    def domain_mesh(self) -> DeviceMesh:
        """The ranks that share this rank's samples."""
        return self.processes.domain_mesh

    @property
    def domain_size(self) -> int:
        """The number of ranks that share each sample."""
        return self.processes.domain_size

    @property
    def domain_rank(self) -> int:
        """The place of this process among those that share its samples."""
        return self.processes.domain_rank(self.global_rank)

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of different samples; None before the mesh is made."""
        return self.processes.data_group

    @property
    def replicas(self) -> int:
        """The number of data replicas, which read different samples."""
        return self.world_size // self.domain_size

    @property
    def num_processes(self) -> int:
        """The number of processes of this node."""
        return process_mesh.processes_of_node(self.cluster_environment, self.parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        shown = self.parallel_devices  # one, where a launcher shows each its own only
        return shown[0] if len(shown) == 1 else shown[self.local_rank]

    @property
    def cluster_environment(self) -> Any:
        """The environment of the launcher, also of launchers that Lightning does not know."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        """Take the environment, or that of a launcher which Lightning does not know."""
        self._environment = environment_of_launcher(environment)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plug-in that writes and reads files; this package's where none is given."""
        self._checkpoint_io = complete_io(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        """Take the plug-in; it is completed when it is asked for."""
        self._checkpoint_io = io

    def set_world_ranks(self) -> None:
        """Give the environment and the printing functions the rank of this process."""
        if self.cluster_environment is not None:
            process_mesh.tell_ranks(
                self.cluster_environment, per_node=self.num_processes, nodes=self.num_nodes
            )
        process_mesh.print_on_first_only(self.global_rank)

    def join(self, precision: Any) -> None:
        """Start the process group; `precision` is the plug-in that learns of the device."""
        use_device(precision, self.root_device.type)
        self.set_world_ranks()
        self.processes.join(
            self.cluster_environment, self.root_device, offloads=self.sharding_options.cpu_offload
        )
        self.peers.watch(self.processes.timeout_s)

    def options_alike(self, precision: Any) -> dict[str, str]:
        """Describe the options that are equal on all ranks."""
        own = {
            "domain_parallel_size": self.processes.domain_sizes,
            "data_parallel_size": self.processes.data_parallel_size,
            "precision": type(precision).__name__,
            "shard_dims": self.shard_dims,
            "exact_random": self.exact_random,
            "torch's default dtype": torch.get_default_dtype(),
            # the paths may differ: a node's own copy of a file
            "the list of parts with init_weights_from": sorted(self.first_weights),
        }
        return {n: str(v) for n, v in own.items()} | self.sharding_options.described()

    def shard(
        self,
        module: nn.Module,
        copied: Sequence[nn.Module] = (),
        files: Mapping[str, str] | None = None,
        *,
        opens_steps: bool = False,
    ) -> None:
        """Compare a module with those of the other ranks, and share out its parameters.

        The arguments are those of `shard_with_copies`.
        """
        facts = parameters.described(module, copied)
        self.processes.compare("module", facts, check=self.peers.check)
        self._moved.update(
            parameters.shard_with_copies(
                module, copied, self.device_mesh, dims=split_dims(self.shard_dims),
                options=self.sharding_options, files=files, device=self.root_device,
                opens_steps=opens_steps,
            )
        )  # fmt: skip

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; a rank that has failed ends the wait."""
        self.peers.barrier(self.root_device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src` on all ranks."""
        return self.peers.broadcast(obj, src)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather one entry per data replica, along a new first dim.

        Of a split tensor each rank gathers its own part, so the result is split alike.
        """
        if group not in (None, dist.group.WORLD):
            return self.peers.all_gather(
                tensor, self.root_device, group=group, sync_grads=sync_grads
            )
        if is_field(tensor) and self.replicas == 1:
            with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
                return torch.stack([tensor])
        is_split = isinstance(tensor, DomainTensor)
        own, like = unpack(tensor) if is_split else (tensor, None)
        every = self.peers.all_gather(
            own, self.root_device, group=self.data_group, sync_grads=sync_grads
        )
        return every if like is None else torch.stack([pack(part, like) for part in every])


def register(
    registry: Any,
    kind: type,
    name: str,
    description: str = "FSDP2 and spatial domain decomposition on one device mesh",
) -> None:
    """Give a strategy its name in the registry of Lightning or of Fabric, once."""
    if name not in registry:
        registry.register(name, kind, description=description)
