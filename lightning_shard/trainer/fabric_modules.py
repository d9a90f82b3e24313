"""Looks after the modules of a loop of Fabric, between the calls of them."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard.fsdp.no_sync import without_reduction
from lightning_shard.fsdp.plain_gradients import plain_gradients_of
from lightning_shard.fsdp.same_blocks import members_come_to
from lightning_shard.fsdp.step_writes import GATHERED
from lightning_shard.fsdp.unused_parameters import unused_parameters_of
from lightning_shard.ops.elementwise.whole_gradients import whole_gradients
from lightning_shard.processes.replica_world import replica_world
from lightning_shard.trainer.same_loop import SameLoop


def refuse_unreduced(modules: Iterable[nn.Module], optimizer: Optimizer) -> None:
    """Refuse to go on with gradients that `no_backward_sync` has left on each rank.

    Raises:
        RuntimeError: One of its parameters has such a gradient.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for module in modules:
        for each in (plain_gradients_of(module), unused_parameters_of(module)):
            if each is not None and each.unreduced.wait(held):
                raise RuntimeError(
                    "the optimizer would step with other gradients on each rank, since the last "
                    "backward pass before it ran under fabric.no_backward_sync; let that pass "
                    "reduce them: fabric.no_backward_sync(model, enabled=False)."
                )


def shard_again(module: nn.Module) -> None:
    """Shard what a forward has left whole; nothing of a module that is whole on each rank."""
    gathered = module.__dict__.get(GATHERED)
    if gathered is not None:
        gathered.shard_again()


def around_loop(
    modules: Iterable[nn.Module], mesh: DeviceMesh, domain_mesh: DeviceMesh, same: SameLoop
) -> AbstractContextManager[None]:
    """Let what a loop does outside of its modules see whole gradients.

    Args:
        modules: The modules of the loop, to which others may be added.
        mesh: The mesh of all processes.
        domain_mesh: The ranks that share samples.
        same: Compares the losses of ranks that share samples.
    """
    backward = partial(_around_backward, modules, mesh, same)
    grad = partial(_without_reductions, modules, mesh)
    return whole_gradients(domain_mesh, grad, members_come_to, backward)


@contextmanager
def _around_backward(
    modules: Iterable[nn.Module], mesh: DeviceMesh, same: SameLoop, outputs: Sequence[Tensor]
) -> Generator[None]:
    """Keep what a loop wrote after forward, which FSDP2 forgets; collectives count replicas."""
    for module in modules:
        gathered = module.__dict__.get(GATHERED)
        if gathered is not None:
            gathered.keep_writes_of_loop()
    with replica_world(mesh), same.backward(outputs):
        yield


@contextmanager
def _without_reductions(modules: Iterable[nn.Module], mesh: DeviceMesh) -> Generator[None]:
    """Let `torch.autograd.grad` reduce no gradients of modules; collectives count replicas."""
    with ExitStack() as stack:
        stack.enter_context(replica_world(mesh))
        for module in modules:
            stack.enter_context(without_reduction(module))
        yield
