"""What `benchmarks.gpu` runs in its own processes, on whatever device the machine has."""

import contextlib
import statistics
import time
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import lightning_shard
from benchmarks.common import QUIET
from benchmarks.gpu_speed import Row, Rows, device, now, peak, reserved, reset_peak, timed
from benchmarks.networks import NETWORKS, Task, UNet
from lightning_shard.memory import offload
from lightning_shard.memory.neuralop.layers import avoid_whole_fields
from lightning_shard.memory.paging.pager import Pager

PRECISIONS: dict[str, tuple[bool, torch.dtype | None]] = {  # TF32, dtype of autocast
    "float64": (False, None),
    "float32": (False, None),
    "float32 with TF32": (True, None),
    "bfloat16": (False, torch.bfloat16),
}
ROUNDING = 1e-4  # of a step in float32
EXACT = 1e-8  # in float64, of which neuraloperator computes a part in complex64
STEPS = 6  # of training with whole and with sharded parameters


def exactness(names: list[str], resolution: int) -> Iterator[Row]:
    """How far steps of split fields are from one process on the CPU, in float64; all ranks call it.

    On a GPU plain neuraloperator is further from that than rounding: it hands `irfftn` spectra that
    are not Hermitian, which cuFFT takes for such (pytorch #154496). A split step is equal in
    float64 to 1e-8; in other precisions if it is no further than rounding, or twice as far as a
    step of one process in the same precision. What torch refuses is a row that says so: on a GPU
    autocast hands bfloat16 to Fourier transforms, which no kernel takes in one process.
    """
    for name in names:
        cpu = torch.device("cpu")
        exact = _step(name, resolution, (False, None), split=False, double=True, place=cpu)
        for precision, how in PRECISIONS.items():
            double = precision == "float64"
            row: dict[str, Any] = {
                "network": name, "ranks": dist.get_world_size(), "backend": dist.get_backend(),
                "precision": precision,
            }  # fmt: skip
            for key, split in (("of one process", False), ("error", True)):
                try:
                    step = _step(name, resolution, how, split=split, double=double)
                    row[key] = _error(step, exact)
                except RuntimeError as error:
                    row[f"{key}: refused"] = str(error).splitlines()[0]
            if "error" in row and "of one process" in row:
                near = EXACT if double else max(ROUNDING, 2 * row["of one process"])
                row["equal"] = row["error"] <= near
            yield row


