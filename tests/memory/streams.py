"""A device with streams, simulated: finds the races of a program, and runs it in the worst order.

`Machine` lies around a program on CPU tensors, forward and backward. Every kernel that runs is
written down with its stream, and with the memory that it reads and writes. Memory that is freed is
handed out again at once, as the caching allocator does for one stream, so a tensor that is freed
too early meets its successor. Two ways then tell whether streams wait as they must:

- `races`: vector clocks. Two accesses of one place, one of which writes, must be ordered by the
  streams and the events between them. The beginning and the end of a tensor count as kernels of
  the stream that its memory is of, which write it.
- `replayed`: the kernels run anew, on memory that holds garbage first, in any order that streams
  and events allow. A wait that is missing gives wrong numbers.
"""

import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.memory.replay import PLACE_BYTES, Kernel, Order, Part, Spoil, Step, replay, tensors

Clock = dict["Stream", int]
HOST = "host"


@dataclass(frozen=True)
class Event:
    """What a stream had done and waited for when it was recorded."""

    number: int | None
    clock: Clock


class Stream:
    """As torch.Stream: what is asked of it is done in order, and later than it is asked."""

    def __init__(self, machine: "Machine", name: str) -> None:
        self.machine, self.name = machine, name
        self.clock: Clock = defaultdict(int)
        self._outer: list[Stream] = []

    def __repr__(self) -> str:
        return self.name

    def __enter__(self) -> "Stream":
        self._outer.append(self.machine.current)
        self.machine.current = self
        return self

    def __exit__(self, *error: object) -> None:
        self.machine.current = self._outer.pop()

    def record_event(self) -> Event:
        return self.machine.record(self)

    def wait_event(self, event: Event) -> None:
        self.machine.wait(self, event)

    def wait_stream(self, other: "Stream") -> None:
        self.machine.wait(self, self.machine.mark(other))


@dataclass(eq=False)
class Place:
    """A piece of memory, which tensors have one after the other.

    Attributes:
        number: Among all places.
        pool: The stream whose allocations get it, or HOST.
        written: The stream that wrote last, and its count of kernels by then.
        read: The same of each stream that has read since.
        recorded: Streams that must be done before it is handed out again.
    """

    number: int
    pool: Any
    written: tuple[Stream, int] | None = None
    read: Clock = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)


