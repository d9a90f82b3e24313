"""Sampling at arbitrary places: the sampled image is made whole, the samples are split.

A grid may point anywhere, so each rank gathers the split spatial dims of the image (and its
channels, if the ranks that split them split the grid): memory and traffic of one whole image per
rank. The samples are split as the grid is; for a plain grid as the image was.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import local_part, whole
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Dim, Factor, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import cast_for
from lightning_shard.ops.registry import implements


@implements(F.grid_sample, limits="the coordinates (last dim of the grid) must be whole")
def grid_sample(
    func: Callable[..., Tensor],
    input: Any,  # noqa: A002 - torch's name of the argument
    grid: Any,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Subdomain:
    """Sample at given places; the whole image travels to all ranks, the samples stay split."""
    x, owner = input, input if isinstance(input, Subdomain) else grid
    layout = _sampled(x, grid, owner)
    if isinstance(x, Subdomain):
        for dim in x.layout.split_dims:
            if dim > 1 or layout.dims[dim] != x.layout.dims[dim]:
                x = whole(x, dim)
    batch, channels, *places = layout.dims
    image = _layout(layout, [batch, channels, *((Factor(n),) for n in x.shape[2:])])
    points = _layout(layout, [batch, *places, (Factor(grid.shape[-1]),)])
    image, points = local_part(x, image), local_part(grid, points)
    if 0 in layout.local_shape:
        sources = cast_for(_sample_of_one, image, points)
        return owner.like(empty_attached(layout.local_shape, *sources, is_curved=True), layout)
    return owner.like(func(image, points, mode, padding_mode, align_corners), layout)


def _sample_of_one(image: Tensor, points: Tensor) -> Tensor:
    return F.grid_sample(image, points.expand(*points.shape[:-1], image.ndim - 2))


def _sampled(x: Any, grid: Any, owner: Subdomain) -> Layout:
    """The layout of the samples, of shape (B, C, *grid.shape[1:-1])."""
    shape = (x.shape[0], x.shape[1], *grid.shape[1:-1])
    if x.shape[0] != grid.shape[0] or x.ndim != grid.ndim or grid.shape[-1] != x.ndim - 2:
        raise RuntimeError(
            f"grid_sample: input of shape {tuple(x.shape)} needs a grid of shape ({x.shape[0]}, "
            f"..., {x.ndim - 2}) with {x.ndim} dims; got {tuple(grid.shape)}"
        )
    dims: list[Dim] = [(Factor(n),) for n in shape]
    if isinstance(grid, Subdomain):
        if grid.layout.axes(grid.ndim - 1):
            raise UnsupportedOperationError("grid_sample with split coordinates")
        for d in grid.layout.split_dims:
            dims[d if d == 0 else d + 1] = grid.layout.dims[d]
    taken = {a for dim in dims for f in dim for a in f.axes}
    for d in x.layout.split_dims if isinstance(x, Subdomain) else ():
        axes = x.layout.axes(d)
        if not taken & set(axes) and dims[d] == (Factor(shape[d]),):
            dims[d] = x.layout.dims[d] if d < 2 else (Factor(shape[d], axes),)
    return _layout(owner.layout, dims)


def _layout(like: Layout, dims: Sequence[Dim]) -> Layout:
    return Layout(tuple(dims), like.grid)


@implements(F.affine_grid, torch.affine_grid_generator, limits="the matrices must be whole")
def affine_grid(
    func: Callable[..., Tensor], theta: Subdomain, size: Sequence[int], align_corners: Any = None
) -> Subdomain:
    """Split the grid as the transformations, over the batch; plain ones need no rule."""
    if theta.layout.axes(1, 2):
        raise UnsupportedOperationError("affine_grid of matrices that are split")
    batch, rows = theta.layout.dims[0], theta.local.shape[0]
    dims = [batch, *((Factor(int(n)),) for n in (*size[2:], len(size) - 2))]
    layout = _layout(theta.layout, dims)
    if rows == 0:
        return theta.like(empty_attached(layout.local_shape, theta.local), layout)
    return theta.like(func(theta.local, [rows, *size[1:]], align_corners), layout)
