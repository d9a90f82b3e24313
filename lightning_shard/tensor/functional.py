"""Offers differentiable collectives and Fourier transforms to code that splits tensors itself.

Everywhere `x` is this rank's part of a tensor of global `shape` that `dims` split over a mesh, one
dim for each mesh axis, as `torch.tensor_split` shares out rows; any extent will do. Gradients
follow one duality: the cotangent of a split tensor is split, that of a replicated one is a partial
sum on each rank. Every function has its true adjoint, so when all ranks start backward on their
replica of a loss, the gradient is the mean over ranks of what they get.

=============  ========================================  ====================================
function       this rank gets                            its gradient
=============  ========================================  ====================================
scatter        its part of a replicated tensor           the part in its place, zero around
gather         the whole tensor                          summed and split (reduce-scatter)
reduce         the sum over ranks                        summed
copy           its replicated input                      summed: whole instead of partial
transpose      the part along another dim (all-to-all)   transposed back
fftn, ...      its part of the transform                 its part of the adjoint transform
=============  ========================================  ====================================

Of parts of any size, along a mesh of one axis:

=============  ========================================  ====================================
all_gather_v   the whole tensor                          summed and split
gather_v       the whole tensor on one rank              split
scatter_v      its part of a tensor of one rank          put together on that rank
=============  ========================================  ====================================
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.domain import comm
from lightning_shard.domain.layout import part_sizes
from lightning_shard.domain.local_group import gathered_objects
from lightning_shard.domain.subdomain import domain_of
from lightning_shard.domain.uneven import check_parts, exchange_rows, spans_of
from lightning_shard.processes.torch_private.typed import fft
from lightning_shard.tensor import placement
from lightning_shard.tensor.tensor import DomainTensor


def scatter(x: Tensor, mesh: DeviceMesh, dims: int | Sequence[int]) -> Tensor:
    """Return this rank's part of `x`, which every rank holds whole."""
    return placement.shard_alike(x, mesh, dims).to_local()


def gather(x: Tensor, mesh: DeviceMesh, dims: int | Sequence[int], shape: Sequence[int]) -> Tensor:
    """Gather the whole tensor of `shape`, on every rank.

    Raises:
        ValueError: `x` is not this rank's part of it.
    """
    return placement.gather(DomainTensor(placement.part_from(x, mesh, dims, shape)))


def all_gather_v(
    x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None = None
) -> Tensor:
    """Gather the parts of all ranks one after the other, on every rank.

    Args:
        x: This rank's part, with any number of rows.
        mesh: A mesh of one axis.
        dim: The dim along which the parts lie.
        sizes: The rows of each rank's part; without them the ranks tell each other.

    Raises:
        ValueError: The mesh has several axes, or `x` has another number of rows.
    """
    owned = _parts(x, mesh, dim, sizes)
    whole = (0, owned[-1][1])
    return exchange_rows(x, dim % x.ndim, owned, [whole] * mesh.size(), _group(mesh))


def gather_v(
    x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None = None, *, dst: int = 0
) -> Tensor:
    """Gather the parts of all ranks in order on rank `dst` of the mesh; others get no rows.

    Args:
        x: This rank's part, with any number of rows.
        mesh: A mesh of one axis.
        dim: The dim along which the parts lie.
        sizes: The rows of each rank's part; without them the ranks tell each other.
        dst: The rank, counted in the mesh, that gets all rows.

    Raises:
        ValueError: The mesh has several axes, or `x` has another number of rows.
    """
    owned = _parts(x, mesh, dim, sizes)
    wanted = [(0, owned[-1][1] if rank == dst else 0) for rank in range(mesh.size())]
    return exchange_rows(x, dim % x.ndim, owned, wanted, _group(mesh))


def scatter_v(
    x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int], *, src: int = 0
) -> Tensor:
    """Send each rank its part, `sizes[rank]` rows, of the tensor of rank `src`.

    Args:
        x: The tensor on rank `src` of the mesh. On the other ranks a tensor without rows of `dim`,
            of the same shape otherwise.
        mesh: A mesh of one axis.
        dim: The dim along which the tensor is parted.
        sizes: The rows that each rank gets.
        src: The rank, counted in the mesh, that has all rows.

    Raises:
        ValueError: The mesh has several axes, or `x` has another number of rows.
    """
    wanted = spans_of(sizes)
    has = [wanted[-1][1] if rank == src else 0 for rank in range(mesh.size())]
    owned = [(0, rows) for rows in has]
    _parts(x, mesh, dim, has)
    return exchange_rows(x, dim % x.ndim, owned, wanted, _group(mesh))


def reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Add `x` up over the ranks of the mesh, on every rank.

    Its adjoint is the sum over the ranks, too. Suppose that each of P ranks starts backward on its
    replica of a loss. Then a split leaf before `reduce` gets P times the gradient of one process:
    divide it by P, or the loss before backward. A replicated parameter before `reduce` gets a part
    on each rank; the mean of these parts, which FSDP and DDP take, is the gradient of one process.
    """
    total = comm.all_reduce(x, _group(mesh))
    return x.clone() if total is x else total


def copy(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """`x` itself, equal on all ranks; its gradient is the sum of the gradients of all ranks.

    So the gradient is the same on every rank. Suppose that each of P ranks starts backward on its
    replica of a loss that `reduce` made. Then the gradient is P times that of one process, and so
    is its mean over the ranks: divide the loss by P before backward. A parameter whose gradients
    FSDP or DDP average needs no `copy`.
    """
    return _Copy.apply(x, _group(mesh))


def transpose(
    x: Tensor, mesh: DeviceMesh, shape: Sequence[int], *, split: int, join: int
) -> Tensor:
    """All-to-all over a mesh of one axis: dim `join`, which was split, is whole instead of `split`.

    Args:
        x: This rank's part, split along `join`.
        mesh: A mesh of one axis.
        shape: The global shape.
        split: The dim along which the result is split.
        join: The dim along which `x` is split.

    Raises:
        ValueError: The mesh has several axes, or `x` is not this rank's part.
    """
    if mesh.ndim != 1:
        raise ValueError(f"transpose needs a mesh of one axis; got {mesh.ndim} axes. Slice it.")
    part = placement.part_from(x, mesh, join, shape)
    parted, before = (part_sizes(part.shape[d], mesh.size()) for d in (split, join))
    return comm.transpose(x, split, join, parted, before, mesh.get_group())


def fftn(
    x: Tensor,
    mesh: DeviceMesh,
    dims: int | Sequence[int],
    shape: Sequence[int],
    *,
    s: Sequence[int] | None = None,
    dim: Sequence[int] | None = None,
    norm: str | None = None,
) -> Tensor:
    """Compute this rank's part of `torch.fft.fftn` of the whole, split along the same dims.

    Args:
        x: This rank's part.
        mesh: The mesh.
        dims: The dims that its axes split.
        shape: The global shape of `x`.
        s: Extents of the whole tensor, by torch.fft's rules.
        dim: The transformed dims, split or not; by default all, as in torch.fft.
        norm: The normalization, by torch.fft's names.

    Raises:
        ValueError: `x` is not this rank's part of a tensor of `shape`.
    """
    return _transform(fft.fftn, x, mesh, dims, shape, s=s, dim=dim, norm=norm)


def ifftn(
    x: Tensor, mesh: DeviceMesh, dims: int | Sequence[int], shape: Sequence[int], **options: Any
) -> Tensor:
    """Compute this rank's part of `torch.fft.ifftn` of the whole; arguments are as for `fftn`."""
    return _transform(fft.ifftn, x, mesh, dims, shape, **options)


def rfftn(
    x: Tensor, mesh: DeviceMesh, dims: int | Sequence[int], shape: Sequence[int], **options: Any
) -> Tensor:
    """Compute this rank's part of `torch.fft.rfftn` of a real tensor; arguments as for `fftn`.

    The last transformed dim of the result is one-sided.
    """
    return _transform(fft.rfftn, x, mesh, dims, shape, **options)


def irfftn(
    x: Tensor, mesh: DeviceMesh, dims: int | Sequence[int], shape: Sequence[int], **options: Any
) -> Tensor:
    """Compute this rank's part of `torch.fft.irfftn` of the whole; arguments are as for `fftn`.

    `shape` is that of the one-sided spectrum `x`.
    """
    return _transform(fft.irfftn, x, mesh, dims, shape, **options)


def _transform(
    function: Callable[..., Any],
    x: Tensor,
    mesh: DeviceMesh,
    dims: int | Sequence[int],
    shape: Sequence[int],
    **options: Any,
) -> Tensor:
    part = placement.part_from(x, mesh, dims, shape)
    return function(DomainTensor(part), **options).to_local()


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return comm.all_reduce(grads[0], ctx.group), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return tangents[0].view_as(tangents[0])


def _parts(
    x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None
) -> list[tuple[int, int]]:
    """The global rows of each rank's part along `dim`."""
    if mesh.ndim != 1:
        raise ValueError(f"parts of any size need a mesh of one axis; got {mesh.ndim}. Slice it.")
    if sizes is None:
        shapes = gathered_objects(tuple(x.shape), _group(mesh))
        check_parts(shapes, [dim % x.ndim])
        sizes = [shape[dim] for shape in shapes]
    if len(sizes) != mesh.size() or x.shape[dim] != sizes[mesh.get_local_rank()]:
        raise ValueError(
            f"sizes must give the rows of dim {dim} of each of the {mesh.size()} ranks; got "
            f"{list(sizes)}, and rank {mesh.get_local_rank()} has {x.shape[dim]}."
        )
    return spans_of(sizes)


def _group(mesh: DeviceMesh) -> ProcessGroup:
    return domain_of(mesh).group(tuple(range(mesh.ndim)))
