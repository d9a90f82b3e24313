"""Lets custom autograd Functions run on split tensors.

autograd records the rules of split tensors on local tensors, but a Function that is applied to a
DomainTensor records itself on the wrapper. Two Functions of ours join these graphs: `_Enter` at its
inputs and `_Leave` at its outputs. What a Function's backward is given and what it returns are
gradients of the whole tensors, as in one process (see ops/elementwise/autograd.py).
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from lightning_shard.domain.align import gathered, local_part
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.memory_format import owned
from lightning_shard.domain.subdomain import Domain, Subdomain
from lightning_shard.ops import name_of
from lightning_shard.ops.elementwise.whole_gradients import (
    is_of,
    mean_over_ranks,
    ranks_of,
    see_whole_gradient,
)
from lightning_shard.processes.torch_private.internals import (
    BackwardHookFunction,
    BackwardNode,
    CheckpointFunction,
    SyncBatchNorm,
    is_view,
    node_class,
    without_rules,
)
from lightning_shard.tensor.gathering import gather_allowed, on_whole_tensors
from lightning_shard.tensor.part import Part, followed, foreign_function
from lightning_shard.tensor.tensor import DomainTensor

# modules whose Functions on plain tensors may see what one rank has
_HOSTS = ("torch", "lightning", "lightning_shard")

F = TypeVar("F", bound=type[Function])

# for `check`, in this process: Functions that `allow_gather` met, and those to allow instead
functions_met: dict[str, None] = {}
functions_to_try: set[str] = set()
PROCESS_STATE = {"functions_met": functions_met, "functions_to_try": functions_to_try}


def allow_function(function: F) -> F:
    """Let a custom autograd Function take split tensors.

    Its forward and backward see tensors of the global shape; each torch function in them is served
    by its rule. A Function that needs this rank's rows alone goes through `local_map` instead.

    Args:
        function: The class, changed in place; forward and backward must treat a tensor as a whole
            and change none of their inputs.

    Returns:
        The class, so this is a decorator, too.

    Raises:
        UnsupportedOperationError: When it is applied, if it changed a split input in place.

    Example:
        >>> @lightning_shard.allow_function
        ... class Cube(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x**3
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * 3 * ctx.saved_tensors[0] ** 2
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super(function, cls)
        return _apply_to_split(cls, plain.apply, args, kwargs)

    function.apply = classmethod(apply)
    return function


def _apply_to_split(
    function: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what `apply` gives, its graph joined to those of the local tensors."""
    if kwargs:
        takes_context = function.setup_context is torch.autograd.Function.setup_context
        given = (None, *args) if takes_context else args
        bound = inspect.signature(function.forward).bind(*given, **kwargs)
        bound.apply_defaults()
        args = bound.args[takes_context:]
    _serve(node_class(function))
    split = [isinstance(a, DomainTensor) for a in args]
    if any(split) and in_forward_mode():
        raise UnsupportedOperationError(
            f"the autograd.Function {name_of(function)} has no forward mode on split tensors; take "
            "torch.autograd.functional.jvp, which differentiates backwards twice"
        )
    domain = args[split.index(True)].subdomain.domain if any(split) else None
    outputs = apply(*map(_entered, args))
    if type(outputs) is tuple:
        return tuple(_left(out, split, domain, function) for out in outputs)
    return _left(outputs, split, domain, function)


def _serve(node: Any) -> None:
    """Let nodes of this class, each its Function's ctx and grad_fn, meet ours in the graph."""
    if node not in followed:
        followed[node] = _read_recorded
        node.apply = _backward
        node.save_for_backward = _save_for_backward
        node.mark_dirty = _mark_dirty


class _Enter(Function):
    """A local tensor as the split tensor that a Function is applied to."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, part: Subdomain) -> DomainTensor:
        ctx.layout, ctx.domain = part.layout, part.domain
        ctx.set_materialize_grads(False)
        return DomainTensor(part)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None
        whole = grads[0].subdomain if isinstance(grads[0], DomainTensor) else grads[0]
        return local_part(whole, ctx.layout) * ranks_of(ctx.domain), None


class _Leave(Function):
    """The local tensor of the split tensor that a Function returned.

    It watches the local tensors that the Function saved: torch refuses to unpack them here if they
    were changed in place; on the wrappers it would not see the change.
    """

    @staticmethod
    def forward(ctx: Any, wrapper: DomainTensor, watched: Sequence[Tensor]) -> Tensor:
        part = wrapper._part
        assert isinstance(part, Subdomain)
        ctx.layout, ctx.domain = part.layout, part.domain
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*watched)
        local = part.local.detach()
        return local if is_view(part.local) else owned(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors
        if grads[0] is None:
            return None, None
        grad = grads[0] / ranks_of(ctx.domain)
        return DomainTensor(Subdomain(grad, ctx.layout, ctx.domain, None, ctx.layout.strides)), None


def _entered(value: Any) -> Any:
    if isinstance(value, DomainTensor):
        part = value.subdomain
        recorded = part.local.requires_grad and torch.is_grad_enabled()
        return _Enter.apply(part.local, part) if recorded else DomainTensor(part)
    return value


def _left(output: Any, split: Sequence[bool], domain: Domain | None, function: Any) -> Any:
    if not isinstance(output, Tensor):
        return output
    with without_rules():
        node: Any = output.grad_fn
    if type(node) not in followed:
        return output
    node.split = split
    if isinstance(output, DomainTensor):
        with torch.no_grad():
            output._part = output.subdomain  # computed, if it is a spectrum
        return DomainTensor(_left_part(output, getattr(node, "watched", ())))
    if domain is not None:
        output.register_hook(functools.partial(_mean_over_ranks, domain=domain))
    elif function is not CheckpointFunction:  # hooks of a module, or a backward of the user's own
        see_whole_gradient(output)
    return output


def _mean_over_ranks(gradient: Tensor | None, domain: Domain) -> Tensor | None:
    """Average the gradient of a plain output over the ranks.

    Each rank has only the part that came through its own use of the output.
    """
    return None if gradient is None else mean_over_ranks(gradient, domain)


def _left_part(tensor: DomainTensor, watched: Sequence[Tensor] = ()) -> Subdomain:
    part = tensor._part
    assert isinstance(part, Subdomain)
    return part.like(_Leave.apply(tensor, watched))


def _read_recorded(tensor: DomainTensor) -> Part:
    """The part of what a Function was given, or has saved for its backward.

    Its local tensor is that of the input, with the same history, or a copy without any.
    """
    lost = torch.is_grad_enabled() and not tensor._part.local.requires_grad
    return _left_part(tensor) if lost else tensor._part


def _backward(ctx: Any, *grads: Any) -> Any:
    """The Function's own backward; gradients of its plain inputs become whole on every rank."""
    found = BackwardNode.apply(ctx, *grads)
    found = found if isinstance(found, tuple) else (found,)
    return tuple(
        gathered(g.subdomain) if isinstance(g, DomainTensor) and not split else g
        for g, split in zip(found, ctx.split, strict=False)
    )


def _save_for_backward(ctx: Any, *tensors: Any) -> None:
    FunctionCtx.save_for_backward(ctx, *tensors)
    parts = [t._part for t in tensors if isinstance(t, DomainTensor)]
    ctx.watched = [part.local for part in parts if isinstance(part, Subdomain)]


def _mark_dirty(ctx: Any, *tensors: Any) -> None:
    FunctionCtx.mark_dirty(ctx, *tensors)
    if any(isinstance(t, DomainTensor) for t in tensors):
        raise UnsupportedOperationError(
            "an autograd.Function that changes a split tensor in place (ctx.mark_dirty); let its "
            "forward return a new tensor"
        )


def _serve_by_rule(function: Any) -> None:
    """Let a Function of torch that has a rule of its own be found like any torch function."""

    def apply(cls: Any, *args: Any) -> Any:
        split = [a for a in args if isinstance(a, DomainTensor)]
        if split:
            return torch.overrides.handle_torch_function(cls, split, *args)
        return super(function, cls).apply(*args)

    function.apply = classmethod(apply)


@functools.cache
def install_functions() -> None:
    """Teach the Functions of torch that meet split tensors; called when the first one is made."""
    _serve_by_rule(SyncBatchNorm)
    for function in (CheckpointFunction, BackwardHookFunction):  # the latter of full backward hooks
        allow_function(function)
    _ask_before_functions()


def _ask_before_functions() -> None:
    """Let `Function.apply` look at its arguments, which it does not ask for a rule.

    A Function that nobody allowed runs on whole tensors inside `allow_gather`, or as one that is
    allowed if it is to be tried (`functions_to_try`). Elsewhere it is refused. Of what it returns
    split, `part_of` refuses the first use, which may never come; what it returns plain, such as a
    loss, is used freely, and is refused here.
    """
    plain: Any = vars(Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = plain.__get__(None, cls)
        split = [a for a in (*args, *kwargs.values()) if isinstance(a, DomainTensor)]
        if cls is _Leave or node_class(cls) in followed:
            return own(*args, **kwargs)
        if not split:
            outputs = own(*args, **kwargs)
            if not _is_of_hosts(cls):
                for out in outputs if isinstance(outputs, tuple) else (outputs,):
                    if isinstance(out, Tensor):
                        see_whole_gradient(out)
            return outputs
        if not gather_allowed.get():
            outputs = own(*args, **kwargs)
            if any(map(_is_recorded, split)) and _gives_plain(outputs):
                raise foreign_function(cls.__name__)
            return outputs
        functions_met[name_of(cls)] = None
        if name_of(cls) in functions_to_try:
            return allow_function(cls).apply(*args, **kwargs)
        return on_whole_tensors(own, args, kwargs, DomainTensor, name=cls)

    Function.apply = classmethod(apply)


@functools.lru_cache(maxsize=1024)
def _is_of_hosts(function: type[Function]) -> bool:
    return is_of(function, _HOSTS)


def _is_recorded(tensor: Tensor) -> bool:
    with without_rules():
        return tensor.requires_grad


def _gives_plain(outputs: Any) -> bool:
    """Return whether a plain tensor with a gradient is among the outputs of a Function.

    One without elements has none. The checkpoints of torch 2.11 save their inputs by such a one.
    """
    each = outputs if isinstance(outputs, tuple) else (outputs,)
    tensors = (x for x in each if isinstance(x, Tensor) and not isinstance(x, DomainTensor))
    return any(x.requires_grad and x.numel() for x in tensors)


followed[node_class(_Enter)] = _read_recorded
node_class(_Leave).function = property(lambda node: node.next_functions[0][0])
