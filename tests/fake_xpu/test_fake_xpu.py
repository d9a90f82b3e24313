"""The fake XPU itself: what the tests on it rely upon."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def test_this_process_has_none():
    assert not torch.xpu.is_available()
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
        torch.empty(1, device="xpu")


@pytest.mark.spmd(1, "xpu")
def test_it_is_torch_xpu():
    assert torch.xpu.is_available()
    assert torch.xpu.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("xpu")
    assert not torch.cuda.is_available()
    assert torch.xpu.get_device_name(1) == "Fake XPU 1"
    assert torch.zeros(2, device="xpu").device == torch.device("xpu", 0)
    with torch.xpu.device(1):
        assert torch.zeros(2, device="xpu").device == torch.device("xpu", 1)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2, device="xpu:2")


@pytest.mark.spmd(1, "xpu")
def test_tensors_of_two_devices_do_not_mix():
    x = torch.ones(2, device="xpu")
    with pytest.raises(RuntimeError, match=r"same device, .* xpu:0 and cpu"):
        x + torch.ones(2)
    with pytest.raises(RuntimeError, match=r"same device, .* xpu:0 and xpu:1"):
        x + torch.ones(2, device="xpu:1")


@pytest.mark.spmd(1, "xpu")
def test_a_network_trains_as_on_the_cpu():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Dropout(0.3), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(36, 5),
    ).double()  # fmt: skip
    x, y = torch.randn(3, 2, 8, 8, dtype=torch.float64), torch.tensor([1, 4, 0])
    trained = []
    for device in ("cpu", "xpu:1"):
        here = copy.deepcopy(network).to(device)
        for foreach in (False, True):
            torch.manual_seed(1)
            optimizer = torch.optim.AdamW(here.parameters(), foreach=foreach)
            loss = F.cross_entropy(here(x.to(device)), y.to(device))
            loss.backward()
            assert loss.device == torch.device(device)
            optimizer.step()
            optimizer.zero_grad()
        trained.append(nn.utils.parameters_to_vector(here.parameters()).cpu())
    assert torch.equal(*trained)


@pytest.mark.spmd(1, "xpu")
def test_spectra_views_and_attention():
    x = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    w = torch.randn(2, 8, 5, dtype=torch.complex128)

    def of(device):
        inputs = [t.detach().to(device).requires_grad_() for t in (x, w)]
        field = torch.fft.irfft2(torch.fft.rfft2(inputs[0]) * inputs[1])
        attended = F.scaled_dot_product_attention(field, field, inputs[0])
        parts = torch.view_as_real(inputs[1]).unfold(1, 2, 2).as_strided((3, 2), (5, 1), 1)
        grads = torch.autograd.grad(attended.sum() + parts.square().sum(), inputs)
        return [t.cpu() for t in (field, attended, *grads)]

    for mine, theirs in zip(of("xpu"), of("cpu"), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.spmd(1, "xpu")
def test_random_numbers_are_those_of_the_cpu():
    torch.manual_seed(3)
    drawn = torch.randn(5, device="xpu:1")
    torch.manual_seed(3)
    assert torch.equal(drawn.cpu(), torch.randn(5))
    state = torch.xpu.get_rng_state("xpu:1")
    drawn = torch.rand(2, device="xpu:1")
    assert not torch.equal(drawn, torch.rand(2, device="xpu:1"))
    torch.xpu.set_rng_state(state, "xpu:1")
    assert torch.equal(drawn, torch.rand(2, device="xpu:1"))


@pytest.mark.spmd(1, "xpu")
def test_memory_is_counted_and_ends():
    before = torch.xpu.memory_allocated(1)
    x = torch.zeros(1000, dtype=torch.uint8, device="xpu:1")
    assert torch.xpu.memory_allocated(1) == before + 1000
    free, total = torch.xpu.mem_get_info(1)
    assert free == total - before - 1000
    del x
    assert torch.xpu.memory_allocated(1) == before
    assert torch.xpu.max_memory_allocated(1) >= before + 1000
    torch.xpu.reset_peak_memory_stats(1)
    assert torch.xpu.max_memory_allocated(1) == before
    with pytest.raises(torch.OutOfMemoryError, match="XPU out of memory"):
        torch.zeros(2**33, dtype=torch.uint8, device="xpu:1")


@pytest.mark.spmd(1, "xpu")
def test_streams_and_events():
    other = torch.xpu.Stream()
    begin, end = (torch.xpu.Event(enable_timing=True) for _ in range(2))
    assert torch.xpu.current_stream() != other
    begin.record()
    with torch.xpu.stream(other):
        assert torch.xpu.current_stream() == other
        torch.ones(100, device="xpu").record_stream(other)
    torch.xpu.current_stream().wait_stream(other)
    end.record()
    end.synchronize()
    assert 0 < begin.elapsed_time(end) < 60_000


@pytest.mark.spmd(1, "xpu")
def test_pinned_memory():
    data = TensorDataset(torch.arange(4.0))
    assert not torch.ones(2).is_pinned()
    assert torch.ones(2).pin_memory().is_pinned()
    for workers in (0, 1):
        loader = DataLoader(data, 2, pin_memory=True, num_workers=workers)
        assert all(x.is_pinned() for (x,) in loader)


@pytest.mark.spmd(2, "xpu")
def test_xccl_knows_tensors_of_the_xpu_only():
    rank = dist.get_rank()
    assert dist.get_backend() == "xccl"
    x = torch.full((3,), float(rank), device="xpu")
    dist.all_reduce(x)
    assert x.tolist() == [1, 1, 1]
    parts = [torch.empty(1, device="xpu") for _ in range(2)]
    dist.all_gather(parts, x.new_full((1,), rank))
    assert torch.cat(parts).tolist() == [0, 1]
    everything = [None, None]
    dist.all_gather_object(everything, {"rank": rank})
    assert everything == [{"rank": 0}, {"rank": 1}]
    dist.barrier()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(x, torch._C._distributed_c10d._make_nccl_premul_sum(0.5))


@pytest.mark.spmd(2, "xpu")
def test_xccl_cannot_be_split():
    with pytest.raises(RuntimeError, match=r"not support splitting|No backend type"):
        dist.split_group(split_ranks=[[0], [1]])


@pytest.mark.spmd(2, "xpu")
def test_a_group_of_gloo_may_be_beside_it():
    group = dist.new_group(backend="cpu:gloo,xpu:xccl")
    for device in ("cpu", "xpu"):
        x = torch.ones(1, device=device)
        dist.all_reduce(x, group=group)
        assert x.item() == 2