class Machine(TorchDispatchMode):
    """While open, a device of several streams on which every kernel runs.

    Args:
        drop: The numbers of calls that order streams or memory, in order of calling. They are left
            out, as if the program had forgotten them.

    Attributes:
        compute, beside: Streams: of computation, and of copies "out" and "back".
        current: The stream that kernels go to.
        races: What is not ordered, in words.
        calls: For each call that orders streams or memory its kind, and whether it says anything
            that was not so before.
        waits: The stream that is to wait, by the number of the call.
        steps: What the streams were asked.
        held: Places that tensors have now, on the device and on the HOST.
        peak: Places of the device that tensors had at most.
        places: All memory there is.
    """

    def __init__(self, drop: Collection[int] = ()) -> None:
        super().__init__()
        self.compute = self.current = Stream(self, "compute")
        self.beside = {way: Stream(self, way) for way in ("out", "back")}
        self.races: list[str] = []
        self.calls: list[tuple[str, bool]] = []
        self.waits: dict[int, Stream] = {}
        self.steps: list[Step] = []
        self.held, self.peak = Counter[str](), 0
        self._drop = drop
        self._on_host = False  # whether memory that is asked for is of the host
        self.places: list[Place] = []
        self._free: dict[Any, list[Place]] = defaultdict(list)
        self._of: dict[int, Place] = {}  # by the address of the storage of a living tensor
        self._ends: dict[int, weakref.finalize[..., Any]] = {}
        self._given: list[tuple[Part, Tensor]] = []  # what was there before the program
        self._events = itertools.count()
        self._recorded: dict[int | None, int] = {}  # the call that recorded an event

    def mark(self, stream: Stream) -> Event:
        """An event at the end of what the stream was asked."""
        number = next(self._events)
        self.steps.append(Step(stream, records=number))
        return Event(number, dict(stream.clock))

    def record(self, stream: Stream) -> Event:
        """As `mark`, if it is not left out."""
        if self._leaves_out("record_event"):
            return Event(None, {})
        event = self.mark(stream)
        self._recorded[event.number] = len(self.calls) - 1
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Let a stream go on after an event."""
        self.waits[len(self.calls)] = stream
        if self._leaves_out("wait"):
            return
        news = {s: t for s, t in event.clock.items() if t > stream.clock[s]}
        if news:
            self.calls[-1] = "wait", True
            if (by := self._recorded.get(event.number)) is not None:
                self.calls[by] = "record_event", True
        stream.clock.update(news)
        self.steps.append(Step(stream, awaits=event.number))

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Let the memory not be handed out before the stream is done."""
        if not self._leaves_out("record_stream"):
            self.calls[-1] = "record_stream", True
            self._place(tensor).recorded.add(stream)

    def _leaves_out(self, kind: str) -> bool:
        self.calls.append((kind, False))
        return len(self.calls) - 1 in self._drop

    @contextmanager
    def host(self) -> Generator[None]:
        """Let tensors be made in pinned memory of the host."""
        self._on_host = True
        yield
        self._on_host = False

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether it was made there."""
        place = self._of.get(_address(tensor))
        return place is not None and place.pool == HOST

    def replayed(self, order: Order, kept: Iterable[Tensor]) -> list[Tensor]:
        """The values of living tensors, after everything ran anew in another order."""
        memory = replay(self.steps, self._given, len(self.places), order)
        return [self._part(tensor).of(memory).clone() for tensor in kept]

    def _place(self, tensor: Tensor) -> Place:
        """Where a tensor lies; one that was there before the program gets a place of its own."""
        place = self._of.get(_address(tensor))
        if place is None:
            self._add(self.compute)
            place = self._hand_out(tensor, self.compute)
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._given.append((self._part(whole), whole.clone()))
        return place

    def _part(self, tensor: Tensor) -> Part:
        return Part(
            self._place(tensor).number, tensor.dtype, tuple(tensor.shape), tensor.stride(),
            int(tensor.storage_offset()), tensor.is_conj(),
        )  # fmt: skip

    def _add(self, pool: Any) -> None:
        """Memory that nobody has had."""
        self.places.append(Place(len(self.places), pool))
        self._free[pool].append(self.places[-1])

    def allocate(self, tensor: Tensor) -> None:
        """Memory of the current stream; another may have it after what this one did until now."""
        place = self._hand_out(tensor, HOST if self._on_host else self.current)
        self._spoil(place, "the beginning of a tensor")

    def _spoil(self, place: Place, what: str) -> None:
        if place.pool != HOST:  # the host's own allocator asks the streams that copied
            place.pool.clock[place.pool] += 1
            self._write(place, place.pool, what)
            self.steps.append(Step(place.pool, run=Spoil(place.number)))

    def _hand_out(self, tensor: Tensor, pool: Any) -> Place:
        storage, address = tensor.untyped_storage(), _address(tensor)
        assert storage.nbytes() <= PLACE_BYTES, "a tensor is larger than a place of memory"
        if not self._free[pool]:
            self._add(pool)
        place = self._of[address] = self._free[pool].pop()
        self.held[_kind(place)] += 1
        self.peak = max(self.peak, self.held["device"])
        self._ends[address] = weakref.finalize(storage, self._end, address, place)
        self._ends[address].atexit = False
        return place

    def free(self, storage: torch.UntypedStorage) -> None:
        """End the memory of a storage that lives on without any."""
        if (end := self._ends.get(storage.data_ptr())) is not None:
            end()

    def _end(self, address: int, place: Place) -> None:
        """As the caching allocator: the next allocation on the same stream gets it."""
        del self._of[address], self._ends[address]
        self.held[_kind(place)] -= 1
        if place.recorded:  # handed out when they are done, which may be never in this program
            return
        self._spoil(place, "the end of a tensor")
        self._free[place.pool].append(place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, stream = str(func), self.current
        reads = [self._place(t) for t in tensors((args, kwargs))]
        spec = tree_map_only(Tensor, lambda t: self._part(t) if t.numel() else t, (args, kwargs))
        if name == "aten.copy_.default":
            self._check_copy(args[0], args[1])
        result = func(*args, **kwargs)
        made, outs = tensors(result), []
        for number, t in enumerate(made):
            if _address(t) not in self._of:
                self.allocate(t)
                outs.append((number, self._part(t)))
        written = {self.places[part.place] for _, part in outs}
        written |= {self._place(t) for t in _changed(func, args, kwargs)}
        if "empty" in name or not written:
            return result  # memory alone, or a view
        stream.clock[stream] += 1
        for place in {*reads} - written:
            self._read(place, stream, name)
        for place in written:
            self._write(place, stream, name)
        self.steps.append(Step(stream, run=Kernel(func, spec, tuple(outs))))
        return result

    def _read(self, place: Place, stream: Stream, what: str) -> None:
        self._check(place.written, place, stream, f"{what} reads")
        place.read[stream] = stream.clock[stream]

    def _write(self, place: Place, stream: Stream, what: str) -> None:
        for other in (place.written, *place.read.items()):
            self._check(other, place, stream, f"{what} writes")
        place.written, place.read = (stream, stream.clock[stream]), {}

    def _check(
        self, other: tuple[Stream, int] | None, place: Place, stream: Stream, what: str
    ) -> None:
        if other is not None and other[0] is not stream and stream.clock[other[0]] < other[1]:
            self.races.append(
                f"{what} place {place.number} of {place.pool} on {stream}, which does not wait for "
                f"kernel {other[1]} of {other[0]}"
            )

    def _check_copy(self, to: Tensor, source: Tensor) -> None:
        """Between host and device torch copies by one call if both are laid out alike."""
        alike = (to.dtype, to.stride()) == (source.dtype, source.stride())
        if self.is_on_host(to) != self.is_on_host(source) and (
            not alike or source.is_conj() or source.is_neg()
        ):
            self.races.append("a copy from or to the host needs memory in between")


def _kind(place: Place) -> str:
    return HOST if place.pool == HOST else "device"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that a kernel writes, as its schema says."""
    found: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors(args[number] if number < len(args) else kwargs.get(argument.name))
    return found
