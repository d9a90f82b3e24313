"""Holds a rank's part of a split tensor, and the process groups that reach the other parts."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.domain.layout import Grid, Layout
from lightning_shard.processes.groups import making_groups
from lightning_shard.processes.simulated.state import cached_per_rank
from lightning_shard.processes.torch_internals import flattened, version_of


class Domain:
    """The process groups of a domain mesh: one for each mesh axis, and one for all of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        coord = mesh.get_coordinate()
        if coord is None:
            raise ValueError("a domain mesh must contain the rank that uses it; this one does not.")
        self.mesh = mesh
        self.grid = Grid(tuple(mesh.shape), tuple(coord))
        self._groups: dict[tuple[int, ...], ProcessGroup] = {
            (a,): mesh.get_group(a) for a in range(mesh.ndim)
        }
        if mesh.ndim > 1:
            with making_groups():
                self._groups[tuple(range(mesh.ndim))] = flattened(mesh).get_group()

    def group(self, axes: tuple[int, ...]) -> ProcessGroup:
        if axes not in self._groups:
            raise NotImplementedError(
                f"mesh axes {axes} of a {len(self.grid.sizes)}-axis domain mesh have no common "
                "process group; use one axis or all of them."
            )
        return self._groups[axes]


@dataclass(frozen=True)
class Copied:
    """Where rows come from that were copied from other ranks, while torch would give a view.

    A write into such rows would not reach their source, nor the other way round. So the first is
    refused, and after the second the rows are stale.

    Attributes:
        source: The local tensor that they come from.
        version: How often its memory had been written then.
    """

    source: Tensor
    version: int

    @property
    def is_stale(self) -> bool:
        """Whether the source has been written since."""
        return self.version != version_of(self.source)


@dataclass(frozen=True)
class Subdomain:
    """This rank's part of a split tensor: the local tensor, its layout, and the groups to ask.

    Of rows that are a copy where torch would give a view, `copied` says of what.
    """

    local: Tensor
    layout: Layout
    domain: Domain
    copied: Copied | None = None
    lazy: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return self.layout.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def read(self) -> "Subdomain":
        """Return itself: its values are there already, while a lazy spectrum computes them here."""
        return self

    def like(self, local: Tensor, layout: Layout | None = None) -> "Subdomain":
        """Wrap a new local tensor on the same domain; its layout is this one by default."""
        return Subdomain(local, layout or self.layout, self.domain)

    def view(self, local: Tensor, layout: Layout) -> "Subdomain":
        """Wrap another view of the same rows."""
        return Subdomain(local, layout, self.domain, self.copied)

    def copy(self, local: Tensor, layout: Layout, *, moved: bool = True) -> "Subdomain":
        """Wrap rows of which torch would give a view: a copy of them, or where none `moved` a view.

        Args:
            local: The rows.
            layout: How they are split.
            moved: Whether any rank got rows of another; the same on all ranks.
        """
        if not moved or self.copied:
            return self.view(local, layout)
        return Subdomain(local, layout, self.domain, Copied(self.local, version_of(self.local)))


def domain_of(mesh: DeviceMesh) -> Domain:
    """The `Domain` of a mesh; the same object for the same mesh."""
    return _domain_of(mesh, dist.group.WORLD)


@lru_cache(maxsize=64)
def _domain_of(mesh: DeviceMesh, _: ProcessGroup | None) -> Domain:
    """Make it for these processes: an equal mesh of former ones has groups that are destroyed."""
    return Domain(mesh)


cached_per_rank(__name__, "_domain_of")
