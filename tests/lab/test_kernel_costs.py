"""What kernels take on a device: seconds, memory beside their tensors, the host's time."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import torchvision.models as vision
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_shard
from benchmarks.networks import UNet
from lightning_shard.lab.clusters import read_cluster
from lightning_shard.lab.device_autocast import autocast_of_gpu
from lightning_shard.lab.kernel_costs import Call, seconds_on, workspace_on
from lightning_shard.lab.machine import Device
from lightning_shard.lab.timeline import SPLIT_HOST, Ledger
from lightning_shard.ops.autocast import cast_for, of_one

aten = torch.ops.aten
CPU = Device("snail", 10**12, {"float32": 1e6}, 1e9, 0.0, "measured")
GPU = replace(CPU, is_beside_host=True)
NUMBERS = [1, 1], [1, 1], [1, 1], False, [0, 0], 1


class Task(LightningModule):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def training_step(self, batch, batch_idx):
        return self.network(batch).float().add(1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


def planned(network, shape, cluster, precision="32-true", pin_memory=False):
    sample = torch.zeros(()).expand(1, *shape)
    data = DataLoader([sample], batch_size=None, pin_memory=pin_memory)
    return lightning_shard.plan(Task(network), data, (1, 1), cluster=cluster, precision=precision)


# MiB of a step of plain Lightning that torch's allocator reported on an H100
@pytest.mark.quick_rows("U-Net")
@pytest.mark.parametrize(
    ("make", "shape", "precision", "mebibytes"),
    [
        (lambda: UNet(16, 1, nn.Conv3d), (1, 128, 128, 128), "32-true", 2452),
        (lambda: UNet(16, 1, nn.Conv3d), (1, 128, 128, 128), "bf16-mixed", 2370),
        (lambda: UNet(32), (3, 1024, 1024), "32-true", 3237),
        (lambda: vision.resnet50(num_classes=10), (3, 1024, 1024), "32-true", 2054),
        (lambda: vision.vit_b_16(image_size=512, num_classes=10), (3, 512, 512), "32-true", 1656),
    ],
    ids=["U-Net 3-D", "U-Net 3-D in bfloat16", "U-Net", "ResNet-50", "ViT-B/16"],
)  # fmt: skip
def test_the_memory_of_an_h100_is_planned_as_it_was_measured(make, shape, precision, mebibytes):
    found = planned(make(), shape, "1xH100", precision)
    assert found.memory / 2**20 == pytest.approx(mebibytes, rel=0.01)
    assert sum(found.memory_by_cause.values()) == found.memory


def test_norms_are_in_float32_on_a_gpu_only():
    network = nn.Sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.GELU())
    clusters = [replace(read_cluster("1xH100"), device=device) for device in (CPU, GPU)]
    on_cpu, on_gpu = (planned(network, (2, 64, 64), c, "bf16-mixed") for c in clusters)
    more = 2 * 8 * 62 * 62  # bytes of a result in float32 beside one in bfloat16
    wanted = on_cpu.activations + 2 * more  # the norm keeps its input, and GELU keeps the norm's
    assert on_gpu.activations == pytest.approx(wanted, rel=0.001)
    whole = [planned(network, (2, 64, 64), c).activations for c in clusters]
    assert whole[0] == whole[1]


@pytest.mark.parametrize("recomputed", [False, True])
def test_ranks_of_a_gpu_have_its_types_and_leave_no_trace(recomputed):
    """Also where blocks are computed again in backward, and where the process trains afterwards."""
    network = nn.Sequential(*[nn.Sequential(nn.Conv2d(2, 2, 3), nn.GroupNorm(1, 2))] * 2)
    cluster = replace(read_cluster("2xH100"), device=GPU)
    data = DataLoader([torch.zeros(1, 2, 32, 32)], batch_size=None)
    options = {"sharding": "full", "activation_checkpointing": recomputed}
    found = lightning_shard.plan(
        Task(network), data, 2, cluster=cluster, precision="bf16-mixed", **options
    )
    assert not found.is_measured
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.ones(1, 2, 4, 4, dtype=torch.bfloat16)
        assert F.group_norm(x, 1).dtype == torch.bfloat16
        (cast,) = cast_for(of_one(torch.group_norm, 1), x)
        assert cast.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("function", "given", "dtype"),
    [
        (lambda x: F.group_norm(x, 1), torch.bfloat16, torch.float32),
        (lambda x: x.softmax(1), torch.float16, torch.float32),
        (lambda x: x.sum(), torch.bfloat16, torch.float32),
        (lambda x: 1 / x, torch.bfloat16, torch.float32),
        (F.gelu, torch.bfloat16, torch.bfloat16),
        (lambda x: F.max_pool3d(x, 2), torch.bfloat16, torch.bfloat16),
        (lambda x: F.pad(x, (1,) * 6, mode="replicate"), torch.bfloat16, torch.bfloat16),
        (lambda x: F.conv3d(x, torch.ones(1, 2, 1, 1, 1)), torch.float32, torch.bfloat16),
        (lambda x: x.cumsum(0), torch.float64, torch.float64),
    ],
)
def test_autocast_of_a_gpu(function, given, dtype):
    x = torch.ones(1, 2, 4, 4, 4, dtype=given)
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast_of_gpu():
        assert function(x).dtype == dtype
    with autocast_of_gpu():
        assert torch.ones(2, dtype=torch.bfloat16).sum().dtype == torch.bfloat16


def convolution(kernel, dtype=torch.float32, last=False):
    x = torch.ones(1, 8, 6, 6, dtype=dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    weight = torch.ones(8, 8, kernel, kernel, dtype=dtype)
    args = (x, weight, None, *NUMBERS)
    y = aten.convolution.default(*args)
    return Call(aten.convolution.default, args, {}, y, [x, weight, y])


def test_a_convolution_is_written_anew_with_its_channels_side_by_side():
    device = replace(GPU, workspaces={"float32": 1.0})
    call = convolution(3)
    x, _, y = call.used
    assert workspace_on(device, call) == 4 * (x.numel() + y.numel())
    for other in (convolution(1), convolution(3, torch.float64), convolution(3, last=True)):
        assert workspace_on(device, other) == 0


def test_what_a_library_keeps_stays_from_the_first_product_on():
    x = torch.ones(16, 16)
    ledger = Ledger(replace(GPU, workspace=10**6))
    ledger.note(aten.add.Tensor, (x, x), {}, [x, x], x + x)
    assert ledger.peak.causes.get("workspaces", 0) == 0
    ledger.note(aten.mm.default, (x, x), {}, [x, x], x @ x)
    assert ledger.peak.causes["workspaces"] == 10**6
    ledger.next_step()
    ledger.note(aten.add.Tensor, (x, x), {}, [x, x], x + x)
    assert ledger.peak.causes["workspaces"] == 10**6


def test_a_device_waits_for_its_host_and_a_cpu_computes_in_the_hosts_time():
    x = torch.ones(250)  # an addition moves 3,000 bytes: 3 µs
    kernel, host = 3e-6, 10e-6

    def after_two(device, is_split=False, loop=0.0):
        ledger = Ledger(replace(device, per_operator=host, per_step=loop))
        ledger.is_split = is_split
        ledger.next_step()
        for _ in range(2):
            ledger.note(aten.add.Tensor, (x, x), {}, [x, x], x + x)
        return ledger.seconds

    assert after_two(GPU) == pytest.approx(2 * host + kernel)
    assert after_two(CPU) == pytest.approx(2 * (host + kernel))
    assert after_two(GPU, loop=5e-6) == pytest.approx(5e-6 + 2 * host + kernel)
    assert after_two(CPU, loop=5e-6) == pytest.approx(5e-6 + 2 * (host + kernel))
    assert after_two(GPU, is_split=True) == pytest.approx(2 * SPLIT_HOST * host + kernel)


@pytest.mark.parametrize("backward", [False, True])
def test_convolutions_of_groups_have_few_operations_and_a_rate_of_their_own(backward):
    x, weight = torch.ones(1, 8, 6, 6), torch.ones(8, 1, 3, 3)
    options = [1, 1], [1, 1], [1, 1], False, [0, 0], 8
    y = aten.convolution.default(x, weight, None, *options)
    call = Call(aten.convolution.default, (x, weight, None, *options), {}, y, [x, weight, y])
    name, flops = "grouped_convolution", 2 * 9 * 8 * 36
    if backward:
        args = (y, x, weight, None, *options, [True, True, False])
        out = aten.convolution_backward.default(*args)
        call = Call(aten.convolution_backward.default, args, {}, out, [y, x, weight])
        name, flops = f"{name}_backward", 2 * flops
    device = replace(CPU, kernels={name: {"float32": 7e5}})
    assert seconds_on(device, call) == pytest.approx(flops / 7e5)


@pytest.mark.parametrize(
    ("operator", "args", "kernel"),
    [
        (aten.gelu.default, (), "gelu"),
        (aten.silu.default, (), "gelu"),
        (aten.threshold_backward.default, (torch.ones(1, 4, 8, 8), 0), "relu_backward"),
        (aten.native_group_norm.default, (None, None, 1, 4, 64, 2, 1e-5), "group_norm"),
        (aten.max_pool2d_with_indices.default, ([2, 2],), "max_pool"),
        (aten._softmax.default, (1, False), "softmax"),
    ],
)
def test_what_goes_by_its_bytes_has_a_rate_of_its_own(operator, args, kernel, monkeypatch):
    x = torch.ones(1, 4, 8, 8)
    out = operator(x, *args)
    first = out if isinstance(out, torch.Tensor) else out[0]
    call = Call(operator, (x, *args), {}, out, [x, first])
    moved = 4 * (x.numel() + first.numel())
    device = replace(CPU, kernels={kernel: {"float32": 5e5}})
    assert seconds_on(device, call) == pytest.approx(moved / 5e5)
    assert seconds_on(CPU, call) == pytest.approx(moved / 1e9)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")  # of products only
    assert seconds_on(device, call) == pytest.approx(moved / 5e5)


def test_a_gradient_of_the_weight_alone_has_a_rate_of_its_own():
    """The first convolution of a network, whose input needs no gradient."""
    x, weight = torch.ones(1, 3, 8, 8), torch.ones(8, 3, 3, 3)
    y = aten.convolution.default(x, weight, None, *NUMBERS)
    args = (y, x, weight, None, *NUMBERS, [False, True, False])
    out = aten.convolution_backward.default(*args)
    call = Call(aten.convolution_backward.default, args, {}, out, [y, x, weight])
    rates = {
        "thin_convolution_weight": {"float32": 3e5},
        "thin_convolution_backward": {"float32": 1e5},
    }
    flops = 2 * weight.numel() * 64
    assert seconds_on(replace(CPU, kernels=rates), call) == pytest.approx(flops / 3e5)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_a_gpu_waits_for_its_batch(pinned):
    """By the rate of memory that the loader pins, or of other memory; a CPU has it already."""
    device = replace(GPU, host_rate=4e9, batch_rate=1e9)
    on_cpu, on_gpu = (
        planned(
            nn.Conv2d(2, 1, 1), (2, 64, 64), replace(read_cluster("1xH100"), device=each),
            pin_memory=pinned,
        )
        for each in (CPU, device)
    )  # fmt: skip
    batch = on_gpu.memory_by_cause["batch"]
    assert on_gpu.link == pytest.approx(batch / (4e9 if pinned else 1e9))
    assert on_gpu.seconds >= on_gpu.compute + on_gpu.link
    assert (on_gpu.overlapped, on_cpu.link) == pytest.approx((0, 0), abs=1e-12)
    assert "waiting for the batch" in str(on_gpu)
    assert "waiting for the batch" not in str(on_cpu)
