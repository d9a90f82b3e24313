"""Gradients of split tensors are those that the user of the whole tensor expects.

The backward pass of a loss starts on every rank of the domain, each with its replica of the loss.
The mean over the ranks is the gradient (domain/comm.py), so inside the pass every cotangent is as
many times too large as there are ranks. What users see of it is divided by the number of ranks:
`grad`, hooks, and the result of `torch.autograd.grad`. What users put into it is multiplied. So
all numbers are those of one process.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import local_part, subdomains
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Domain, Subdomain
from lightning_shard.ops.elementwise.whole_gradients import (
    as_part,
    comparing,
    local_gradients,
    mean_over_ranks,
    ranks_of,
)
from lightning_shard.ops.registry import composes, implements
from lightning_shard.processes.narrow import is_list

Operand = Subdomain | Tensor
_GRAD: Any = Tensor.grad  # typed as a value; it is the descriptor
_REQUIRES_GRAD: Any = Tensor.requires_grad
_DATA: Any = Tensor.data


@implements(torch.autograd.grad, limits="no is_grads_batched", checked=False)
def grad(
    func: Callable[..., Any],
    outputs: Sequence[Operand],
    inputs: Sequence[Operand],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    is_grads_batched: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Split inputs get their rows of the gradient, plain inputs all of it."""
    if is_grads_batched:
        raise UnsupportedOperationError("batched gradients (is_grads_batched=True, vmap)")
    domain = subdomains([outputs, inputs])[0].domain
    with local_gradients():
        found = func(
            [_local(o) for o in outputs],
            [_local(i) for i in inputs],
            _seeds(outputs, grad_outputs, domain),
            retain_graph,
            create_graph,
            **options,
        )
    return tuple(_shown(i, g, domain) for i, g in zip(inputs, found, strict=True))


@implements(torch.autograd.backward, Tensor.backward, checked=False)
def backward(
    func: Callable[..., Any],
    tensors: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    grad_tensors: Any = None,
) -> None:
    """Do for a split tensor what the backward of `(tensor * gradient).sum()` does."""
    outputs = tensors if is_list(tensors) else [tensors]
    inputs = inputs if inputs is None or is_list(inputs) else [inputs]
    domain = subdomains([outputs, inputs])[0].domain
    given = gradient if gradient is not None else grad_tensors
    torch.autograd.backward(
        [_local(o) for o in outputs],
        _seeds(outputs, given, domain),
        retain_graph,
        create_graph,
        inputs=None if inputs is None else [_local(i) for i in inputs],
    )


@composes(Tensor.register_hook, checked=False)
def register_hook(func: Callable[..., Any], x: Any, hook: Callable[[Any], Any]) -> Any:
    """Let a hook see the gradient, split, as many times smaller as there are ranks.

    A hook of one rank may look at its part. A hook that changes the gradient runs on all ranks.
    """
    _compute(x)
    part, shown = x.subdomain, type(x)
    layout, domain = part.layout, part.domain  # not x: a hook must not keep its own tensor alive
    strides = layout.strides if part.is_in_order else None
    comes_to = comparing(domain)

    def local_hook(gradient: Tensor) -> Tensor | None:
        changed = hook(shown(Subdomain(gradient / ranks_of(domain), layout, domain, None, strides)))
        if changed is None:
            return None
        comes_to("changes the gradient of a split tensor in a hook")
        return _part_of(changed, layout) * ranks_of(domain)

    return part.local.register_hook(local_hook)


@composes(Tensor.retain_grad, checked=False)
def retain_grad(func: Callable[..., Any], x: Any) -> None:
    """Keep the gradient of what others compute with, also of a spectrum."""
    _compute(x)
    func(x.subdomain.local)


def _compute(x: Any) -> None:
    """Compute a spectrum in place, so that what is asked of its gradient is asked of its modes.

    Raises:
        UnsupportedOperationError: Others have read slices of it, which have another graph.
    """
    if not x._part.lazy:
        return
    computed = x._part.settled()
    if computed is None:
        raise UnsupportedOperationError(
            "slices of this spectrum were taken, and their gradients pass it by; take "
            "spectrum.clone() first"
        )
    x._part = computed


