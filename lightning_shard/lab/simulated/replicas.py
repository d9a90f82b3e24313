"""Lets the ranks in turns of several processes be ranks of one world.

Each process has as many ranks. Once all ranks of a process wait, it meets the other processes. Each
meeting tells all of them what the ranks have written to the store, and which collectives the ranks
of each process have brought their part to. Collectives that are complete are then computed, in one
order on all processes. So processes need not let their ranks run in the same order.
"""

from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.lab.simulated.across import Processes, compute_across
from lightning_shard.lab.simulated.store import Values
from lightning_shard.lab.simulated.turns import StuckError
from lightning_shard.processes.torch_private.internals import own_world, use_world

Key = tuple[str, tuple[int, ...], int]


@dataclass
class Told:
    """The words of a process at a meeting.

    Attributes:
        begun: Names of the collectives that its ranks wait for, by their keys.
        written: Changes of the store since the last meeting.
        stops: True if its ranks shall end before their next batch.
        looks: True if a rank will look into the store again, whatever it finds.
        has_ended: True if all its ranks have.
        waits: The collectives and values that its ranks wait for, in words.
    """

    begun: dict[Key, str]
    written: list[Any]
    stops: bool
    looks: bool
    has_ended: bool
    waits: str


@dataclass
class _Pending:
    name: str
    brought: dict[int, Any]
    compute: Callable[[list[Any]], None]
    on_host: Callable[[Any], AbstractContextManager[Any]]
    finish: Callable[[], None]


@dataclass
class Replicas:
    """The processes of a run whose ranks take turns.

    It is made where the process group of the processes is torch's default one.

    Attributes:
        ranks: The number of ranks of each process.
        local_process: The number of this process on its node.
        local_processes: The number of processes of this node.
        node: The number of this node.
        values: The store of the ranks.
        wants_to_stop: True if the ranks of all processes shall end before their next batch; set by
            this process.
        all_stop: True once all processes have heard of that, at the same meeting.
    """

    ranks: int
    local_process: int
    local_processes: int
    node: int
    values: Values = field(default_factory=Values)
    wants_to_stop: bool = False
    all_stop: bool = False

    def __post_init__(self) -> None:
        """Find the place of this process."""
        self._world = own_world()
        self.process, self.processes = dist.get_rank(), dist.get_world_size()
        self._pending: dict[Key, _Pending] = {}
        self.values.changes = []

    @property
    def first(self) -> int:
        """The first rank of this process."""
        return self.process * self.ranks

    @property
    def world_size(self) -> int:
        """The number of ranks of all processes."""
        return self.processes * self.ranks

    def become(self, variables: MutableMapping[str, str]) -> range:
        """Set the launcher's variables that ranks of a node have alike; return their places there.

        Args:
            variables: The variables of the environment.
        """
        variables["GROUP_RANK"] = str(self.node)
        variables["LOCAL_WORLD_SIZE"] = str(self.local_processes * self.ranks)
        first = self.local_process * self.ranks
        return range(first, first + self.ranks)

    def process_of(self, rank: int) -> int:
        """Return the process of a rank."""
        return rank // self.ranks

    def own(self, members: Sequence[int]) -> list[int]:
        """Return the ranks of a group that are of this process."""
        return [rank for rank in members if self.process_of(rank) == self.process]

    def pend(
        self,
        key: Key,
        name: str,
        brought: dict[int, Any],
        compute: Callable[[list[Any]], None],
        on_host: Callable[[Any], AbstractContextManager[Any]],
        finish: Callable[[], None],
    ) -> None:
        """Keep a collective to which all ranks of this process have brought their parts.

        Args:
            key: The same on all processes.
            name: The name of the collective.
            brought: Tensors that the ranks brought, by their places in the group.
            compute: The function that computes it where all ranks are of one process.
            on_host: The context that gives tensors as tensors of the host.
            finish: The function that is called once it is computed.
        """
        self._pending[key] = _Pending(name, brought, compute, on_host, finish)

    def meet(self, *, looks: bool, has_ended: bool, waits: str) -> bool:
        """Meet the other processes; return False if the ranks of all of them have ended.

        Raises:
            StuckError: No rank of any process can go on.
            RuntimeError: Ranks call different collectives.
        """
        begun = {key: pending.name for key, pending in self._pending.items()}
        changes, self.values.changes = self.values.changes or [], []
        own = Told(begun, changes, self.wants_to_stop, looks, has_ended, waits)
        with torch.no_grad(), self._world_of_processes():
            all_: list[Any] = [None] * self.processes
            dist.all_gather_object(all_, own)
            for process, told in enumerate(all_):
                if process != self.process:
                    self.values.change(told.written)
            complete = self._complete(all_)
            for key in complete:
                self._compute(key)
        self.all_stop = self.all_stop or any(told.stops for told in all_)
        if all(told.has_ended for told in all_):
            return False
        if not complete and not any(told.written or told.looks for told in all_):
            said = [f"replica {n}: {told.waits or 'has ended'}" for n, told in enumerate(all_)]
            raise StuckError(f"no rank can go on: {'; '.join(said)}.")
        return True

    def _complete(self, all_: list[Told]) -> list[Key]:
        """Return the collectives that all their processes have begun, in one order."""
        found: list[Key] = []
        for key in sorted({key for told in all_ for key in told.begun}):
            processes = sorted({self.process_of(rank) for rank in key[1]})
            names = {n: all_[n].begun[key] for n in processes if key in all_[n].begun}
            first, name = next(iter(names.items()))
            for other, other_name in names.items():
                if other_name != name:
                    raise RuntimeError(
                        f"replica {other} calls {other_name} where replica {first} calls {name}; "
                        "all ranks of a group must call the same collectives in one order."
                    )
            if len(names) == len(processes):
                found.append(key)
        return found

    def _compute(self, key: Key) -> None:
        pending, members = self._pending.pop(key, None), key[1]
        processes = Processes(self.process, [self.process_of(rank) for rank in members])
        if pending is None:  # of other processes, of which a part of the exchange needs this one
            compute_across(processes, {}, None)
            return
        places = sorted(pending.brought)
        with pending.on_host([pending.brought[place] for place in places]) as parts:
            try:
                compute_across(processes, dict(zip(places, parts, strict=True)), pending.compute)
            except RuntimeError as error:
                error.add_note(f"This is {pending.name} of ranks {', '.join(map(str, members))}.")
                raise
        pending.finish()

    @contextmanager
    def _world_of_processes(self) -> Generator[None]:
        """Let torch know the process group of the processes, while open."""
        own = own_world()
        use_world(self._world)
        try:
            yield
        finally:
            use_world(own)
