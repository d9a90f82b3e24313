"""Fields that are views of others: what is written into one is seen in the other.

Parts that are views share memory, and parts that are copies of rows are written back by their rules
(ops/view/write_back.py). This file keeps the caller's graph right: after a write through a view its
base has a graph of what was written, and other views of the base are taken anew before they are
used.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.memory_format import dims_in_memory
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.view.write_back import refuse_stale
from lightning_shard.processes.torch_private.internals import storage_key, without_rules
from lightning_shard.tensor.tensor import swapped
from lightning_shard.tiles.operation import as_field
from lightning_shard.tiles.tile_tensor import TileTensor, View

Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]


class _Rebase(Function):
    """The graph of a field after a write through a view of it."""

    @staticmethod
    def forward(
        ctx: Any, base: TileTensor, written: TileTensor, again: Callable[[Any], Any]
    ) -> TileTensor:
        ctx.mark_dirty(base)
        ctx.again = again
        ctx.order = dims_in_memory(base.parts[0].read().local.stride())
        ctx.tiles, ctx.layouts = base.tiles, [part.layout for part in base.parts]
        return base

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rest = _stored_in(as_field(ctx.tiles, grads[0], ctx.layouts), ctx.order)
        shown = ctx.again(rest)
        of_view = torch.clone(shown)
        shown.zero_()
        return fresh(rest), of_view, None


def _stored_in(x: Tensor, order: list[int]) -> TileTensor:
    """Return a copy whose dims lie in this order, so that what was a view of it is one again."""
    copied = x.permute(order).clone(memory_format=torch.contiguous_format)
    return copied.permute([order.index(d) for d in range(x.ndim)])  # pyright: ignore


def fresh(x: TileTensor) -> TileTensor:
    """Return a field with the graph and the values that its base has after the last write."""
    view, first = x.view_of, x.parts[0]
    is_old = isinstance(first, Subdomain) and first.copied is not None and first.copied.is_stale
    if view is None:
        if is_old:  # x[1:].detach() has no place in the graph of x
            refuse_stale()
        return x
    if view.seen == view.base.writes and not is_old:
        return x
    made = view.again(fresh(view.base))
    made.view_of = View(view.base, view.again)
    if is_old:
        x.parts = made.parts
    return made


def renew(x: TileTensor) -> None:
    """Give a view the graph and the values that its base has after the last write.

    Raises:
        UnsupportedOperationError: Something else in torch holds the view.
    """
    view, made = x.view_of, fresh(x)
    if view is None or made is x:
        return
    swapped(
        x,
        made,
        "a view of a field that was written since, and that autograd has saved, cannot be "
        "written; take the view again after the write",
    )
    x.view_of = View(view.base, view.again)


def refuse_write(target: TileTensor) -> None:
    """Raise torch's errors for a write into a leaf, or into a view of one.

    Raises:
        RuntimeError: The field, or the one that it is a view of, is a leaf that requires grad.
    """
    if not torch.is_grad_enabled():
        return
    base = target if target.view_of is None else target.view_of.base
    with without_rules():
        if base.is_leaf and base.requires_grad:
            of = "a leaf" if base is target else "a view of a leaf"
            raise RuntimeError(
                f"{of} Variable that requires grad is being used in an in-place operation."
            )


def note_write(target: TileTensor, *, has_graph: bool) -> None:
    """Let the base of a view that was written have the graph of what was written."""
    base = target if target.view_of is None else target.view_of.base
    base.changes += 1
    if not has_graph:
        return
    view = target.view_of
    if view is None:
        target.writes += 1
        return
    with torch.enable_grad(), without_rules():
        _Rebase.apply(view.base, target, view.again)
    view.base.placed = None
    view.base.writes += 1
    view.seen = view.base.writes


def note_views(
    call: Call, fields: Sequence[tuple[Any, TileTensor]], results: Any, made: Any
) -> None:
    """Remember of fields that are views which field they show, and how they are taken anew.

    Args:
        call: The function that made them, and its arguments.
        fields: The fields among those, each as it was computed with (`fresh`).
        results: The results of the rule for the first tile.
        made: The results of the caller.
    """
    if isinstance(made, TileTensor):
        _note_view(call, fields, results, made, ())
    elif type(made) in (list, tuple):
        for number, (result, field) in enumerate(zip(results, made, strict=True)):
            _note_view(call, fields, result, field, (number,))


def _note_view(
    call: Call,
    fields: Sequence[tuple[Any, TileTensor]],
    result: Any,
    field: Any,
    path: tuple[int, ...],
) -> None:
    if not isinstance(field, TileTensor) or not isinstance(result, Subdomain):
        return
    if any(field is given for given, _ in fields):  # the function gave it back as it is
        return
    if result.copied is not None and not result.copied.is_view:  # it may not show a later write
        return
    key = storage_key(result.local if result.copied is None else result.copied.source)
    for given, source in fields:
        if not source.is_lazy and source is not field and _memory(source) == key:
            show_view(field, source, functools.partial(_again, call, given, path))
            return


def show_view(field: TileTensor, source: TileTensor, again: Callable[[Any], Any]) -> None:
    """Remember that a field is a view of another one, which `again` takes anew."""
    if source.view_of is not None:
        again = functools.partial(_in_turn, source.view_of.again, again)
    field.view_of = View(source if source.view_of is None else source.view_of.base, again)


def _memory(x: TileTensor) -> int:
    part: Any = x.parts[0]
    return storage_key(part.local if part.copied is None else part.copied.source)


def _in_turn(first: Callable[[Any], Any], second: Callable[[Any], Any], base: Any) -> Any:
    return second(first(base))


def _again(call: Call, given: Any, path: tuple[int, ...], base: TileTensor) -> Any:
    func, args, kwargs = call

    def put(value: Any) -> Any:
        if value is given:
            return base
        return type(value)(map(put, value)) if type(value) in (list, tuple) else value

    result = TileTensor.run(func, tuple(map(put, args)), {k: put(v) for k, v in kwargs.items()})
    for place in path:
        result = result[place]
    return result
