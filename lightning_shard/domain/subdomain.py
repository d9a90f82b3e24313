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
from lightning_shard.processes.torch_internals import flattened


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
class Subdomain:
    """This rank's part of a split tensor: the local tensor, its layout, and the groups to ask.

    `moved` marks rows that were copied from other ranks where torch would give a view: writing into
    them in place would not reach their source, so that is refused.
    """

    local: Tensor
    layout: Layout
    domain: Domain
    moved: bool = False
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
        return Subdomain(local, layout, self.domain, self.moved)


def domain_of(mesh: DeviceMesh) -> Domain:
    """The `Domain` of a mesh; the same object for the same mesh."""
    return _domain_of(mesh, dist.group.WORLD)


@lru_cache(maxsize=64)
def _domain_of(mesh: DeviceMesh, _: ProcessGroup | None) -> Domain:
    """Make it for these processes: an equal mesh of former ones has groups that are destroyed."""
    return Domain(mesh)
