"""Keeps account of one rank's training step: seconds, bytes of memory, and collectives.

A `Ledger` is given each operation of a rank that runs alone, and adds up what a device would take.
A `Recorder` listens to the same rank and writes a `Timeline`: a list of events with the seconds of
computation before each.
"""

import time
import weakref
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch import Tensor, UntypedStorage

from lightning_shard.lab.kernel_costs import NO_KERNEL, ByRates, Call, Costs
from lightning_shard.lab.machine import PCIE_4, Collective, Device
from lightning_shard.memory.paging.pager import SMALL_BYTES
from lightning_shard.processes.torch_private.internals import key_of_storage, storage_key

# bytes a second each way between device and host, in practice: about three quarters of data sheets
HOST_RATES = {"PCIe 4": PCIE_4, "PCIe 5": 2 * PCIE_4, "NVLink-C2C": 12 * PCIE_4}
SPLIT_HOST = 1.75  # times the host's time of an operator: 1.55 to 2.1 with 4 networks on GPUs


@dataclass(frozen=True)
class Peak:
    """The moment at which a step holds most memory.

    Attributes:
        bytes: The memory that is held.
        place: The part of the step that computes then, in words.
        causes: The bytes by their cause, such as "activations".
    """

    bytes: int = 0
    place: str = ""
    causes: dict[str, int] = field(default_factory=dict[str, int])


@dataclass
class _Memory:
    """The memory that some tensors share.

    Attributes:
        sizes: Pairs of the number of an operation, and the bytes from then on.
        cause: The reason for which it is held; "" if unknown.
        of: The storage, if it can be resized.
        away: The bytes that lie on the host.
        is_copied: True if the host has a copy that nobody has written since.
        used: The operation that used it last.
    """

    sizes: list[tuple[int, int]]
    cause: str = ""
    of: Any = None
    away: int = 0
    is_copied: bool = False
    used: int = 0

    def at(self, operation: int) -> int:
        place = bisect(self.sizes, operation, key=itemgetter(0))
        return self.sizes[place - 1][1] if place else 0


_ONCE = ("parameters", "gradients", "optimizer")  # one for all ranks that take turns


