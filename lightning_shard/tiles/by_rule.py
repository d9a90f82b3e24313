"""Runs the rule of a torch function for all tiles of the fields among its arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.local_group import after
from lightning_shard.ops.become import BecameSplit, is_shared
from lightning_shard.ops.registry import Rule, changes_first, run_rule
from lightning_shard.processes.torch_private.internals import accessors, in_transform
from lightning_shard.tensor.gathering import split_in
from lightning_shard.tensor.met import SplitInTransform
from lightning_shard.tensor.settle import unsettled
from lightning_shard.tensor.tensor import checked_call, on_parts, swapped
from lightning_shard.tiles.call_inputs import Inputs
from lightning_shard.tiles.operation import Call, mark_unread
from lightning_shard.tiles.results import Results
from lightning_shard.tiles.tile_tensor import TileTensor
from lightning_shard.tiles.views import note_views, note_write, refuse_write, renew
from lightning_shard.tiles.whole import compute_result, gathered_tiles

Function = Callable[..., Any]

_NO_VIEWS = {Tensor.detach, torch.detach, accessors("data").__get__}


def by_rule(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function by its rule, and enter what it gives into the caller's graph.

    Raises:
        UnsupportedOperationError: There is no rule, or it does not serve this call.
        ValueError: Fields were cut by two objects of `Tiles`.
    """
    if in_transform():
        raise SplitInTransform(in_tiles=True)
    rule, args, kwargs = checked_call(func, args, kwargs, TileTensor)
    if rule is not None and rule.composes:
        return run_rule(rule, func, args, kwargs)
    fields = [*split_in([args, kwargs], TileTensor)]
    for x in fields:
        compute_result(x)
    for x in unsettled(func, args, kwargs, fields):
        settle(x)
    # functions of nn.init name their first argument
    writes = bool(args) and changes_first(func, args, kwargs)
    if writes and isinstance(args[0], Tensor) and not isinstance(args[0], TileTensor):
        return _into_plain(rule, func, args, kwargs)
    target = args[0] if writes and isinstance(args[0], TileTensor) else None
    if target is not None:
        refuse_write(target)
        renew(target)
    named = (args, tuple(kwargs.values()))
    inputs = Inputs(named, target)
    records = inputs.records
    call = Call(inputs.tiles, inputs.given, records=records, target=target)
    names = [*kwargs]

    def compute(tile: int, locals_: list[Any]) -> Any:
        if not tile:
            inputs.note_first(locals_)
        local_args, values = inputs.with_locals(named, locals_)
        parts = [p for p, x in zip(locals_, inputs.given, strict=True) if _is_field(x)]
        result = on_parts(rule, func, local_args, dict(zip(names, values, strict=True)), parts)
        written = locals_[0].local if target is not None and not locals_[0].lazy else None
        return after(result, lambda result: (result, written))

    given = call.run(compute, joins=rule is not None and rule.joins)
    results = [result for result, _ in given]
    is_written = target is not None and given[0][1] is not None
    if is_written:
        call.written([local for _, local in given])
    builder = Results(call, inputs)
    made = builder.of(results)
    call.enter()
    made = builder.with_rows((func, args), made)
    if target is not None:
        if target.is_lazy:
            target.roots = tuple(call.roots)
            mark_unread(target)
        else:
            note_write(target, has_graph=bool(call.outputs))
    if target is None and func not in _NO_VIEWS:
        note_views((func, args, kwargs), inputs.pairs, results[0], made)
    return made


def settle(x: TileTensor) -> None:
    """Compute a spectrum that nobody has read; it is the same Python object."""
    with torch.enable_grad():
        made = by_rule(Tensor.clone, (x,), {})
    swapped(x, made, "a spectrum that autograd has saved cannot be computed; take its clone()")


def _into_plain(
    rule: Rule | None, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a function that writes rows of fields into a plain tensor.

    The tensor becomes a field, the same Python object, where the rule makes one of it and nothing
    else sees its memory. Otherwise it takes the whole of what was written.
    """
    plain = args[0]
    if plain.is_leaf and plain.requires_grad and torch.is_grad_enabled():
        raise UnsupportedOperationError(
            "a plain leaf that requires grad cannot take rows of fields"
        )
    shared = is_shared(plain)
    named = (args, tuple(kwargs.values()))
    inputs = Inputs(named, None, first=plain)
    call = Call(inputs.tiles, inputs.given, records=inputs.records)
    names = [*kwargs]

    def compute(tile: int, locals_: list[Any]) -> Any:
        own = locals_[0].clone()  # the rule makes a field of it, or writes it
        vars(own).update(vars(plain))
        local_args, values = inputs.with_locals(named, [own, *locals_[1:]])
        local_kwargs = dict(zip(names, values, strict=True))
        parts = [p for p, x in zip(locals_, inputs.given, strict=True) if _is_field(x)]
        result = on_parts(rule, func, local_args, local_kwargs, parts)
        return result if isinstance(result, BecameSplit) else own

    given = call.run(compute)
    became = isinstance(given[0], BecameSplit)
    made = call.field([each.part for each in given]) if became else call.plain(given)
    call.enter()
    if isinstance(made, TileTensor) and not shared:
        swapped(
            plain,
            made,
            "a plain tensor that autograd has saved cannot take rows of a field; make it like the "
            "field (torch.zeros_like)",
        )
    else:
        plain.copy_(gathered_tiles(made) if isinstance(made, TileTensor) else made)
    return None if func is Tensor.__setitem__ else plain


def _is_field(x: Any) -> bool:
    return isinstance(x, TileTensor)
