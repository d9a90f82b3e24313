"""A module on its way through the steps of parallelize."""

import functools
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.processes.errors_together import copy_from_first
from lightning_shard.processes.mesh import domain_mesh, flat_mesh
from lightning_shard.tensor.tensor import DomainTensor

Moved = dict[nn.Parameter, nn.Parameter]


class Work:
    """A module on its way through the steps below, and what one step leaves for a later one.

    Attributes:
        axes: The names of the mesh axes along which samples are split, or none for the usual ones.
        split: The mesh of these axes, or None.
        before: The parameters by name, as the user made them.
        ignored: The parameters that the user wants whole.
        chosen: The blocks, inner ones first.
        plain: All parameters that stay whole on each rank.
        running: A context that is true while a step or a block runs.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        methods: Sequence[str],
        dims: Sequence[int] | None,
        options: ShardingOptions,
        loaded: Sequence[str],
        axes: tuple[str, ...],
    ) -> None:
        """Begin with what `parallelize` was given; nothing is changed yet."""
        self.module, self.mesh, self.methods, self.dims = module, mesh, methods, dims
        self.options, self.loaded, self.axes = options, loaded, axes
        self.split = domain_mesh(mesh, axes)
        self.before = dict(module.named_parameters(remove_duplicate=False))
        self.ignored: set[nn.Parameter] = set()
        self.chosen: list[nn.Module] = []
        self.plain: list[nn.Parameter] = []
        self.running = Running()

    def moved(self) -> Moved:
        """Return the present parameter for each that the user made."""
        after = dict(self.module.named_parameters(remove_duplicate=False))
        return {p: after[name] for name, p in self.before.items()}

    def finished(self) -> Moved:
        """Return what `moved` does, and keep no parameter that is now sharded.

        Hooks hold this object as long as the module lives, so they would hold all of the whole
        parameters, too.
        """
        moved = {old: new for old, new in self.moved().items() if old is not new}
        self.before.clear()
        return moved

    @functools.cached_property
    def group(self) -> dist.ProcessGroup:
        """All ranks that shard the module."""
        return flat_mesh(self.mesh).get_group()


class Running:
    """A context that may be opened again inside, and is true while it is open."""

    def __init__(self) -> None:
        """Begin closed."""
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


def share_values(work: Work) -> None:
    """Copy parameters and buffers of the first rank to all others."""
    copy_all_from_first((*work.module.parameters(), *work.module.buffers()), work.group)


def copy_all_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give tensors the values that they have on the first rank of a group."""
    for tensor in tensors:
        # a buffer that a step has made a split field has parts, which are not alike
        if not tensor.is_meta and not isinstance(tensor, DomainTensor):
            copy_from_first(tensor, group)
