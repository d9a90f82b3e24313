"""Products of tensors: a split dim that is kept stays split, one that is contracted is summed.

Every function is one contraction with labelled dims. A plain operand gives its local slice of a
split label; a label that is contracted while split leaves partial sums, which one all-reduce
completes. Where two labels are split over the same ranks, the first one of the output keeps its
rows and those of the other are gathered: queries times keys, and weights times values, keep the
rows of the queries.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from string import ascii_letters
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import (
    common_dim,
    one_factor,
    split_differently,
    subdomains,
    take_local,
    whole,
)
from lightning_shard.domain.comm import all_reduce
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.half import wide
from lightning_shard.domain.layout import Dim, Factor, Layout, layout_of, merge
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.autocast import cast_for, without_autocast
from lightning_shard.ops.elementwise.pointwise import elementwise
from lightning_shard.ops.reduce.sums import sum_
from lightning_shard.ops.registry import implements, listed
from lightning_shard.processes.torch_private.typed import linalg, typed_torch

Operand = Subdomain | Tensor


def contract(
    compute: Callable[..., Tensor], operands: Sequence[Operand], inputs: Sequence[str], output: str
) -> Operand:
    """Compute on local parts what `compute` contracts over the labels that `output` lacks.

    Args:
        compute: Takes the local tensors of `operands`, returns the local result.
        operands: Split and plain tensors.
        inputs: One label for each dim of each operand.
        output: The labels of the result.
    """
    first = next(o for o in operands if isinstance(o, Subdomain))
    kinds = tuple([o.layout if isinstance(o, Subdomain) else tuple(o.shape) for o in operands])
    dims = _dims_of(kinds, tuple(inputs), output)
    if dims is None:
        raise split_differently(operands)
    grid = first.layout.grid
    parts: list[Tensor] = []
    for operand, labels in zip(operands, inputs, strict=True):
        if isinstance(operand, Subdomain):
            for d in operand.layout.split_dims:
                one_row = operand.shape[d] == 1 != math.prod(f.extent for f in dims[labels[d]])
                if one_row or not any(f.axes for f in dims[labels[d]]):
                    operand = whole(operand, d)
                elif merge(operand.layout.dims[d]) != merge(dims[labels[d]]):
                    operand = one_factor(operand, d)
        local = operand.local if isinstance(operand, Subdomain) else operand
        for d, label in enumerate(labels):
            split = isinstance(operand, Subdomain) and operand.layout.axes(d)
            whole_label = operand.shape[d] == math.prod(f.extent for f in dims[label])
            if any(f.axes for f in dims[label]) and not split and whole_label:
                local = take_local(local, d, dims[label], grid)
        parts.append(local)
    result = compute(*parts)
    gone = {label for label in dims if label not in output}
    summed = tuple(sorted(a for label in gone for f in dims[label] for a in f.axes))
    if summed:
        total = all_reduce(wide(result), first.domain.group(summed))
        result = total.to(result.dtype)
    layout = layout_of(tuple(dims[label] for label in output), grid)
    return first.like(result, layout) if layout.split_dims else result


@lru_cache(maxsize=4096)
def _dims_of(
    kinds: tuple[Layout | tuple[int, ...], ...], inputs: tuple[str, ...], output: str
) -> Mapping[str, Dim] | None:
    """The factors of each label, every mesh axis splitting one label only, output labels first.

    A label is split if any operand is split there; None if operands are split differently.

    Args:
        kinds: The layout of each split operand, and the shape of each plain one.
        inputs: One label for each dim of each operand.
        output: The labels of the result.
    """
    dims: dict[str, Dim] = {}
    for kind, labels in zip(kinds, inputs, strict=True):
        is_split = isinstance(kind, Layout)
        for rows, own, label in zip(
            kind.shape if is_split else kind,
            kind.dims if is_split else [(Factor(rows),) for rows in kind],
            labels,
            strict=True,
        ):
            known = dims.setdefault(label, own)
            extent = math.prod(f.extent for f in known)
            if not any(f.axes for f in known) or extent == 1 != rows:
                dims[label] = own if rows != 1 or len(known) == 0 else known
            elif any(f.axes for f in own) and rows == extent:
                common = common_dim(known, own)
                if common is None:
                    return None
                dims[label] = common
    taken: set[int] = set()
    for label in dict.fromkeys((*output, *dims)):
        axes = {a for f in dims[label] for a in f.axes}
        if axes & taken:
            dims[label] = (Factor(math.prod(f.extent for f in dims[label])),)
        else:
            taken |= axes
    return MappingProxyType(dims)


@implements(F.linear, joins=True)
def linear(
    func: Callable[..., Tensor], x: Operand, weight: Operand, bias: Tensor | None = None
) -> Operand:
    """Linear layer; sums over split features are added up, and otherwise nothing travels."""
    free = ascii_letters[: x.ndim - 1]
    if (
        isinstance(x, Subdomain)
        and isinstance(weight, Tensor)
        and weight.ndim == 2
        and not x.layout.axes(x.ndim - 1)
    ):
        layout = x.layout.with_dim(x.ndim - 1, weight.shape[0])
        return x.in_rows(func(x.local, weight, bias), layout)
    kept = "Z" if weight.ndim > 1 else ""  # a weight of one dim gives one number
    result = contract(F.linear, [x, weight], [free + "Y", kept + "Y"], free + kept)
    return result if bias is None else elementwise(torch.add, result, bias.to(result.dtype))


@implements(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, linalg.matmul,
            torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.mv, Tensor.mv, torch.dot,
            Tensor.dot, torch.sparse.mm, joins=True)  # fmt: skip
def matmul(func: Callable[..., Tensor], a: Operand, *second: Operand, **named: Operand) -> Operand:
    """The second factor is called `other`, `mat2`, `vec` or `tensor`."""
    (b,) = (*second, *named.values())
    if func is Tensor.__rmatmul__:
        a, b = b, a
    rank = max(a.ndim, b.ndim) - 2
    batch = ascii_letters[: max(rank, 0)]
    left = (batch + "XY")[-a.ndim :] if a.ndim > 1 else "Y"
    right = (batch + "YZ")[-b.ndim :] if b.ndim > 1 else "Y"
    output = batch + ("X" if a.ndim > 1 else "") + ("Z" if b.ndim > 1 else "")
    sparse = any(isinstance(x, Tensor) and x.layout != torch.strided for x in (a, b))
    compute = torch.bmm if sparse and a.ndim == 3 else torch.matmul  # torch's own takes no batches
    a, b = cast_for(func, a, b)
    with without_autocast(a):
        return contract(compute, [a, b], [left, right], output)


@implements(torch.inner, Tensor.inner)
def inner(func: Callable[..., Tensor], input: Operand, other: Operand) -> Operand:  # noqa: A002
    """The sum of products over the last dims."""
    a, b = input, other
    if not (a.ndim and b.ndim):
        return elementwise(torch.mul, a, b)
    left, right = ascii_letters[: a.ndim], ascii_letters[a.ndim :][: b.ndim]
    output = left[:-1] + right[:-1]
    return contract(torch.inner, [a, b], [left, right[:-1] + left[-1]], output)


@implements(torch.outer, Tensor.outer, torch.ger, Tensor.ger)
def outer(func: Callable[..., Tensor], input: Operand, vec2: Operand) -> Operand:  # noqa: A002
    """Outer product; where both operands are split, one of them travels."""
    return contract(torch.outer, [input, vec2], ["X", "Z"], "XZ")


@implements(torch.einsum, limits="no label twice in one operand")
def einsum(func: Callable[..., Tensor], equation: str, *operands: Any) -> Operand:
    """Einstein sum: kept dims stay split, sums over split dims are added up over the ranks."""
    if not isinstance(equation, str):
        raise UnsupportedOperationError("einsum with lists of dims; write the equation as a string")
    tensors = listed(operands)
    inputs, _, output = equation.replace(" ", "").partition("->")
    labels = inputs.split(",")
    if "..." in equation:
        labels, output = _expand_ellipsis(labels, output, tensors)
    elif "->" not in equation:
        joined = "".join(labels)
        output = "".join(sorted(c for c in set(joined) if joined.count(c) == 1))
    if any(len(set(each)) < len(each) for each in labels):
        raise UnsupportedOperationError(f"einsum with a repeated label in one operand: {equation}")
    local_equation = f"{','.join(labels)}->{output}"
    found = contract(lambda *parts: torch.einsum(local_equation, *parts), tensors, labels, output)
    # torch chooses the order of the dims in memory by the extents
    is_split = isinstance(found, Subdomain)
    return found.in_any_order(found.local, found.layout) if is_split else found


def _expand_ellipsis(
    labels: Sequence[str], output: str, tensors: Sequence[Operand]
) -> tuple[list[str], str]:
    free = [c for c in ascii_letters if c not in "".join(labels)]
    widths = [
        t.ndim - len(each) + 3 if "..." in each else 0
        for each, t in zip(labels, tensors, strict=True)
    ]
    names = "".join(free[: max(widths)])
    expanded = [
        each.replace("...", names[len(names) - width :])
        for each, width in zip(labels, widths, strict=True)
    ]
    return expanded, output.replace("...", names)


@implements(typed_torch.tensordot)
def tensordot(
    func: Callable[..., Tensor], a: Operand, b: Operand, dims: Any = 2, **_: Any
) -> Operand:
    """Contract dims of two tensors, as `einsum` does."""
    if isinstance(dims, int):
        dims = (range(a.ndim - dims, a.ndim), range(dims))
    left, right = ([d % t.ndim for d in each] for t, each in ((a, dims[0]), (b, dims[1])))
    a = _summed(a, [i for i, j in zip(left, right, strict=True) if b.shape[j] == 1 != a.shape[i]])
    b = _summed(b, [j for i, j in zip(left, right, strict=True) if a.shape[i] == 1 != b.shape[j]])
    if not subdomains([a, b]):
        return typed_torch.tensordot(a, b, (left, right))
    a_labels, b_labels = list(ascii_letters[: a.ndim]), list(ascii_letters[a.ndim :][: b.ndim])
    for i, j in zip(left, right, strict=True):
        b_labels[j] = a_labels[i]
    kept = [c for d, c in enumerate(a_labels) if d not in left]
    kept += [c for d, c in enumerate(b_labels) if d not in right]
    local = (list(left), list(right))
    return contract(
        functools.partial(typed_torch.tensordot, dims=local),
        [a, b],
        ["".join(a_labels), "".join(b_labels)],
        "".join(kept),
    )


def _summed(x: Operand, dims: Sequence[int]) -> Any:
    """With one row of `dims`: torch contracts a dim with one of extent 1 so."""
    if not dims:
        return x
    if isinstance(x, Tensor):
        return x.sum(tuple(dims), keepdim=True, dtype=x.dtype)
    return sum_(torch.sum, x, tuple(dims), keepdim=True, dtype=x.dtype)
