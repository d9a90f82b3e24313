"""`plan(measure=True)`: kernels of the step run on a device of this machine and are timed."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

import lightning_shard
from benchmarks.forecast_runs import peak_of
from benchmarks.networks import UNet
from lightning_shard.lab import own_kernels as own
from lightning_shard.lab.fake_modes import Real
from lightning_shard.lab.kernels import name_of
from lightning_shard.lab.machine import Cluster, Device, Link
from lightning_shard.lab.step_memory import StepMemory, part_of
from lightning_shard.lab.timeline import Ledger
from tests.lab.test_kernel_costs import Task

CPU = torch.device("cpu")
SNAIL = Device(name_of(CPU), 10**12, {"float32": 1.0}, 1.0, 0.0, "an operation a second")
HERE = Cluster(SNAIL, 1, 1, Link(1e9, 1e-6), Link(1e9, 1e-6))


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(own, "PASSES", 2)


def run_here(step):
    """The kernels of a step that was traced on real tensors and run once more, and its seconds."""
    found = own.OwnKernels(HERE, CPU)
    for _ in range(2):
        ledger = Ledger(SNAIL, costs=found)
        with Real(ledger):
            step()
        found.run()
    return found, ledger.seconds


def test_a_kernel_takes_its_time_not_that_of_the_rates():
    x = torch.randn(64, 64)
    found, seconds = run_here(lambda: x @ x)  # the rates say 2 * 64^3 seconds
    assert 0 < seconds < 1
    assert not found.not_run


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.transpose(0, 1) @ x[:, :8],
        lambda x: x[:1].expand(16, -1) + x,
        lambda x: x.add_(1).mul_(x),
        lambda x: x[torch.arange(16).flip(0)],
        lambda x: F.embedding(torch.tensor([[3, 1], [2, 15]]), x),
        lambda x: torch.cat([x, x[::2]]).split(5),
        lambda x: F.max_pool1d(x, 2),
        lambda x: torch.fft.irfft(torch.fft.rfft(x)),
        lambda x: torch._foreach_add([x, x], 1.0),
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: x[:, :0] + 1,
        lambda x: torch.zeros_like(x).index_add_(0, torch.tensor([1, 2]), x[:2]),
        lambda x: torch.sort(x)[1].float(),
    ],
    ids=[
        "views", "expanded", "in place", "index", "embedding", "cat", "pool", "fft", "lists",
        "bfloat16", "empty", "zeros", "sort",
    ],
)  # fmt: skip
def test_any_order_of_memory_and_any_type_runs(step):
    x = torch.randn(16, 16)
    found, seconds = run_here(lambda: step(x))
    assert not found.not_run
    assert 0 < seconds < 1


def test_equal_kernels_run_once(monkeypatch):
    x = torch.randn(8, 8)
    found, _ = run_here(lambda: [x @ x, x @ x])
    monkeypatch.setattr(own, "_Passes", None)  # it would be an error to run them again
    with Real(Ledger(SNAIL, costs=found)):
        x @ x
    assert found.run() is False


def test_memory_is_held_as_long_as_in_the_step():
    one, two, three = object(), object(), object()
    x = part_of(torch.zeros(10), one)
    y, z = replace(x, memory=two), replace(x, memory=three)
    memory = StepMemory([([x], [y]), ([y], [z]), ([x], [x])], CPU)
    assert memory.tensor(x) is memory.tensor(x)
    made = torch.ones(10)
    memory.keep([y], made)
    memory.give_back(0)
    assert memory.tensor(y) is made
    memory.give_back(1)
    assert memory.tensor(y) is not made  # nothing needs it any more
    assert memory.tensor(x) is memory.tensor(x)  # the step had found it


def test_what_finds_no_room_is_made_again(monkeypatch):
    monkeypatch.setattr("lightning_shard.lab.step_memory.free_here", lambda: (200, "here"))
    x, y = (part_of(torch.zeros(20), object()) for _ in range(2))
    memory = StepMemory([([x], [y]), ([x], [y])], CPU)
    first = memory.tensor(x)
    memory.keep([y], torch.ones(20))
    assert memory.tensor(x) is first
    with pytest.raises(RuntimeError, match="larger than the free memory"):
        memory.tensor(part_of(torch.zeros(100), object()))


def unet():
    return UNet(8), DataLoader([torch.randn(2, 3, 32, 32)] * 3, batch_size=None)


@pytest.mark.quick_rows("32-true")
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_the_workspaces_of_convolutions_are_seen(precision):
    def train(clock):
        network, data = unet()  # here, since the profiler counts what is made while it runs
        Trainer(
            accelerator="cpu", devices=1, strategy="hybrid_shard", max_steps=3, logger=False,
            precision=precision, callbacks=[clock], enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(Task(network), data)  # fmt: skip

    network, data = unet()
    task = Task(network)
    planned = lightning_shard.plan(task, data, cluster=HERE, precision=precision, measure=True)
    assert planned.memory == pytest.approx(peak_of(train), rel=0.01)
    assert planned.memory_by_cause["workspaces"] > 0


def test_a_plan_says_where_its_times_come_from():
    network, data = unet()
    found = lightning_shard.plan(Task(network), data, cluster=HERE, measure=True)
    assert 0 < found.seconds < 60  # the rates would say years
    assert f"On {SNAIL.name} each kernel of the step was run and timed" in str(found)


@pytest.mark.slow
def test_a_rank_of_a_domain_runs_the_kernels_of_its_share():
    network, data = unet()
    pair = replace(HERE, per_node=2)
    found = lightning_shard.plan(Task(network), data, (1, 2), cluster=pair, measure=True)
    assert 0 < found.compute < 60
    assert found.exchange > 0


@pytest.mark.slow
def test_the_best_mesh_by_kernels_that_ran():
    network, (_, data) = nn.Conv2d(3, 3, 3, padding=1), unet()
    found = lightning_shard.best(Task(network), data, replace(HERE, per_node=2), measure=True)
    assert len(found.candidates) >= 2
    assert all(0 < each.forecast.seconds < 60 for each in found.candidates)


@torch.library.custom_op("tests_own_kernels::lazy", mutates_args=())
def lazy(x: torch.Tensor) -> torch.Tensor:
    """An operator that cannot run on random numbers."""
    if not x.eq(1).all():
        raise RuntimeError("not ones")
    return x.clone()


@lazy.register_fake
def _(x):
    return torch.empty_like(x)


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(lazy(x))


def test_half_precision_runs_though_traced_norms_have_other_types():
    network, data = unet()
    found = lightning_shard.plan(
        Task(network), data, cluster=HERE, precision="bf16-mixed", measure=True
    )
    assert found.by_rates == ()


def test_only_what_is_too_large_takes_the_rates(monkeypatch):
    monkeypatch.setattr("lightning_shard.lab.step_memory.free_here", lambda: (2**12, "here"))
    small, large = torch.randn(16), torch.randn(2**10)
    found, _ = run_here(lambda: [small + 1, large + 1])
    assert found.not_run == {"add"}
    with Real(Ledger(SNAIL, costs=found)):
        small + 1
    assert found._costs[found._step[0].key].seconds < 1


def test_a_kernel_may_fail_in_a_later_pass(monkeypatch):
    """As where another program has taken the memory meanwhile."""
    timed, runs = own._Passes._timed, []

    def failing(self, kernel, call):
        runs.append(kernel.name)
        if kernel.name == "mul" and runs.count("mul") == 2:
            raise RuntimeError("out of memory")
        return timed(self, kernel, call)

    monkeypatch.setattr(own._Passes, "_timed", failing)
    monkeypatch.setattr(own._Passes, "_seconds_of_asking", lambda self: 0.0)
    x = torch.randn(16)
    found, _ = run_here(lambda: x * 2 + 1)
    assert found.not_run == {"mul"}


def test_what_cannot_run_takes_the_rates_and_is_named():
    data = DataLoader([torch.ones(2, 4)], batch_size=None)
    found = lightning_shard.plan(Task(Lazy()), data, cluster=HERE, measure=True)
    assert found.by_rates == ("lazy",)
    assert "By the rates of the device, since they could not be run here: lazy." in str(found)
    assert found.seconds > 32  # bytes, at a byte a second


def test_another_device_is_refused():
    network, data = unet()
    with pytest.raises(ValueError, match="but the cluster is of H100; run it on such a machine"):
        lightning_shard.plan(Task(network), data, cluster="1xH100", measure=True)
    with pytest.raises(ValueError, match=r"measure runs the kernels .* name one, such as 1xH100"):
        lightning_shard.plan(Task(network), data, measure=True)


@pytest.mark.parametrize(
    ("device", "torch_says", "is_it"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("A100-40", "NVIDIA A100-SXM4-40GB", True),
        ("Max1550", "Intel(R) Data Center GPU Max 1550", True),
        ("H200", "NVIDIA H100 80GB HBM3", False),
        ("AMD EPYC", "AMD EPYC", True),
    ],
)
def test_a_device_is_known_by_its_name(device, torch_says, is_it):
    assert own._is_named(device, torch_says) is is_it


def test_the_command_line_refuses_it_without_such_a_device(tmp_path):
    word = [sys.executable, "-m", "lightning_shard", "plan", "--measure"]
    done = subprocess.run(word, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "--measure needs --cluster" in done.stderr


@pytest.mark.spmd(1, "xpu")
def test_kernels_of_a_device_are_timed_by_its_clock():
    device = torch.device("xpu", 0)
    named = replace(HERE, device=replace(SNAIL, name=name_of(device), is_beside_host=True))
    assert own.device_here(named) == device
    found = own.OwnKernels(named, device)
    x, kernel = torch.randn(1, 8, 32, 32, requires_grad=True), torch.randn(8, 8, 3, 3)
    for _ in range(2):
        ledger = Ledger(named.device, costs=found)
        with Real(ledger):
            y = F.conv2d(x, kernel, padding=1) @ x
            F.scaled_dot_product_attention(y, y, x, is_causal=True).sum().backward()
        x.grad = None
        found.run()
    assert not found.not_run
    assert 0 < ledger.seconds < 1
