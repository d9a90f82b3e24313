"""Holds a rank's part of a split tensor, and the process groups that reach the other parts."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.domain.layout import Grid, Layout
from lightning_shard.processes.subgroups import making_groups
from lightning_shard.processes.torch_private.internals import flattened, storage_key, version_of
from lightning_shard.processes.torch_private.typed import integers


class Domain:
    """The process groups of a domain mesh: one for each mesh axis, and one for all of them.

    Attributes:
        grid: The sizes of the mesh, and the place of this rank.
        writes_plain: False where another member of the domain, in the same process, writes the
            plain tensors that a rule writes, such as running statistics.
        has_graph: False where the graph of an operation is kept outside of its rule.
    """

    writes_plain = has_graph = True

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

    def decides(self, question: Callable[[], bool]) -> bool:
        """Answer a question about memory, which all members of one process must answer alike."""
        return question()

    def drawing(
        self, generator: torch.Generator | None, device: torch.device
    ) -> AbstractContextManager[None]:
        """Return a context in which a rule draws numbers that all members draw alike.

        Args:
            generator: The generator; None: the default one of the device.
            device: The device.
        """
        return nullcontext()

    @property
    def ranks(self) -> list[int]:
        """The ranks of the domain in the default process group."""
        return integers(self.mesh.mesh.flatten())

    @property
    def exchanges_on(self) -> str | None:
        """The type of the device whose tensors the members exchange; None: of any."""
        return self.mesh.device_type

    def group(self, axes: tuple[int, ...]) -> ProcessGroup:
        """Return the process group of these mesh axes: one axis, or all of them.

        Raises:
            NotImplementedError: These axes have no common group.
        """
        if axes not in self._groups:
            raise NotImplementedError(
                f"mesh axes {axes} of a {len(self.grid.sizes)}-axis domain mesh have no common "
                "process group; use one axis or all of them."
            )
        return self._groups[axes]


@dataclass(eq=False)
class Copied:
    """Where rows come from that were copied from other ranks, while torch would give a view.

    A write into such rows does not reach their source by itself, nor the other way round. So after
    the first the rows are written back (ops/view/write_back.py), or it is refused where it is not
    known how. After the second the rows are stale.

    Attributes:
        parent: The part from which they were taken, which may be a copy itself.
        version: Number of writes to the memory of the first parent until then.
        rows: The copy.
        index: The rows are those of `parent[index]`; None where no index says which they are.
        factor: The parent's values are this many times larger.
        taken: The local tensor that the user indexed, the index, and the local rows that he got.
        seen: Number of writes to the copy's memory when it was last written back.
    """

    parent: "Subdomain"
    version: int
    rows: "Subdomain"
    index: tuple[Any, ...] | None = None
    factor: int = 1
    taken: tuple[Tensor, Any, Tensor] | None = None
    seen: int = 0

    @property
    def source(self) -> Tensor:
        """The local tensor that the rows come from in the end."""
        return self.parent.copied.source if self.parent.copied else self.parent.local

    @property
    def is_stale(self) -> bool:
        """True once the source has been written after the rows were taken."""
        return self.version != version_of(self.source)


BY_STRIDES = (-1,)
APART, PERHAPS_APART = (-2,), (-3,)
_uncounted: WeakSet[Copied] = WeakSet()  # nobody counts writes in inference mode


def written_in_inference(x: Tensor) -> None:
    """Make copies of rows of `x` stale; of other modes' tensors torch counts the writes."""
    if not x.is_inference():
        return
    for copied in list(_uncounted):
        if storage_key(copied.source) == storage_key(x):
            copied.version = -1


