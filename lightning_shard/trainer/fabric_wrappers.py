"""Stands where Fabric would have a module, an optimizer that is loaded, and a sampler."""

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_shard.checkpoint.state import load_optimizer_state
from lightning_shard.fsdp.step_writes import GATHERED, GatheredParameters
from lightning_shard.processes.torch_private.internals import backward_pass

_UNSIZED = (
    "the sampler {} {}, so its samples cannot be divided among the data replicas: give it the "
    "length of an epoch, or pass use_distributed_sampler=False to fabric.setup_dataloaders and let "
    "it yield those of its replica."
)


class Entered(nn.Module):
    """Calls a sharded module, which gathers parameters then.

    Fabric takes another object than the module for a wrapper, through whose call it sends methods
    that are marked as forward methods, and names those that are to be marked.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.gathered.in_loop = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with the hooks that gather.

        Without gradients it is sharded again. With them it stays whole until backward, and what a
        loop writes into parameters meanwhile goes into the shards.
        """
        gathered = self.gathered
        if backward_pass() == -1:  # backward calls it once more where a loop recomputes it
            gathered.shard_again()  # after a call that no backward pass followed
        output = self.module(*args, **kwargs)
        gathered.begin()
        if not torch.is_grad_enabled():
            gathered.shard_again()
        return output

    @property
    def gathered(self) -> GatheredParameters:
        """The parameters of the module that are whole at the moment."""
        return self.module.__dict__[GATHERED]


def entered(module: nn.Module) -> nn.Module:
    """Return the module that was set up."""
    return module.module if isinstance(module, Entered) else module


class Shards:
    """Loads the state of an optimizer part by part, in place of `optimizer.load_state_dict`."""

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        self._optimizer, self._module = optimizer, module
        self.state_dict = optimizer.state_dict  # Fabric loads what has both methods

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's parts."""
        load_optimizer_state(self._optimizer, state, self._module)


class Alike:
    """Yields on all ranks the samples in the order that the first rank has drawn."""

    def __init__(self, sampler: Any, broadcast: Callable[[Any], Any]) -> None:
        if not hasattr(sampler, "__len__"):
            raise TypeError(_UNSIZED.format(type(sampler).__name__, "has no length"))
        self._sampler, self._broadcast = sampler, broadcast

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        number = len(self._sampler)
        drawn = list(islice(self._sampler, number + 1))  # one more, at which torch's draw again
        if len(drawn) > number:
            more = f"yields more samples than its length, {number}"
            raise ValueError(_UNSIZED.format(type(self._sampler).__name__, more))
        return iter(self._broadcast(drawn))

    def __reduce__(self) -> Any:
        """Save the user's sampler, where a checkpoint holds its loader."""
        return copy.copy, (self._sampler,)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to a sampler that draws by it."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)


def through(
    loader: DataLoader[Any], batches: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]]
) -> DataLoader[Any]:
    """Return a loader like `loader`, which yields what `batches` makes of its batches."""
    kind = type(loader)

    class Through(kind):
        """Yields what a function makes of the batches of a loader."""

        def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
            return batches(super().__iter__)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Save the user's loader, where a checkpoint holds this one."""
            plain = object.__new__(kind)
            vars(plain).update(vars(self))
            return copy.copy, (plain,)

    found = object.__new__(Through)
    vars(found).update(vars(loader))
    return found
