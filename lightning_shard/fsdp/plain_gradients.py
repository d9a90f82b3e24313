"""Averages gradients of parameters that every rank keeps whole, once at the end of backward.

FSDP2 leaves some parameters alone: scalars, which it cannot shard, ignored ones, and those whose
dtype is not their block's. A gradient may hold a part that an earlier backward has averaged. That
part is equal on all ranks, so another mean leaves it as it is.
"""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.fsdp.shard_block import sharded_modules
from lightning_shard.processes.torch_private.internals import (
    after_backward,
    backward_pass,
    parameter_groups,
)

_KEY = "_plain_gradients"


class PlainGradients:
    """Averages over the ranks of `group` after each backward, unless `enabled` is False."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = sorted(parameters, key=_kind)
        self.group = group
        self.enabled = True
        self._backward = -1
        for p in self.parameters:
            wanted = p.requires_grad
            p.requires_grad_()  # torch takes hooks of frozen parameters when they are not
            p.register_post_accumulate_grad_hook(self._accumulated)
            p.requires_grad_(wanted)

    def _accumulated(self, _: Tensor) -> None:
        backward = backward_pass()
        if self.enabled and backward != self._backward:
            self._backward = backward
            after_backward(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        for _, alike in groupby(self.parameters, key=_kind):
            parameters = [p for p in alike if p.requires_grad]
            if not parameters:
                continue
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            has_one = torch.tensor([float(p.grad is not None) for p in parameters]).to(grads[0])
            flat = torch.cat([*(g.reshape(-1) for g in grads), has_one])
            dist.all_reduce(flat, group=self.group)
            *means, has_one = flat.split_with_sizes([*(g.numel() for g in grads), len(grads)])
            for p, mean, has in zip(parameters, means, has_one.tolist(), strict=True):
                if has:  # else no rank used the parameter
                    p.grad = (mean / dist.get_world_size(self.group)).view_as(p)


def _kind(p: Tensor) -> tuple[str, str]:
    return str(p.dtype), str(p.device)


def average_plain_gradients(
    module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup
) -> None:
    """Average the gradients of `parameters` of `module` over the ranks of `group`, from now on."""
    module.__dict__[_KEY] = PlainGradients(parameters, group)


@contextmanager
def no_sync(module: nn.Module) -> Generator[None]:
    """Inside, backward adds up gradients on each rank; the first backward after it averages them.

    Args:
        module: The module that `parallelize` was given.
    """
    sharded = sharded_modules(module)
    plain: PlainGradients | None = module.__dict__.get(_KEY)
    _synchronise(sharded, plain, False)
    try:
        yield
    finally:
        _synchronise(sharded, plain, True)


def _synchronise(sharded: list[FSDPModule], plain: PlainGradients | None, value: bool) -> None:
    for module in sharded:
        module.set_requires_gradient_sync(value, recurse=False)
    if plain is not None:
        plain.enabled = value


@contextmanager
def without_reduction(module: nn.Module) -> Generator[None]:
    """Inside, a backward pass leaves parameters whole and reduces nothing: `torch.autograd.grad`.

    FSDP2 would take such a pass inside of a step for the step's own, and give the parameters up.
    """
    sharded = sharded_modules(module)
    groups = [group for block in sharded for group in parameter_groups(block)]
    names = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")
    before = [{name: getattr(group, name) for name in names} for group in groups]
    for block in sharded:
        block.set_is_last_backward(False)
    for group in groups:
        vars(group).update(dict.fromkeys(names, False))
    try:
        yield
    finally:
        for group, values in zip(groups, before, strict=True):
            vars(group).update(values)
        for block in sharded:
            block.set_is_last_backward(True)


def step_one_by_one_if_mixed(optimizer: Optimizer, *_: Any) -> None:
    """Let an optimizer update a group parameter by parameter where torch cannot do it at once.

    Its foreach and fused kernels, the default on GPUs, take DTensors of one mesh, or plain tensors.
    """
    for group in optimizer.param_groups:
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
        if len(meshes) < 2:
            continue
        for way in {"foreach", "fused"} & group.keys():
            if group[way]:
                warnings.warn(
                    f"{way}=True updates parameters of one mesh; these are of {len(meshes)} (kept "
                    "whole, sharded over all ranks or over data replicas): one by one instead.",
                    stacklevel=2,
                )
            group[way] = False
