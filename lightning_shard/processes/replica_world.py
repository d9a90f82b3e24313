"""Lets a module's own collectives count each domain once.

A module that calls torch.distributed itself, as a codebook does that keeps statistics over all
processes, adds up results of which each process has its own. The ranks of a domain hold copies of
one result, so over all processes it would be counted once for each of them. While a step runs, or
a stage of a Trainer with all its hooks, the default group of such a call is therefore that of the
data replicas: of each domain the rank at the same place. `get_world_size()` and `get_rank()` count
replicas, and so do `src` and `dst`. The group of all processes by name is refused: it would count
each rank of a domain. Its rank and size alone are those of the replicas, since libraries that read
data ask for these by name. Two collectives count nothing, and are of all processes: a barrier,
since all may read then what one has written; and a broadcast of the first rank, since it may have
drawn or named alone what it sends.

Only calls without a group from the user's modules are meant. torch's own parallelism, Lightning,
torchmetrics and this package ask for the group that they want, and get it.

torch has no public way to say what the default group is. Two functions of its
`distributed_c10d` decide it for all collectives, however a module has imported these; they are
replaced when the first run or step with a domain begins (seen in torch 2.11 to 2.15).

Another default group for all code that runs in a step was considered, and not taken: `init_mesh`,
a checkpoint that a step saves, `distribute_tensor` and `new_group` ask for the default group, too,
and so does the thread that writes while training goes on. Each would mean other ranks, in silence.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType, FunctionType
from typing import Any

import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.processes.mesh import domain_axes
from lightning_shard.processes.subgroups import making_groups
from lightning_shard.processes.torch_private.internals import number_in_group, replace_internal
from lightning_shard.processes.torch_private.typed import integers

INFRASTRUCTURE = ("torch.", "lightning.", "lightning_fabric.", "pytorch_lightning.",
                   "torchmetrics.", "lightning_shard.")  # fmt: skip
_BARRIERS, _BROADCASTS = ("barrier", "monitored_barrier"), ("broadcast", "broadcast_object_list")
# they count replicas also where WORLD is named
_NUMBERS = ("get_rank", "get_world_size")
# modules between a collective and its caller
_CARRIERS = {
    "contextlib",
    "torch.distributed.c10d_logger",
    "torch.distributed._functional_collectives",
    "torch.distributed.distributed_c10d",
}


@dataclass(frozen=True, eq=False)
class _Counted:
    """Replicas that count, in place of all processes, while something is open."""

    replicas: dist.ProcessGroup
    processes: dist.ProcessGroup | None
    is_lent: bool  # True if an axis of the mesh is the group of all processes
    is_open: Callable[[], bool]


# a variable of the process, not a ContextVar: backward runs in threads that inherit none
_counted: tuple[_Counted, ...] = ()  # the last that is open counts


@contextlib.contextmanager
def replica_world(mesh: DeviceMesh | None, domain: Sequence[str] = ()) -> Generator[None]:
    """Send collectives of the user's modules over the data replicas of `mesh`, while open.

    `parallelize` opens it around the module's forward pass and its steps.

    Args:
        mesh: The whole mesh, data and domain axes. Nothing changes for a mesh without a domain.
        domain: The axes along which samples are split; by default those called domain.
    """
    is_open = True
    count_replicas(mesh, lambda: is_open, domain)
    try:
        yield
    finally:
        is_open = False
        _forget_closed()


def count_replicas(
    mesh: DeviceMesh | None, is_open: Callable[[], bool], domain: Sequence[str] = ()
) -> None:
    """Send collectives of the user's modules over the data replicas of `mesh`, until a run ends.

    Args:
        mesh: The whole mesh, data and domain axes. Nothing changes for a mesh without a domain.
        is_open: Returns False once the run has ended.
        domain: The axes along which samples are split; by default those called domain.
    """
    global _counted
    _forget_closed()
    if mesh is not None and (replicas := make_replicas(mesh, domain)) is not None:
        _install()
        is_lent = dist.group.WORLD in mesh.get_all_groups()
        _counted += (_Counted(replicas, dist.group.WORLD, is_lent, is_open),)


def _forget_closed() -> None:
    global _counted
    _counted = tuple(each for each in _counted if each.is_open())


def _now() -> _Counted | None:
    """Return what counts now; None if processes do."""
    return next((each for each in reversed(_counted) if each.is_open()), None)


def make_replicas(mesh: DeviceMesh | None, domain: Sequence[str] = ()) -> dist.ProcessGroup | None:
    """Make the group of the data replicas of `mesh`, which `replica_world` then finds.

    All ranks make a group together. A step is too late for it, since some replicas may have no
    batch for the first one.

    Args:
        mesh: The whole mesh.
        domain: The axes along which samples are split; by default those called domain.

    Returns:
        The group that has this rank; None for a mesh without a domain.
    """
    if mesh is None:
        return None
    names, axes = domain_axes(mesh, domain), mesh.mesh_dim_names or ()
    if math.prod(mesh.size(axes.index(name)) for name in names) == 1:
        return None
    return _replicas_of(mesh, names, dist.group.WORLD)


@lru_cache(maxsize=16)
def _replicas_of(
    mesh: DeviceMesh, domain: tuple[str, ...], _: dist.ProcessGroup | None
) -> dist.ProcessGroup:
    """Make this rank's group of replicas, whose ranks are numbered in it, also as `src`."""
    axes = [axis for axis, name in enumerate(mesh.mesh_dim_names or ()) if name in domain]
    places = mesh.mesh.movedim(axes, list(range(len(axes))))
    columns = [integers(c) for c in places.reshape(math.prod(places.shape[: len(axes)]), -1)]
    with making_groups():
        group = dist.new_subgroups_by_enumeration(columns)[0]
    assert isinstance(group, dist.ProcessGroup)  # this rank is in one of them
    number_in_group(group)
    return group


