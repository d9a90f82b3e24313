"""Convolutions that compute while the rows of other ranks travel.

Of a convolution, this rank's rows alone give all its output rows as if there were zeros around
them; only the rows near the border then lack something. So the rows begin to travel, the rank
convolves its own rows, waits, and adds what the other ranks' rows give: few rows of the kernel meet
them. In backward what belongs to the other ranks' rows is computed first and travels back, while
the gradients of the rank's own rows and of the weight are computed.

No rank copies its rows to put others beside them. The border costs one small convolution for each
side; where parts are thin that is too much, so the sizes decide (`overlapping` in domain/halo.py).
All ranks decide alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.halo import (
    Box,
    Halo,
    add_framed,
    framed,
    overlap_mode,
    part_of,
    return_halo,
    send_halo,
)
from lightning_shard.ops.window.strips import Plan, Window
from lightning_shard.processes.torch_private.internals import in_transform

_gradients = torch.ops.aten.convolution_backward


@dataclass(frozen=True)
class Numbers:
    """The numbers of a convolution for each spatial dim; `whole` dims are padded as torch does."""

    stride: list[int]
    padding: list[int]
    whole: tuple[int, ...]
    dilation: list[int]
    groups: int

    def around(self, paddings: dict[int, int]) -> list[int]:
        """Return the padding, with that of split dims, 0 unless it is given."""
        return [p if d in self.whole else paddings.get(d, 0) for d, p in enumerate(self.padding, 2)]


@lru_cache(maxsize=4096)
def numbers_of(windows: tuple[Window, ...], split: tuple[Window, ...], groups: int) -> Numbers:
    """Collect the numbers of a convolution that reads its spatial dims through these windows.

    Args:
        windows: The windows along all spatial dims.
        split: The windows along dims whose rows travel.
        groups: Number of groups of channels.
    """
    return Numbers(
        [w.stride for w in windows],
        [w.before for w in windows],
        tuple([w.dim for w in windows if w not in split]),
        [w.dilation for w in windows],
        groups,
    )


def overlapped(
    plan: Plan,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    numbers: Numbers,
    plain: Callable[..., Tensor],
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute this rank's rows of a convolution.

    Args:
        plan: The rows that travel, and the strips.
        tensors: This rank's rows, the weight and the bias.
        numbers: Strides, paddings, dilations and groups of the convolution.
        plain: The same function of the tensors, differentiable twice; it waits for the rows.
        group: The ranks.
    """
    return _Overlapped.apply(*tensors, plan, numbers, plain, group)


def may_overlap(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> bool:
    """Return True if torch takes these tensors of a convolution as they are."""
    given = [t for t in (x, weight, bias) if t is not None]
    return (
        overlap_mode() != "never"
        and x.ndim == weight.ndim
        and x.numel() > 0
        and weight.numel() > 0
        and groups > 0
        and x.shape[1] == weight.shape[1] * groups
        and weight.shape[0] % groups == 0
        and (bias is None or bias.shape == weight.shape[:1])
        and all(t.dtype == x.dtype and t.device == x.device for t in given)
        and x.dtype.is_floating_point
        and not in_transform()
        and not in_forward_mode()
    )


class _Overlapped(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        numbers: Numbers,
        plain: Callable[..., Tensor],
        group: dist.ProcessGroup,
    ) -> Tensor:
        wait = send_halo(x, plan.halo, group)
        result = _convolved(x, weight, bias, numbers, plan.paddings)
        theirs = _boxes(plan.halo, wait())
        dims = plan.halo.dims
        strips = [
            framed(x, dims, strip.input, {box: theirs[box] for box in strip.boxes})
            for strip in plan.strips
        ]
        for strip, rows in zip(plan.strips, strips, strict=True):
            part = _convolved(
                rows, part_of(weight, dims, strip.kernel), None, numbers, strip.paddings
            )
            part_of(result, dims, strip.output).add_(part)
        ctx.save_for_backward(x, weight, bias, *strips)
        ctx.plan = plan, numbers, plain, group
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight, bias, *strips) = grads, ctx.saved_tensors
        plan, numbers, plain, group = ctx.plan
        wanted = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # they are to be differentiated again
            given = [t for t, wants in zip((x, weight, bias), wanted, strict=True) if wants]
            again = torch.autograd.grad(plain(x, weight, bias), given, grad, create_graph=True)
            found = iter(again)
            return *(next(found) if wants else None for wants in wanted), None, None, None, None
        dims, halo = plan.halo.dims, plan.halo
        sums: dict[Box, Tensor] = {}
        extra: list[Tensor] = []
        for strip, rows in zip(plan.strips, strips, strict=True):
            if not any(wanted[:2]):
                break
            of_rows, of_weight, _ = _gradients_of(
                part_of(grad, dims, strip.output),
                (rows, part_of(weight, dims, strip.kernel)),
                numbers,
                strip.paddings,
                [wanted[0], wanted[1], False],
            )
            extra.append(of_weight)
            if wanted[0]:
                add_framed(of_rows, dims, strip.input, strip.boxes, sums)
        add_to = return_halo(sums, halo, x, group) if wanted[0] else None
        of_x, of_weight, of_bias = _gradients_of(grad, (x, weight), numbers, plan.paddings, wanted)
        if wanted[1]:
            for strip, part in zip(plan.strips, extra, strict=True):
                part_of(of_weight, dims, strip.kernel).add_(part)
        if add_to is not None:
            add_to(of_x)
        return of_x, of_weight, of_bias, None, None, None, None


def _boxes(halo: Halo, parts: Sequence[Tensor]) -> dict[Box, Tensor]:
    return dict(zip([box for box in halo.receives if box is not None], parts, strict=True))


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Numbers, paddings: dict[int, int]
) -> Tensor:
    padding = numbers.around(paddings)
    none, dilation, groups = [0] * len(padding), numbers.dilation, numbers.groups
    return torch.convolution(
        x, weight, bias, numbers.stride, padding, dilation, False, none, groups
    )


def _gradients_of(
    grad: Tensor,
    given: tuple[Tensor, Tensor],
    numbers: Numbers,
    paddings: dict[int, int],
    wanted: list[bool],
) -> tuple[Any, Any, Any]:
    x, weight = given
    padding = numbers.around(paddings)
    own = (numbers.stride, padding, numbers.dilation, False, [0] * len(padding), numbers.groups)
    return _gradients(grad, x, weight, [weight.shape[0]], *own, wanted)
