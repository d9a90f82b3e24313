"""Makes metrics and rates count each sample once, though all ranks of a domain see it.

A metric of torchmetrics adds up over the processes in `Metric.sync`. While a run lasts, that means
the data replicas: of each domain the rank at the same place. The metric itself is not changed, so
whatever copies, pickles or makes one while the run lasts gets one that counts alike. States that
are split over a domain stay split: only the rows of the other replicas travel.
"""

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.local_group import gathered_objects
from lightning_shard.domain.subdomain import Subdomain, domain_of
from lightning_shard.domain.wire import all_to_all, packed
from lightning_shard.lightning import (
    FabricBaseStrategy,
    LightningModule,
    Strategy,
    Trainer,
    TrainerStatus,
)
from lightning_shard.processes.narrow import is_list
from lightning_shard.tensor.local_mesh import LocalField
from lightning_shard.tensor.placement import gather
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer.host import trainer_of


class _Counted(NamedTuple):
    """The data replicas that metrics count, in a run of these processes, as long as it lasts."""

    group: dist.ProcessGroup
    domain_mesh: DeviceMesh
    world: dist.ProcessGroup | None
    lasts: Callable[[], bool]
    runs: Callable[[], bool]


class _Kind(NamedTuple):
    """Describes a state to other replicas before it travels."""

    layout: Layout | None  # None where the state is whole
    dtype: torch.dtype
    has_seen: bool  # False for what torchmetrics gathers of an empty list


_counted: _Counted | None = None
PROCESS_STATE = {"_counted": _counted}


def count_domains_once(
    trainer: Trainer,
    module: LightningModule,
    data_group: dist.ProcessGroup | None,
    domain_mesh: DeviceMesh,
) -> None:
    """Let metrics add up over data replicas, not over all ranks.

    It holds until another run begins after this one, or another Trainer takes the module. A metric
    that was given a process group keeps it. It holds also where the module is freed meanwhile:
    Python frees it at another moment on each rank, and all must count over the same ranks.
    """
    model, runner = weakref.ref(module), weakref.ref(trainer)

    def lasts() -> bool:
        taken_by = trainer_of(model())
        return taken_by is None or taken_by is runner()

    def runs() -> bool:
        running = runner()
        return running is not None and running.state.status == TrainerStatus.RUNNING

    count_metrics_over(data_group, domain_mesh, lasts, runs)


def count_metrics_over(
    data_group: dist.ProcessGroup | None,
    domain_mesh: DeviceMesh,
    lasts: Callable[[], bool],
    runs: Callable[[], bool],
) -> None:
    """Let metrics of torchmetrics add up over data replicas.

    Args:
        data_group: The replicas.
        domain_mesh: The mesh of the ranks that share a sample.
        lasts: Returns True as long as metrics shall count so. The answer is the same on all ranks,
            so it does not ask for what the garbage collector has freed.
        runs: Returns True as long as the run goes on. A run that begins meanwhile lies inside of it
            and changes nothing; one that begins later ends the counting.
    """
    global _counted
    _count_replicas()
    _end_with_other_runs()
    _counted = None
    if data_group is not None and dist.get_world_size() > 1:
        _counted = _Counted(data_group, domain_mesh, dist.group.WORLD, lasts, runs)


@functools.lru_cache(maxsize=1)
def _end_with_other_runs() -> None:
    """Let all strategies end the counting as they begin, for good."""
    for kind in (Strategy, FabricBaseStrategy):
        _end_where_begins(kind)


def _end_where_begins(kind: Any) -> None:
    plain = kind.setup_environment

    @functools.wraps(plain)
    def setup_environment(strategy: Any) -> None:
        global _counted
        if _counted is not None and not _counted.runs():
            _counted = None
        plain(strategy)

    kind.setup_environment = setup_environment


@functools.lru_cache(maxsize=1)
def _count_replicas() -> None:
    """Replace the method with which all metrics ask other processes, for good."""
    plain = Metric.sync

    @functools.wraps(plain)
    def sync(
        self: Metric,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        counted = _counts_now()
        group = process_group or self.process_group or (counted.group if counted else None)
        if dist_sync_fn is None and dist.is_initialized():
            if dist.get_world_size(group) == 1:
                return  # as in one process: a list stays one
            if counted is not None:
                dist_sync_fn = _states_of_replicas
            elif _holds_fields(self):
                dist_sync_fn = _whole_states
        plain(self, dist_sync_fn, group, *args, **kwargs)

    Metric.sync = sync


def _counts_now() -> _Counted | None:
    """Return what metrics count, unless its run or its processes have ended."""
    counted = _counted
    lasts = counted is not None and counted.world is dist.group.WORLD and counted.lasts()
    return counted if lasts else None


def _holds_fields(metric: Metric) -> bool:
    """Return whether a state of a metric is a field in tiles, or a list of such."""
    states = metric.metric_state.values()
    return any(isinstance(x, LocalField) for s in states for x in (s if is_list(s) else [s]))


def _whole_states(state: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the state of each process; of fields in tiles the whole of each."""
    if isinstance(state, LocalField):
        state = gather(state)
    return gather_all_tensors(state, group)


def _states_of_replicas(state: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the state of each replica that has one, split as it is there.

    Layouts and dtypes travel between the replicas, then of split states the rows of this rank. A
    replica that has seen nothing, or less, may hold another dtype than the others.

    Raises:
        UnsupportedOperationError: The state is split, and asked for over other ranks than the
            replicas; or it is split on some of the replicas only.
    """
    if _counted is None or group is not _counted.group:
        if isinstance(state, DomainTensor):
            raise UnsupportedOperationError(
                "a metric whose state is split over a domain was given a process_group of its own; "
                "leave process_group out, then it counts each data replica once."
            )
        return _whole_states(state, group)
    part = state.subdomain if isinstance(state, DomainTensor) else None
    own = _Kind(part.layout if part else None, state.dtype, part is not None or state.numel() > 0)
    kinds = gathered_objects(own, group)
    seen = [kind for kind in kinds if kind.has_seen] or kinds
    dtype = functools.reduce(torch.promote_types, [kind.dtype for kind in seen])
    layouts = [kind.layout for kind in kinds]
    if not any(layouts):
        return _whole_states(state.to(dtype), group)
    if any(kind.layout is None for kind in seen):
        raise UnsupportedOperationError(
            "a metric's state is split over a domain on some data replicas and whole on others; "
            "update the metric with the same kind of tensors on all ranks."
        )
    sizes = [math.prod(layout.local_shape) if layout else 0 for layout in layouts]
    local = part.local.detach() if part else state.new_empty(0)
    mine = packed([local.to(dtype)], state)
    ranks = len(kinds)
    rows = all_to_all(mine.repeat(ranks), sizes, [mine.numel()] * ranks, group).split(sizes)
    domain = domain_of(_counted.domain_mesh)
    return [
        DomainTensor(Subdomain(local.view(layout.local_shape), layout, domain))
        for local, layout in zip(rows, layouts, strict=True)
        if layout
    ]
