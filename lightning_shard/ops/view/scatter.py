"""Writes elements and rows where an index tensor says, along one dim.

Where the dim is whole and operand, index and source are split alike, every rank writes its own.
Otherwise what is written travels to the ranks that own the places (write.py).
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import common_layout, local_part, subdomains, take_part
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.fetch_by_index import rows_of
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.masked_rows import global_rows
from lightning_shard.domain.memory_format import laid_by
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.become import BecameSplit, become_split, large_target
from lightning_shard.ops.registry import implements, is_in_place, name_of
from lightning_shard.ops.view.aligned import (
    Operand,
    aligned_layout,
    as_table,
    brought,
    dim_of,
    part_of_row,
    places_of,
    refuse_other_domains,
)
from lightning_shard.ops.view.expanded import row_numbers_of
from lightning_shard.ops.view.index import strided
from lightning_shard.ops.view.mask import in_front
from lightning_shard.ops.view.write import Rows, Writing, written

# the functions of one kind, by torch's name of it: the same kind runs along the first dim
_SCATTERS = {
    "scatter": (torch.scatter, Tensor.scatter, Tensor.scatter_),
    "scatter_add": (torch.scatter_add, Tensor.scatter_add, Tensor.scatter_add_),
    "scatter_reduce": (torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_),
}
_WRITES = {
    "index_add": (torch.index_add, Tensor.index_add, Tensor.index_add_),
    "index_copy": (torch.index_copy, Tensor.index_copy, Tensor.index_copy_),
    "index_fill": (torch.index_fill, Tensor.index_fill, Tensor.index_fill_),
    "index_reduce": (torch.index_reduce, Tensor.index_reduce, Tensor.index_reduce_),
}
_KINDS: dict[Callable[..., Any], str] = {
    function: kind for kind, functions in (_SCATTERS | _WRITES).items() for function in functions
}
# these do the same where the index names whole rows
_OF_ROWS: dict[Callable[..., Any], Callable[..., Any]] = dict(
    zip(_SCATTERS["scatter_add"], _WRITES["index_add"], strict=True)
)


@implements(*itertools.chain(*_SCATTERS.values()))
def scatter(
    func: Callable[..., Any], x: Operand, dim: int, index: Operand, *args: Any, **kwargs: Any
) -> Operand | BecameSplit:
    """Write `source`, an element for each of the index, or one number."""
    source = args[0] if args else kwargs.pop("src" if "src" in kwargs else "value")
    rest = args[1:]
    d = dim_of(x, dim, index)
    operands = [o for o in (x, index, source) if isinstance(o, Subdomain | Tensor) and o.ndim]
    target = large_target(x, d, [index, source])
    if target is not None:
        given = d, index, source, *rest
        return _split_first(func, x, target, lambda part: scatter(func, part, *given, **kwargs))
    layout = aligned_layout(d, x.shape, operands)
    if layout is None or any(o.layout.axes(d) for o in subdomains(operands)):
        numbers = row_numbers_of(x, d, index, source) if func in _OF_ROWS else None
        if numbers is not None:
            return write_rows(_OF_ROWS[func], x, d, numbers, source)
        return _scattered(func, x, d, index, source, *rest, **kwargs)
    in_place = is_in_place(func)
    if in_place and isinstance(x, Tensor):
        part = subdomains(operands)[0].like(x, layout)
        return become_split(
            x, part, lambda part: scatter(func, part, d, index, source, *rest, **kwargs)
        )
    if in_place and not (isinstance(x, Subdomain) and x.layout == layout):
        raise UnsupportedOperationError(
            "an in-place scatter into a tensor that is not split as its index is"
        )
    rows = source if len(operands) < 3 else part_of_row(source, layout, d)
    own = part_of_row(x, layout, d), part_of_row(index, layout, d)
    return subdomains(operands)[0].like(func(own[0], d, own[1], rows, *rest, **kwargs), layout)


def _split_first(
    func: Callable[..., Any], x: Any, target: Subdomain, write: Callable[[Subdomain], Any]
) -> Any:
    """Write into the plain tensor `x` of many rows once it is split as `target` is."""
    if is_in_place(func):
        return become_split(x, target, write, is_alone=True)
    return write(target.like(take_part(x, target.layout)))


def _scattered(
    func: Callable[..., Any],
    x: Operand,
    d: int,
    index: Operand,
    source: Any,
    *rest: Any,
    **kwargs: Any,
) -> Operand:
    """Send each element with the flat number of its place."""
    name = _KINDS[func]
    values = _cut(source, index.shape) if isinstance(source, Subdomain | Tensor) else None
    values = values if values is not None and values.ndim else None
    owner = subdomains([x, index, source])[0]
    sent = [index] if values is None else [index, values]
    layout = Layout.of(index.shape, {}, owner.layout.grid)
    layout = common_layout(sent) if subdomains(sent) else layout
    own = local_part(index, layout)
    places = places_of(layout, own, d)
    extents = x.shape
    numbers, wrong = rows_of([p.reshape(-1) for p in places], extents, negative=False)
    flat = as_table(x, owner)
    if is_in_place(func):  # backward must not need what is written over
        flat = flat.like(flat.local.clone())
    rows = None if values is None else local_part(values, layout).reshape(-1)
    reduce = rest[0] if rest else kwargs.get("reduce")
    order = None
    if name == "scatter" and rows is not None and reduce is None:
        order = rows_of([p.reshape(-1) for p in places_of(layout, own)], layout.shape)[0]

    included = kwargs.get("include_self", True)
    adds = name == "scatter_add" or (reduce in ("sum", "add") and included)
    run = functools.partial(_run, name, source, rest, kwargs)
    writing = Writing(run, lambda value, _: _out_of_range(name, value, d, extents[d]), adds)
    found = written(flat, Rows(numbers, wrong, rows, layout.axes(), order), writing)
    return given_back(func, x, found.reshape(local_of(x).shape))


def _cut(source: Operand, shape: Sequence[int]) -> Operand:
    """The first rows of each dim of `source`, as many as the index has."""
    for d, n in enumerate(shape if source.ndim else ()):
        if source.shape[d] != n:
            source = (
                strided(source, d, range(n))
                if isinstance(source, Subdomain)
                else source.narrow(d, 0, n)
            )
    return source


# results of the others lie row by row
_LIKE_A_CLONE = {torch.index_fill, Tensor.index_fill, torch.put, Tensor.put}


def local_of(x: Operand) -> Tensor:
    """Return the local part of a split tensor; a plain one as it is."""
    return x.local if isinstance(x, Subdomain) else x


def given_back(func: Callable[..., Any], x: Operand, found: Tensor) -> Operand:
    """Return the result, in memory as torch's; for an in-place function, write it into `x`."""
    own = local_of(x)
    if is_in_place(func):
        found = own.copy_(found)
    else:
        found = laid_by(found, own.stride()) if func in _LIKE_A_CLONE else found.contiguous()
    return x.like(found) if isinstance(x, Subdomain) else found