@composes(Tensor.register_post_accumulate_grad_hook, checked=False)
def register_post_accumulate_grad_hook(
    func: Callable[..., Any], x: Any, hook: Callable[[Any], None]
) -> Any:
    """Let a hook see the leaf as a split tensor."""
    part, shown = x.subdomain, type(x)
    layout, domain, strides = part.layout, part.domain, part.strides

    def local_hook(leaf: Tensor) -> None:
        hook(shown(Subdomain(leaf, layout, domain, None, strides)))

    return func(part.local, local_hook)


@implements(_GRAD.__get__, checked=False)
def get_grad(func: Callable[..., Any], x: Subdomain) -> Subdomain | None:
    """Copy the gradient of one process; the accumulated one is the sum over replicas."""
    if x.local.grad is None:
        return None
    ranks, index = ranks_of(x.domain), (slice(None),) * x.ndim
    grad = x.like(x.local.grad)
    return grad.copy(x.local.grad / ranks, x.layout, grad.strides, index=index, factor=ranks)


@implements(_GRAD.__set__, checked=False)
def set_grad(func: Callable[..., Any], x: Subdomain, value: Operand | None) -> None:
    """Assign `.grad`: each rank keeps its part, times the ranks; nothing travels."""
    if value is None:
        x.local.grad = None
    else:
        x.local.grad = local_part(value, x.layout) * ranks_of(x.domain)


@implements(_GRAD.__delete__, checked=False)
def delete_grad(func: Callable[..., Any], x: Subdomain) -> None:
    """Delete `.grad` of this rank's part; nothing travels."""
    x.local.grad = None


@implements(_DATA.__set__, limits="shape and dtype must stay", checked=False)
def set_data(func: Callable[..., Any], x: Subdomain, value: Operand) -> None:
    """Assign `.data`: each rank takes its part; nothing travels."""
    if tuple(value.shape) != tuple(x.shape) or value.dtype != x.dtype:
        raise UnsupportedOperationError(
            f"a value of shape {tuple(value.shape)} and {value.dtype} for one of shape "
            f"{tuple(x.shape)} and {x.dtype}"
        )
    part = local_part(value, x.layout).detach()
    x.local.data = part if isinstance(value, Subdomain) else part.clone()  # not rows of a whole


@implements(_REQUIRES_GRAD.__set__, checked=False)
def set_requires_grad(func: Callable[..., Any], x: Subdomain, value: bool) -> None:
    """Set `.requires_grad` of this rank's part; nothing travels."""
    as_part(x.local).requires_grad = value


def _local(x: Operand) -> Tensor:
    if not isinstance(x, Subdomain | Tensor):
        raise UnsupportedOperationError("gradient edges beside split tensors")
    return x.local if isinstance(x, Subdomain) else x


def _seeds(outputs: Sequence[Operand], given: Any, domain: Domain) -> list[Tensor]:
    """The cotangent from which each output's backward starts on this rank."""
    seeds = list(given) if is_list(given) else [given] * len(outputs)
    if given is not None and len(seeds) != len(outputs):
        raise RuntimeError(f"got {len(outputs)} tensors and {len(seeds)} gradients")
    started: list[Tensor] = []
    for output, seed in zip(outputs, seeds, strict=True):
        if seed is None and math.prod(output.shape) != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        if isinstance(output, Subdomain):
            local = (
                torch.ones_like(output.local) if seed is None else local_part(seed, output.layout)
            )
            started.append(local * ranks_of(domain))
        elif isinstance(seed, Subdomain):
            raise UnsupportedOperationError(f"a split gradient ({seed.layout}) of a plain output")
        else:
            started.append(torch.ones_like(output) if seed is None else seed)
    return started


def _shown(x: Operand, gradient: Tensor | None, domain: Domain) -> Any:
    if gradient is None:
        return None
    if isinstance(x, Subdomain):
        return x.like(gradient / ranks_of(domain))
    return mean_over_ranks(gradient, domain)


def _part_of(value: Any, layout: Layout) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else local_part(value, layout)
