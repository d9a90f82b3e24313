"""Normalizes by the moments of the global tensor: one message forward, one backward.

Each rank reduces its own rows to a mean and a variance. These few numbers are gathered and combined
exactly: each counts by its rank's number of rows, which all ranks know. Then every value is
multiplied and added to. Both passes run on torch's fused kernels. A backward pass that is to be
differentiated again is a formula of functions that autograd knows. Half precision is computed in
float32, and autograd keeps the values in half precision alone.

A local tensor is (B, C, ...), and its channels are K groups (ops/norm/groups.py).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.cache import made_once
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.half import wide, wide_dtype
from lightning_shard.domain.local_group import Later, after, joining
from lightning_shard.domain.memory_format import format_of, owned
from lightning_shard.ops.norm.groups import Groups, Joint, mixed, own_moments
from lightning_shard.processes.torch_private.internals import in_transform

Normalized = tuple[Tensor, Tensor]  # the result, and the moments of each group

_sums = torch.ops.aten.native_batch_norm_backward


def normalize_groups(
    local: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: Groups,
    note: Callable[[Tensor], None] | None = None,
) -> Normalized | Later[Normalized]:
    """(local - mean) / sqrt(variance + eps) * weight + bias.

    Args:
        local: This rank's values, (B, C, ...).
        weight: A factor for each channel (C), the same for all samples.
        bias: A summand for each channel (C).
        groups: The values that share their moments.
        note: Is given the moments before autograd keeps anything of this call, as torch's kernels
            write running statistics: a block that runs again in backward ends as autograd keeps
            the last of its tensors.

    Returns:
        The result, and of each group the mean and the biased variance over all ranks, (2, K), which
        carry no gradient. In tiles they are there later: go on by `after`.
    """
    given = {wide_dtype(t.dtype) for t in (local, weight, bias) if t is not None}
    fused = given in ({torch.float32}, {torch.float64})
    if fused and not in_transform() and not in_forward_mode():
        own = _Member(local, weight, bias, groups)
        here = joining(groups.domain.group(groups.axes)) if groups.axes else None
        if here is None:
            return _normalize([own], note)[0]
        made = here.later(own, _normalize)  # in tiles a call keeps its last tensor as it ends
        return made if note is None else after(made, lambda made: _noted(made, note))
    flat = groups.flat(local)
    mean, variance = groups.moments(flat)
    moments = torch.stack([mean, variance]).detach().flatten(1)
    if note is not None:
        note(moments)
    weight, bias = (
        None if v is None else groups.of_channels(_of_flat(v, flat.shape[1])).unsqueeze(-1)
        for v in (weight, bias)
    )
    result = normalized(groups.view(flat), mean, variance, weight, bias, groups.eps)
    return _shaped_as(local, result), moments


def _noted(made: Normalized, note: Callable[[Tensor], None]) -> Normalized:
    note(made[1])
    return made


def _shaped_as(x: Tensor, flat: Tensor) -> Tensor:
    """Values in the shape and the memory format of `x`."""
    if flat.shape == x.shape:
        return flat
    return flat.reshape(x.shape).contiguous(memory_format=format_of(x))


def normalized(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, of which autograd keeps only `x`."""
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale
    shift = shift if bias is None else shift + bias
    return torch.addcmul(shift, x, scale).to(x.dtype)


class _Member(NamedTuple):
    """Holds the tensors that one rank, or one tile, normalizes."""

    local: Tensor
    weight: Tensor | None
    bias: Tensor | None
    groups: Groups

    def flat(self, x: Tensor) -> Tensor:
        """Return values like `local` as the kernels take them, in float32 if they are in half."""
        return self.groups.flat(wide(x))


Slot = tuple[int, int | None, int | None]  # the places of a member's tensors


def _normalize(
    members: Sequence[_Member], note: Callable[[Tensor], None] | None = None
) -> list[Normalized]:
    """Normalize the part of this rank, or those of all tiles that share moments."""
    given = {id(t): t for m in members for t in m[:3]}  # tiles may have one weight in common
    given.pop(id(None), None)
    places = dict(zip(given, range(len(given)), strict=True))
    slots = [tuple([places.get(id(t)) for t in m[:3]]) for m in members]
    joint = Joint([m.groups for m in members])
    *results, moments = _Normalize.apply(joint, slots, note, *given.values())
    return [(result, moments) for result in results]


