"""Real training steps on a few processes of this machine, and what is predicted of them.

Each is a run of the Trainer with HybridShardStrategy, on one thread for each rank, with one sample
for each data replica. Runs of all meshes and links take turns.
"""

import copy
import json
import math
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from benchmarks import slow_links
from benchmarks.common import QUIET, Case, Mesh, most
from benchmarks.networks import NETWORKS, Task
from lightning_modules.cnn.simple_cnn import SimpleCNN
from lightning_shard import HybridShardStrategy, predict, read_cluster
from lightning_shard.lab.batches import first_batches
from lightning_shard.lab.calibrate import measured_links
from lightning_shard.lab.fake_trainer import train
from lightning_shard.lab.machine import Cost, MeasuredLinks
from lightning_shard.lab.replay import Replay
from lightning_shard.lab.run import Task as Run
from lightning_shard.lab.run import quiet
from lightning_shard.lab.simulate import alone
from lightning_shard.lab.timeline import Recorder, Timeline
from lightning_shard.processes.forking import become_rank

# of a network on a mesh, for each step, what each rank did alone
Timed = dict[tuple[str, Mesh], list[tuple[Timeline, ...]]]

Stored = list[list[Any]]  # of each collective its name and ranks, and the costs by bytes

MAKE: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with the resolution of the field
    "CNN": (lambda: SimpleCNN(hidden_channels=32), 768),
    "U-Net": (NETWORKS["U-Net"], 256),
    "TFNO": (NETWORKS["TFNO"], 512),
    "ViT": (NETWORKS["ViT"], 256),
}
STEP = "forecast: step"
WARM_UP = 2  # steps that make caches and the optimizer's states


def task_and_data(network: str, steps: int) -> tuple[Task, DataLoader[Any]]:
    """A module, and as many batches of one sample."""
    seed_everything(0, verbose=False)
    make, resolution = MAKE[network]
    samples: Any = [torch.randn(1, 3, resolution, resolution)] * steps  # a list is a dataset
    return Task(make()), DataLoader(samples, batch_size=None)


def measured(
    networks: Sequence[str],
    meshes: Sequence[Mesh],
    rates: Sequence[float | None],
    rounds: int,
    steps: int,
) -> tuple[list[dict[str, Any]], Timed]:
    """What each network takes on each mesh and link; every rank of the group calls it.

    In the same rounds the steps of each rank alone are recorded, for the prediction.

    Returns:
        Of each case what it was, the median seconds of a step on the rank that needs most, all that
        this rank needed, and the peak of bytes in tensors on the rank that holds most. And what was
        recorded.
    """
    become_rank(dist.get_rank(), dist.get_world_size(), port=1)  # the group is there already
    found: list[dict[str, Any]] = []
    timed: Timed = {}
    for network in networks:
        for mesh in meshes:
            peak = int(*most(peak_of(partial(_fit, network, mesh, 3))))
            of_mesh, lone = _in_turns(network, mesh, rates, rounds, steps)
            found += [case | {"memory": peak} for case in of_mesh]
            timed[network, mesh] = lone
    return found, timed


def _in_turns(
    network: str, mesh: Mesh, rates: Sequence[float | None], rounds: int, steps: int
) -> tuple[list[dict[str, Any]], list[tuple[Timeline, ...]]]:
    times: dict[float | None, list[float]] = defaultdict(list)
    lone: list[Timeline] = []
    task, data = task_and_data(network, 1)
    run = Run(task, None, first_batches(task, data, "fit"), mesh)
    for _ in range(rounds):
        for rate in rates:
            _limit(rate)
            times[rate] += _seconds(network, mesh, steps)
        _limit(None)
        lone += timed_alone(run, steps)
    everyone: list[list[Timeline]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, lone)
    found = [
        {"network": network, "ranks": dist.get_world_size(), "mesh": list(mesh), "gigabits": rate,
         "seconds": most(statistics.median(spent))[0], "all": spent}
        for rate, spent in times.items()
    ]  # fmt: skip
    return found, [*zip(*everyone, strict=True)]


def timed_alone(run: Run, steps: int) -> list[Timeline]:
    """Time steps of this rank as if it were alone; all ranks of the group call it at once.

    So each of them gets as much of this machine as among the others, and none waits.
    """
    rank, processes = dist.get_rank(), dist.get_world_size()
    recorder = Recorder(rank)
    dist.barrier()
    body = _Alone(run, steps + 1, recorder)
    alone(body, processes=processes, rank=rank, listener=recorder)
    return recorder.steps[1 + WARM_UP : -1]  # the last has no batch to look for behind it


class _Alone:
    """The function of a lone rank; a copy of it shares the recorder."""

    def __init__(self, run: Run, steps: int, recorder: Recorder) -> None:
        self._run, self._steps, self._recorder = run, steps, recorder

    def __deepcopy__(self, memo: Any) -> "_Alone":
        return self

    def __call__(self) -> None:
        run = replace(self._run, module=copy.deepcopy(self._run.module))
        train(run, self._steps, self._recorder.cut, warm_up=WARM_UP)


