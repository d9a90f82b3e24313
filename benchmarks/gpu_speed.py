"""How fast a device is, and how many kernels a step starts: parts of `benchmarks.gpu`."""

import copy
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_shard
from benchmarks.networks import NETWORKS
from lightning_shard.memory.neuralop.layers import avoid_whole_fields
from lightning_shard.processes.mesh import make_mesh

SPECTRAL_FIELDS = [
    (2**12,), (2**16,), (2**20,), (64, 64), (128, 128), (256, 256), (512, 512), (1024, 1024),
    (2048, 2048), (421, 421), (64, 64, 64), (128, 128, 128),
]  # fmt: skip
Row = dict[str, Any]
Rows = list[Row]
ALLOCATE = ("empty", "set_", "new_empty", "_unsafe_view")


FAMILIES = {
    "convolutions": ("convolution",), "norms": ("norm", "var_mean", "rsqrt"),
    "padding and joining": ("pad", "cat", "stack", "clone", "copy_"),
    "pooling and resizing": ("pool", "upsample"), "activations": ("relu", "threshold"),
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operators that are neither views nor bare memory: on a GPU each starts a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count the operator, and run it."""
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ALLOCATE:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def families(seen: Counter[str]) -> Counter[str]:
    """Count operators by family; "other" has those that no family names."""
    found: Counter[str] = Counter()
    for name, count in seen.items():
        of = (family for family, words in FAMILIES.items() if any(word in name for word in words))
        found[next(of, "other")] += count
    return found


def device() -> torch.device:
    """This process's accelerator, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def now() -> float:
    """Seconds: processor time on the CPU, else by the clock, with the device idle."""
    if device().type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def timed(step: Callable[[], Any], rounds: int = 10) -> float:
    """Median milliseconds, by events of the device, or the clock of the CPU."""
    kind, found = device(), []
    for number in range(rounds + 3):
        if kind.type == "cpu":
            begin = time.perf_counter()
            step()
            spent = 1e3 * (time.perf_counter() - begin)
        else:
            module = torch.get_device_module(kind)
            first, last = (module.Event(enable_timing=True) for _ in range(2))
            first.record()
            step()
            last.record()
            last.synchronize()
            spent = first.elapsed_time(last)
        found += [spent] if number >= 3 else []
    return statistics.median(found)


def reserved() -> float | None:
    """MiB that torch holds of the device at most; the CPU does not tell."""
    return None if device().type == "cpu" else torch.accelerator.max_memory_reserved() / 2**20


def reset_peak() -> None:
    """Forget the most that tensors have held."""
    if device().type != "cpu":
        torch.accelerator.reset_peak_memory_stats()


def peak() -> float | None:
    """MiB that tensors held at most; the CPU does not tell."""
    return None if device().type == "cpu" else torch.accelerator.max_memory_allocated() / 2**20


def spectral(fields: list[tuple[int, ...]], modes: int = 32, width: int = 32) -> Iterator[Row]:
    """One spectral convolution, forward and backward, beside neuraloperator's own layer.

    "one device" is ours where no field is split, as the strategy of one device has it. "split" is
    ours on a field that is split over one rank, which is timed as the rule chooses, and with each
    method forced. "host" is the time until all
    kernels are asked for, the device's work not awaited.
    """
    from neuralop.layers.spectral_convolution import SpectralConv

    mesh = init_device_mesh(device().type, (1,))
    for extents in fields:
        kept = min(modes, *extents) if len(extents) < 3 else min(modes // 2, *extents)
        layer = SpectralConv(width, width, (kept,) * len(extents), bias=False).to(device())
        ours, alone = copy.deepcopy(layer), copy.deepcopy(layer)
        avoid_whole_fields(ours)
        avoid_whole_fields(alone, mesh)
        local = torch.randn(1, width, *extents, device=device(), requires_grad=True)
        split = lightning_shard.from_local(local, mesh, 2, local.shape)
        row: dict[str, Any] = {"field": "x".join(map(str, extents)), "modes": kept}
        plain = partial(_backward_of, layer, local)
        for name, step, method in (
            ("neuraloperator", plain, "auto"),
            ("one device", partial(_backward_of, alone, local), "auto"),
            ("split", partial(_backward_of, ours, split), "auto"),
            ("products", partial(_backward_of, ours, split), "dft"),
            ("FFTs", partial(_backward_of, ours, split), "fft"),
        ):  # fmt: skip
            with lightning_shard.spectral_method(cast("Any", method)):
                reset_peak()
                row[f"{name} ms"] = timed(step)
                if method == "auto":
                    row[f"{name} host ms"], row[f"{name} MiB"] = host_time(step), peak()
                    row[f"{name} kernels"] = kernels(step)
        for name in ("one device", "split"):
            row[f"{name}, times the speed"] = row["neuraloperator ms"] / row[f"{name} ms"]
        yield row


def _backward_of(net: nn.Module, field: Tensor) -> None:
    net.zero_grad()
    field.grad = None
    net(field).square().mean().backward()


def host_time(step: Callable[[], Any], rounds: int = 10) -> float:
    """Median milliseconds until the host is free again; on the CPU its processor time."""
    clock = time.process_time if device().type == "cpu" else time.perf_counter
    found: list[float] = []
    for _ in range(rounds):
        now()
        begin = clock()
        step()
        found.append(1e3 * (clock() - begin))
    return statistics.median(found)


def kernels(step: Callable[[], Any]) -> int:
    """Kernels that a step starts: by the profiler, on the CPU operators that would start one."""
    if device().type == "cpu":
        with Launches() as counted:
            step()
        return counted.seen.total()
    chosen = [ProfilerActivity.CUDA if device().type == "cuda" else ProfilerActivity.XPU]
    with profile(activities=chosen) as profiled:
        step()
        torch.accelerator.synchronize()
    return sum(e.count for e in profiled.key_averages() if e.self_device_time_total > 0)


def launches(names: list[str], resolution: int) -> Iterator[Row]:
    """Kernels and host time of a step, plain and split on one rank."""
    mesh = init_device_mesh(device().type, (1,))
    for name in names:
        torch.manual_seed(0)
        net = NETWORKS[name]().to(device())
        whole = torch.randn(1, 3, resolution, resolution, device=device())
        row: dict[str, Any] = {"network": name}
        for way in ("plain", "split"):
            if way == "split":
                avoid_whole_fields(net)
            field = whole if way == "plain" else lightning_shard.shard(whole, mesh, 2)
            step = partial(_backward_of, net, field)
            row[f"{way} ms"], row[f"{way} host ms"] = timed(step), host_time(step)
            row[f"{way} kernels"] = kernels(step)
        yield row | {"kernels to plain": row["split kernels"] / row["plain kernels"]}


def captured(resolution: int) -> Iterator[Row]:
    """Steps of networks as they are, and captured whole as CUDA graphs; with the optimizer.

    All are to change the weights as the plain step does.
    """
    mesh = make_mesh(device().type, 1, (1,))["domain"]
    whole = torch.randn(2, 3, resolution, resolution, device=device())
    split = lightning_shard.shard(whole, mesh, 2)
    graphs = (False, True) if device().type == "cuda" else (False,)
    for name, make in (("README", _of_readme), *((n, NETWORKS[n]) for n in ("U-Net", "TFNO"))):
        first: list[Tensor] = []
        for is_captured, field in itertools.product(graphs, (whole, split)):
            way = f"{'plain' if field is whole else 'split'}{', captured' if is_captured else ''}"
            torch.manual_seed(0)
            net = make().to(device())
            if field is split:
                avoid_whole_fields(net)
            step = partial(_of_training, net, field, torch.optim.SGD(net.parameters(), lr=1e-3))
            reset_peak()
            row: dict[str, Any] = {"network": name, "way": way}
            try:
                step = _captured(step) if is_captured else step
                row |= {"ms of a step": timed(step), "peak MiB": peak()}
                row["host ms"] = host_time(step)
                found = _steps_from_start(net, make, step)
                first = first or found
                row["error"] = max(
                    float((a - b).norm() / b.norm()) for a, b in zip(found, first, strict=True)
                )
            except RuntimeError as error:
                row["failed"] = str(error).splitlines()[0]
            yield row


def compiled(resolution: int) -> Iterator[Row]:
    """A step of the plain U-Net in the CUDA graphs of torch.compile, beside the step as it is."""
    field = torch.randn(2, 3, resolution, resolution, device=device())
    for way in ("plain", "plain, compiled"):
        torch.manual_seed(0)
        net: Any = NETWORKS["U-Net"]().to(device())
        step = partial(_of_training, net, field, torch.optim.SGD(net.parameters(), lr=1e-3))
        if way != "plain" and device().type == "cuda":
            compiled = torch.compile(net, mode="reduce-overhead")
            step = partial(_of_training, compiled, *step.args[1:])
        reset_peak()
        yield {"way": way, "ms of a step": timed(step), "peak MiB": peak()}


def _of_readme() -> nn.Module:
    """The network of README's first run, for a field of three channels."""
    conv, last = nn.Conv2d(3, 16, 5, padding=2), nn.Conv2d(16, 1, 5, padding=2)
    return nn.Sequential(conv, nn.GroupNorm(4, 16), nn.GELU(), last)


def _steps_from_start(
    net: nn.Module, make: Callable[[], nn.Module], step: Callable[[], Any]
) -> list[Tensor]:
    """How far three steps move the weights from where they start."""
    torch.manual_seed(0)
    start = [p.detach().to(device()) for p in make().parameters()]
    for p, first in zip(net.parameters(), start, strict=True):
        p.data.copy_(first)
    for _ in range(3):
        step()
    return [(p.detach() - b).cpu() for p, b in zip(net.parameters(), start, strict=True)]


def _of_training(net: Any, field: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """A step that reads no gradient of the one before, which a CUDA graph overwrites."""
    torch.compiler.cudagraph_mark_step_begin()
    optimizer.zero_grad()
    net(field).square().mean().backward()
    optimizer.step()


def _captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """A step whose kernels are recorded once and started together."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
