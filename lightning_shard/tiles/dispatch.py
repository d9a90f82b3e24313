"""Leads every torch function of a field in tiles to its rule, once for all tiles."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.processes.torch_private.internals import (
    accessors,
    frame_callback,
    untraced,
    without_rules,
)
from lightning_shard.tensor.facts import FACTS, OF_WRAPPER, attributes_of
from lightning_shard.tensor.gathering import (
    gather_allowed,
    on_whole_tensors,
    refusal,
    split_in,
    writes,
)
from lightning_shard.tensor.met import SplitInTransform
from lightning_shard.tensor.tensor import (
    DomainTensor,
    swapped,
)
from lightning_shard.tiles.by_rule import by_rule, settle
from lightning_shard.tiles.operation import without_graph
from lightning_shard.tiles.rows import TileRows, plain_rows
from lightning_shard.tiles.tile_tensor import OF_AUTOGRAD, TileTensor
from lightning_shard.tiles.views import (
    fresh,
    refuse_write,
    show_view,
)
from lightning_shard.tiles.whole import gathered_tiles

Function = Callable[..., Any]

# autograd keeps these for the wrapper, as for any tensor
_OF_GRAPH = attributes_of(
    "is_leaf retains_grad output_nr _version grad grad_fn requires_grad _backward_hooks "
    "_post_accumulate_grad_hooks grad_dtype"
) | {
    Tensor.retain_grad, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook,
    accessors("grad").__set__,
    accessors("grad").__delete__, accessors("requires_grad").__set__, Tensor.requires_grad_,
    accessors("_backward_hooks").__set__,
}  # fmt: skip
_OF_PARTS = {Tensor.stride, Tensor.is_contiguous, Tensor.is_conj, torch.is_conj, Tensor.is_neg,
             torch.is_neg, Tensor.is_pinned}  # fmt: skip
_OF_HOST = {Tensor.numpy, Tensor.__array__, Tensor.tolist}
_SHOWN = {Tensor.__repr__, Tensor.__str__}
_RESHAPE = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name)
    for name in ("squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")
}
_SET_DATA = accessors("data").__set__
_BACKWARD = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}


def run(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], types: Sequence[type] = ()
) -> Any:
    """Run a function of which fields in tiles are arguments."""
    if TileRows in types:
        args, kwargs = plain_rows(tuple(args)), plain_rows(kwargs)
    if torch.compiler.is_compiling() or frame_callback() is not None:
        return _run_uncompiled(func, args, kwargs)
    return _run(func, args, kwargs)


@untraced
def _run_uncompiled(*call: Any) -> Any:
    return _run(*call)


TileTensor.run = staticmethod(run)


def _run(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func in OF_WRAPPER or func in OF_AUTOGRAD:
        with without_rules():
            return func(*args, **kwargs)
    if func in _OF_GRAPH:
        return _of_graph(func, args, kwargs)
    if func in _OF_PARTS:
        shown = DomainTensor(without_graph(_in_memory(args[0]).parts[0]))
        return FACTS[func](func, shown, *args[1:], **kwargs)
    if func in _BACKWARD:
        return _backward(func, args, kwargs)
    if func in _SHOWN:
        return _shown(args[0])
    if func in _OF_HOST:
        result = func(gathered_tiles(args[0]), *args[1:], **kwargs)
        if func is not Tensor.tolist:
            result.flags.writeable = False  # a write into it would not reach the field
        return result
    if func in _RESHAPE:
        return _reshaped(_RESHAPE[func], *args, **kwargs)
    if func == _SET_DATA and isinstance(args[0], TileTensor):  # each look makes it, so no `is`
        return _set_data(*args)
    try:
        if "out" in kwargs:
            return _into_out(func, args, kwargs)
        if kwargs.get("requires_grad"):  # a leaf of the caller's graph, as torch.zeros_like makes
            return by_rule(func, args, {**kwargs, "requires_grad": False}).requires_grad_()
        return by_rule(func, args, kwargs)
    except UnsupportedOperationError as error:
        if gather_allowed.get() and func not in FACTS and not writes(func, args, kwargs):
            return on_whole_tensors(func, args, kwargs, TileTensor, whole=gathered_tiles)
        if error.is_named:
            raise
        raise refusal(func, [args, kwargs], str(error), TileTensor) from error


def _in_memory(x: TileTensor) -> TileTensor:
    """Return a field whose parts lie in memory as those of `x` do once somebody has read them."""
    x = fresh(x)
    if not x.is_lazy:
        return x
    with torch.no_grad():
        return by_rule(Tensor.clone, (x,), {})


def _shown(x: TileTensor) -> str:
    """Return the values of the whole field in words, and the tiles that it is cut into."""
    dims = ", ".join(map(str, x.split_dims))
    with torch.no_grad():
        whole = gathered_tiles(x)
    return f"{whole!r}, a field in {x.tiles.count} tiles along dim {dims}"


def _into_out(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function with `out=`, which has no graph, and copy what it gives there."""
    out = kwargs["out"]
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    if out is None:
        return by_rule(func, args, rest)
    given = [*split_in([args, rest, out], Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        raise RuntimeError(
            "functions with out=... arguments don't support automatic differentiation, but one of "
            "the arguments requires grad."
        )
    result = func(*args, **rest)
    many = type(result) is not Tensor and not isinstance(result, TileTensor)
    pairs = zip(result, out, strict=True) if many else [(result, out)]
    for made, target in pairs:
        if made.shape != target.shape or made.dtype != target.dtype:
            raise UnsupportedOperationError(
                f"out= must have the shape and the dtype of the result, {tuple(made.shape)} and "
                f"{made.dtype}; it has {tuple(target.shape)} and {target.dtype}"
            )
        if isinstance(made, TileTensor) and not isinstance(target, TileTensor):
            raise UnsupportedOperationError("out= is a plain tensor and the result is a field")
        target.copy_(made)
    kind: Any = type(result)
    return kind(out) if many else out


def _of_graph(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else None
    if isinstance(x, TileTensor):
        current = fresh(x)
        if x.roots and func in _OF_NODES:
            settle(x)
        if current is not x and func in _READ:
            args = current, *args[1:]
    with without_rules():
        return func(*args, **kwargs)


_OF_NODES = {Tensor.register_hook, Tensor.retain_grad, accessors("grad_fn").__get__}
_READ = {accessors(name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")}


def _backward(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function of autograd, which is given places of its graph instead of fields.

    Without `__torch_function__` it would run hooks, and what the graph calls, without it as well.
    """
    bound = inspect.signature(func).bind(*args, **kwargs).arguments
    if func is Tensor.backward:
        func, first = torch.autograd.backward, bound.pop("self")
        bound = {"tensors": first, "grad_tensors": bound.pop("gradient", None), **bound}
    if bound.get("is_grads_batched"):
        raise SplitInTransform
    starts: Any = bound.get("inputs")  # `grad` makes a tuple of what it is given
    fills = bound.get("materialize_grads") and bound.get("allow_unused") is not False
    if fills:  # torch makes no zeros for a place
        bound.update(materialize_grads=False, allow_unused=True)
    for name in ("tensors", "outputs", "inputs"):
        if bound.get(name) is not None:
            bound[name] = _places(bound[name])
    found = func(**bound)
    if not fills:
        return found
    return tuple([
        torch.zeros_like(x, requires_grad=bound.get("create_graph", False)) if g is None else g
        for x, g in zip(starts, found, strict=True)
    ])  # fmt: skip


def _places(value: Any) -> Any:
    if isinstance(value, TileTensor):
        if value.roots:
            raise UnsupportedOperationError(
                "a spectrum that nobody has read has no place in the graph; take x.clone() of it"
            )
        with without_rules():
            return get_gradient_edge(fresh(value))
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        return {key: _places(each) for key, each in value.items()}
    return [_places(each) for each in value]


def _reshaped(view: Function, x: TileTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Change the shape in place: the same Python object holds what `view` gives from now on."""
    refuse_write(x)
    made: Any = view(x, *args, **kwargs)
    if not isinstance(made, TileTensor):
        raise UnsupportedOperationError(
            "a row of all tiles is a copy, which cannot take the place of the field; call the "
            "function that gives another tensor, as x = x.squeeze(dim)"
        )
    with without_rules():
        if x.is_leaf and x.requires_grad:
            if x.grad is not None:
                raise UnsupportedOperationError(
                    "a leaf that has a gradient cannot change its shape in place, since its "
                    "gradient keeps the old one; set x.grad = None before"
                )
            made = made.detach().requires_grad_()
        # afterwards `made` is the field as it was
        swapped(x, made, "a tensor that autograd has saved cannot change its shape in place")
    x.view_of = None
    show_view(x, made, functools.partial(_viewed, view, args, kwargs))
    return x


def _viewed(view: Function, args: Any, kwargs: Any, base: TileTensor) -> Any:
    return view(base, *args, **kwargs)


def _set_data(x: TileTensor, value: Tensor) -> None:
    """Take the values of `value`; what shares memory with `x` keeps the old ones, as in torch."""
    if x.is_lazy:
        raise UnsupportedOperationError(
            "a spectrum that nobody has read takes no other values; take x.clone() of it"
        )
    with torch.no_grad():
        made = by_rule(Tensor.detach, (x,), {})
        by_rule(_SET_DATA, (made, value), {})
    x.parts, x.view_of = made.parts, None
    x.changes += 1