class Ledger:
    """Adds up the seconds and the memory of operations.

    Attributes:
        seconds: The time of all operations so far, on the device.
        in_turns: The number of ranks that take turns on one device; 0: each has its own.
        operations: The number of operations in this step.
        place: The part of the step that computes now, in words; set from outside.
        out: Bytes that this rank has sent to the host in this step.
        back: Bytes that it has brought back.
        on_host: The most bytes that it had there; set from outside unless ranks take turns.
        waited: Seconds of this step in which the device waited for copies.
        received: Seconds of them in which it waited for the batch.
        is_split: True if the step computes on split fields.
    """

    def __init__(
        self,
        device: Device | None,
        in_turns: int = 0,
        budget: int = 0,
        costs: Costs | None = None,
    ) -> None:
        """Begin with an empty ledger.

        Args:
            device: The device whose seconds are counted; None: no seconds are.
            in_turns: The number of ranks that take turns on one device; 0: each has its own.
            budget: Bytes that all of them together may keep there between their turns.
            costs: Tells what kernels take; None: the rates of the device do.
        """
        self._costs = costs or (None if device is None else ByRates(device))
        self.seconds = 0.0
        self.place = ""
        self.out = self.back = self.on_host = 0
        self.waited = self.received = self._host = 0.0
        self.is_split = False
        self._workspace = self._workspace_at_peak = 0
        self._device, self.in_turns, self._budget = device, in_turns, budget
        self._live: dict[int, _Memory] = {}
        self._resized: dict[int, _Memory] = {}  # memory that FSDP2 gives back and takes again
        self._all: list[_Memory] = []  # all memory of this step
        self._held = self.operations = self._peak_at = self._most = 0
        self._waiting = self._waiting_at_peak = 0  # bytes of other ranks that stay on the device
        self._peak_place = ""

    def next_step(self) -> None:
        """Begin a step, and forget the one before."""
        self.operations = self._peak_at = self._most = self._waiting = self._waiting_at_peak = 0
        self.out = self.back = self.on_host = 0
        self.waited = self.received = 0.0
        if self._costs is not None:
            self._costs.begin_step()
        self.synchronize()
        self._ask(0.0 if self._device is None else self._device.per_step)
        self._all = list(self._live.values())
        for memory in self._all:
            memory.sizes = [(0, memory.sizes[-1][1])]
            memory.cause = memory.cause if memory.cause == "gathered" else ""

    @property
    def peak(self) -> Peak:
        """The moment at which this step held most so far."""
        causes = Counter[str]()
        for memory in self._all:
            causes[memory.cause or "temporary"] += memory.at(self._peak_at)
        causes["waiting"] = self._waiting_at_peak
        causes["workspaces"] = self._workspace_at_peak
        return Peak(self._most, self._peak_place, {k: v for k, v in causes.items() if v})

    @property
    def free(self) -> int:
        """The bytes that the device has left now; 0 without a device."""
        return 0 if self._device is None else max(0, self._device.memory - self._held)

    @property
    def is_of_gpu(self) -> bool:
        """Return whether the step would run on a device beside the host."""
        return self._device is not None and self._device.is_beside_host

    def held(self, cause: str) -> int:
        """Return the bytes that are held for a cause now."""
        own = (each for each in self._live.values() if each.cause == cause)
        return sum(each.sizes[-1][1] + each.away for each in own)

    def hold(self, tensors: Iterable[Tensor], cause: str) -> None:
        """Count the memory of tensors for a cause, unless it is held for another one already."""
        for x in tensors:
            memory = self._see(x)
            memory.cause = memory.cause or cause
            if cause in _ONCE:
                self._bring(memory)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count the memory of tensors no more, since a real run would not hold them."""
        for x in tensors:
            self._resize(self._see(x), 0, self.operations)

    @property
    def _host_rate(self) -> float:
        return PCIE_4 if self._device is None else self._device.host_rate

    def carry(self, count: int, way: str) -> float:
        """Count bytes that go to the host ("out") or "back"; return the seconds that they take."""
        if way == "out":
            self.out += count
        else:
            self.back += count
        return count / self._host_rate

    def receive(self, tensors: Iterable[Tensor]) -> None:
        """Let the host wait until it has copied a batch to a device beside it."""
        if self._device is not None and self._device.is_beside_host:
            self.received = sum(x.nbytes for x in tensors) / self._device.batch_rate
            self.wait_until(self.seconds + self.received)
            self.synchronize()

    def synchronize(self) -> None:
        """Let the host wait for the device."""
        self._host = self.seconds = max(self._host, self.seconds)

    def wait_until(self, moment: float) -> None:
        """Let the device wait for a copy that ends then."""
        waited = max(0.0, moment - self.seconds)
        self.seconds += waited
        self.waited += waited

    def resize(self, storage: UntypedStorage, size: int) -> None:
        """Let a storage have its bytes on the device, or none there while the host has them."""
        memory = self._live[key_of_storage(storage)]
        memory.away = 0 if size else memory.sizes[-1][1]
        self._resize(memory, size, self.operations)

    def hand_over(self) -> None:
        """Let what this rank holds lie on the host, as its turn on the device ends.

        Small storages stay, and what was used last as far as the budget goes. These are there for
        all ranks. Parameters, gradients and the optimizer's states are there once.
        """
        self._waiting, room = 0, self._budget // max(1, self.in_turns)
        own = (memory for memory in self._live.values() if memory.cause not in _ONCE)
        for memory in sorted(own, key=lambda memory: -memory.used):
            size = memory.sizes[-1][1]
            if size < SMALL_BYTES or size <= room:
                room -= size
                self._waiting += size * (self.in_turns - 1)
                continue
            self.out += 0 if memory.is_copied else size
            memory.away, memory.is_copied = size, True
            self._resize(memory, 0, self.operations + 1)
        self.on_host = max(self.on_host, sum(each.away for each in self._live.values()))

    def _bring(self, memory: _Memory) -> None:
        if memory.away:
            self.back += memory.away
            self._resize(memory, memory.away, self.operations)
            memory.away = 0

    def note(self, operator: Any, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> None:
        """Count one operation."""
        self.operations += 1
        made = [x for x in (out if isinstance(out, list | tuple) else [out]) if _is_tensor(x)]
        known = {storage_key(x) for x in given}
        of_fsdp = operator.namespace == "fsdp"
        writes = "out" in kwargs or operator.overloadpacket.__name__.endswith("_")
        written = {storage_key(x) for x in made} if writes else set[int]()
        for x in (*given, *made):
            memory = self._see(x)
            memory.used = self.operations
            if self.in_turns:
                self._bring(memory)
                memory.is_copied = memory.is_copied and storage_key(x) not in written
            if of_fsdp and memory.cause in ("", "gathered"):
                memory.cause, memory.of = "gathered", weakref.ref(x.untyped_storage())
                memory.is_copied = False
                self._resized[storage_key(x)] = memory
        besides = 0
        if writes or any(storage_key(x) not in known for x in made):
            besides = self._compute(Call(operator, args, kwargs, out, [*given, *made]))
        self._count_resized(all_of_them=of_fsdp)
        held = self._held + self._waiting + self._workspace + besides
        if held > self._most:
            self._most, self._waiting_at_peak = held, self._waiting
            self._workspace_at_peak = self._workspace + besides
            self._peak_at, self._peak_place = self.operations, self.place

    def _see(self, x: Tensor) -> _Memory:
        key = storage_key(x)
        found = self._live.get(key)
        if found is None:
            storage = x.untyped_storage()
            found = self._live[key] = _Memory([(self.operations, storage.nbytes())])
            self._all.append(found)
            self._held += storage.nbytes()
            weakref.finalize(storage, self._forget, key)
        return found

    def _forget(self, key: int) -> None:
        memory = self._live.pop(key)
        self._resized.pop(key, None)
        self._resize(memory, 0, self.operations + 1)

    def _count_resized(self, *, all_of_them: bool) -> None:
        """Read the sizes of resizable storages again.

        Empty ones can only have grown just before an operation of FSDP2.
        """
        for memory in self._resized.values():
            if all_of_them or memory.sizes[-1][1] or memory.away:
                storage = memory.of()
                size = 0 if storage is None else storage.nbytes()
                if memory.away:  # it waits on the host, until FSDP2 frees it
                    memory.away = size
                else:
                    self._resize(memory, size, self.operations)

    def _resize(self, memory: _Memory, size: int, operation: int) -> None:
        before = memory.sizes[-1][1]
        if size != before:
            self._held += size - before
            memory.sizes.append((operation, size))

    def _compute(self, call: Call) -> int:
        """Count the seconds of an operation; return the bytes that its kernel takes besides.

        A device computes while the host asks for what follows; a CPU is the host.
        """
        device, costs = self._device, self._costs
        if device is None or costs is None or call.name in NO_KERNEL:
            return 0
        if call.is_product:
            self._workspace = device.workspace
        self._ask(device.per_operator * (SPLIT_HOST if self.is_split else 1.0))
        cost = costs.cost(call, self._see)
        self.seconds += cost.seconds
        return cost.workspace

    def _ask(self, seconds: float) -> None:
        """Let the host work; what it asks a device for then begins no earlier."""
        self._host += seconds
        self.seconds = max(self.seconds, self._host) if self.is_of_gpu else self.seconds + seconds


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


@dataclass(frozen=True)
class Event:
    """The moment at which a collective begins, or at which its result is needed.

    Attributes:
        computed: Seconds of computation since the event before.
        number: The number of the collective in the step.
        begins: True if the collective begins.
    """

    computed: float
    number: int
    begins: bool


@dataclass
class Timeline:
    """One step of one rank.

    Attributes:
        rank: The number of the rank.
        collectives: Its collectives, in the order in which they begin.
        events: Its events in order.
        rest: Seconds of computation after the last event.
    """

    rank: int
    collectives: list[Collective] = field(default_factory=list[Collective])
    events: list[Event] = field(default_factory=list[Event])
    rest: float = 0.0

    @property
    def computed(self) -> float:
        """Seconds of computation of the whole step."""
        return sum(event.computed for event in self.events) + self.rest


class Recorder:
    """Listens to a rank that runs alone.

    Attributes:
        steps: The timelines of the steps so far.
        named: A name for the collectives that begin, in the place of torch's; None: torch's.
    """

    def __init__(
        self,
        rank: int,
        clock: Callable[[], float] = time.perf_counter,
        at_wait: Callable[[], None] | None = None,
    ) -> None:
        """Record the steps of a rank.

        Args:
            rank: Its number.
            clock: Returns the seconds of its computation so far.
            at_wait: A function that is called where it waits for other ranks.
        """
        self._at_wait = at_wait
        self.named: str | None = None
        self.steps: list[Timeline] = []
        self._rank, self._clock = rank, clock
        self._now = Timeline(rank)
        self._last = clock()
        self._ended = set[int]()

    def cut(self) -> None:
        """End a step, and begin the next."""
        self._now.rest += self._since()
        self.steps.append(self._now)
        self._now, self._ended = Timeline(self._rank), set()

    def begins(self, name: str, members: tuple[int, ...], sent: int) -> int:
        """Note that a collective begins; see `Listener`."""
        number = len(self._now.collectives)
        self._now.collectives.append(Collective(self.named or name, members, sent))
        self._now.events.append(Event(self._since(), number, begins=True))
        return number

    def is_under_way(self) -> None:
        """Leave out what the answer to a collective took."""
        self._last = self._clock()

    def waits(self, number: int) -> None:
        """Note that a result is needed, once for each collective of this step."""
        if number < len(self._now.collectives) and number not in self._ended:
            self._ended.add(number)
            self._now.events.append(Event(self._since(), number, begins=False))
            if self._at_wait is not None:
                self._at_wait()

    def _since(self) -> float:
        before, self._last = self._last, self._clock()
        return self._last - before
