"""Lets ranks without a batch gather blocks together with the ranks that run a step.

A forward pass gathers each block over all ranks. In the last step of an evaluation some replicas
may have no samples left. They run no step, so that nothing is counted twice, but they gather the
same blocks: before each gather the first rank that runs the step says which block comes next.

| event | what travels |
| --- | --- |
| a block is gathered | its number, to all ranks; then its shards, as in every step |
| a number is logged | a sign, to all ranks; then the number |
| the step ends, or is refused | a sign, to all ranks |

Any other collective of the step would wait for ranks that never come, so it is refused.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard.fsdp.same_blocks import NamedGather
from lightning_shard.fsdp.shard_block import sharded_modules
from lightning_shard.processes.errors import LightningShardError
from lightning_shard.processes.torch_private.internals import (
    DispatchMode,
    gather_of,
    group_of_collective,
    parameter_groups,
)

_END, _LOGGED, _REFUSED = -1, -2, -3


class AbsentRanksError(LightningShardError, RuntimeError):
    """Says that a step communicates with ranks that have no batch for it."""


class JoinedStep:
    """A step that some ranks run, and in which the others only gather blocks.

    Attributes:
        present: The ranks that run it.
    """

    def __init__(
        self, modules: Iterable[nn.Module], present: Sequence[bool], device: torch.device
    ) -> None:
        """Describe the step; all ranks do so alike.

        Args:
            modules: The modules whose blocks may be gathered, in the same order on all ranks.
            present: True for a rank that runs the step, by rank.
            device: The device of this rank's collectives.
        """
        found = dict.fromkeys(block for module in modules for block in sharded_modules(module))
        self._blocks = [(b, gather) for b in found if (gather := _named_gather(b)) is not None]
        self.present, self._device = [r for r, here in enumerate(present) if here], device
        self._leader = self.present[0]
        self._guard = _RefuseAbsent([rank for rank, here in enumerate(present) if not here])

    @contextmanager
    def run(self) -> Generator[None]:
        """Run the step inside, on a rank that has a batch.

        Raises:
            AbsentRanksError: The step communicates with ranks that have none.
        """
        with ExitStack() as stack:
            for number, (_, gather) in enumerate(self._blocks):
                gather.announced = partial(self._announced, number)
                stack.callback(setattr, gather, "announced", gather.not_announced)
            try:
                with self._guard:
                    yield
            except AbsentRanksError:
                self._say(_REFUSED)
                raise
            self._say(_END)

    def logs_number(self) -> Any:
        """Return a context in which all ranks exchange a logged number."""
        return self._announced(_LOGGED)

    @torch.no_grad()
    def join(self, exchange_number: Callable[[], None]) -> None:
        """Gather what the others gather until their step ends, on a rank that has no batch.

        Args:
            exchange_number: Takes part in the exchange of a logged number.

        Raises:
            AbsentRanksError: The step of the others communicates with ranks that have no batch.
        """
        while (event := self._hear()) != _END:
            if event == _REFUSED:
                raise AbsentRanksError(_words(self._guard.absent))
            if event == _LOGGED:
                exchange_number()
            else:
                block = self._blocks[event][0]
                block.unshard()
                block.reshard()

    @contextmanager
    def _announced(self, event: int) -> Generator[None]:
        self._guard.allows, before = True, self._guard.allows
        try:
            self._say(event)
            yield
        finally:
            self._guard.allows = before

    def _say(self, event: int) -> None:
        dist.broadcast(torch.tensor([event], device=self._device), self._leader)

    def _hear(self) -> int:
        event = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.broadcast(event, self._leader)
        return int(event)


def _named_gather(block: FSDPModule) -> NamedGather | None:
    found = [gather_of(group) for group in parameter_groups(block)]
    return next((gather for gather in found if isinstance(gather, NamedGather)), None)


class _RefuseAbsent(DispatchMode):
    """Refuses collectives over ranks that do not run the step."""

    def __init__(self, absent: list[int]) -> None:
        super().__init__()
        self.absent, self.allows = absent, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self.allows and func.namespace in ("c10d", "_c10d_functional"):
            group = group_of_collective([*args, *(kwargs or {}).values()])
            ranks = [] if group is None else dist.get_process_group_ranks(group)
            if waited_for := [rank for rank in self.absent if rank in ranks]:
                raise AbsentRanksError(_words(waited_for))
        return func(*args, **(kwargs or {}))


def _words(ranks: Sequence[int]) -> str:
    return (
        f"this step communicates with the ranks {ranks}, which have no samples left for it, since "
        "data replicas do not divide the number of samples; communicate in "
        "on_validation_epoch_end or on_test_epoch_end, or let replicas repeat samples as Lightning "
        "does: Trainer(callbacks=[lightning_shard.RepeatSamples()])."
    )
