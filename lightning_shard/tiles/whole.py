"""Cuts tensors into tiles, and puts fields in tiles together again."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import gathered
from lightning_shard.domain.layout import Layout, splits_of
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.tensor.scripted import install_scripted
from lightning_shard.tensor.transforms import install_transforms
from lightning_shard.tiles.operation import Call, cut_as
from lightning_shard.tiles.tile_tensor import Tiles, TileTensor
from lightning_shard.tiles.views import fresh


def cut(tiles: Tiles, tensor: Tensor, dims: int | Sequence[int]) -> TileTensor:
    """Cut a tensor into tiles.

    Args:
        tiles: The tiles.
        tensor: The whole tensor.
        dims: The dim that each axis of their grid splits: an int for one axis.

    Raises:
        ValueError: `dims` does not fit the tiles or the tensor.
    """
    return cut_as(tensor, tiles, _layouts(tiles, tensor.shape, dims))


def made_by(
    tiles: Tiles,
    shape: Sequence[int],
    dims: int | Sequence[int],
    read: Callable[[tuple[slice, ...]], Tensor],
) -> TileTensor:
    """Make a field of which a function gives the rows of each tile, one after the other.

    Args:
        tiles: The tiles.
        shape: The shape of the whole field.
        dims: The dim that each axis of their grid splits: an int for one axis.
        read: A function from the place of rows to these rows, in new memory.

    Raises:
        ValueError: `dims` does not fit the tiles or the shape.
    """
    layouts = _layouts(tiles, shape, dims)
    call = Call(tiles, [], records=False)

    def compute(tile: int, _: list[Any]) -> Subdomain:
        layout = layouts[tile]
        return Subdomain(read(rows_of(layout)), layout, tiles.domains[tile], None, layout.strides)

    return call.field(call.run(compute))


def _layouts(tiles: Tiles, shape: Sequence[int], dims: int | Sequence[int]) -> list[Layout]:
    install_scripted()
    install_transforms()
    splits = splits_of(len(shape), tiles.sizes, dims)
    return [Layout.of(shape, splits, domain.grid) for domain in tiles.domains]


def compute_result(field: TileTensor) -> None:
    """Compute a spectrum that an autograd.Function returned, in place.

    Its gradient is the Function's; the small graphs of a spectrum would begin at no input.
    """
    if not field.is_lazy or field.roots or not field.has_gradient:
        return

    def compute(_: int, locals_: list[Any]) -> Subdomain:
        part = locals_[0].read()
        return part.like(part.local.clone())

    field.parts = Call(field.tiles, [field], records=False).run(compute)
    field.roots = ()


def gathered_tiles(field: TileTensor, device: torch.device | None = None) -> Tensor:
    """Return the whole tensor of a field; a gradient of it is cut into tiles again.

    Args:
        field: The field.
        device: Where the whole tensor lies; by default where the field is.
    """
    field = fresh(field)
    compute_result(field)
    layout = field.parts[0].layout
    records = torch.is_grad_enabled() and (bool(field.roots) or field.has_gradient)
    call = Call(field.tiles, [field], records=records)
    if layout is None or any(len(dim) > 1 for dim in layout.dims):  # a view that joined dims
        made = call.plain(call.run(lambda _, locals_: gathered(locals_[0].read())))
        call.enter()
        return made if device is None else made.to(device)
    made = torch.empty(field.shape, dtype=field.dtype, device=device or field.device)

    def compute(tile: int, locals_: list[Any]) -> Subdomain:
        part = locals_[0].read()
        with torch.no_grad():
            made[rows_of(part.layout)] = part.local
        return part

    parts = call.run(compute)
    made = call.whole(made, parts)
    call.enter()
    return made


def each_part(field: TileTensor, use: Callable[[Tensor, tuple[slice, ...]], None]) -> None:
    """Call a function with the rows of each tile, one after the other, and with their place."""
    field = fresh(field)
    layout = field.parts[0].layout
    if layout is None or any(len(dim) > 1 for dim in layout.dims):  # a view that joined dims
        use(gathered_tiles(field), tuple(slice(0, n) for n in field.shape))
        return

    def compute(_: int, locals_: list[Any]) -> None:
        part = locals_[0].read()
        use(part.local, rows_of(part.layout))

    with torch.no_grad():
        Call(field.tiles, [field], records=False).run(compute)


TileTensor.cut, TileTensor.join = staticmethod(cut), staticmethod(gathered_tiles)
TileTensor.made_by = staticmethod(made_by)


def rows_of(layout: Layout) -> tuple[slice, ...]:
    """Return the rows of the whole tensor that a part has."""
    bounds = [
        dim[0].bounds(layout.grid) if dim[0].axes else (0, dim[0].extent) for dim in layout.dims
    ]
    return tuple(slice(low, high) for low, high in bounds)
