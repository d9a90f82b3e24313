"""DomainTensor: a tensor that shows the global shape and holds this rank's part.

It is a `torch.Tensor` subclass without storage. Every function on it arrives at
`__torch_function__` and is served by its rule, on local tensors; autograd records only those. What
has no rule raises: nothing ever falls through to a kernel that would see a part and take it for the
whole.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo

from lightning_shard.domain import Subdomain
from lightning_shard.facts import (
    GET_GRAD_FN,
    GET_REQUIRES_GRAD,
    OF_LOCAL,
    OF_WRAPPER,
    SET_REQUIRES_GRAD,
)
from lightning_shard.ops import UnsupportedOperationError, name_of, rule_for
from lightning_shard.ops.align import gathered
from lightning_shard.ops.become import refuse_shared
from lightning_shard.ops.canvas import Canvas
from lightning_shard.ops.pointwise import is_in_place, pointwise
from lightning_shard.ops.registry import canonical_names, check_operands, set_wrapper
from lightning_shard.ops.spectrum import Spectrum

Part = Subdomain | Spectrum | Canvas

gather_allowed: ContextVar[bool] = ContextVar("gather_allowed", default=False)
# how to read a tensor that has history of its own, by the class of its grad_fn; see function.py
followed: dict[type, Callable[["DomainTensor"], Part]] = {}
_warned: set[Any] = set()

_plain = torch._C.DisableTorchFunctionSubclass
aten = torch.ops.aten


class DomainTensor(Tensor):
    """A tensor split over a domain mesh; made by `shard` and `from_local`.

    `shape`, `size()`, `numel()` are those of the global tensor; `to_local()` is this rank's part.
    """

    _part: Part

    @staticmethod
    def __new__(cls, part: Part, device: torch.device | None = None) -> "DomainTensor":
        device = device or part.local.device
        # the wrapper requires grad too: a foreign autograd.Function then marks it, see `_checked`
        wanted = not isinstance(part, Canvas) and part.local.requires_grad
        wrapper = Tensor._make_wrapper_subclass(
            cls, part.shape, dtype=part.dtype, device=device, requires_grad=wanted
        )
        wrapper._part = part
        return wrapper

    def __init__(self, part: Part, device: torch.device | None = None) -> None:
        """Everything is done in `__new__`."""

    def to_local(self) -> Tensor:
        """This rank's part: a plain tensor, connected to the autograd graph."""
        return self.subdomain.local

    @property
    def subdomain(self) -> Subdomain:
        """This rank's part with its layout; a lazy spectrum is computed."""
        return _read(_checked(self))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # torch.compile: rules are not traced, they run as they are
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return _dispatch_uncompiled(func, args, kwargs or {})
        return _dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Only what autograd does with the wrappers of a Function, see function.py."""
        if func is aten.detach.default:
            return DomainTensor(args[0]._part.like(args[0]._part.local.detach()))
        if func is aten.add.Tensor and all(isinstance(a, DomainTensor) for a in args):
            return _wrap(pointwise(torch.add, *(a._part for a in args)), {})
        raise UnsupportedOperationError(
            f"{func} reached a tensor split over ranks without passing a rule. "
            "Register one (lightning_shard.register_rule) or gather first (lightning_shard.gather)."
        )

    def __copy__(self) -> "DomainTensor":
        part = self.subdomain
        return DomainTensor(part.like(copy.copy(part.local)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "DomainTensor":
        """A copy of this rank's part; as in torch, only of a leaf."""
        part = self.subdomain
        copied = DomainTensor(part.like(part.local.__deepcopy__(memo)))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DomainTensor holds one rank's part and cannot be pickled; pickle "
            "lightning_shard.gather(tensor) instead."
        )


