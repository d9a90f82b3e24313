"""Boxes of torchvision: each rank pools its part of the boxes, and all choose the same ones.

A box may lie anywhere, so the image that is pooled is made whole, like one that is sampled. Which
boxes are suppressed depends on all of them in their order: they are few numbers, which every rank
gathers.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_shard.domain.align import gathered, local_part, subdomains, whole
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements_operator
from lightning_shard.ops.view.aligned import Operand, refuse_other_domains


@implements_operator("torchvision.nms")
def nms(func: Callable[..., Tensor], boxes: Operand, scores: Operand, threshold: float) -> Tensor:
    """The places of the boxes that are kept, plain: alike on every rank."""
    everything = [gathered(x) if isinstance(x, Subdomain) else x for x in (boxes, scores)]
    return func(*(x.detach() for x in everything), threshold)


@implements_operator("torchvision.roi_align", limits="the coordinates of a box must be whole")
def roi_align(
    func: Callable[..., Tensor], x: Operand, boxes: Operand, scale: float, *args: Any
) -> Subdomain:
    """Pool boxes (K, 5): their image and corners, to (K, C, *bins), split as the boxes are.

    Plain boxes are shared out over the ranks that split the places of the images.
    """
    refuse_other_domains(x, boxes)
    owner = subdomains([x, boxes])[0]
    if isinstance(boxes, Subdomain) and boxes.layout.axes(1):
        raise UnsupportedOperationError("boxes whose coordinates are split")
    splits: dict[int, tuple[int, ...]] = {}
    channels = x.layout.axes(1) if isinstance(x, Subdomain) else ()
    if isinstance(boxes, Subdomain):
        splits[0] = boxes.layout.axes(0)
    elif isinstance(x, Subdomain):
        splits[0] = x.layout.axes(0, 2, 3)
    if not set(channels) & set(splits[0]):
        splits[1] = channels
    layout = Layout.of((boxes.shape[0], x.shape[1], *args[:2]), splits, owner.layout.grid)
    for d in x.layout.split_dims if isinstance(x, Subdomain) else ():
        if d != 1 or 1 not in splits:
            assert isinstance(x, Subdomain)
            x = whole(x, d)
    image = Layout(tuple(layout.dims[1] if d == 1 else (Factor(n),) for d, n in enumerate(x.shape)),
                   layout.grid)  # fmt: skip
    own = Layout((layout.dims[0], (Factor(5),)), layout.grid)
    pixels, corners = local_part(x, image), local_part(boxes, own)
    if 0 in layout.local_shape:
        return owner.like(empty_attached(layout.local_shape, pixels), layout)
    return owner.like(func(pixels, corners, scale, *args), layout)
