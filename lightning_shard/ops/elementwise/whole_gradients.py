"""Gives whole gradients of plain tensors, such as weights, to what looks at them in a step.

Each rank of a domain has a part of the gradient of a plain tensor, since it ran the backward pass
of its own rows. The mean over the ranks is the gradient. FSDP2 and `parallelize` take it for
parameters after the backward pass. What a step sees before that is whole by the hooks of this file:
the results of `torch.autograd.grad`, `.grad` of leaves that the step has made, hooks of tensors and
modules, `retain_grad`, and what the backward of a custom autograd.Function is given. Where ranks
hold different numbers, as of rows that a step has taken by `to_local`, each keeps its own gradient.
"""

import functools
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.hooks import RemovableHandle

from lightning_shard.domain.comm import all_mean, all_reduce_extreme
from lightning_shard.domain.subdomain import Domain, domain_of
from lightning_shard.processes.torch_private.internals import (
    backward_pass,
    in_transform,
    replace_internal,
)

# hooks that these packages register are given what one rank has, as they expect
_HOSTS = (
    "torch.distributed", "torch.utils", "torch._dynamo", "torch._functorch",
    "lightning", "lightning_fabric", "pytorch_lightning", "lightning_shard",
)  # fmt: skip


_PART = "_part_of_a_split_tensor"


def as_part(local: Tensor) -> Tensor:
    """Remember of a plain tensor that it holds rows: its gradient is that of these rows."""
    setattr(local, _PART, True)
    return local


def ranks_of(domain: Domain) -> int:
    """Count the ranks of a domain."""
    return math.prod(domain.grid.sizes)


def mean_over_ranks(gradient: Tensor, domain: Domain) -> Tensor:
    """Average the gradient of a plain tensor over the ranks, each of which has its own part."""
    everyone = domain.group(tuple(range(len(domain.grid.sizes))))
    return all_mean(gradient, ranks_of(domain), everyone)


# compares an event, which a clause names, with what the other ranks of a domain do
ComesTo = Callable[[Domain, str], None]


@dataclass(frozen=True)
class _Step:
    """A step that runs, or a loop of steps.

    Attributes:
        domain: The ranks over which plain gradients are averaged; None: none.
        around: A context for each call of `torch.autograd.grad`.
        around_backward: Gives a context for each other backward pass, which is told its outputs.
        is_loop: True for a loop, which also computes what is not split.
        comes_to: Lets the ranks of the domain compare what they do with gradients.
    """

    domain: Domain | None
    around: Callable[[], AbstractContextManager[Any]]
    around_backward: Callable[[Sequence[Tensor]], AbstractContextManager[Any]] = nullcontext
    is_loop: bool = False
    comes_to: ComesTo | None = None


_step: ContextVar[_Step | None] = ContextVar("_step", default=None)


def whole_gradients(
    mesh: DeviceMesh | None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    comes_to: ComesTo | None = None,
    around_backward: Callable[[Sequence[Tensor]], AbstractContextManager[Any]] | None = None,
) -> AbstractContextManager[None]:
    """Inside, plain tensors show whole gradients; for `torch.autograd.grad` one sum travels.

    Args:
        mesh: The domain mesh; nothing is averaged for None and for one rank.
        around: A context that is opened for each call of `torch.autograd.grad`.
        comes_to: Raises where other ranks of the domain do something else with gradients.
        around_backward: In a loop of the user's own, gives a context for each other backward pass,
            from its outputs: there what the loop does outside of its modules sees them, too.
    """
    loop = {} if around_backward is None else {"around_backward": around_backward, "is_loop": True}
    return _running(_Step(_domain(mesh), around, comes_to=comes_to, **loop))


def _domain(mesh: DeviceMesh | None) -> Domain | None:
    return None if mesh is None or mesh.size() == 1 else domain_of(mesh)


@contextmanager
def _running(step: _Step) -> Generator[None]:
    _average_gradients()
    before = _step.get()
    _step.set(step)
    try:
        yield
    finally:  # a loop that was dropped ends when it is collected, perhaps within a later one
        if _step.get() is step:
            _step.set(before)


@contextmanager
def local_gradients() -> Generator[None]:
    """Inside, plain tensors show this rank's gradients."""
    step = _step.get()
    token = _step.set(None if step is None else replace(step, domain=None))
    try:
        yield
    finally:
        _step.reset(token)


def comparing(domain: Domain) -> Callable[[str], None]:
    """Return what compares events with the other ranks of a domain, which is that of the step."""
    step = _step.get()
    if step is None or step.comes_to is None or step.domain is not domain:
        return lambda event: None
    return functools.partial(step.comes_to, domain)


def splits_samples() -> bool:
    """Return True inside of a step whose samples are split over ranks."""
    step = _step.get()
    return step is not None and step.domain is not None and not step.is_loop


@cache
def _average_gradients() -> None:
    """Replace the function of torch behind `torch.autograd.grad`, and methods of tensors."""
    replace_internal("torch.autograd._engine_run_backward", _averaging)
    register, retain = Tensor.register_hook, Tensor.retain_grad

    def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        if has_torch_function_unary(self):
            return handle_torch_function(register, (self,), self, hook)
        return register(self, hook if is_of(hook, _HOSTS) else on_whole_gradient(self, hook))

    def retain_grad(self: Tensor) -> None:
        if has_torch_function_unary(self):
            handle_torch_function(retain, (self,), self)
            return
        if not (self.is_leaf or self.retains_grad):
            see_whole_gradient(self)
        retain(self)

    Tensor.register_hook = functools.wraps(register)(register_hook)
    Tensor.retain_grad = functools.wraps(retain)(retain_grad)


