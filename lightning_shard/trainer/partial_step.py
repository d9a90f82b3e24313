"""Lets ranks without a batch exchange logged numbers with the ranks that run a step.

In the last step of an evaluation some replicas may have no samples left. They run no step, so that
nothing is counted twice. The parameters are whole meanwhile, so that no rank gathers any.

| event | what travels |
| --- | --- |
| a number is logged | a sign, to all ranks; then the number |
| the step ends, or is refused | a sign, to all ranks |

Any other collective of the step would wait for ranks that never come, so it is refused.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.processes.errors import LightningShardError
from lightning_shard.processes.torch_private.internals import DispatchMode, group_of_collective

_END, _LOGGED, _REFUSED = -1, -2, -3


class AbsentRanksError(LightningShardError, RuntimeError):
    """Says that a step communicates with ranks that have no batch for it."""


class PartialStep:
    """A step that some ranks run, and in which the others only exchange numbers.

    Attributes:
        present: The ranks that run it.
    """

    def __init__(self, present: Sequence[bool], device: torch.device) -> None:
        """Describe the step; all ranks do so alike.

        Args:
            present: True for a rank that runs the step, by rank.
            device: The device of this rank's collectives.
        """
        self.present, self._device = [r for r, here in enumerate(present) if here], device
        self._leader = self.present[0]
        self._guard = _RefuseAbsent([rank for rank, here in enumerate(present) if not here])

    @contextmanager
    def run(self) -> Generator[None]:
        """Run the step inside, on a rank that has a batch.

        Raises:
            AbsentRanksError: The step communicates with ranks that have none.
        """
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
        """Exchange what the others log until their step ends, on a rank that has no batch.

        Args:
            exchange_number: Takes part in the exchange of a logged number.

        Raises:
            AbsentRanksError: The step of the others communicates with ranks that have no batch.
        """
        while (event := self._hear()) != _END:
            if event == _REFUSED:
                raise AbsentRanksError(_words(self._guard.absent))
            exchange_number()

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