def _step(
    name: str,
    resolution: int,
    how: tuple[bool, torch.dtype | None],
    *,
    split: bool,
    double: bool = False,
    place: torch.device | None = None,
) -> list[Tensor]:
    """The loss, and the gradients of all parameters, on the CPU."""
    kind = place or device()
    if kind.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = how[0]
    torch.manual_seed(0)
    net = NETWORKS[name]().to(kind)
    field = torch.randn(1, 3, resolution, resolution).to(kind)
    if double:
        field = _to_double(net, field)
    if split:
        avoid_whole_fields(net)
        mesh = init_device_mesh(kind.type, (dist.get_world_size(),))
        field = lightning_shard.shard(field, mesh, 2)
    with torch.autocast(kind.type, how[1], enabled=how[1] is not None):
        loss = net(field).square().mean()
    loss.backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    for grad in grads if split else ():  # each rank has its part; the mean of all is the gradient
        dist.all_reduce(torch.view_as_real(grad) if grad.is_complex() else grad)
        grad /= dist.get_world_size()
    return [x.detach().cpu().to(_wide(x.dtype)) for x in (loss, *grads)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _to_double(net: nn.Module, field: Tensor) -> Tensor:
    """Compute in float64: `nn.Module.double` leaves complex parameters as they are."""
    net.double()
    for p in net.parameters():
        p.data = p.data.to(_wide(p.dtype))
    return field.double()


def parameters(names: list[str], resolution: int) -> Iterator[Row]:
    """Training with whole and with sharded parameters beside one process; every rank calls it.

    Seconds are of a step, forward to optimizer, in float32; the error is that of the weights after
    some steps in float64, relative to how far these have moved.
    """
    kind, ranks = device().type, dist.get_world_size()
    for name in names:
        alone, seconds = _train(name, resolution, None, "")
        row = {"network": name, "mesh": "one process", "sharding": "", "ms": 1e3 * seconds}
        yield row
        for sizes in ({"data": 1, "domain": ranks}, {"data": ranks, "domain": 1}):
            mesh = lightning_shard.init_mesh(sizes, kind)
            for mode in ("none", "full"):
                found, seconds = _train(name, resolution, mesh, mode)
                yield {
                    "network": name, "mesh": "x".join(map(str, sizes.values())), "sharding": mode,
                    "ms": 1e3 * seconds, "error": _distance(found, alone),
                }  # fmt: skip


def _train(name: str, resolution: int, mesh: Any, mode: Any) -> tuple[list[Tensor], float]:
    """Return how far weights have moved in some steps of float64, and the seconds of a step."""
    moved: list[Tensor] = []
    for double in (True, False):
        torch.manual_seed(0)
        net = NETWORKS[name]().to(device())
        fields = torch.randn(STEPS, 2, 3, resolution, resolution).to(device())
        if double:
            fields = _to_double(net, fields)
        first = [p.detach().clone() for p in net.parameters()]
        if mesh is not None:
            options = lightning_shard.ShardingOptions(mode)
            lightning_shard.parallelize(net, mesh, options=options)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        ends = [now()]
        for field in fields:
            if mesh is not None:
                field = field.chunk(mesh["data"].size())[mesh.get_local_rank("data")]
                field = lightning_shard.shard(field, mesh["domain"], 2)
            net(field).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(now())
        if double:
            with lightning_shard.whole_parameters(net):
                after = [p.detach().clone() for p in net.parameters()]
            moved = [(b - a.to(b.dtype)).cpu() for a, b in zip(first, after, strict=True)]
    seconds = [b - a for a, b in pairwise(ends[1:])]
    return moved, statistics.median(seconds)


def _distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the norm of the differences of all tensors, relative to that of all of them."""
    apart = torch.stack([(a - b).norm() for a, b in zip(found, wanted, strict=True)]).norm()
    return float(apart / torch.stack([b.norm() for b in wanted]).norm())


def _error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The relative error of the loss, or of the norm of all gradients, whichever is larger."""
    pairs = list(zip(found, exact, strict=True))
    wrong = torch.stack([(a - b).abs().norm() for a, b in pairs[1:]]).norm()
    size = torch.stack([b.abs().norm() for b in exact[1:]]).norm()
    loss, wanted = pairs[0]
    return max(float((loss - wanted).abs() / wanted.abs()), float(wrong / size))


class Clock(Callback):
    """Seconds of each step: processor time on the CPU, else by the clock, with the device idle."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if not on_cpu:
            torch.accelerator.synchronize()
        self.ends.append(time.process_time() if on_cpu else time.perf_counter())


def one_device(resolution: int, steps: int, rounds: int = 3) -> Rows:
    """The strategy on a mesh of 1x1 beside plain Lightning, in turns."""
    seconds: dict[str, list[float]] = {"plain Lightning": [], "strategy, 1x1": []}
    for _ in range(rounds):
        for way, spent in seconds.items():
            strategy = "auto" if way == "plain Lightning" else "hybrid_shard"
            spent += _trained(strategy, resolution, steps)[0]
    plain = statistics.median(seconds["plain Lightning"])
    return [
        {"way": way, "ms of a step": 1e3 * statistics.median(s),
         "to plain": statistics.median(s) / plain}
        for way, s in seconds.items()
    ]  # fmt: skip


def _trained(
    strategy: Any, resolution: int, steps: int, dtype: torch.dtype = torch.float32
) -> tuple[list[float], Task]:
    """Train a U-Net on one device; return the seconds of each step after the fifth, and it."""
    torch.manual_seed(0)
    clock, module = Clock(), Task(UNet(16), torch.optim.SGD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on workers and intervals
        trainer = Trainer(
            accelerator=device().type, devices=1, strategy=strategy, max_steps=steps + 5,
            precision="64-true" if dtype == torch.float64 else "32-true", callbacks=[clock],
            **QUIET,
        )  # fmt: skip
        field = torch.randn(steps + 5, 3, resolution, resolution, dtype=dtype)
        samples: Any = field  # a tensor has the length and the items of a data set
        trainer.fit(module, DataLoader(samples, 1))
    return [b - a for a, b in zip(clock.ends[4:], clock.ends[5:], strict=False)], module


class _CopiedInLine(saved_tensors_hooks):
    """In the place of `offload.OnHost`: torch's copies, on the stream that computes."""

    def __init__(self, budget: int | None = None) -> None:
        kind = device().type
        copies: Any = save_on_cpu(pin_memory=kind != "cpu", device_type=kind)

        def pack(tensor: Tensor) -> Any:
            return copies.pack_hook(tensor) if offload.is_moved(tensor) else tensor

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else copies.unpack_hook(packed)

        super().__init__(pack, unpack)


def offloaded(resolution: int, dtype: torch.dtype = torch.float32) -> Iterator[Row]:
    """A step of the U-Net with activations kept, copied in line, and fetched ahead of backward.

    All three are to have the same gradients: a wait that a device needs and lacks shows here.
    """
    field = torch.randn(1, 3, resolution, resolution).to(device(), dtype)
    kept: list[Tensor] = []
    for way in ("kept", "on the host, copied in line", "on the host, fetched ahead"):
        torch.manual_seed(0)
        net = UNet(16).to(device(), dtype)
        if way != "kept":
            offload.offload([*net.down, *net.up])
        hooks = _CopiedInLine if way.endswith("in line") else offload.OnHost
        with mock.patch.object(offload, "OnHost", hooks):
            loss = net(field).square().mean()
            loss.backward()
            found = [
                loss.detach(),
                *(p.grad.clone() for p in net.parameters() if p.grad is not None),
            ]
            kept = kept or found
            reset_peak()
            cost = timed(lambda net=net: net(field).square().mean().backward())
        yield {
            "way": way, "ms of a step": cost, "peak MiB": peak(), "error": _error(found, kept),
        }  # fmt: skip


def paged(resolution: int, dtype: torch.dtype = torch.float32) -> Iterator[Row]:
    """A step of the U-Net within budgets of device memory: its time, its peak, what was reserved.

    The pager sees every operator; activation_offload sees what autograd saves. Copies hide where a
    step within a budget takes as long as a plain one. All rows are to have the same gradients.
    """
    kind = device()
    field = torch.randn(1, 3, resolution, resolution).to(kind, dtype)
    kept: list[Tensor] = []
    least = 2**30  # bytes of the plain step, where the CPU does not tell
    for way, share in (
        ("kept", 1.0), ("saved", 0.54), ("saved", 0.27), ("paged", 0.54), ("paged", 0.27),
    ):  # fmt: skip
        torch.manual_seed(0)
        net, budget = UNet(16).to(kind, dtype), int(share * least)
        pager = Pager(kind, budget)
        around = {
            "kept": contextlib.nullcontext, "saved": partial(offload.OnHost, budget),
            "paged": pager.paging,
        }[way]  # fmt: skip

        def step(net: nn.Module = net, around: Any = around, way: str = way) -> Tensor:
            with around():
                loss = net(field).square().mean()
                if way == "paged":
                    loss.backward()
            if way != "paged":
                loss.backward()
            return loss.detach()

        loss = step()
        found = [loss, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        kept = kept or found
        reset_peak()
        cost, most = timed(step), peak()
        if way == "kept" and most is not None:
            least = int(most * 2**20)
        yield {
            "way": way, "share of the peak": share, "ms of a step": cost, "peak MiB": most,
            "reserved MiB": reserved(), "error": _error(found, kept),
        }  # fmt: skip


def tiled(resolution: int, steps: int = 3, dtype: torch.dtype = torch.float32) -> Iterator[Row]:
    """Inference and training of a U-Net on one device, whole and in tiles: times, peaks, errors.

    Of "8 tiles" what half of the free memory holds stays; of "8 tiles, budget 0" all leaves with
    the turn. What is reserved beyond the peak is lost to fragments.
    """
    kept: dict[str, list[Tensor]] = {}
    torch.manual_seed(0)
    network = UNet(16).to(device(), dtype).eval()
    field = torch.randn(1, 3, resolution, resolution, dtype=dtype)
    ways = ("whole", None, None), ("8 tiles", 8, None), ("8 tiles, budget 0", 8, "0")
    for way, tiles, budget in ways:
        options: Any = {"tile_budget": budget}
        for task in ("inference", "training"):
            reset_peak()
            if task == "training":
                kind = lightning_shard.TiledStrategy
                strategy = "auto" if tiles is None else kind(tiles, **options)
                seconds, module = _trained(strategy, resolution, steps, dtype)
                cost = 1e3 * statistics.median(seconds)
                found = [p.detach().cpu() for p in module.parameters()]
            else:
                around = (
                    contextlib.nullcontext()
                    if tiles is None
                    else lightning_shard.in_tiles(network, tiles, **options)
                )
                with torch.inference_mode(), around:
                    cost = timed(lambda: network(field.to(device())).cpu(), rounds=steps)
                    found = [network(field.to(device())).cpu()]
            exact = kept.setdefault(task, found)
            error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
            yield {
                "way": way, "task": task, "ms": cost, "peak MiB": peak(),
                "reserved MiB": reserved(), "error": error,
            }  # fmt: skip


def collective(resolution: int) -> Iterator[Row]:
    """Exactness with the device's own backend, on as many ranks as there are devices."""
    return exactness(["U-Net", "TFNO"], resolution)
