"""Runs one job for each tile; where tiles exchange, one hands over to the next.

The first tile runs in the caller's thread. Each other one has a thread of its own, which no code of
a user ever sees. One of them runs at a time. A job that exchanged nothing for the first tile
exchanges nothing for the others, which then run in the caller's thread as well.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from lightning_shard.domain.local_group import Later
from lightning_shard.processes.errors import StuckError
from lightning_shard.tiles.caller_modes import Job, Task
from lightning_shard.tiles.exchange import STUCK, Compute, Exchange
from lightning_shard.tiles.mover import Mover

STACKS_BYTES = 2**26  # for the threads of all tiles together
STACK_BYTES = 2**19, 2**23  # for each thread, at least and at most: libraries of devices need much
T = TypeVar("T")


class TurnsNeededError(StuckError):
    """A job for all tiles at once wants to exchange, for which each tile needs its own turn."""


class _EndedError(BaseException):
    """Ends the job of a tile after that of another one has failed."""


class Crew:
    """Runs the tiles of one device in turns.

    Args:
        tiles: The number of tiles.
        mover: Moves tensors of waiting tiles to other memory; None: they stay.

    Attributes:
        exchanges: The number of values that tiles have brought to exchanges.
        joins: True while the graphs of the tiles may be one: the rule that runs exchanges by
            functions that autograd knows.
        states: States of random generators before each draw of the job.
        draws: The number of draws that each tile has made in the job.
        answers: The decisions of rules of the job that depend on memory.
        asked: The number of answers that each tile was given.
        at_end: The writes that the job leaves for the end of the operation.
    """

    def __init__(self, tiles: int, mover: Mover | None = None) -> None:
        self.tiles, self.exchanges, self.mover = tiles, 0, mover
        self.joins = self._has_met = False
        self.states: list[tuple[torch.Tensor, ...]] = []
        self.draws = [0] * tiles
        self.answers: list[bool] = []
        self.asked = [0] * tiles
        self.at_end: list[Callable[[], None]] = []
        self._wake = [threading.Lock() for _ in range(tiles)]
        for lock in self._wake:
            lock.acquire()
        self._tasks: list[deque[Task]] = [deque() for _ in range(tiles)]
        self._waits: list[Exchange | None] = [None] * tiles
        self._open: dict[Any, Exchange] = {}
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        # whether a job runs for all tiles at once, and whether the first tile exchanged nothing
        self._is_for_all = self._exchanges_none = False
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread of the caller, while a job runs
        _crews.add(self)

    def run(
        self, job: Callable[[int], Any], *, joins: bool = False, reads: int = 0
    ) -> tuple[list[Any], bool, bool]:
        """Run `job(tile)` for each tile, in their order up to what they exchange.

        Args:
            job: Is given the number of a tile; may give back what is there later.
            joins: True if all that the job exchanges may be one graph of all tiles.
            reads: The bytes of the fields that it reads.

        Returns:
            What the job gave for each tile, whether the graphs of the tiles are one now, and
            whether tiles have exchanged else.

        Raises:
            BaseException: The error of the first tile that failed.
            StuckError: Tiles exchange different things.
        """
        with self._as_owner(reads):
            self.joins, self._has_met, self.at_end = joins, False, []
            before, given = self.exchanges, list[Any]([None] * self.tiles)

            def begin(tile: int) -> None:
                given[tile] = job(tile)

            def go_on(tile: int) -> None:
                value = given[tile]
                given[tile] = value.read() if isinstance(value, Later) else value

            try:
                self._run(begin)
                while any(isinstance(value, Later) for value in given):
                    self._run(go_on)
            finally:
                self.joins = False
            return given, self._has_met, self.exchanges > before and not self._has_met

    def run_for_all(self, job: Callable[[], T], reads: int) -> T:
        """Run a job once, which computes for all tiles and exchanges nothing.

        Raises:
            TurnsNeededError: It exchanges something.
        """
        with self._as_owner(reads):
            self._is_for_all = True
            try:
                return job()
            finally:
                self._is_for_all = False

    @contextmanager
    def _as_owner(self, reads: int) -> Generator[None]:
        """Let this thread run the tiles."""
        if self._owner == threading.get_ident():
            raise RuntimeError(
                "an operation on fields in tiles was called by code that runs within another one; "
                "a rule is given the parts of one tile."
            )
        with self._lock:  # several threads of the caller take turns
            self._owner = threading.get_ident()
            try:
                with nullcontext() if self.mover is None else self.mover.seeing(reads):
                    yield
            finally:
                self._owner = None

    def _run(self, job: Job) -> None:
        before = self.exchanges
        self.states, self.draws = [], [0] * self.tiles
        self.answers, self.asked = [], [0] * self.tiles
        task = Task(job)
        for tasks in self._tasks[1:]:
            tasks.append(task)
        try:
            job(0)
            if self.exchanges == before:
                self._exchanges_none = True
                for tile in range(1, self.tiles):
                    self._tasks[tile].clear()
                    job(tile)
            else:
                self._finish()
        except BaseException as error:
            self._end_all(error)
            raise
        finally:
            self._exchanges_none = False

    def meet(
        self,
        members: tuple[int, ...],
        place: int,
        value: Any,
        compute: Compute,
        kind: str,
        *,
        has_graph: bool = False,
    ) -> Any:
        """Bring a value, let the others go on until all have, and return what this member gets.

        Args:
            members: The tiles of the group.
            place: The member that calls.
            value: Its value.
            compute: A function from the values of all members to the result of each.
            kind: The name of the exchange.
            has_graph: True if the results have a graph, where gradients are wanted.

        Raises:
            StuckError: The tiles exchange different things.
            TurnsNeededError: A job for all tiles at once cannot wait for the others.
        """
        if self._is_for_all:
            raise TurnsNeededError
        if self._exchanges_none:
            raise StuckError(STUCK)
        self.exchanges += 1
        exchange, tile = self._brought(members, place, value, kind), members[place]
        if not exchange.missing:
            self._compute(exchange, compute, has_graph=has_graph)
        self._waits[tile] = exchange
        try:
            while exchange.missing:
                self._let_others_run(tile)
        finally:
            self._waits[tile] = None
        return exchange.result_of(place)

    def bring_early(
        self,
        members: tuple[int, ...],
        place: int,
        value: Any,
        compute: Compute,
    ) -> Later[Any]:
        """Bring a value for the last exchange of a rule, whose results have a graph.

        The tile's job ends without them, and is ended by `run` once all tiles have come so far.
        """
        exchange = self._brought(members, place, value, "together")
        if not exchange.missing:
            self._compute(exchange, compute, has_graph=True)
        return Later(lambda: exchange.result_of(place))

    def _brought(self, members: tuple[int, ...], place: int, value: Any, kind: str) -> Exchange:
        """Bring the value of a member to the exchange of its group, which the first one opens."""
        exchange = self._open.setdefault(members, Exchange(members, kind))
        exchange.bring(place, value, kind)
        if not exchange.missing:
            del self._open[members]
        return exchange

    def _compute(self, exchange: Exchange, compute: Compute, *, has_graph: bool) -> None:
        records = has_graph and torch.is_grad_enabled()
        self._has_met = self._has_met or records
        exchange.compute(compute, None if has_graph else self.mover, records=records)

    # ---- turns

    def _let_others_run(self, tile: int) -> None:
        following = self._following(tile)
        if following is None:
            raise StuckError(STUCK)
        self._switch(tile, following)
        if self._failure is not None:
            raise self._failure if tile == 0 else _EndedError

    def _finish(self) -> None:
        """Let the others end their jobs, after the first tile has ended its own."""
        while (following := self._following(0)) is not None:
            self._switch(0, following)
            if self._failure is not None:
                raise self._failure

    def _following(self, tile: int) -> int | None:
        """Return the next tile that can go on; after a failure all that wait can, to end."""
        for step in range(1, self.tiles):
            other = (tile + step) % self.tiles
            exchange = self._waits[other]
            if exchange is not None:
                if not exchange.missing or (self._failure is not None and other):
                    return other
            elif self._tasks[other]:
                return other
        return None

    def _switch(self, tile: int, following: int) -> None:
        """Hand over, and wait until this tile has its turn again."""
        self._begin_threads()
        self._wake[following].release()
        if tile:
            self._wake[tile].acquire()
            return
        while True:
            try:
                self._wake[0].acquire()
                return
            except BaseException as error:  # Ctrl-C: the tile that runs goes on to where it waits
                self._failure = self._failure or error

    def _begin_threads(self) -> None:
        if not self._threads:
            least, most = STACK_BYTES
            before = threading.stack_size(min(most, max(least, STACKS_BYTES // self.tiles)))
            for tile in range(1, self.tiles):
                thread = threading.Thread(
                    target=_work, args=(weakref.ref(self), tile, self._wake[tile]), daemon=True
                )
                thread.name = f"tile {tile}"
                self._threads.append(thread)
                thread.start()
            threading.stack_size(before)

    def work(self, tile: int) -> None:
        """Run what waits for a tile, in its thread, and hand over."""
        while self._tasks[tile]:
            task = self._tasks[tile].popleft()
            try:
                task.run(tile)
            except _EndedError:
                pass  # the error is told by the tile that failed
            except BaseException as error:
                self._fail(error)
        following = self._following(tile)
        if following is None and self._waits[0] is not None and self._waits[0].missing:
            self._fail(StuckError(STUCK))
            following = self._following(tile)
        following = following or 0
        self._wake[following].release()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        for tasks in self._tasks:
            tasks.clear()

    def _end_all(self, error: BaseException) -> None:
        """End the jobs of all other tiles after one has failed."""
        self._fail(error)
        self._waits[0] = None
        while (following := self._following(0)) is not None:
            self._switch(0, following)
        self._open.clear()
        self._failure = None

    def close(self) -> None:
        """End the threads."""
        if self._threads and self._owner is None:
            threads, self._threads = self._threads, []
            for lock in self._wake[1:]:
                lock.release()
            for thread in threads:
                thread.join()

    def forget_threads(self) -> None:
        """Begin without threads, in the fork of a process."""
        self._threads, self._owner = [], None
        self._lock = threading.Lock()
        self._waits = [None] * self.tiles
        self._open.clear()
        for tasks in self._tasks:
            tasks.clear()

    def __del__(self) -> None:
        """Wake the threads, which end as they are no longer those of the tiles.

        A weak reference still gives the object that is just deleted.
        """
        threads, self._threads = self._threads, []
        for lock in self._wake[1 : len(threads) + 1]:
            lock.release()


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


def _work(crew_ref: "weakref.ref[Crew]", tile: int, wake: Any) -> None:
    """Run the thread of a tile until its crew is closed or gone."""
    torch.set_num_threads(torch.get_num_threads())  # each thread of OpenMP has a number of its own
    torch.autograd.set_multithreading_enabled(False).__enter__()
    while True:
        wake.acquire()
        crew = crew_ref()
        if crew is None or threading.current_thread() not in crew._threads:  # pyright: ignore
            return
        crew.work(tile)
        del crew


def _after_fork() -> None:
    for crew in list(_crews):
        crew.forget_threads()


os.register_at_fork(after_in_child=_after_fork)
