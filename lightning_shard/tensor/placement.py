"""Splits a tensor over a domain mesh, and puts it together again."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.domain.align import gathered, own_part
from lightning_shard.domain.layout import Layout, splits_of
from lightning_shard.domain.strides import Strides, of_copy, of_whole
from lightning_shard.domain.subdomain import Domain, Subdomain, domain_of
from lightning_shard.domain.uneven import to_canonical
from lightning_shard.tensor.autograd_function import install_functions
from lightning_shard.tensor.calls import counted_calls
from lightning_shard.tensor.held_alike import are_alike, device_of, first_different
from lightning_shard.tensor.local_mesh import LocalField, LocalMesh
from lightning_shard.tensor.rows import Rows
from lightning_shard.tensor.scripted import install_scripted
from lightning_shard.tensor.strangers import computes, dispatches
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.tensor.transforms import install_transforms

_OTHERS = (
    "the ranks {} share the tensor that is split, but hold different {}, whose rows make up no "
    "field; read the same sample on all of them, and draw random numbers from the same seed. Parts "
    "that each rank has read for itself become a field with lightning_shard.from_local."
)


def shard(tensor: Tensor, mesh: DeviceMesh | LocalMesh, dims: int | Sequence[int]) -> DomainTensor:
    """Split a tensor that every rank holds whole.

    Args:
        tensor: The full tensor, equal on all ranks of `mesh`, which compare some of its values.
            For values that come later give zeros: `torch.empty` differs between ranks.
        mesh: The domain mesh, of one or several axes; or tiles of this process.
        dims: The dim of the tensor that each mesh axis splits: an int for a mesh of one axis. All
            axes may split the same one.

    Returns:
        The same values as a `DomainTensor`, or as a field in tiles; each rank keeps a copy of its
        rows. It lies in memory as the tensor does, if that lies alike on all ranks, else row by
        row. Any extent can be split over any number of ranks: rows are shared out as by
        `torch.tensor_split`.

    Raises:
        ValueError: `dims` does not fit the mesh or the tensor; or the ranks hold different ones; or
            it is split already.
        TypeError: It is no tensor, or one without rows in memory: sparse, nested or quantized.
    """
    _refuse_all_but_plain(tensor, "shard")
    if isinstance(mesh, LocalMesh):
        return mesh.cut(tensor, dims)
    known = type(tensor) in (Tensor, Rows) or dispatches(type(tensor))
    plain = tensor if known else tensor.as_subclass(Tensor)
    domain, facts = domain_of(mesh), [*plain.shape, plain.dtype]
    place = [*facts, splits_of(plain.ndim, domain.grid.sizes, dims)]
    if not are_alike([*place, *plain.stride()], domain):
        if not are_alike(facts, domain):
            raise ValueError(_OTHERS.format(domain.ranks, "shapes or dtypes"))
        if not are_alike(place, domain):
            raise ValueError(
                f"the ranks {domain.ranks} share the tensor that is split, but split other dims of "
                f"it, here {dims}; give the same dims on all of them."
            )
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if first_different([plain], domain) is not None:
        raise ValueError(_OTHERS.format(domain.ranks, "values"))
    return shard_alike(tensor, mesh, dims)


def shard_alike(tensor: Tensor, mesh: DeviceMesh, dims: int | Sequence[int]) -> DomainTensor:
    """Split a tensor, see `shard`, that lies in memory alike on all ranks: none has to ask."""
    _install()
    domain = domain_of(mesh)
    layout = Layout.of(tensor.shape, splits_of(tensor.ndim, domain.grid.sizes, dims), domain.grid)
    known = type(tensor) in (Tensor, Rows)
    stranger = not known and not computes(type(tensor))
    # the part is plain: MONAI's MetaTensor, for one, makes new tensors by other arguments
    plain = tensor if known or dispatches(type(tensor)) else tensor.as_subclass(Tensor)
    strides = of_copy(layout.shape, plain.stride())
    split = DomainTensor(Subdomain(own_part(plain, layout), layout, domain, None, strides))
    if not stranger:
        return split
    named = split.as_subclass(type(tensor))
    vars(named).update(vars(tensor))
    return named


def from_local(
    local: Tensor, mesh: DeviceMesh, dims: int | Sequence[int], shape: Sequence[int] | None = None
) -> DomainTensor:
    """Wrap this rank's part of a split tensor.

    Args:
        local: This rank's rows: as many as `torch.tensor_split` gives it if `shape` is given, any
            number otherwise.
        mesh: The domain mesh, of one or several axes.
        dims: The dim of the tensor that each mesh axis splits: an int for a mesh of one axis.
        shape: The global shape. Without it the ranks tell each other the shapes of their parts, and
            rows move to where `torch.tensor_split` puts them.

    All ranks call, since they tell each other how their parts lie in memory, and whether one
    requires grad: then the whole does.

    Raises:
        ValueError: `local` is not this rank's part of a tensor of `shape`, or the parts do not make
            up a whole, or it is split already.
        TypeError: It is no tensor, or one without rows in memory: sparse, nested or quantized.
    """
    _refuse_all_but_plain(local, "from_local")
    domain = domain_of(mesh)
    if shape is None:
        splits = splits_of(local.ndim, domain.grid.sizes, dims)
        local, shape = to_canonical(local, domain, splits)
    part = part_from(local, mesh, dims, shape)
    return DomainTensor(_agreed(local, part.layout, domain))


def rows_from_local(
    local: Tensor, mesh: DeviceMesh, dims: int | Sequence[int], shape: Sequence[int]
) -> DomainTensor:
    """Wrap this rank's part of a tensor of `shape`, laid row by row, so that no rank has to ask."""
    part = part_from(local.contiguous(), mesh, dims, shape)
    return DomainTensor(part.in_rows(part.local))


