"""Runs the kernels of a planned step on a device of this machine, and keeps what each takes.

A plan traces a step on tensors without numbers. Where this machine has the device of the cluster,
kernels need no rates: they run one after the other as in the step, on random numbers, and each is
timed. Memory is given back where the step gives it back, so caches hold what they hold in a step.
"""

import itertools
import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_shard.lab.clusters import read_cluster
from lightning_shard.lab.fake_modes import Real
from lightning_shard.lab.kernel_costs import ByRates, Call, KernelCost
from lightning_shard.lab.kernels import name_of, seconds_of, small_step, wait_for
from lightning_shard.lab.machine import RUN_HERE, Cluster
from lightning_shard.lab.step_memory import Part, StepMemory, part_of
from lightning_shard.lab.timeline import Ledger
from lightning_shard.processes.cpu_settings import quiet_profiler, tune_process
from lightning_shard.processes.device import own_device, present
from lightning_shard.processes.torch_private.internals import tree_leaves, tree_map_only

SMALL_SECONDS = 0.1  # a small network runs so long, to show the time of the host
PASSES, FEWEST, SECONDS = 7, 2, 10.0  # through the step; no more than two after so many seconds
ASKED = 100  # kernels that do nothing
QUICK = 4  # a quarter of the passes may be quicker than the one that counts
AHEAD, HOST = 256, 2e-4  # kernels that the host asks for ahead, and its seconds for one at most
BUSY, WIDEST = 5e-3, 2**13  # seconds of a product that keeps a device busy, and its extent at most
_CONVOLUTIONS = ("convolution", "convolution_backward")
_NO_KERNELS = ("c10d", "_c10d_functional")  # namespaces of collectives
_Key = tuple[str, str]  # the name of an operator, and its arguments but for their memory


def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False,
    *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Callable[[], Any]:  # fmt: skip
    def call() -> Any:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, is_causal, scale=scale
        ), None  # fmt: skip

    return call


