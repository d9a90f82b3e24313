"""Functions without a rule run on whole tensors where `allow_gather` permits, or are refused."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from lightning_shard.domain.align import gathered
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.ops import name_of
from lightning_shard.ops.registry import is_in_place
from lightning_shard.tensor.part import part_of

gather_allowed: ContextVar[bool] = ContextVar("gather_allowed", default=False)

# functions without a rule that ran on gathered tensors, each of which is warned of once
gathered_functions: dict[Any, None] = {}
PROCESS_STATE = {"gathered_functions": gathered_functions}


def split_in(values: Any, kind: type[Tensor]) -> Iterator[Any]:
    """Find the tensors of a class in nested lists, tuples and dicts."""
    if isinstance(values, kind):
        yield values
    elif isinstance(values, dict):
        yield from split_in(list(values.values()), kind)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from split_in(value, kind)


def writes(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if the function changes a tensor that it is given, so that a copy will not do."""
    name = getattr(func, "__name__", "")
    if is_in_place(func) or name in ("__setitem__", "__set__", "__delete__"):
        return True
    try:
        given = inspect.signature(func).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a function of C++ tells no signature
        given = kwargs
    return given.get("out") is not None or bool(given.get("inplace"))


def gathered_part(x: Tensor) -> Tensor:
    """Return the whole of a tensor that is split over ranks."""
    return gathered(part_of(x).read())


def on_whole_tensors(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    kind: type[Tensor],
    *,
    whole: Callable[[Any], Tensor] = gathered_part,
    name: Any = None,
) -> Any:
    """Run `func` with every split tensor gathered; the result is plain, and warned of once.

    Args:
        func: A torch function, or the `apply` of an autograd Function.
        args: Its arguments.
        kwargs: Its arguments by name.
        kind: The class of split tensors.
        whole: Gathers one of them.
        name: The name in the warning, where that is not `func`.
    """
    split = {id(t): t for t in split_in([args, kwargs], kind)}
    shown = name or func
    if shown not in gathered_functions:
        gathered_functions[shown] = None
        size = sum(math.prod(t.shape) * t.dtype.itemsize for t in split.values())
        warnings.warn(
            f"{name_of(shown)} has no rule for split tensors; it runs on gathered ones, {size:,} "
            "bytes on every rank, as lightning_shard.allow_gather() permits.",
            stacklevel=3,
        )
    wholes = {key: whole(t) for key, t in split.items()}

    def plain(value: Any) -> Any:
        if isinstance(value, kind):
            return wholes[id(value)]
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else value

    return func(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})


def refusal(
    func: Callable[..., Any], arguments: Any, reason: str, kind: type[Tensor]
) -> UnsupportedOperationError:
    """Return the error of a call that no rule serves, with the ways out."""
    layouts = (t._part.layout for t in split_in(arguments, kind))
    placements = "; ".join(dict.fromkeys(str(layout) for layout in layouts if layout))
    error = UnsupportedOperationError(
        f"cannot run {name_of(func)} on a tensor split over ranks ({placements}): {reason}. "
        "Two ways out: register a rule with lightning_shard.register_rule, or gather explicitly, "
        "with lightning_shard.gather and lightning_shard.shard, or `with lightning_shard."
        "allow_gather():` around the call. `python -m lightning_shard check` names all such calls "
        "of a model."
    )
    error.is_named = True
    return error
