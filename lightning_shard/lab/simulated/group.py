"""A process group whose ranks take turns in one process.

A collective is computed by the rank that comes last, while the others wait: in `wait` of what the
collective returned, so that a rank may begin several before it waits for one.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_shard.lab.simulated import collectives
from lightning_shard.lab.simulated.turns import Turns

# torch documents how to subclass neither; its signatures have changed between releases
_AnyWork: Any = dist.Work
_AnyGroup: Any = dist.ProcessGroup


@dataclass
class _Collective:
    """One collective of a group, with what the ranks have brought so far."""

    name: str
    brought: dict[int, Any] = field(default_factory=dict[int, Any])
    done: bool = False


class OpenCollectives:
    """All collectives of a simulation that have begun and have not ended.

    Attributes:
        turns: The ranks.
    """

    def __init__(self, turns: Turns) -> None:
        """Begin without any, of these ranks."""
        self.turns = turns
        self._open: dict[Any, _Collective] = {}
        self._sent = defaultdict[Any, list[tuple[_Collective, list[Tensor]]]](list)
        self._wanted = defaultdict[Any, list[tuple[_Collective, list[Tensor]]]](list)

    def bring(
        self, key: Any, group: Sequence[int], place: int, name: str, data: Any, compute: Any
    ) -> _Collective:
        """Bring the data of the rank at `place` of the group to its next collective, `key`."""
        met = self._open.setdefault(key, _Collective(name))
        if met.name != name:
            others = ", ".join(str(group[other]) for other in met.brought)
            raise RuntimeError(
                f"rank {group[place]} calls {name} where rank {others} of its group called "
                f"{met.name}; all ranks of a group must call the same collectives in one order."
            )
        met.brought[place] = data
        if len(met.brought) < len(group):
            return met
        del self._open[key]
        with torch.no_grad():
            try:
                compute([met.brought[other] for other in range(len(group))])
            except RuntimeError as error:
                error.add_note(f"This is {name} of ranks {', '.join(map(str, group))}.")
                raise
        met.brought.clear()
        met.done = True
        return met

    def pass_on(self, key: Any, tensors: list[Tensor], *, sends: bool) -> _Collective:
        """Send to a rank, or receive from it: the n-th send meets the n-th receive of one key."""
        met = _Collective("send" if sends else "recv")
        (self._sent if sends else self._wanted)[key].append((met, tensors))
        while self._sent[key] and self._wanted[key]:
            (given, parts), (taken, places) = self._sent[key].pop(0), self._wanted[key].pop(0)
            with torch.no_grad():
                for part, place in zip(parts, places, strict=True):
                    collectives.put(part, place)
            given.done = taken.done = True
        return met


class Handle(_AnyWork):
    """A collective that was called, whose results are there once `wait` returns."""

    def __init__(self, result: Any) -> None:
        """Keep the results, which the collective fills in."""
        super().__init__()
        self._result = result

    def synchronize(self) -> None:
        """Wait for the results."""
        self.wait()

    def result(self) -> Any:
        """Return the results."""
        return self._result

    def get_future(self) -> Any:
        """Wait for the results, and return a future that has them."""
        self.wait()
        future = Future[Any]()
        future.set_result(self._result)
        return future


class _Work(Handle):
    """A collective that has begun."""

    def __init__(
        self, rank: int, met: _Collective, what: str, open_ones: OpenCollectives, result: Any
    ) -> None:
        super().__init__(result)
        self._rank, self._met, self._what, self._open_ones = rank, met, what, open_ones

    def wait(self, timeout: Any = None) -> bool:
        self._open_ones.turns.wait(self._rank, lambda: self._met.done, self._what)
        return True

    def is_completed(self) -> bool:
        if not self._met.done:
            self._open_ones.turns.give_way(self._rank)  # to those whom a loop would wait for
        return self._met.done

    def is_success(self) -> bool:
        return self._met.done


class SimulatedGroup(_AnyGroup):
    """A process group of simulated ranks."""

    def __init__(
        self, name: str, members: Sequence[int], place: int, open_ones: OpenCollectives
    ) -> None:
        """Begin the group.

        Args:
            name: The name by which torch knows the group; the same on all its ranks.
            members: The ranks of the group, in its order.
            place: The place of this rank among them.
            open_ones: The collectives of the simulation.
        """
        super().__init__(place, len(members))
        self._name, self._members, self._place = name, tuple(members), place
        self._open_ones, self._begun = open_ones, 0

    def _bring(
        self,
        name: str,
        data: Any,
        compute: Callable[[list[Any]], None],
        result: Any = None,
    ) -> Any:
        self._begun += 1
        key = self._name, self._members, self._begun
        met = self._open_ones.bring(key, self._members, self._place, name, data, compute)
        what = f"{name} of ranks {', '.join(map(str, self._members))}"
        return self._work(met, what, result)

    def _work(self, met: _Collective, what: str, result: Any) -> Any:
        rank = self._members[self._place]
        return _Work(rank, met, what, self._open_ones, result)

    def __deepcopy__(self, memo: Any) -> "SimulatedGroup":
        """Return the group itself, to which a Trainer's next stage may still point."""
        return self

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._members)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return a name of the backend, by which torch treats all devices alike."""
        return "threaded"

    def _get_backend(self, device: torch.device) -> Any:
        """Return what torch asks for coalescing and splitting, neither of which is here."""
        return self

    @property
    def group_name(self) -> Any:
        """The name under which torch knows the group."""
        return self._name

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce tensors over the ranks, in place."""
        tensors, op = _listed(tensors), _reduction(opts)
        return self._bring("all_reduce", tensors, partial(collectives.all_reduce, op=op), tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, root: Any, op: Any = None, timeout: Any = None) -> Any:
        """Reduce tensors over the ranks, into those of one rank."""
        root, op = (root.rootRank, root.reduceOp) if hasattr(root, "rootRank") else (root, op)
        compute = partial(collectives.reduce_to, op=op, root=root)
        return self._bring("reduce", _listed(tensors), compute, tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Copy the tensors of one rank to the others."""
        tensors, root = _listed(tensors), getattr(opts, "rootRank", opts)
        return self._bring("broadcast", tensors, partial(collectives.broadcast, root=root), tensors)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Give each rank the tensors of all."""
        data = _listed(input_tensors)[0], _inner(output_tensors)
        return self._bring("all_gather", data, collectives.all_gather, output_tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002
        """Give each rank the tensors of all, joined to one."""
        compute = collectives.all_gather_single
        return self._bring("all_gather_single", (input, output), compute, output)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather several tensors, one after the other."""
        works = [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)]
        return _all_of(works)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Reduce lists of tensors, and give each rank one of the results."""
        data = _inner(input_tensors), _listed(output_tensors)[0]
        compute = partial(collectives.reduce_scatter, op=_reduction(opts))
        return self._bring("reduce_scatter", data, compute, output_tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002
        """Reduce tensors, and give each rank its part of the result."""
        compute = partial(collectives.reduce_scatter_single, op=_reduction(opts))
        return self._bring("reduce_scatter_single", (input, output), compute, output)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce and scatter several tensors, one after the other."""
        pairs = zip(outputs, inputs, strict=True)
        return _all_of([self.reduce_scatter_single(*pair, opts) for pair in pairs])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        opts: Any = None,
    ) -> Any:
        """Exchange parts of one tensor between all ranks."""
        data = input, output, list(input_split_sizes or ()), list(output_split_sizes or ())
        return self._bring("all_to_all_single", data, collectives.all_to_all_single, output)

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Exchange lists of tensors between all ranks."""
        data = list(input_tensors), list(output_tensors)
        return self._bring("all_to_all", data, collectives.all_to_all, output_tensors)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Any:
        """Give each rank one of the tensors of one rank."""
        data = _inner(input_tensors), _listed(output_tensors)[0]
        compute = partial(collectives.scatter, root=opts.rootRank)
        return self._bring("scatter", data, compute, output_tensors)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Any:
        """Give one rank the tensors of all."""
        data = _listed(input_tensors)[0], _inner(output_tensors)
        compute = partial(collectives.gather, root=opts.rootRank)
        return self._bring("gather", data, compute, output_tensors)

    def barrier(self, opts: Any = None) -> Any:
        """Wait until all ranks are here."""
        return self._bring("barrier", None, collectives.nothing)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all; the turns say who is missing."""
        self.barrier().wait()

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send tensors to another rank."""
        return self._pass_on(tensors, (self._place, dst, tag), sends=True)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receive tensors from another rank."""
        return self._pass_on(tensors, (src, self._place, tag), sends=False)

    def _pass_on(self, tensors: Any, route: tuple[int, int, int], *, sends: bool) -> Any:
        key = self._name, self._members, route
        sender, receiver = (self._members[place] for place in route[:2])
        met = self._open_ones.pass_on(key, list(tensors), sends=sends)
        what = f"{met.name} from rank {sender} to rank {receiver}"
        return self._work(met, what, tensors)

    # names until torch 2.14
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _inner(lists: Any) -> list[Tensor]:
    """The list of tensors in a list; what a rank leaves out that brings or gets none is empty."""
    lists = list(lists)
    return list(lists[0]) if lists and not isinstance(lists[0], Tensor) else lists


def _reduction(opts: Any) -> Any:
    op = getattr(opts, "reduceOp", opts)
    return dist.ReduceOp.SUM if op is None else op


def _all_of(works: list[Any]) -> Any:
    for work in works[:-1]:
        work.wait()
    return works[-1]
