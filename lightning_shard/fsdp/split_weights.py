"""Splits large spectral weights over the domain: each rank holds what it multiplies.

Dense weights are split by mode, large factorized ones by the terms of their sum (factorized.py).
Such weights are far larger than the modes of the fields, so FSDP2 would send much more for them
than the whole spectral convolution sends. Here each rank of a domain keeps its modes for good, and
FSDP2 shards those over data replicas only. Of a dense weight the layer sees a tensor of the whole
shape, split over modes as the modes of its input are; where the input is not split in that way, it
sees the whole.

DTensor parts a dim as `torch.chunk` does and a `Subdomain` as `torch.tensor_split` does; the rows
in between travel.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from lightning_shard.domain.align import gathered
from lightning_shard.domain.comm import exchange
from lightning_shard.domain.fetch import Needs, Segment, route
from lightning_shard.domain.layout import Layout, partition
from lightning_shard.domain.subdomain import Domain, Subdomain, domain_of
from lightning_shard.memory.neuralop.factorized import fills, kind_of, terms, travels_less
from lightning_shard.processes.torch_private.internals import own_parameters
from lightning_shard.tensor.mixins import Mixin, is_a, mix_in
from lightning_shard.tensor.tensor import DomainTensor


class _SplitByMode(Mixin):
    """Mixin of a factorized dense weight whose pairs are a DTensor of the domain in forward."""

    _domain_mesh: DeviceMesh
    _split: dict[int, tuple[int, ...]]
    _input_domain: Domain | None

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(value, DTensor) or not _is_unsharded(value, self._domain_mesh):
            return value  # FSDP2's own, or a slice of the weight
        modes = torch.view_as_complex(_mean_over(self._domain_mesh, value.to_local()))
        domain = self._input_domain or domain_of(self._domain_mesh)
        part = _canonical(modes, tuple(value.shape[:-1]), self._split, domain)
        return gathered(part) if self._input_domain is None else DomainTensor(part)


class _OwnTerms(Mixin):
    """Mixin of a module whose DTensors of the domain read as what this rank holds of them."""

    _domain_mesh: DeviceMesh

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(value, DTensor) or not _is_unsharded(value, self._domain_mesh):
            return value
        partial = [Partial() if p.is_replicate() else p for p in value.placements]
        local = _mean_over(self._domain_mesh, value.to_local(grad_placements=partial))
        return torch.view_as_complex(local) if name in self.__dict__.get("_pairs", ()) else local


def split_by_mode(
    root: nn.Module, mesh: DeviceMesh, dims: Sequence[int], kept: Collection[nn.Parameter] = ()
) -> Iterator[nn.Module]:
    """Split the large weights of neuraloperator's spectral convolutions, and give their layers.

    Args:
        root: A module whose complex parameters are stored as pairs.
        mesh: The domain mesh.
        dims: The dim of the fields that each mesh axis splits.
        kept: Parameters that stay whole, and with them their layers.

    Returns:
        The layers whose weights are split. FSDP2 must wrap them over data replicas, and then
        `show_split_weights` be called.
    """
    if mesh.ndim > 2:  # FSDP2 takes DTensors of at most two axes
        return
    seen: set[Tensor] = set(kept)
    for layer in root.modules():
        own = set(layer.parameters())
        if not is_a(layer, "neuralop", "SpectralConv") or own & seen:
            continue
        if _has_dense_modes(layer, mesh, dims):
            _split_modes(layer, mesh, dims)
        elif not _split_terms(layer, mesh):
            continue
        seen |= own
        if own_parameters(layer).get("bias") is not None:
            _distribute(layer, "bias", mesh, [Replicate()] * mesh.ndim)
            mix_in(layer, _OwnTerms, _domain_mesh=mesh)
        yield layer


def _split_modes(layer: nn.Module, mesh: DeviceMesh, dims: Sequence[int]) -> None:
    """Each rank holds some modes of the dense weight."""
    weight: Any = layer.weight
    # (channels, modes...) of separable layers, instead of (in, out, modes...)
    shift = 1 if layer.separable else 0
    placements: list[Placement] = [Shard(d - shift) for d in dims]
    _distribute(weight, "tensor", mesh, placements)
    split = {d - shift: (axis,) for axis, d in enumerate(dims)}
    mix_in(weight, _SplitByMode, _domain_mesh=mesh, _split=split, _input_domain=None)


def _split_terms(layer: nn.Module, mesh: DeviceMesh) -> bool:
    """Each rank holds some terms of the sum that a large factorized weight is."""
    weight: Any = layer.weight
    if kind_of(layer) is None or layer.separable or not travels_less(weight, mesh.device_type):
        return False
    split = terms(weight, mesh.shape)
    if not any(split):
        return False
    names = [name for name, _ in weight.named_parameters()]
    for name in names:
        holder = weight.get_submodule(name.rpartition(".")[0])
        placements = [Shard(dims[name]) if name in dims else Replicate() for dims in split]
        _distribute(holder, name.rpartition(".")[2], mesh, placements)
        mix_in(holder, _OwnTerms, _domain_mesh=mesh)
    summed = tuple(axis for axis, dims in enumerate(split) if dims)
    mix_in(weight, _OwnTerms, _domain_mesh=mesh, _summed=summed)
    return True


def show_split_weights(layer: nn.Module, dims: Sequence[int]) -> None:
    """Let `layer` see dense weights that are split like its input, or whole ones."""
    if not isinstance(layer.weight, _SplitByMode):
        return
    wanted = {d: (axis,) for axis, d in enumerate(dims)}

    def look(layer: nn.Module, args: tuple[Any, ...]) -> None:
        part = args[0].subdomain if args and isinstance(args[0], DomainTensor) else None
        alike = part is not None and all(
            part.layout.axes(d) == wanted.get(d, ()) for d in range(part.ndim)
        )
        weight: Any = layer.weight
        weight._input_domain = part.domain if part is not None and alike else None

    layer.register_forward_pre_hook(look)


def _has_dense_modes(layer: nn.Module, mesh: DeviceMesh, dims: Sequence[int]) -> bool:
    weight: Any = layer.weight
    order: Any = layer.order
    known = getattr(weight, "name", "").endswith("Dense") and "tensor" in own_parameters(weight)
    first = weight.ndim - order
    return known and all(
        2 <= d < 2 + order and fills(weight.shape[d - 2 + first], parts)
        for d, parts in zip(dims, mesh.shape, strict=True)
    )


def _distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, placements: list[Placement]
) -> None:
    """Make the named parameter of `module` a DTensor."""
    parameter = own_parameters(module)[name]
    assert parameter is not None
    data = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
    own_parameters(module)[name] = nn.Parameter(data, requires_grad=parameter.requires_grad)


def _mean_over(mesh: DeviceMesh, weight: Tensor) -> Tensor:
    """`weight`, whose gradient is divided by the domain's ranks: each starts its own backward.

    FSDP2's divide factor would do, but on one data replica torch 2.15 divides by it twice.
    """
    if weight.requires_grad:
        weight.register_hook(lambda gradient: gradient / mesh.size())
    return weight


def _is_unsharded(value: DTensor, mesh: DeviceMesh) -> bool:
    """Return True if FSDP2 has gathered `value` from the data replicas."""
    return value.device_mesh.ndim == mesh.ndim


def _canonical(
    chunk: Tensor, shape: tuple[int, ...], split: dict[int, tuple[int, ...]], domain: Domain
) -> Subdomain:
    """This rank's rows of a tensor of `shape` that is parted as `torch.chunk` does."""
    layout = Layout.of(shape, split, domain.grid)
    for dim, axes in split.items():
        extent, parts = shape[dim], domain.grid.parts(axes)
        size = -(-extent // parts)
        held = tuple(
            Segment(low, min(low + size, extent), owner, 0)
            for owner, low in enumerate(range(0, extent, size))
        )
        offsets = partition(extent, parts)
        needs: Needs = tuple(((offsets[i], offsets[i + 1]),) for i in range(parts))
        plan = route(held, domain.grid.index(axes), needs)
        chunk = exchange(chunk, dim, plan, domain.group(axes))
    return Subdomain(chunk, layout, domain)