class _Normalize(Function):
    @staticmethod
    def forward(ctx: Any, joint: Joint, slots: list[Slot], note: Any, *tensors: Tensor) -> Any:
        members = _members(joint, slots, tensors)
        moments, eps = joint.combined(_fused_moments(members, joint)), joint.first.eps
        channels = joint.first.channels_of(members[0].local)
        of_channels = _each_channel(channels, joint.first, moments)
        both = of_channels.unbind()
        ctx.save_for_backward(*tensors, *both)
        ctx.plan = joint, slots
        moments = owned(moments)
        if note is not None:
            note(moments)
        ctx.mark_non_differentiable(moments)
        ctx.set_materialize_grads(False)
        results: list[Tensor] = []
        for m in reversed(members):  # the last one's rows were read last, so they are still near
            result = _scaled(m.flat(m.local), m.weight, m.bias, both, eps)
            results.append(owned(_shaped_as(m.local, result.to(m.local.dtype))))
        return *reversed(results), moments

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, mean, variance = ctx.saved_tensors
        joint, slots = ctx.plan
        members = _members(joint, slots, tensors)
        arrived = [
            torch.zeros_like(m.local) if grad is None else grad
            for grad, m in zip(grads, members, strict=False)
        ]
        if torch.is_grad_enabled():  # they are to be differentiated again
            found = _gradients(arrived, members, joint)
        else:
            found = _fused_gradients(arrived, members, (mean, variance), joint)
        totals: list[Any] = [None] * len(tensors)
        for (of_x, *others), m, slot in zip(found, members, slots, strict=True):
            for place, part in zip(slot, (_shaped_as(m.local, of_x), *others), strict=True):
                if place is not None and part is not None and ctx.needs_input_grad[3 + place]:
                    part = _of_channels(part, tensors[place])
                    before = totals[place]
                    totals[place] = part if before is None else before + part
        return None, None, None, *totals


def _of_flat(values: Tensor, channels: int) -> Tensor:
    """Return one value for each channel of all samples, in memory of its own.

    Not by `repeat`, of which no samples give a gradient without a graph.
    """
    own = values.shape[0]
    return values if own == channels else values.expand(channels // max(own, 1), -1).flatten()


def _of_channels(gradient: Tensor, values: Tensor) -> Tensor:
    """Return a gradient like `values`, of which each sample has given a part."""
    (own,) = values.shape[:1]
    if gradient.ndim == 1 and gradient.shape[0] != own:
        gradient = gradient.reshape(-1 if gradient.shape[0] else 0, own).sum(0)
    return gradient.to(values.dtype)


def _members(joint: Joint, slots: list[Slot], tensors: Sequence[Tensor]) -> list[_Member]:
    """Return what each member normalizes: the tensors at its places, the weights in float32."""
    weights: dict[int | None, Tensor | None] = {None: None}
    channels = joint.first.channels_of(tensors[slots[0][0]])
    for _, *places in slots:
        for n in places:
            if n is not None and n not in weights:
                weights[n] = _of_flat(wide(tensors[n]), channels)
    return [
        _Member(tensors[x], weights[weight], weights[bias], groups)
        for (x, weight, bias), groups in zip(slots, joint.groups, strict=True)
    ]


def _fused_moments(members: Sequence[_Member], joint: Joint) -> Tensor:
    """Means, then variances, of the rows of each of n members, shape (2 * n, K).

    On a CPU torch's kernel of group norm is the quickest. It gives them for each of B samples;
    these are mixed. On other devices it takes one block of threads for each group, and writes a
    result that nobody wants.
    """
    few = [m.local.numel() == 0 or math.prod(m.local.shape[2:]) == 1 for m in members]
    if any(few):
        return Joint.moments_of([
            own_moments(m.groups.view(m.flat(m.local))).flatten(1) for m in members
        ])  # fmt: skip
    if members[0].local.device.type != "cpu":
        views = [m.groups.view(m.flat(m.local)) for m in members]
        found = [torch.var_mean(view, (0, 2, 3), correction=0) for view in views]
        return torch.stack([*(mean for _, mean in found), *(variance for variance, _ in found)])
    means: list[Tensor] = []
    deviations: list[Tensor] = []
    counts: list[int] = []
    for m in members:
        x = m.flat(m.local)
        samples, area = x.shape[0], math.prod(x.shape[2:])
        # contiguous: of channels_last it takes the difference of large numbers, and a variance of
        # 1 around a mean of 100 is wrong by a tenth
        own = (samples, x.shape[1], area, joint.first.number, 0.0)
        _, mean, deviation = torch.native_group_norm(x.contiguous(), None, None, *own)
        means.append(mean)
        deviations.append(deviation)
        counts.append(samples)
    both = torch.cat([*means, *deviations])
    half = both.shape[0] // 2
    both.narrow(0, half, half).pow_(-2)
    if max(counts) == 1:
        return both
    each = both.view(2, half, -1).transpose(0, 1).split_with_sizes(counts)
    return Joint.moments_of([mixed(parts) for parts in each])


def _each_channel(channels: int, groups: Groups, values: Tensor) -> Tensor:
    """(2, K) -> (2, C), one after the other in memory.

    torch's kernels on the CPU do not look at the stride, which is 0 where one value is expanded.
    """
    per_group = channels // max(groups.number, 1)
    return values if per_group == 1 else values.repeat_interleave(per_group, 1)


def _scaled(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, moments: Sequence[Tensor], eps: float
) -> Tensor:
    """The formula of `normalized`, for each channel, by the kernel of batch norm."""
    if x.numel() == 0:
        return torch.empty_like(x)
    # not F.batch_norm, which refuses an eps of 0 before torch 2.12, nor cuDNN, which takes no small
    mean, variance = moments
    return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]


