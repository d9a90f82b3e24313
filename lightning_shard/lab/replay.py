"""Lets ranks go through their timelines on links: when does each collective end?

A collective begins when the last of its ranks brings its part. While another one is under way on
the same link it waits for that.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_shard.lab.machine import Collective, Cost
from lightning_shard.lab.timeline import Event, Timeline


@dataclass
class Replayed:
    """The time of one rank's step, by what it does.

    Attributes:
        seconds: Seconds of the whole step.
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
    """The place that a rank has reached in its step."""

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
        """Choose the steps of the ranks that are known; others do as those that they meet."""
        self._ranks = {step.rank: _Rank(step) for step in steps}
        self._cost = cost
        self._met: dict[tuple[tuple[int, ...], int], _Met] = {}
        self._free: dict[tuple[int, ...], float] = defaultdict(float)

    def run(self) -> list[Replayed]:
        """Return the times of the step for each rank that is known.

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
        """Go on up to a wait for a rank that has not come so far."""
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