def part_from(
    local: Tensor, mesh: DeviceMesh, dims: int | Sequence[int], shape: Sequence[int]
) -> Subdomain:
    """Check this rank's part of a tensor of `shape`, without a message; see `from_local`.

    Nobody knows how the whole lies, since the other parts may lie otherwise.
    """
    _install()
    domain = domain_of(mesh)
    layout = Layout.of(shape, splits_of(len(shape), domain.grid.sizes, dims), domain.grid)
    if tuple(local.shape) != layout.local_shape:
        raise ValueError(
            f"this rank's part of a tensor of {layout} has shape {layout.local_shape}; got "
            f"{tuple(local.shape)}. Split the rows as torch.tensor_split does, or leave the shape "
            "out: rows then move to where they belong."
        )
    return Subdomain(local, layout, domain)


def _refuse_all_but_plain(tensor: object, function: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{function} takes a tensor; got {type(tensor).__name__}. Make one of it by "
            "torch.as_tensor."
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise TypeError(
            f"{function} cuts rows out of dense tensors, and this one is sparse, nested or "
            "quantized; give x.to_dense(), torch.nested.to_padded_tensor(x, 0) or x.dequantize()."
        )
    if is_field(tensor):
        raise ValueError(
            f"{function} takes a plain tensor, but this one of shape {tuple(tensor.shape)} is "
            f"split already, along dims {list(dims_split_in(tensor))}; use it as it is, or make it "
            "whole by lightning_shard.gather before."
        )


def _agreed(local: Tensor, layout: Layout, domain: Domain) -> Subdomain:
    """Wrap the part of which the ranks agree how the whole lies, and whether it has a graph.

    One rank alone may have a part that lies otherwise, or that requires grad. If each went by its
    own, a write would reach others on some ranks only, and backward would pair other messages.
    Parts that do not lie alike are laid row by row.
    """
    strides: Strides | None = layout.strides
    if not local.is_contiguous():
        strides = of_whole(layout.local_shape, local.stride(), layout)
    facts = [local.dtype, layout.dims]
    own = [*facts, *(strides or [-1] * layout.ndim)]
    if not are_alike([*own, int(local.requires_grad)], domain):
        if not are_alike(facts, domain):
            raise ValueError(
                f"the ranks {domain.ranks} have parts of one tensor, but say different dtypes, "
                f"global shapes or dims of it, here {local.dtype} and {layout}; give the same on "
                "all of them."
            )
        if not are_alike(own, domain):
            local, strides = local.contiguous(), layout.strides
        some_graph = domain.any_says(lambda: local.requires_grad, device_of(domain))
        if some_graph and not local.requires_grad:
            local = local.detach().requires_grad_()
    return Subdomain(local, layout, domain, None, strides)


def _install() -> None:
    """Let what asks no rule look at its arguments, from the first split tensor on."""
    install_functions()
    install_scripted()
    install_transforms()


def gather(tensor: Tensor) -> Tensor:
    """Gather the full tensor on every rank; a plain tensor comes back unchanged.

    Differentiable: each rank's gradient of the full tensor is a partial one, which is added up and
    split again.

    Raises:
        TypeError: It is no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"gather takes a tensor; got {type(tensor).__name__}. Gather each tensor in it: "
            "[gather(x) for x in value]."
        )
    if isinstance(tensor, LocalField):
        return tensor.whole()
    if not isinstance(tensor, DomainTensor):
        return tensor
    if (calls := counted_calls.get()) is not None:
        calls.note(gather, (tensor,), {})
    part = tensor.subdomain
    travels_on = part.domain.mesh.device_type
    if part.local.device.type == "cpu" != travels_on:  # where Lightning puts predictions
        return gathered(replace(part, local=part.local.to(travels_on))).cpu()
    return gathered(part)


def is_field(value: object) -> bool:
    """Return whether a value is a split tensor, over ranks or in tiles."""
    return isinstance(value, DomainTensor | LocalField)


def dims_split_in(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims along which a tensor is split; none of a plain one."""
    if isinstance(tensor, LocalField):
        return tensor.split_dims
    return tensor.subdomain.layout.split_dims if isinstance(tensor, DomainTensor) else ()


def unpack(tensor: DomainTensor) -> tuple[Tensor, Subdomain]:
    """Return the local tensor, and what `pack` needs to wrap another one like it."""
    part = tensor.subdomain
    return part.local, part


def pack(local: Tensor, like: Subdomain) -> DomainTensor:
    """Wrap a local tensor that is laid out as `like`."""
    return DomainTensor(replace(like, local=local))
