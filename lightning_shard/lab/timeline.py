"""Records when one rank computes, begins a collective and waits for it; replays it on links.

A step of a rank that runs alone (`simulate`) is a list of events with the seconds of computation
before each. On links these say when each collective ends: it begins when the last of its ranks
brings what it has, and while another one is under way on the same link it waits for that.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Collective:
    """What a rank brings to one collective.

    Attributes:
        name: Such as "all_reduce".
        members: The ranks of its group.
        sent: Bytes that this rank sends.
    """

    name: str
    members: tuple[int, ...]
    sent: int


@dataclass(frozen=True)
class Event:
    """A collective begins, or its result is needed.

    Attributes:
        computed: Seconds of computation since the event before.
        number: Of the collective in the step.
        begins: Whether it begins.
    """

    computed: float
    number: int
    begins: bool


@dataclass
class Timeline:
    """One step of one rank.

    Attributes:
        rank: Which one.
        collectives: In the order in which they begin.
        events: In order.
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
    """

    def __init__(self, rank: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Record the steps of that rank by a clock of its computation, in seconds."""
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
        self._now.collectives.append(Collective(name, members, sent))
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

    def _since(self) -> float:
        before, self._last = self._last, self._clock()
        return self._last - before


@dataclass(frozen=True)
class Cost:
    """Of one collective on a link.

    Attributes:
        busy: Seconds in which the rank itself works for it, and computes nothing.
        link: Seconds in which the link is taken, while ranks may compute.
    """

    busy: float
    link: float


@dataclass
class Replayed:
    """What a step of one rank takes.

    Attributes:
        seconds: The whole step.
        computed: Seconds of computation.
        busy: Seconds of work for collectives that stop the computation.
        waited: Seconds of waiting, by the name of the collective and its number of ranks.
        hidden: Seconds of collectives that passed during computation.
    """

    seconds: float = 0.0
    computed: float = 0.0
    busy: float = 0.0
    waited: dict[tuple[str, int], float] = field(
        default_factory=lambda: defaultdict[tuple[str, int], float](float)
    )
    hidden: float = 0.0


@dataclass
class _Rank:
    """Where a rank is in its step."""

    steps: Timeline
    now: float = 0.0
    next: int = 0
    counted: defaultdict[tuple[int, ...], int] = field(default_factory=lambda: defaultdict(int))
    keys: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # pyright: ignore
    found: Replayed = field(default_factory=Replayed)


class _Met:
    """A collective that some of its ranks have begun."""

    def __init__(self, members: Sequence[int]) -> None:
        self.missing = set(members)
        self.begun, self.end, self.cost = 0.0, 0.0, Cost(0.0, 0.0)


class Replay:
    """Lets the ranks of a mesh go through a step each, on links."""

    def __init__(self, steps: Sequence[Timeline], cost: Callable[[Collective], Cost]) -> None:
        """Choose the steps of the ranks that are known; others do as those that they meet.

        Args:
            steps: One step of each rank that is known.
            cost: What a collective takes.
        """
        self._ranks = {step.rank: _Rank(step) for step in steps}
        self._cost = cost
        self._met: dict[tuple[tuple[int, ...], int], _Met] = {}
        self._free: dict[tuple[int, ...], float] = defaultdict(float)

    def run(self) -> list[Replayed]:
        """What the step takes, of each rank that is known.

        Raises:
            RuntimeError: The ranks call different collectives.
        """
        going = dict(self._ranks)
        while going:
            before = sum(rank.next for rank in going.values())
            for number in sorted(going, key=lambda one: going[one].now):
                self._go_on(number, going[number])
            ended = [n for n, rank in going.items() if rank.next == len(rank.steps.events)]
            if not ended and before == sum(rank.next for rank in going.values()):
                raise RuntimeError("the ranks of this mesh call different collectives.")
            for number in ended:
                rank = going.pop(number)
                rank.now += rank.steps.rest
                rank.found.computed = rank.steps.computed
                rank.found.seconds = rank.now
        return [rank.found for rank in self._ranks.values()]

    def _go_on(self, number: int, rank: _Rank) -> None:
        """Up to a wait for a rank that has not come so far."""
        while rank.next < len(rank.steps.events):
            event = rank.steps.events[rank.next]
            if event.begins:
                rank.now += event.computed
                self._begin(number, rank, rank.steps.collectives[event.number])
            elif not self._wait(rank, event):
                return
            rank.next += 1

    def _begin(self, number: int, rank: _Rank, collective: Collective) -> None:
        members = collective.members
        rank.counted[members] += 1
        key = members, rank.counted[members]
        rank.keys.append(key)
        met = self._met.setdefault(key, _Met([m for m in members if m in self._ranks]))
        cost = self._cost(collective)
        rank.now += cost.busy
        rank.found.busy += cost.busy
        met.missing.discard(number)
        met.begun = max(met.begun, rank.now)
        met.cost = max(met.cost, cost, key=lambda one: one.link)
        if not met.missing:
            begin = max(met.begun, self._free[members])
            met.end = self._free[members] = begin + met.cost.link

    def _wait(self, rank: _Rank, event: Event) -> bool:
        collective = rank.steps.collectives[event.number]
        met = self._met[rank.keys[event.number]]
        if met.missing:
            return False
        rank.now += event.computed
        waited = max(0.0, met.end - rank.now)
        rank.found.waited[collective.name, len(collective.members)] += waited
        rank.found.hidden += max(0.0, met.cost.link - waited)
        rank.now += waited
        return True