def _dispatch(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func in OF_WRAPPER:
        with _plain():
            return func(*args, **kwargs)
    if func == SET_REQUIRES_GRAD:  # of the wrapper too, see __new__
        with _plain():
            func(*args)
    wrappers: dict[int, DomainTensor] = {}
    local_args = [_unwrap(a, wrappers) for a in args]
    local_kwargs = {k: _unwrap(v, wrappers) for k, v in kwargs.items()}
    if func == GET_REQUIRES_GRAD:  # of a copy that a Function saved, see function.py
        with _plain():
            return local_args[0].local.requires_grad or args[0].grad_fn is not None
    if func == GET_GRAD_FN:
        node = local_args[0].local.grad_fn
        return getattr(node, "function", node)  # of a Function the user's, see function.py
    if func in OF_LOCAL:
        return func(local_args[0].local, *local_args[1:], **local_kwargs)
    parts = [w._part for w in wrappers.values()]
    try:
        if func is Tensor.__setitem__ and _is_spectral_canvas(args[0], local_args[-1]):
            local_args[0] = _become_canvas(args[0])
            parts.append(local_args[0])
        lazy = any(not isinstance(p, Subdomain) for p in parts)
        rule = rule_for(func, lazy=True) if lazy else None
        if lazy and rule is None:
            local_args = [_read(a) for a in local_args]
            local_kwargs = {k: _read(v) for k, v in local_kwargs.items()}
        rule = rule or rule_for(func)
        if rule is None:
            raise UnsupportedOperationError("it has no rule for split tensors")
        if is_in_place(func) and isinstance(local_args[0], Subdomain) and local_args[0].moved:
            raise UnsupportedOperationError(
                "it would write into a copy, not into the tensor that the rows came from; assign "
                "with x[index] = value"
            )
        local_args, local_kwargs = canonical_names(tuple(local_args), local_kwargs)
        if not lazy:
            check_operands(rule, local_args, local_kwargs)
        result = rule(func, *local_args, **local_kwargs)
        if func is Tensor.__setitem__ and isinstance(args[0], DomainTensor):
            _show_requires_grad(args[0])
        return _wrap(result, wrappers)
    except UnsupportedOperationError as error:
        if gather_allowed.get() and not is_in_place(func):
            return _run_whole(func, args, kwargs, parts)
        raise UnsupportedOperationError(_refusal(func, parts, str(error))) from error
    except TypeError as error:
        if "unexpected keyword" in str(error) or "positional argument" in str(error):
            raise UnsupportedOperationError(_refusal(func, parts, str(error))) from error
        raise


@_disable_dynamo  # torch.compiler.disable, which would import the compiler here and now
def _dispatch_uncompiled(*call: Any) -> Any:
    return _dispatch(*call)


def _run_whole(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], parts: Sequence[Part]
) -> Any:
    """Run `func` on whole tensors, on every rank; the result is plain. Warns once per function."""
    if func not in _warned:
        _warned.add(func)
        size = sum(math.prod(p.shape) * p.dtype.itemsize for p in parts)
        warnings.warn(
            f"{name_of(func)} has no rule for split tensors; it runs on gathered ones, {size:,} "
            "bytes on every rank, as lightning_shard.allow_gather() permits.",
            stacklevel=2,
        )
    whole = {id(part.local): gathered(_read(part)) for part in parts}

    def plain(value: Any) -> Any:
        if isinstance(value, DomainTensor):
            return whole[id(value._part.local)]
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else value

    return func(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})


def _is_spectral_canvas(target: Any, value: Any) -> bool:
    plain = isinstance(target, Tensor) and not isinstance(target, DomainTensor)
    return plain and target.is_complex() and isinstance(value, Subdomain | Spectrum)


def _show_requires_grad(tensor: DomainTensor) -> None:
    """After a write in place the wrapper says what its part says, see `_checked`."""
    if isinstance(tensor._part, Subdomain):
        with _plain():
            if tensor.grad_fn is None:
                tensor.requires_grad_(tensor._part.local.requires_grad)


def _become_canvas(plain: Tensor) -> Canvas:
    """Turn the caller's tensor of zeros into a canvas, as the same Python object."""
    refuse_shared(plain)
    canvas = Canvas.like(plain)
    torch.utils.swap_tensors(plain, DomainTensor(canvas, plain.device))
    return canvas


def _read(value: Any) -> Any:
    """`value` with lazy spectra computed."""
    if isinstance(value, Spectrum):
        return value.read()
    if isinstance(value, Canvas):
        raise UnsupportedOperationError(
            "only an inverse transform can follow an assignment of modes"
        )
    if type(value) in (list, tuple):
        return type(value)(map(_read, value))
    return value


def _refusal(func: Callable[..., Any], parts: Sequence[Part], reason: str) -> str:
    if reason.startswith("cannot run "):
        return reason
    placements = "; ".join(dict.fromkeys(str(p.layout) for p in parts if p.layout))
    return (
        f"cannot run {name_of(func)} on a tensor split over ranks ({placements}): {reason}. "
        "Two ways out: register a rule with lightning_shard.register_rule, or compute on the whole "
        "tensor with lightning_shard.gather and split the result again with lightning_shard.shard."
    )


def _unwrap(value: Any, wrappers: dict[int, DomainTensor]) -> Any:
    if isinstance(value, DomainTensor):
        part = _checked(value)
        wrappers[id(part.local)] = value
        return part
    if type(value) in (list, tuple):
        return type(value)(_unwrap(v, wrappers) for v in value)
    return value


def _wrap(value: Any, wrappers: dict[int, DomainTensor]) -> Any:
    if isinstance(value, Subdomain):
        same = wrappers.get(id(value.local))
        if (
            same is not None
            and isinstance(same._part, Subdomain)
            and same._part.layout == value.layout
        ):
            _show_requires_grad(same)
            return same  # an in-place operation gives back its tensor
        return DomainTensor(value)
    if isinstance(value, Spectrum | Canvas):
        return DomainTensor(value)
    if type(value) in (list, tuple) or type(value).__module__ == "torch.return_types":
        return type(value)([_wrap(v, wrappers) for v in value])
    return value


set_wrapper(lambda value: _wrap(value, {}))


def _checked(tensor: DomainTensor) -> Part:
    """The part of `tensor`, unless a foreign autograd.Function put its history on the wrapper."""
    with _plain():
        foreign = tensor.grad_fn
    if foreign is None:
        return tensor._part
    follow = followed.get(type(foreign))
    if follow is None:
        raise UnsupportedOperationError(
            f"the autograd.Function behind {type(foreign).__name__} was applied to a tensor split "
            "over ranks; its gradients would be lost. Allow it with "
            "lightning_shard.allow_function if it computes with torch functions, or run it on each "
            "rank's rows with lightning_shard.local_map."
        )
    return follow(tensor)