@lru_cache(maxsize=1)
def _install() -> None:
    """Replace the functions of torch that choose a default group, for good."""
    replace_internal("torch.distributed.distributed_c10d._get_default_group", _of_replicas)
    for path in (
        "torch.distributed.distributed_c10d._rank_not_in_group",
        # the first of the two since torch 2.12
        "torch.distributed._functional_collectives._resolve_group|_resolve_group_name",
    ):
        replace_internal(path, _refusing)
    for collective in vars(differentiable).values():  # they name a group made before their import
        if isinstance(collective, FunctionType):
            given = collective.__defaults__ or ()
            world = dist.group.WORLD
            collective.__defaults__ = tuple(None if each is world else each for each in given)


def _of_replicas(of_all: Callable[[], dist.ProcessGroup]) -> Callable[[], dist.ProcessGroup]:
    """Wrap `of_all`: a user's collective without a group gets that of the data replicas."""

    def default_group() -> dist.ProcessGroup:
        """Return the data replicas to a collective that a user's module calls without a group."""
        # torch asks here for itself, too, with all ranks (tests/processes/test_replica_world.py)
        caller = sys._getframe(1)
        if (counted := _now()) is not None:
            given = caller.f_locals.get("group", ...)
            if given is counted.replicas:
                return counted.replicas
            if (given is None or given is counted.processes) and _counting_call(caller):
                return counted.replicas
        return of_all()

    return default_group


def _refusing(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `resolve`: a user's step that names the group of all processes is refused."""

    def checked(group: Any, *args: Any, **kwargs: Any) -> Any:
        """Resolve a group that is not that of all processes, or is asked for by a library."""
        if (
            group is not None
            and (counted := _now()) is not None
            and group is counted.processes
            and (called := _counting_call(sys._getframe(1)))
            and (called not in _NUMBERS or counted.is_lent)
        ):
            raise RuntimeError(
                f"{called} over torch.distributed.group.WORLD in a step or hook would "
                "count each rank of a domain, which hold copies of one result. Leave the group "
                "out: it is then that of the data replicas; or name another one, such as an axis "
                "of a mesh of lightning_shard.init_mesh (a mesh that torch made may lend WORLD to "
                "an axis of all processes)."
            )
        return resolve(group, *args, **kwargs)

    return checked


def _counting_call(frame: FrameType | None) -> str:
    """Return the collective that counts ranks, if a module that is no infrastructure called it.

    What torch.distributed.nn does in backward has no caller of its own; nobody else uses it.

    Returns:
        The name of the collective; "" for infrastructure, and for a call that counts nothing.
    """
    called: FrameType | None = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        is_differentiable = module.startswith("torch.distributed.nn.")
        is_of_mode = module == "torch.overrides" or frame.f_code.co_name == "__torch_function__"
        if is_differentiable or (module not in _CARRIERS and not is_of_mode):
            by_infrastructure = module.startswith(INFRASTRUCTURE) and not is_differentiable
            if called is None or by_infrastructure:
                return ""
            return "" if _counts_nothing(called, is_differentiable) else called.f_code.co_name
        if frame.f_code.co_name == "_get_msg_dict":  # torch reports an error of a collective
            return ""
        if not (is_of_mode or frame.f_code.co_name == "wrapper"):
            called = frame
        frame = frame.f_back
    return ""


def _counts_nothing(called: FrameType, is_differentiable: bool) -> bool:
    """Return True for a barrier, and for a broadcast of the first rank that has no gradient."""
    name, given = called.f_code.co_name, called.f_locals
    is_of_first = not (given.get("src") or given.get("group_src"))
    return name in _BARRIERS or (name in _BROADCASTS and is_of_first and not is_differentiable)


PROCESS_STATE = {"_counted": _counted, "_replicas_of": _replicas_of}