def _fused_gradients(
    grads: Sequence[Tensor], members: Sequence[_Member], moments: Sequence[Tensor], joint: Joint
) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Gradients of `x`, `weight` and `bias`; two sums for each group travel in one message.

    With g = dL/dy, n = (x - mean) / sigma and M values in a group, over all ranks: dL/dx = (w g -
    sum(w g) / M - n sum(w g n) / M) / sigma, where w is the weight of a value's channel. The two
    sums are over the whole group. dL/dw = sum(g n) and dL/db = sum(g) are over this rank's values
    of a channel; FSDP2 adds them up with the other parameters' gradients. Of tiles that have their
    weight in common the first one gives them, for all.
    """
    inverse, eps = torch.rsqrt(moments[1] + joint.first.eps), joint.first.eps
    alike: dict[tuple[int, int], list[int]] = {}
    for number, m in enumerate(members):
        alike.setdefault((id(m.weight), id(m.bias)), []).append(number)
    found: list[Any] = [(None, None, None)] * len(members)
    each: list[Tensor] = []
    for numbers in alike.values():
        own = [_own_sums(grads[n], members[n], moments[0], inverse) for n in numbers]
        sums = torch.stack([part for parts in zip(*own, strict=True) for part in parts])
        sums = torch.unflatten(sums, 0, (2, -1)).sum(1) if len(own) > 1 else sums
        of_bias, of_weight = sums if len(own) > 1 else own[0]
        found[numbers[0]] = None, of_weight, of_bias
        first = members[numbers[0]]
        sums = first.groups.of_channels(sums if first.weight is None else sums * first.weight)
        each.append(sums if sums.shape[2] == 1 else sums.sum(2, keepdim=True))
    sums, nothing = joint.added(each), _nothing(inverse.dtype, inverse.device)
    factor = joint.first.of_channels(inverse)
    scaled = torch.addcmul(nothing, sums, factor, value=-1 / max(joint.first.count, 1))
    shifts, slopes = scaled.flatten(1).unbind()
    for numbers in alike.values():
        weight = members[numbers[0]].weight
        factors = inverse if weight is None else inverse * weight
        for n in reversed(numbers):
            m = members[n]
            x, grad = m.flat(m.local), m.flat(grads[n])
            result = _scaled(x, slopes, shifts, moments, eps)
            result.addcmul_(grad, factors.view(1, -1, *[1] * (x.ndim - 2)))
            found[n] = result.to(m.local.dtype), *found[n][1:]
    return found


def _own_sums(grad: Tensor, m: _Member, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `bias` and `weight` from the values of one member."""
    x, grad = m.flat(m.local), m.flat(grad)
    if not x.numel():
        return x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    # contiguous: of others the kernel of the CPU gives less exact sums, or wrong ones
    given = grad.contiguous(), x.contiguous(), m.weight, None, None, mean, inverse
    _, of_weight, of_bias = _sums(*given, True, 0.0, [False, True, True])
    return of_bias, of_weight


@made_once
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _gradients(
    grads: Sequence[Tensor], members: Sequence[_Member], joint: Joint
) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    """The same as functions of `grads`, values and weights that can be differentiated again."""
    views = [m.groups.view(m.flat(m.local)) for m in members]
    mean, variance = joint.combined(Joint.moments_of([own_moments(view) for view in views]))
    inverse = torch.rsqrt(variance + joint.first.eps)
    given: list[tuple[Tensor, Tensor, Tensor]] = []
    for grad, view, m in zip(grads, views, members, strict=True):
        grad = m.groups.view(m.flat(grad))
        weight = None if m.weight is None else m.groups.of_channels(m.weight).unsqueeze(-1)
        scaled = grad if weight is None else grad * weight
        given.append((grad, scaled, (view - mean) * inverse))
    sums = [
        torch.stack([part.sum((0, 2, 3), keepdim=True) for part in (scaled, scaled * distance)])
        for _, scaled, distance in given
    ]
    along, across = joint.mean_of_all(sums)
    found: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
    for grad, scaled, distance in given:
        result = inverse * (scaled - along - distance * across)
        of_weight, of_bias = (part.sum((0, 3)).flatten() for part in (grad * distance, grad))
        found.append((result, of_weight, of_bias))
    return found