def is_of(function: Any, packages: Sequence[str]) -> bool:
    """Return True for a function, or a class, that one of these packages defines."""
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or ""
    return any(module == name or module.startswith(f"{name}.") for name in packages)


def see_whole_gradient(tensor: Tensor) -> RemovableHandle | None:
    """Let what looks at the gradient of a tensor of a step after this hook see all of it."""
    hook = on_whole_gradient(tensor, _unchanged)
    return None if hook is _unchanged else tensor.register_hook(hook)


def _unchanged(gradient: Tensor) -> None:
    """Look at a gradient, and leave it as it is."""


def on_whole_gradient(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return a hook that is given whole gradients; `hook` itself outside of a step.

    Parameters, whose gradients FSDP2 adds up, tensors of other classes, and parts of split tensors
    keep their hooks.
    """
    step = _step.get()
    if step is None or step.domain is None or type(tensor) is not Tensor:
        return hook
    if getattr(tensor, _PART, False):
        return hook
    if not tensor.requires_grad or tensor.is_meta or in_transform():
        return hook
    domain, mark, comes_to = step.domain, mark_of(tensor), comparing(step.domain)

    def on_whole(gradient: Tensor) -> Any:
        comes_to("gives a hook the whole gradient of a tensor")
        if not _alike(domain, [mark])[0]:
            return hook(gradient)
        whole = mean_over_ranks(gradient, domain)
        changed = hook(whole)
        return whole if changed is None else changed

    return on_whole


def _averaging(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, whose gradients are averaged over a domain where a step asks for them."""

    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        step = _step.get()
        if step is None or backward_pass() != -1:
            return run(outputs, *args, **kwargs)
        inputs: Any = args[3] if len(args) > 3 and kwargs.get("accumulate_grad") is False else None
        if inputs is not None:
            if step.domain is not None and not in_transform():
                comparing(step.domain)("calls torch.autograd.grad in a step")
            return _averaged_over(step, inputs, lambda: run(outputs, *args, **kwargs))
        handles = [see_whole_gradient(leaf) for leaf in _leaves_of(step, outputs)]
        try:
            with step.around_backward(outputs):
                return run(outputs, *args, **kwargs)
        finally:
            for handle in filter(None, handles):
                handle.remove()

    return run_backward


def _leaves_of(step: _Step, outputs: Sequence[Any]) -> list[Tensor]:
    """Return the leaves that the step has made, such as latents that it trains in a loop."""
    waiting = [] if step.domain is None else [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen: set[Any] = {*waiting}
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    leaves = (getattr(node, "variable", None) for node in seen)
    return [leaf for leaf in leaves if type(leaf) is Tensor]


def _averaged_over(
    step: _Step, inputs: Sequence[Any], run: Callable[[], Sequence[Any]]
) -> Sequence[Any]:
    with step.around():
        found = run()
    if any(g is None and isinstance(p, DTensor) for p, g in zip(inputs, found, strict=True)):
        raise RuntimeError(
            "torch.autograd.grad was asked for a sharded parameter of a block, which is whole "
            "only while its block runs, and has found no gradient: keep parameters whole with "
            "sharding='none'."
        )
    if step.domain is None or in_transform():
        return found
    with local_gradients():
        return _averaged(step.domain, inputs, found)


def _averaged(domain: Domain, inputs: Sequence[Any], found: Sequence[Any]) -> tuple[Any, ...]:
    shared = _equal_on_all_ranks(domain, inputs)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, gradient in enumerate(found):
        if gradient is not None and type(gradient) is Tensor and shared[i]:
            by_dtype.setdefault(gradient.dtype, []).append(i)
    result = list(found)
    for places in by_dtype.values():
        flat = torch.cat([found[i].reshape(-1) for i in places])
        parts = mean_over_ranks(flat, domain).split([found[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            result[i] = part.view(found[i].shape)
    return tuple(result)


def _equal_on_all_ranks(domain: Domain, inputs: Sequence[Any]) -> list[bool]:
    """Return for each input True if all ranks hold the same numbers, as they do of a parameter."""
    others = [i for i, x in enumerate(inputs) if type(x) is Tensor]
    equal = [isinstance(x, nn.Parameter) for x in inputs]
    if others:
        same = _alike(domain, [mark_of(inputs[i]) for i in others])
        for i, alike in zip(others, same, strict=True):
            equal[i] = alike
    return equal


def _alike(domain: Domain, marks: Sequence[Tensor]) -> list[bool]:
    return are_alike(marks, [domain.group(tuple(range(len(domain.grid.sizes))))])


@torch.no_grad()
def are_alike(marks: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> list[bool]:
    """Return for each mark True if it is the same on all ranks of these groups."""
    low = high = torch.stack([*marks])
    for group in groups:
        low = all_reduce_extreme(low, dist.ReduceOp.MIN, group)
        high = all_reduce_extreme(high, dist.ReduceOp.MAX, group)
    return [bool(same) for same in (low == high).all(1)]


@torch.no_grad()
def mark_of(x: Tensor) -> Tensor:
    """Return three numbers that differ between tensors of other shapes or values."""
    values = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    values = values.reshape(-1).double().nan_to_num(7.0)
    weights = torch.arange(values.numel(), device=x.device, dtype=torch.float64).cos()
    return torch.stack([values.sum(), (values * weights).sum(), weights.sum()])
