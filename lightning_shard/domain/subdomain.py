"""Holds a rank's part of a split tensor, and the process groups that reach the other parts."""

import math
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
from lightning_shard.domain.memory_format import format_of
from lightning_shard.domain.strides import (
    Strides,
    are_in_order,
    channels_last,
    of_copy,
    of_view,
    of_whole,
    shows_channels_last,
)
from lightning_shard.domain.wire import all_gather
from lightning_shard.processes.arguments import check_mesh
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
        check_mesh(mesh)
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
        """Answer a question which all members of one process must answer alike."""
        return question()

    def any_says(self, question: Callable[[], bool], device: torch.device) -> bool:
        """Return whether any member answers yes; all members ask."""
        return bool(self.gathered(torch.tensor(question(), device=device)).any())

    def gathered(self, own: Tensor) -> Tensor:
        """Gather a few numbers of each member, stacked in order; all members call."""
        everyone = tuple(range(len(self.grid.sizes)))
        return all_gather(own, math.prod(self.grid.sizes), self.group(everyone))

    def drawing(
        self, generator: torch.Generator | None, device: torch.device
    ) -> AbstractContextManager[None]:
        """Return a context in which a rule draws numbers that all members draw alike.

        Args:
            generator: The generator; None: the default one of the device.
            device: The device.
        """
        return nullcontext()

    def at_end(self, write: Callable[[], None]) -> None:
        """Write plain tensors once the operation has its place in the caller's graph."""
        write()

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
class Seen:
    """The number of writes into the memory of a tensor when somebody looked at it.

    Attributes:
        source: The tensor.
        version: The number of writes until then.
    """

    source: Tensor
    version: int

    @staticmethod
    def of(tensor: Tensor) -> "Seen":
        """Look at a tensor now; what is kept of it has no graph."""
        seen = Seen(tensor.detach(), version_of(tensor))
        if tensor.is_inference():
            _uncounted.add(seen)
        return seen

    @property
    def is_stale(self) -> bool:
        """True once the tensor has been written since."""
        return self.version != version_of(self.source)


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
        is_view: False where nobody knows whether torch would give a view of the rows or a copy.
        taken: The local tensor that the user indexed, the index, and the local rows that he got.
        seen: Number of writes to the copy's memory when it was last written back.
    """

    parent: "Subdomain"
    version: int
    rows: "Subdomain"
    index: tuple[Any, ...] | None = None
    factor: int = 1
    is_view: bool = True
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


_uncounted: WeakSet[Copied | Seen] = WeakSet()  # nobody counts writes in inference mode


def written_in_inference(x: Tensor) -> None:
    """Make stale what was seen of `x`; of other modes' tensors torch counts the writes."""
    if not x.is_inference():
        return
    for seen in list(_uncounted):
        if storage_key(seen.source) == storage_key(x):
            seen.version = -1


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
        strides: The strides that the whole tensor has in one process, equal on all ranks; None
            where nobody knows them. Only a tensor that lies densely has parts that lie so, too.
    """

    local: Tensor
    layout: Layout
    domain: Domain
    copied: Copied | None = None
    strides: Strides | None = None
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

    def settled(self) -> "Subdomain":
        """Return itself."""
        return self

    def check(self) -> None:
        """Find out that a rule made other rows than its layout says, before others read them.

        Raises:
            RuntimeError: The shape of the local tensor is not that of this rank's part.
        """
        if self.local.shape != self.layout.local_shape:
            raise RuntimeError(
                f"a rule gave a part of shape {tuple(self.local.shape)} where the split of "
                f"{self.shape} has one of {self.layout.local_shape}. That is an error of this "
                "package, or of a rule that register_rule was given; please report it. "
                "lightning_shard.gather before the call, and shard after it, go around it."
            )

    def like(self, local: Tensor, layout: Layout | None = None) -> "Subdomain":
        """Wrap a new local tensor on the same domain; its layout is this one by default."""
        layout = layout or self.layout
        strides = layout.strides if self.is_in_order else self._strides_of_result(local, layout)
        return Subdomain(local, layout, self.domain, None, strides)

    def beside(self, weight: Tensor, local: Tensor, layout: Layout) -> "Subdomain":
        """Wrap what a convolution makes: with the channels last where those of `weight` lie so."""
        if weight.ndim == 3 and not weight.is_contiguous():
            return self.in_any_order(local, layout)  # torch computes it as of two dims
        if not self.is_in_order or weight.stride() != channels_last(tuple(weight.shape)):
            return self.like(local, layout)
        return Subdomain(local, layout, self.domain, None, _strides_in_format(local, layout))

    def _strides_of_result(self, local: Tensor, layout: Layout) -> Strides | None:
        """Strides of a result with the channels last, as this has them; of others nobody knows."""
        if self.strides is None or self.strides != channels_last(self.shape):
            return None
        return _strides_in_format(local, layout)

    @property
    def memory_format(self) -> torch.memory_format:
        """The memory format of the whole tensor, equal on all ranks; row by row where unknown."""
        if self.strides is None or self.is_in_order:
            return torch.contiguous_format
        return _format_of_strides(self.shape, self.strides)

    def alike(self, local: Tensor) -> "Subdomain":
        """Wrap new memory like it, such as a clone or a tensor of another dtype."""
        if self.strides == self.layout.strides:
            return Subdomain(local, self.layout, self.domain, None, self.strides)
        strides = None if self.strides is None else of_copy(self.shape, self.strides)
        return Subdomain(local, self.layout, self.domain, None, strides)

    def in_rows(self, local: Tensor, layout: Layout | None = None) -> "Subdomain":
        """Wrap a new local tensor of a whole one that lies row by row, as torch would make it."""
        layout = layout or self.layout
        return Subdomain(local, layout, self.domain, None, layout.strides)

    def in_any_order(self, local: Tensor, layout: Layout) -> "Subdomain":
        """Wrap a new local tensor that may lie in memory otherwise than torch's result would."""
        return Subdomain(local, layout, self.domain)

    def chosen(self, local: Tensor, layout: Layout) -> "Subdomain":
        """Wrap rows that were chosen of it. Those of a turned tensor lie otherwise than torch's."""
        wrap = self.in_rows if self.is_in_order else self.in_any_order
        return wrap(local, layout)

    @property
    def is_in_order(self) -> bool:
        """True if the dims of the whole tensor lie in memory in their order."""
        if self.strides == self.layout.strides:
            return True
        return self.strides is not None and are_in_order(self.shape, self.strides)

    @property
    def strides_shown(self) -> Strides:
        """The strides; if nobody knows them, those that the parts suggest, else those of rows."""
        if self.strides is not None:
            return self.strides
        strides = of_whole(tuple(self.local.shape), self.local.stride(), self.layout)
        return self.layout.strides if strides is None else strides

    def strides_of(self, function: str, *args: object) -> Strides | None:
        """Strides of a view of the whole tensor; None if torch gives none, or nobody knows it.

        Args:
            function: The name of a method of `Tensor`.
            args: Its arguments.
        """
        return None if self.strides is None else of_view(self.shape, self.strides, function, *args)

    def view(self, local: Tensor, layout: Layout, strides: Strides | None) -> "Subdomain":
        """Wrap another view of the same rows; of the whole tensor it would have these strides."""
        return Subdomain(local, layout, self.domain, self.copied, strides)

    def alias(self) -> "Subdomain":
        """Wrap a view of all rows, for functions of which torch gives another tensor."""
        return self.view(self.local[...], self.layout, self.strides)

    def copy(
        self,
        local: Tensor,
        layout: Layout,
        strides: Strides | None,
        *,
        moved: bool = True,
        index: tuple[Any, ...] | None = None,
        factor: int = 1,
        is_view: bool = True,
    ) -> "Subdomain":
        """Wrap rows of which torch would give a view: a copy of them, or where none `moved` a view.

        Args:
            local: The rows.
            layout: The split of the rows.
            strides: The strides of torch's view of the whole tensor.
            moved: True if any rank got rows of another; the same on all ranks.
            index: The index that chooses them in this tensor, if they can be written back there.
            factor: By what they are multiplied then.
            is_view: False if nobody knows whether torch would give a view.
        """
        if not moved:
            return self.view(local, layout, strides)
        version = self.copied.version if self.copied else version_of(self.local)
        copied = Copied(self, version, self.like(local, layout), index, factor, is_view)
        if copied.source.is_inference():
            _uncounted.add(copied)
        # rows that travelled lie in the order of their dims
        return Subdomain(local, layout, self.domain, copied, strides if self.is_in_order else None)


@lru_cache(maxsize=4096)
def _format_of_strides(shape: tuple[int, ...], strides: Strides) -> torch.memory_format:
    return format_of(torch.empty_strided(shape, strides, device="meta"))


def _strides_in_format(local: Tensor, layout: Layout) -> Strides | None:
    """Strides of a whole with the channels last, if this part of it lies so.

    The strides of some parts say nothing. All ranks ask the layout whether there is such a part, or
    they would answer differently.
    """
    if not shows_channels_last(layout) or format_of(local) == torch.contiguous_format:
        return None
    return channels_last(layout.shape)


def domain_of(mesh: DeviceMesh) -> Domain:
    """Return the `Domain` of a mesh, the same object for the same mesh."""
    return _domain_of(mesh, dist.group.WORLD)


@lru_cache(maxsize=64)
def _domain_of(mesh: DeviceMesh, _: ProcessGroup | None) -> Domain:
    """Make it for these processes: an equal mesh of former ones has groups that are destroyed."""
    return Domain(mesh)


PROCESS_STATE = {"_domain_of": _domain_of}
