"""Computes losses per element or per sample on every rank, then reduces them over all ranks."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import all_in_rows, common_layout, local_part, sum_over
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.half import wide, wide_dtype
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.reduce.sums import mean, sum_
from lightning_shard.ops.registry import implements, without_deprecated
from lightning_shard.ops.view.reshape import unsqueeze

Operand = Subdomain | Tensor
_WEIGHTED_MEANS = {F.mse_loss, F.l1_loss}  # their mean divides by the sum of the weights


@implements(F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy,
            F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.soft_margin_loss,
            F.hinge_embedding_loss, F.margin_ranking_loss, joins=True)  # fmt: skip
def elementwise_loss(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Operand:
    """Apply the function to each element, then reduce."""
    given = _arguments(func, args, kwargs)
    reduction = given.pop("reduction", "mean")
    weight = given.pop("weight", None) if func in _WEIGHTED_MEANS else None
    tensors = {name: v for name, v in given.items() if isinstance(v, Subdomain | Tensor)}
    layout = common_layout([*tensors.values(), *([] if weight is None else [weight])])
    given |= {name: local_part(v, layout) for name, v in tensors.items()}
    owner = next(v for v in (*tensors.values(), weight) if isinstance(v, Subdomain))
    local = func(**given, reduction="none")
    if weight is None:
        return _reduced(_wrapped(owner, local, layout, [*tensors.values()]), reduction)
    scale = owner.like(local_part(weight, layout).expand(layout.local_shape), layout)
    weighted = owner.like(local * scale.local, layout)
    if reduction != "mean":
        return _reduced(weighted, reduction)
    return _over(weighted, _over(scale, 1))


@implements(F.cross_entropy, F.nll_loss, limits="the classes (dim 1) must be whole", joins=True)
def class_loss(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Operand:
    """Compute it per sample or pixel; a mean divides by the global weight of the classes."""
    given = _arguments(func, args, kwargs)
    x, target = given.pop("input"), given.pop("target")
    reduction = given.pop("reduction", "mean")
    class_dim = min(x.ndim - 1, 1)
    layout = _class_layout(x, target, class_dim)
    owner = x if isinstance(x, Subdomain) else target
    dims = layout.dims[:class_dim] + layout.dims[class_dim + 1 :]
    samples = Layout(dims, layout.grid)
    by_index = target.ndim < x.ndim
    labels = local_part(target, samples if by_index else layout)
    local = func(local_part(x, layout), labels, **given, reduction="none")
    per_sample = owner.like(local, samples)
    if reduction != "mean" or not by_index:
        return _reduced(per_sample, reduction)
    counts = labels != given.get("ignore_index", -100)
    weight = given.get("weight")
    if weight is None:
        share = counts.to(wide_dtype(local.dtype))
    else:
        share = torch.where(counts, wide(weight)[torch.where(counts, labels, 0)], 0)
    return _over(per_sample, sum_over(per_sample, share.sum(), range(samples.ndim)))


def _arguments(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, without the deprecated ones."""
    return without_deprecated(inspect.signature(func).bind(*args, **kwargs).arguments)


def _class_layout(x: Operand, target: Operand, class_dim: int) -> Layout:
    """The common layout of input and target; all classes must be on one rank."""
    if target.ndim < x.ndim:
        split = isinstance(target, Subdomain)
        target = (
            unsqueeze(torch.unsqueeze, target, class_dim) if split else target.unsqueeze(class_dim)
        )
    layout = common_layout([x, target])
    if layout.axes(class_dim):
        raise UnsupportedOperationError(
            f"the class dim {class_dim} is split; a loss over classes needs all of them on one rank"
        )
    return layout


def _wrapped(
    owner: Subdomain, local: Tensor, layout: Layout, operands: Sequence[Operand]
) -> Subdomain:
    """Wrap losses of single elements, whose order in memory is known if all operands have one."""
    if all_in_rows(operands):
        return owner.in_rows(local, layout)
    orders = {x.stride() if isinstance(x, Tensor) else x.strides for x in operands}
    return (owner.like if len(orders) == 1 else owner.in_any_order)(local, layout)


def _reduced(x: Subdomain, reduction: str) -> Operand:
    if reduction == "none":
        return x
    if reduction == "batchmean":
        return _over(x, x.shape[0])
    return (mean if reduction == "mean" else sum_)(getattr(torch, reduction), x)


def _over(x: Subdomain, divisor: Tensor | int) -> Tensor:
    total = sum_(torch.sum, x, dtype=wide_dtype(x.dtype))
    assert isinstance(total, Tensor)
    return (total / divisor).to(x.dtype)
