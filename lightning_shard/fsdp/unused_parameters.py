"""Gives zero gradients to parameters that this rank's step has not used, where another rank has.

FSDP2 reduces the gradients that a rank has, in the order of the block's parameters. Two replicas
that use different heads of one block have as many numbers to reduce, so each head would get the
mean of both heads' gradients. Here each rank reduces all parameters of a block that it has used in
part, as DDP does with `find_unused_parameters`. A parameter that no rank has used keeps none.

The ranks compare after the first backward whether any of them has left out a parameter. Only then
one message of a number for each parameter travels in each backward; otherwise none does.
"""

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.fsdp.same_blocks import NamedGather, same_blocks
from lightning_shard.fsdp.shard_block import sharded_modules
from lightning_shard.fsdp.unreduced import Unreduced
from lightning_shard.processes.torch_private.internals import (
    after_backward,
    backward_pass,
    gather_of,
    parameter_groups,
)
from lightning_shard.processes.torch_private.typed import named_modules

_FOLLOWED = "_unused_parameters"  # attribute of a module
_ACCUMULATED = "unsharded_accumulated_grad"  # in torch 2.11; it is the grad in newer ones


class UnusedParameters:
    """Fills in the gradients that are missing in the blocks of one module, and keeps their order.

    Attributes:
        some: True if a rank has left out a parameter in the first backward; None before it.
        unreduced: The shards whose gradients are left on each rank.
    """

    def __init__(self, root: nn.Module, group: dist.ProcessGroup) -> None:
        """Follow the backward passes of a module."""
        self.some: bool | None = None
        self.unreduced = Unreduced()
        self._group = group
        self._order = same_blocks(group)
        names: dict[Any, str] = {module: name for name, module in named_modules(root)}
        found: list[Any] = []
        for module in sharded_modules(root):
            name = repr(names[module]) if names[module] else "the module itself"
            for each in parameter_groups(module):
                found.append(each)
                each.pre_backward = self._dropping(each)
                each.post_backward = self._filling(each, name)
                if group.size() > 1 and self._order is not None:
                    gather: Any = NamedGather(gather_of(each), self._order, name)
                    module.set_custom_all_gather(gather)
        self._parameters: list[Any] = [p for each in found for p in each.fsdp_params]
        self._filled: set[int] = set()
        self._used: set[int] = set()
        self._backward = -1
        self._groups, self._has_reduced = found, False
        root.__dict__[_FOLLOWED] = self

    @contextmanager
    def one_backward(self) -> Generator[None]:
        """Let the ranks compare that a backward pass inside has reduced no block on this rank.

        Others may wait for rows that this rank's loss does not need.
        """
        self._has_reduced = False
        yield
        if self._has_reduced or self._order is None:
            return
        if any(group.reduce_grads for group in self._groups):
            event = "ends a backward pass in which its loss reaches no parameter"
            self._order.comes_to(event, in_backward=True)

    @contextmanager
    def set_aside(self, shards: Collection[Tensor]) -> Generator[None]:
        """Inside, a backward pass changes no gradient of these, nor what waits to be reduced."""
        held: list[tuple[Any, str]] = []
        for p in self._parameters:
            if p.sharded_param in shards:
                held += [(p.sharded_param, "grad")]
                held += [(p.unsharded_param, "grad")] if hasattr(p, "_unsharded_param") else []
                held += [(p, _ACCUMULATED)] if _ACCUMULATED in vars(p) else []
        kept = [getattr(*place) for place in held]
        for place in held:
            setattr(*place, None)
        with self.unreduced.set_aside(shards):
            yield
        for place, gradient in zip(held, kept, strict=True):
            setattr(*place, gradient)

    def _dropping(self, group: Any) -> Callable[..., None]:
        plain: Callable[..., None] = group.pre_backward

        def pre_backward(*args: Any) -> None:
            self._drop_zeroed(group)
            plain(*args)

        return pre_backward

    def _drop_zeroed(self, group: Any) -> None:
        """Take away what a rank has of gradients that `zero_grad` has set to zero."""
        for p in group.fsdp_params:
            if self.unreduced.takes_zeroed(p.sharded_param):
                p.unsharded_param.grad = None
                if _ACCUMULATED in vars(p):
                    p.unsharded_accumulated_grad = None

    def _note_unreduced(self, group: Any) -> None:
        if group.reduce_grads:
            self.unreduced.forget(p.sharded_param for p in group.fsdp_params)
            return
        for p in group.fsdp_params:
            if _is_trained(p) and _has_gradient(p):
                self.unreduced.note(p.sharded_param)

    def _filling(self, group: Any, name: str) -> Callable[..., None]:
        plain: Callable[..., None] = group.post_backward

        def post_backward(*args: Any) -> None:
            self._drop_zeroed(group)  # a pass has not reached them
            fills = group.reduce_grads and self.some is not False
            if fills:
                self._fill(group)
                backward = backward_pass()
                if backward != self._backward:
                    self._backward = backward
                    after_backward(self._compare)
            if self._order is not None and group.reduce_grads:
                trained = [_has_gradient(p) for p in group.fsdp_params if _is_trained(p)]
                if any(trained):
                    self._has_reduced = True
                    some = "" if all(trained) else f" (only {trained.count(True)} parameters)"
                    self._order.comes_to(f"reduces the gradients of {name}{some}")
            for p in group.fsdp_params:
                _shard_gradient(p.sharded_param)
            plain(*args)
            self._note_unreduced(group)

        return post_backward

    def _fill(self, group: Any) -> None:
        trained = [p for p in group.fsdp_params if _is_trained(p)]
        used = [p for p in trained if _has_gradient(p)]
        self._used.update(id(p) for p in used)
        if used:
            for p in trained:
                if not _has_gradient(p):
                    if p.sharded_param.grad is None:  # else an earlier pass has made one
                        self._filled.add(id(p))
                    p.unsharded_param.grad = torch.zeros_like(p.unsharded_param)

    @torch.no_grad()
    def _compare(self) -> None:
        """Forget the gradients of parameters that no rank has used."""
        filled, used = self._filled, self._used
        self._filled, self._used = set(), set()
        if self.some is None:
            # a step that is predicted on fake tensors reads 1 from each
            self.some = self._sum(torch.tensor([2.0 * bool(filled)], device="cpu"))[0] > 1
        if self.some:
            flags = torch.tensor([float(id(p) in used) for p in self._parameters], device="cpu")
            for p, number in zip(self._parameters, self._sum(flags), strict=True):
                if id(p) in filled and not number:
                    p.sharded_param.grad = None

    def _sum(self, numbers: torch.Tensor) -> list[float]:
        numbers = numbers.to(self._parameters[0].sharded_param.device)
        dist.all_reduce(numbers, group=self._group)
        return numbers.tolist()


def unused_parameters_of(module: nn.Module) -> UnusedParameters | None:
    """Return what follows the backward passes of `module`; None where nothing is sharded."""
    return module.__dict__.get(_FOLLOWED)


def _shard_gradient(p: Any) -> None:
    """Shard a gradient of `p` that is whole on each rank, as of a penalty outside of the step.

    FSDP2 adds its shard to what the rank has, which would be added to every row of the whole.
    """
    if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
        with torch.no_grad():
            p.grad = p.grad.redistribute(placements=p.placements)


def _is_trained(p: Any) -> bool:
    return hasattr(p, "_unsharded_param") and p.unsharded_param.requires_grad


def _has_gradient(p: Any) -> bool:
    accumulated = getattr(p, _ACCUMULATED, None)
    return p.unsharded_param.grad is not None or accumulated is not None