@implements(*itertools.chain(*_WRITES.values()))
def write_rows(
    func: Callable[..., Any],
    x: Operand,
    dim: int,
    index: Operand,
    source: Any,
    *args: Any,
    **kwargs: Any,
) -> Operand | BecameSplit:
    """Write rows of `dim`, one for each number of the index, or one number into all of them."""
    d = dim_of(x, dim)
    if isinstance(index, Tensor) and not index.ndim:
        index = index.reshape(1)
    target = large_target(x, d, [index, source])
    if target is not None:
        given = d, index, source, *args
        return _split_first(func, x, target, lambda part: write_rows(func, part, *given, **kwargs))
    owner = subdomains([x, index, source])[0]
    values = source if isinstance(source, Subdomain | Tensor) and source.ndim else None
    layout = _rows_layout(x, d, index, values)
    _refuse_source(name_of(func), x, source, layout, d)
    carried = layout.with_dims(
        {d: x.layout.dims[d] if isinstance(x, Subdomain) else (Factor(x.shape[d]),)}
    )
    if isinstance(x, Subdomain) and is_in_place(func) and carried != x.layout:
        raise UnsupportedOperationError(f"{name_of(func)} of rows that are split otherwise")
    if isinstance(x, Tensor) and is_in_place(func) and carried.split_dims:
        raise UnsupportedOperationError(f"{name_of(func)} of split rows into a plain tensor")
    rows = None if values is None else brought(values, layout)
    if not layout.axes(d) and not (isinstance(x, Subdomain) and x.layout.axes(d)):
        own = local_part(x, carried), brought(index, Layout((layout.dims[d],), layout.grid))
        found = func(own[0], d, own[1], source if rows is None else rows, *args, **kwargs)
        return owner.in_any_order(found, carried) if carried.split_dims else found
    return _sent_rows(func, x, d, index, source, rows, (layout, carried), args, kwargs)