def _gradients_of_attention(grad: Tensor, *given: Any, **named: Any) -> Callable[[], Any]:
    """Return a call; the operator is given query, key, value, result, its sums, and options."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    others: list[Any] = list(given[5:])
    result, _ = _attention(*leaves, *others, **named)()
    return partial(torch.autograd.grad, result, leaves, grad)


# A step is traced on the CPU, whose attention is an operator of its own. A device has several
# kernels, of which torch chooses one.
_ON_DEVICES: dict[str, Callable[..., Callable[[], Any]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _gradients_of_attention,
}


@dataclass(frozen=True)
class _Kernel:
    """Describes an operator of the traced step, with a `Part` for each tensor.

    Attributes:
        key: It is the same for equal kernels.
        operator: The operator of torch.ops.
        args: Its arguments.
        kwargs: Its arguments by name.
        made: The tensors of its result; None for what is none.
        by_rates: Its cost at the rates of the device.
    """

    key: _Key
    operator: Any
    args: Any
    kwargs: Any
    made: list[Part | None]
    by_rates: KernelCost

    @property
    def name(self) -> str:
        """The name of the operator without its overload."""
        return self.operator.overloadpacket.__name__

    def on(self, device: torch.device, tensor: Callable[[Part], Tensor]) -> Callable[[], Any]:
        """Return a call of it on a device; `tensor` makes the tensors of its parts."""
        args: Any = [tensor(x) if isinstance(x, Part) else x for x in self.args]
        kwargs: Any = self.kwargs
        if kwargs or any(isinstance(x, list | tuple) for x in args):
            args, kwargs = tree_map_only(Part, tensor, (args, kwargs))
            args, kwargs = tree_map_only(torch.device, lambda _: device, (args, kwargs))
        if device.type != "cpu" and self.name in _ON_DEVICES:
            return _ON_DEVICES[self.name](*args, **kwargs)
        return partial(self.operator, *args, **kwargs)

    @property
    def parts(self) -> tuple[list[Part], list[Part]]:
        """The tensors that it is given, and those that it makes."""
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Part)], [
            x for x in self.made if x is not None
        ]


@dataclass
class OwnKernels:
    """Tells what kernels take on a device of this machine, where they run.

    A kernel takes the rates of the device while a step is traced, until `run` has run the step's.

    Attributes:
        cluster: The machines that have such a device.
        device: The device that runs them.
        not_run: The names of operators that could not be run here.
    """

    cluster: Cluster
    device: torch.device
    not_run: set[str] = field(default_factory=set[str])
    _costs: dict[_Key, KernelCost] = field(default_factory=dict[_Key, KernelCost])
    _step: list[_Kernel] = field(default_factory=list[_Kernel])

    def __deepcopy__(self, memo: Any) -> "OwnKernels":
        return self

    @property
    def kernels(self) -> int:
        """The number of kernels of the step that was traced."""
        return len(self._step)

    def begin_step(self) -> None:
        """Forget the kernels of the step before."""
        self._step.clear()

    def cost(self, call: Call, memory_of: Callable[[Tensor], Any]) -> KernelCost:
        """Return what a kernel takes, and note it for `run`.

        Args:
            call: The operator, traced.
            memory_of: Returns an object that stands for the memory of a tensor.
        """

        def part(x: Tensor) -> Part:
            return part_of(x, memory_of(x))

        args, kwargs = tree_map_only(Tensor, part, (call.args, call.kwargs))
        key = (call.operator.name(), repr((args, kwargs)))
        made = [part(x) if isinstance(x, Tensor) else None for x in tree_leaves(call.out)]
        by_rates = ByRates(self.cluster.device).cost(call, memory_of)
        self._step.append(_Kernel(key, call.operator, args, kwargs, made, by_rates))
        return self._costs.get(key, by_rates)

    def run(self) -> bool:
        """Run the kernels of the step, unless all are known; return whether they were run."""
        step, self._step = self._step, []
        if all(kernel.key in self._costs for kernel in step):
            return False
        passes = _Passes(step, self.device)
        self._costs |= passes.costs()
        for kernel in step:
            if kernel.key in passes.failed:
                self.not_run.add(kernel.name)
                self._costs[kernel.key] = kernel.by_rates
        return True


class _Passes:
    """Runs the kernels of a step several times.

    Attributes:
        failed: The kernels that could not be run.
    """

    def __init__(self, step: list[_Kernel], device: torch.device) -> None:
        self._step, self._device = step, device
        self.failed = {each.key for each in step if each.operator.namespace in _NO_KERNELS}
        self._workspaces: dict[_Key, int] = {}
        self._asking = self._seconds_of_asking() if device.type == "cpu" else 0.0
        self._busy = _Busy(device) if device.type != "cpu" else None
        self._memory = StepMemory([kernel.parts for kernel in step], device)

    def costs(self) -> dict[_Key, KernelCost]:
        """Return what each kernel takes: one of its quickest runs, the mean of its places."""
        self._pass(self._watched)  # the first pass also takes memory, and chooses among kernels
        begin = time.perf_counter()
        if self._busy is not None:
            self._pass(self._timed)
            spent = time.perf_counter() - begin
            self._busy.seconds = AHEAD * min(HOST, 1.2 * spent / len(self._step))
        seen: list[dict[int, float]] = []
        while len(seen) < FEWEST or (
            len(seen) < PASSES and time.perf_counter() - begin < SECONDS
        ):  # fmt: skip
            seen.append(self._pass(self._timed))
        times = defaultdict[_Key, list[float]](list)
        for place in seen[-1]:  # a kernel that failed in a later pass has no time in the last
            few = sorted(each[place] for each in seen)  # other programs make a run only longer
            times[self._step[place].key].append(few[len(few) // QUICK])
        return {key: KernelCost(mean(each), self._workspaces[key]) for key, each in times.items()}

    def _pass(
        self, run: Callable[[_Kernel, Callable[[], Any]], tuple[Any, Callable[[], float]]]
    ) -> dict[int, float]:
        """Run all kernels in order; return the seconds of each, by its place."""
        ends: dict[int, Callable[[], float]] = {}
        for place, kernel in enumerate(self._step):
            if self._busy is not None and place % AHEAD == 0:
                self._busy.start()
            if kernel.key not in self.failed:
                try:
                    call = kernel.on(self._device, self._memory.tensor)
                    made, ends[place] = run(kernel, call)
                    self._memory.keep(kernel.made, made)
                    del call, made
                except (RuntimeError, NotImplementedError, TypeError):  # as no such kernel here
                    self.failed.add(kernel.key)
            self._memory.give_back(place)
        wait_for(self._device)
        return {place: seconds() for place, seconds in ends.items()}

    def _seconds_of_asking(self) -> float:
        """Return what Python takes to start a kernel, which a step does not take for each."""
        x, detach = torch.zeros(1, device="cpu"), torch.ops.aten.detach.default
        self._asking = 0.0
        return min(self._timed(self._step[0], lambda: detach(x))[1]() for _ in range(ASKED))

    def _timed(self, _: _Kernel, call: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        if self._device.type != "cpu":
            event = torch.get_device_module(self._device).Event
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            made = call()
            end.record()
            return made, lambda: begin.elapsed_time(end) / 1e3  # events count milliseconds
        # the time of a lone thread's processor leaves out what else the machine does
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        made = call()
        seconds = max(0.0, clock() - start - self._asking)
        return made, lambda: seconds

    def _watched(self, kernel: _Kernel, call: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Run a kernel, and see which memory it takes beside its tensors."""
        if self._device.type != "cpu":
            there = torch.get_device_module(self._device)
            wait_for(self._device)
            before = int(there.memory_allocated(self._device))
            there.reset_peak_memory_stats(self._device)
            made = call()
            peak = int(there.max_memory_allocated(self._device)) - before
        elif kernel.name in _CONVOLUTIONS and kernel.key not in self._workspaces:
            made, peak = _watched_on_cpu(call)
        else:  # torch's profiler alone would tell, and takes its time
            made = call()
            peak = self._workspaces.get(kernel.key, 0) + _bytes_of(made)
        self._workspaces[kernel.key] = max(0, peak - _bytes_of(made))
        return made, lambda: 0.0


