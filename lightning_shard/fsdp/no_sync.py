"""Lets backward passes leave gradients on each rank: for accumulation, and within a step."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from lightning_shard.fsdp.plain_gradients import plain_gradients_of
from lightning_shard.fsdp.shard_block import sharded_modules
from lightning_shard.processes.torch_private.internals import parameter_groups


@contextmanager
def no_sync(module: nn.Module) -> Generator[None]:
    """Inside, backward adds up gradients on each rank; the first backward after it averages them.

    Args:
        module: The module that `parallelize` was given.
    """
    _synchronise(module, False)
    try:
        yield
    finally:
        _synchronise(module, True)


def _synchronise(module: nn.Module, value: bool) -> None:
    for block in sharded_modules(module):
        block.set_requires_gradient_sync(value, recurse=False)
    if (plain := plain_gradients_of(module)) is not None:
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