@dataclass(eq=False)
class Subdomain:
    """This rank's part of a split tensor: the local tensor, its layout, and the groups to ask.

    No field changes once it is made. It is not frozen, since each call makes some, and a frozen
    dataclass takes twice the time.

    Attributes:
        local: The rank's rows.
        layout: The split of the whole tensor.
        domain: The process groups.
        copied: The source of rows that are a copy where torch would give a view.
        stored: The dims in the order in which the whole tensor would have them in memory, the
            outermost first; empty where that is the order of its dims. `BY_STRIDES` where only the
            strides of `local` tell, which they cannot of one row. `APART` where the dims are in
            order, and other rows lie between, as in a slice, which the strides of `local` may not
            show; `PERHAPS_APART` in views of such. None where nobody knows.
    """

    local: Tensor
    layout: Layout
    domain: Domain
    copied: Copied | None = None
    stored: tuple[int, ...] | None = ()
    lazy: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.layout.shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.layout.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the local tensor."""
        return self.local.dtype

    def read(self) -> "Subdomain":
        """Return itself: its values are there already, while a lazy spectrum computes them here."""
        return self

    def like(self, local: Tensor, layout: Layout | None = None) -> "Subdomain":
        """Wrap a new local tensor on the same domain; its layout is this one by default."""
        return Subdomain(local, layout or self.layout, self.domain, None, self._order_of_others)

    def chosen(self, local: Tensor, layout: Layout) -> "Subdomain":
        """Wrap rows that were chosen of it. Those of a turned tensor lie otherwise than torch's."""
        return Subdomain(local, layout, self.domain, None, () if self.is_in_order else None)

    def in_any_order(self, local: Tensor, layout: Layout) -> "Subdomain":
        """Wrap a new local tensor that may lie in memory otherwise than torch's result would."""
        return Subdomain(local, layout, self.domain, None, None)

    @property
    def is_in_order(self) -> bool:
        """True if the dims of the whole tensor lie in memory in their order."""
        return self.stored in ((), APART, PERHAPS_APART)

    @property
    def knows_order(self) -> bool:
        """True if all ranks know in which order the dims of the whole tensor lie in memory."""
        by_strides = self.stored == BY_STRIDES and not self.layout.leaves_one_row
        return by_strides or self.stored not in (None, BY_STRIDES)

    def in_rows(self, local: Tensor, layout: Layout | None = None) -> "Subdomain":
        """Wrap a new local tensor of a whole one that lies row by row, as torch would make it."""
        return Subdomain(local, layout or self.layout, self.domain)

    def view(self, local: Tensor, layout: Layout) -> "Subdomain":
        """Wrap another view of the same rows."""
        stored = PERHAPS_APART if self.stored and self.is_in_order else self._order_of_others
        return Subdomain(local, layout, self.domain, self.copied, stored)

    def apart(self, view: "Subdomain") -> "Subdomain":
        """Return a view of it whose rows lie apart in memory; its strides may not show it."""
        if not self.is_in_order or view.copied is not None:
            return view
        return Subdomain(view.local, view.layout, view.domain, None, APART)

    def alias(self) -> "Subdomain":
        """Wrap a view of all rows, for functions of which torch gives another tensor."""
        return Subdomain(self.local[...], self.layout, self.domain, self.copied, self.stored)

    @property
    def _order_of_others(self) -> tuple[int, ...] | None:
        """The order in memory of what is made of it: that of its dims is kept, another is not."""
        return () if self.is_in_order else BY_STRIDES if self.stored else None

    def copy(
        self,
        local: Tensor,
        layout: Layout,
        *,
        moved: bool = True,
        index: tuple[Any, ...] | None = None,
        factor: int = 1,
    ) -> "Subdomain":
        """Wrap rows of which torch would give a view: a copy of them, or where none `moved` a view.

        Args:
            local: The rows.
            layout: The split of the rows.
            moved: True if any rank got rows of another; the same on all ranks.
            index: The index that chooses them in this tensor, if they can be written back there.
            factor: By what they are multiplied then.
        """
        if not moved:
            return self.view(local, layout)
        version = self.copied.version if self.copied else version_of(self.local)
        copied = Copied(self, version, self.like(local, layout), index, factor)
        if copied.source.is_inference():
            _uncounted.add(copied)
        return Subdomain(local, layout, self.domain, copied, () if self.is_in_order else None)

    def perhaps_view(self, local: Tensor, layout: Layout) -> "Subdomain":
        """Wrap what is a view of the same rows on some ranks and a copy on others.

        Of rows that are a copy it is read only.
        """
        return self.copy(local, layout, moved=self.copied is not None)


def domain_of(mesh: DeviceMesh) -> Domain:
    """Return the `Domain` of a mesh, the same object for the same mesh."""
    return _domain_of(mesh, dist.group.WORLD)


@lru_cache(maxsize=64)
def _domain_of(mesh: DeviceMesh, _: ProcessGroup | None) -> Domain:
    """Make it for these processes: an equal mesh of former ones has groups that are destroyed."""
    return Domain(mesh)


PROCESS_STATE = {"_domain_of": _domain_of}