class _Busy:
    """Keeps a device busy while the host asks for the kernels that follow.

    The events around a kernel would tell the time of the host where the device waits for it.

    Attributes:
        seconds: The time that the device is to work at least.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        spent, extent = 0.0, 256
        while spent < BUSY and extent < WIDEST:
            extent *= 2
            x = torch.zeros(extent, extent, device=device)
            self._product = partial(torch.mm, x, x, out=torch.empty_like(x))
            spent = seconds_of(self._product, device, BUSY)
        self._spent = spent

    def start(self) -> None:
        """Start the work, and do not wait for it."""
        for _ in range(math.ceil(self.seconds / self._spent)):
            self._product()


def device_here(cluster: Cluster) -> torch.device:
    """Return the device of this machine that is such a one as the cluster has.

    Raises:
        ValueError: This machine has another one.
    """
    names: list[str] = []
    for kind in dict.fromkeys((present(), "cpu")):
        device = own_device(kind, 0, 1)
        names.append(name_of(device))
        if _is_named(cluster.device.name, names[-1]):
            return device
    raise ValueError(
        f"measure runs the kernels of a step on this machine, which has {' and '.join(names)}, "
        f"but the cluster is of {cluster.device.name}; run it on such a machine, or leave measure "
        "out."
    )


def own_kernels(cluster: Cluster | str | None) -> OwnKernels:
    """Return the kernels of a cluster's device, and measure what the host takes for each.

    A CPU is its own host: the time of its kernels is none of the host.

    Raises:
        ValueError: There is no cluster, or this machine has no such device.
    """
    if cluster is None:
        raise ValueError(
            "measure runs the kernels of a step for the devices of a cluster; name one, such as "
            "1xH100, or the file of this machine that calibrate writes."
        )
    cluster = read_cluster(cluster) if isinstance(cluster, str) else cluster
    device = device_here(cluster)
    if device.type == "cpu":
        tune_process(cluster.per_node)  # as a run does
    step, found = small_step(device), OwnKernels(cluster, device)
    bare = replace(cluster.device, per_operator=0.0, is_beside_host=False)
    for is_known in (False, True):
        ledger = Ledger(bare, costs=found)
        with Real(ledger):
            step()
        count = found.kernels
        if not is_known:
            found.run()
    spent = seconds_of(step, device, SMALL_SECONDS)
    spent = spent if device.type != "cpu" else max(0.0, spent - ledger.seconds)
    source = f"{RUN_HERE} with torch {torch.__version__}"
    own = replace(cluster.device, source=source, per_operator=spent / count)
    return replace(found, cluster=replace(cluster, device=own))


def _is_named(device: str, own: str) -> bool:
    """Return whether the name of a device, such as "A100-40", is in that of torch."""
    kind = device.partition("-")[0].lower()
    return device == own or (kind.isalnum() and kind in own.lower().replace(" ", ""))


def _bytes_of(made: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(made) if isinstance(x, Tensor))


def _watched_on_cpu(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a call, and the most bytes that torch's allocator gave during it."""
    quiet_profiler()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        made = call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    given = sorted(
        (each["ts"], each["args"]["Bytes"]) for each in events if each.get("name") == "[memory]"
    )
    return made, max(itertools.accumulate(size for _, size in given), default=0)