def _limit(gigabits: float | None) -> None:
    if dist.get_world_size() > 1:
        slow_links.limit_link(None if gigabits is None else gigabits * 1e9)


def _clock(ends: list[float]) -> Callback:
    """Notes when each step ends, and names the steps for a profiler."""
    named = record_function(STEP)

    def end(*_: Any) -> None:
        named.__exit__(None, None, None)
        ends.append(time.perf_counter())

    return LambdaCallback(on_train_batch_start=lambda *_: named.__enter__(), on_train_batch_end=end)


def _seconds(network: str, mesh: Mesh, steps: int) -> list[float]:
    """Seconds from the end of a step to that of the next, after two that warm up."""
    ends: list[float] = []
    _fit(network, mesh, steps + 2, _clock(ends))
    return [after - before for before, after in pairwise(ends[1:])]


def quickest(network: str, mesh: Mesh, steps: int) -> float:
    """Seconds of the quickest step; every rank of a group that was launched calls it."""
    return min(_seconds(network, mesh, steps))


def _fit(network: str, mesh: Mesh, steps: int, clock: Callback) -> None:
    task, data = task_and_data(network, steps)
    strategy = HybridShardStrategy(data_parallel_size=mesh[0], domain_parallel_size=mesh[1:])
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_steps=steps,
            callbacks=[clock], use_distributed_sampler=False, **QUIET,
        )  # fmt: skip
        trainer.fit(task, data)


def peak_of(train_with: Callable[[Callback], None]) -> int:
    """The most bytes that tensors hold in the last step, as torch's allocator reports them.

    All tensors of a run are made under the profiler, since it counts those alone.

    Args:
        train_with: Trains for some steps with a callback.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        train_with(_clock([]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    begin = [event["ts"] for event in events if event.get("name") == STEP][-1]
    memory = sorted(
        ((e["ts"], e["args"]) for e in events if e.get("name") == "[memory]"), key=itemgetter(0)
    )
    return _highest(memory, begin)


def _highest(memory: list[tuple[float, dict[str, Any]]], begin: float) -> int:
    """The most that is held from `begin` on; what a run before had left may be given back, too."""
    live: dict[Any, int] = {}
    held = peak = 0
    for at, given in memory:
        if given["Bytes"] > 0:
            live[given["Addr"]] = given["Bytes"]
            held += given["Bytes"]
        else:
            held -= live.pop(given["Addr"], 0)
        if at >= begin:
            peak = max(peak, held)
    return peak


def links(rates: Sequence[float | None]) -> dict[str, Stored]:
    """What collectives take on links of each rate; every rank of the group calls it."""
    found: dict[str, Stored] = {}
    ranks = dist.get_world_size()
    for rate in rates:
        slow_links.limit_link(None if rate is None else rate * 1e9)
        costs = measured_links([n for n in (2, 4) if n <= ranks]).costs
        found[f"{ranks}, {rate}"] = [
            [*kind, [[sent, cost.busy, cost.link] for sent, cost in points]]
            for kind, points in costs.items()
        ]
    return found


def _read(stored: Stored) -> MeasuredLinks:
    return MeasuredLinks({
        (name, ranks): [(sent, Cost(busy, link)) for sent, busy, link in points]
        for name, ranks, points in stored
    })  # fmt: skip


def predicted(cases: Iterable[Case], stored: dict[str, Stored], timed: Timed) -> list[Case]:
    """The cases with what is predicted of them, where links and steps are known."""
    found: list[Case] = []
    for case in cases:
        steps = timed.get((case["network"], tuple(case["mesh"])))
        known = stored.get(f"{case['ranks']}, {case['gigabits']}")
        if steps and (known or case["ranks"] == 1):
            time_ = _replayed(steps, _read(known or []))
            memory = planned_memory(case["network"], tuple(case["mesh"]))
            found.append(case | {"predicted": time_ | {"memory": memory}})
    return found


@cache
def planned_memory(network: str, mesh: Mesh) -> int:
    """The peak of bytes in tensors, which is the same on all devices."""
    cluster = read_cluster(f"{math.prod(mesh)}xH100")
    bare = replace(cluster.device, workspace=0, workspaces={})  # a GPU's kernels take more
    return predict(*task_and_data(network, 1), mesh, replace(cluster, device=bare)).memory


def _replayed(steps: Sequence[tuple[Timeline, ...]], known: MeasuredLinks) -> dict[str, float]:
    """Of the rank that needs most, the median of the steps."""
    slowest = [max(Replay(each, known.cost).run(), key=lambda r: r.seconds) for each in steps]
    return {
        "seconds": statistics.median(r.seconds for r in slowest),
        "computed": statistics.median(r.computed for r in slowest),
        "busy": statistics.median(r.busy for r in slowest),
        "waited": statistics.median(sum(r.waited.values()) for r in slowest),
        "hidden": statistics.median(r.hidden for r in slowest),
    }
