"""Counts a domain as one device where a program asks the Trainer for its devices.

A program that divides its batches, or the steps of its schedule, by `trainer.world_size` takes each
device for a data replica. Here the ranks of a domain share their samples, so user code is told the
number of replicas. Lightning asks the same properties for the number of its processes, and gets it.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from lightning_shard.lightning import Trainer
from lightning_shard.processes.replica_world import INFRASTRUCTURE

_COUNTS_SAMPLES = ".throughput_monitor"  # a callback of Lightning that multiplies by it


@cache
def count_devices_by_replica() -> None:
    """Let the numbers of any Trainer whose strategy has a mesh be those of replicas, for good."""
    for name, count in {
        "world_size": _replicas,
        "num_nodes": _nodes,
        "num_devices": lambda trainer: len(_of_replicas(trainer)),
        "device_ids": _of_replicas,
    }.items():
        setattr(Trainer, name, _told(vars(Trainer)[name], count))


def _told(plain: property, count: Callable[[Trainer], Any]) -> property:
    """Wrap a property of the Trainer: what user code reads counts replicas."""

    def read(trainer: Trainer) -> Any:
        # a property is not told who asks; without this schedules of programs that count devices are
        # too short (tests/trainer/test_metrics_once.py)
        asks: str = sys._getframe(1).f_globals.get("__name__", "")
        counts_devices = asks.startswith(INFRASTRUCTURE) and not asks.endswith(_COUNTS_SAMPLES)
        if counts_devices or _domain(trainer) == 1:
            return plain.__get__(trainer)
        return count(trainer)

    return property(read, doc=plain.__doc__)


def _domain(trainer: Trainer) -> int:
    """Return the number of ranks that share a sample; 1 before the mesh is known, and for tiles."""
    strategy: Any = trainer.strategy
    has_mesh = getattr(strategy, "processes", None) is not None and not hasattr(strategy, "tiles")
    return strategy.domain_size if has_mesh and strategy.device_mesh is not None else 1


def _replicas(trainer: Trainer) -> int:
    return trainer.world_size // _domain(trainer)


def _of_replicas(trainer: Trainer) -> list[int]:
    """Return the first device of each replica of this node; one for a domain of several nodes."""
    return trainer.device_ids[:: _domain(trainer)]


def _nodes(trainer: Trainer) -> int:
    return max(1, _replicas(trainer) // len(_of_replicas(trainer)))