def _refuse_source(name: str, x: Operand, source: Any, layout: Layout, d: int) -> None:
    """On every rank alike: torch's meta tensors take some wrong shapes (2.11 more than 2.15)."""
    if not isinstance(source, Subdomain | Tensor) or source.shape == layout.shape:
        return
    if not source.ndim and (x.ndim < 2 or "index_fill" in name):
        return
    if not source.ndim:
        of_rows = layout.shape[d] != 1
    elif source.ndim != layout.ndim:
        of_rows = True
    else:
        of_rows = all(source.shape[e] == layout.shape[e] for e in range(x.ndim) if e != d)
    error = IndexError if "index_copy" in name and of_rows else RuntimeError  # as in torch
    raise error(
        f"{name}: {layout.shape[d]} rows along dim {d} of a tensor of shape {tuple(x.shape)} need "
        f"a source of shape {tuple(layout.shape)}, got {tuple(source.shape)}"
    )


def _sent_rows(
    func: Callable[..., Any],
    x: Operand,
    d: int,
    index: Operand,
    source: Any,
    rows: Tensor | None,
    layouts: tuple[Layout, Layout],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Operand:
    """Send the rows, which lie as the first layout says, to `x`, which lies as the second says."""
    owner, (layout, carried) = subdomains([x, index, source])[0], layouts
    name = _KINDS[func]
    extent = x.shape[d]
    own = brought(index, Layout((layout.dims[d],), layout.grid))
    numbers, wrong = rows_of([own], [extent], negative=name == "index_fill")
    target = in_front(local_part(x, carried), d, 1)
    target = target.clone() if is_in_place(func) else target
    order = [d, *(e for e in range(x.ndim) if e != d)]
    table = owner.like(target, Layout(tuple(carried.dims[e] for e in order), carried.grid))
    rows = None if rows is None else in_front(rows, d, 1)

    places = global_rows(layout.dims[d], layout.grid, numbers.device)
    order_of_rows = places if name == "index_copy" else None
    sent = Rows(numbers, wrong, rows, layout.axes(d), order_of_rows)
    run = functools.partial(_run, name, source, args, kwargs)
    writing = Writing(
        run, lambda value, _: _out_of_range(name, value, d, extent), name == "index_add"
    )
    found = written(table, sent, writing).reshape(target.shape).movedim(0, d)
    if is_in_place(func) or not carried.split_dims:
        return given_back(func, x, found)
    return owner.in_any_order(found, carried)


def _run(
    name: str,
    source: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Tensor,
    ids: Tensor,
    given: Tensor | None,
) -> Tensor:
    """Call torch's own function along the first dim."""
    what = source if given is None else given
    return getattr(torch, name)(target, 0, ids, what, *args, **kwargs)


def _out_of_range(name: str, value: int, dim: int, extent: int) -> Exception:
    words = f"index {value} is out of bounds for dimension {dim} with size {extent}"
    if name == "index_add" or name.startswith("scatter"):
        return RuntimeError(words)
    if name == "index_reduce":
        return IndexError("index out of range in self")
    return IndexError(f"index_copy_(): {words}" if name == "index_copy" else words)


def _rows_layout(x: Operand, d: int, index: Operand, values: Operand | None) -> Layout:
    """Choose the split of rows that are written to `x`.

    Other dims are split as those of `x`, and `d` as the rows or the index.

    A mesh axis that splits the rows of `x` cannot split another dim of what is written: that dim
    becomes whole, and the rows are split instead.
    """
    refuse_other_domains(x, index, values)
    grid = subdomains([x, index, values])[0].layout.grid
    own = x.layout if isinstance(x, Subdomain) else Layout.of(x.shape, {}, grid)
    layout = own.with_dim(d, index.shape[0], ())
    given = values.layout if isinstance(values, Subdomain) else layout
    rows = [given.dims[d]]
    rows += [index.layout.dims[0]] if isinstance(index, Subdomain) else []
    for e in given.split_dims:
        if not set(layout.axes()) & set(given.axes(e)) and e != d:
            if set(own.axes(d)) & set(given.axes(e)):
                rows.append((Factor(index.shape[0], given.axes(e)),))
            else:
                layout = layout.with_dims({e: given.dims[e]})
    for factors in rows:
        axes = {a for f in factors for a in f.axes}
        if axes and not axes & set(layout.axes()):
            return layout.with_dims({d: factors})
    return layout
