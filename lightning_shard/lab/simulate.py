"""Runs one function on many ranks inside this process, for a debugger and for many meshes."""

import copy
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.lab.simulated.alone import AloneGroup, Listener
from lightning_shard.lab.simulated.group import OpenCollectives, SimulatedGroup
from lightning_shard.lab.simulated.state import State
from lightning_shard.lab.simulated.store import LoneStore, SimulatedStore, Values
from lightning_shard.lab.simulated.turns import Turns
from lightning_shard.processes.forking import become_rank
from lightning_shard.processes.torch_private.internals import backend_plugins, groups_of_threads

_BACKEND = "threaded"  # the name by which torch tells apart meshes of ranks that are threads
_running = False


def simulate(
    function: Callable[..., Any], *args: Any, processes: int = 2, rank: int | None = None
) -> list[Any]:
    """Run `function(*args)` on many ranks in this process, with real tensors and collectives.

    As in `launch`, `torch.distributed` is initialised in a rank, so that meshes, `parallelize` and
    FSDP2 work in it. The ranks are threads, of which one runs at a time, on the CPU and with one
    thread of torch: each up to a collective that waits for other ranks. So they run in the same
    order every time, a breakpoint stops all of them, and ranks that wait for each other for ever
    are named at once.

    Each rank has its own random numbers, which begin as those of the caller, and its own default
    process group. Other values of the process, such as what a module of Python keeps, belong to all
    ranks together.

    Args:
        function: The function that each rank runs. Tensors that it finds elsewhere than in its
            arguments are the same objects on all ranks.
        args: Its arguments, of which each rank gets a deep copy.
        processes: Number of ranks.
        rank: The only one that runs, if not all do. Its collectives give it what it brings itself,
            so that it computes, holds and sends as much as it would among the others.

    Returns:
        What each rank returned, in the order of the ranks; with `rank` what that one returned.

    Raises:
        StuckError: The ranks wait for each other, since they call different collectives.
        ValueError: `processes` is smaller than 1, or there is no such rank.
        RuntimeError: A simulated rank calls it, or ranks bring tensors that do not fit.
        Exception: The error of the first rank that failed, with a note of its number.

    Example:
        >>> def rank_and_sum(x):
        ...     torch.distributed.all_reduce(x)
        ...     return torch.distributed.get_rank(), x.item()
        >>> lightning_shard.simulate(rank_and_sum, torch.ones(()), processes=3)
        [(0, 3.0), (1, 3.0), (2, 3.0)]
    """
    if processes < 1:
        raise ValueError(f"processes must be 1 or more; got {processes}.")
    if rank is None:
        return _run(range(processes), processes, function, args, SimulatedGroup, SimulatedStore)
    if not 0 <= rank < processes:
        raise ValueError(f"rank must be from 0 to {processes - 1}; got {rank}.")
    return [alone(function, *args, processes=processes, rank=rank)]


def alone(
    function: Callable[..., Any],
    *args: Any,
    processes: int,
    rank: int,
    listener: Listener | None = None,
) -> Any:
    """Run one rank, as `simulate` does, and tell the listener of its collectives."""
    group = partial(AloneGroup, listener=listener)
    with _own_objects():
        return _run([rank], processes, function, args, group, LoneStore)[0]


@contextmanager
def _own_objects() -> Generator[None]:
    """Let a rank get its own objects where another one would send it others."""

    def gather(places: list[Any], own: Any, *_: Any, **__: Any) -> None:
        places[:] = [own] * len(places)

    def gather_to(own: Any, places: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if places is not None:
            places[:] = [own] * len(places)

    with _in_place_of_torch(
        broadcast_object_list=lambda *_, **__: None,
        all_gather_object=gather,
        gather_object=gather_to,
    ):
        yield


@contextmanager
def _in_place_of_torch(**functions: Callable[..., Any]) -> Generator[None]:
    """Replace functions of torch.distributed, while open."""
    before = {name: getattr(dist, name) for name in functions}
    for name, function in functions.items():
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _run(
    ranks: Sequence[int],
    processes: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    group: Callable[..., SimulatedGroup],
    make_store: type[SimulatedStore],
) -> list[Any]:
    if _running:
        raise RuntimeError(
            "a simulation is running in this process; call the function itself, outside of "
            "`simulate`."
        )
    written = Values()

    def body(rank: int) -> Any:
        store = make_store(written, rank - ranks[0], turns)
        dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=processes)
        return function(*copy.deepcopy(args))

    turns = Turns([partial(body, rank) for rank in ranks])
    _begin_autograd()
    with _as_it_was():
        become_rank(0, processes, port=1)  # where nobody listens: the group is there already
        names = ({"RANK": str(r), "LOCAL_RANK": str(r)} for r in ranks)
        with _backend(partial(group, open_ones=OpenCollectives(turns))):
            turns.run([State().as_rank(variables) for variables in names])
    return turns.values


def _begin_autograd() -> None:
    """Let autograd begin now, without threads, so that this process can still be forked.

    DTensor computes on fake tensors, for which torch makes eight devices of CUDA where there are
    none. Autograd would start a thread for each of them, and refuse to run in forks.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), requires_grad=True, device="cpu").clone().backward()


@contextmanager
def _backend(group: Callable[..., SimulatedGroup]) -> Generator[None]:
    """Let torch make the groups of simulated ranks, also where gloo is asked for by name."""

    def make(options: Any, _: Any) -> SimulatedGroup:
        ranks = options.global_ranks_in_group or range(options.group_size)
        return group(options.group_id, ranks, options.group_rank)

    new_group = dist.new_group

    def simulated_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return new_group(ranks, timeout, None if backend == "gloo" else backend, *args, **kwargs)

    plugins = backend_plugins()
    before = dict(plugins)
    dist.Backend.register_backend(_BACKEND, make, extended_api=True, devices=["cpu"])
    try:
        with groups_of_threads(), _in_place_of_torch(new_group=simulated_group):
            yield
    finally:
        plugins.clear()
        plugins.update(before)


@contextmanager
def _as_it_was() -> Generator[None]:
    """Give the process back as it was, but for what no rank has of its own."""
    global _running
    variables, hook, threads = dict(os.environ), sys.excepthook, torch.get_num_threads()
    _running = True
    try:
        yield
    finally:
        _running = False
        sys.excepthook = hook
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(variables)
