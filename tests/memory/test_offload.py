"""What an offloaded block moves, and what it refuses."""

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_shard.memory import offload
from lightning_shard.memory.paging.host_memory import MemoryInParts, sizes_of_parts
from tests.memory.simulated_driver import on_machine

KIB = 2**10


def test_what_is_moved():
    large, weight = torch.randn(128, 128), nn.Parameter(torch.randn(128, 128))
    frozen = nn.Parameter(torch.randn(128, 128), requires_grad=False)
    assert offload.is_moved(large)
    assert offload.is_moved(large.t()[:, ::1])
    assert offload.is_moved(large[:1].expand(128, 128))  # its memory, once
    assert offload.is_moved(weight * 2)
    for stays in (
        torch.randn(64, 255),  # less than 64 KiB
        weight,
        weight.t(),
        frozen,
        frozen.t(),  # FSDP2 frees it after the block
        large.to_sparse(),
    ):
        assert not offload.is_moved(stays), stays.shape


def test_nothing_moves_on_the_cpu():
    mover = offload.Mover(offload.Driver())
    x = torch.randn(128, 128)
    assert mover.unpack(None, mover.pack(None, x)) is x


def test_what_fits():
    """Half of what gradients and Adam leave free when the first forward begins."""
    net = nn.Linear(9, 1).requires_grad_()  # 40 bytes
    assert offload.WhatFits(net).bytes() is None  # a CPU does not tell, and moves nothing
    fits = offload.WhatFits(net)
    for free in (1000, 0):
        with mock.patch.object(offload, "free_bytes", return_value=free):
            assert fits.bytes() == (1000 - 3 * 40) // 2
            assert offload.WhatFits(net).bytes() == (440 if free else None)


def machine_of(program):
    """What ran it; the two newest tensors of 4 KiB are near."""
    return on_machine(program, ahead=2 * 4 * KIB, small=KIB)[0]


@pytest.mark.parametrize("late", [False, True])
def test_a_saved_tensor_that_is_written(late):
    """As without blocks it is refused, whether or not it has left by then."""
    x = torch.rand(32, 32, requires_grad=True)

    def program():
        with offload.OnHost():
            y = x.exp()
            z = y.exp().exp().exp() if late else y
        with torch.no_grad():
            y.zero_()
        z.sum().backward()

    with pytest.raises(RuntimeError, match=r"a tensor \(32, 32\) that backward needs was writ"):
        machine_of(program)


def test_a_saved_tensor_whose_memory_is_freed():
    """As FSDP2 frees a gathered parameter, of which only a detached copy was seen."""
    tensor = torch.rand(32, 32)
    saved = []

    def program():
        mover = offload.MOVER
        saved.append(mover.pack(None, tensor))
        tensor.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="its memory was freed"):
            mover.unpack(None, saved[0])

    machine_of(program)
    assert not torch.is_tensor(saved[0])


@pytest.mark.parametrize("count", [10, 2**17])
def test_what_stays_is_as_without_blocks(count):
    """A write into it is refused, and its memory ends with the graph."""
    x = torch.rand(count, requires_grad=True)
    with offload.OnHost(0):
        y = x.exp()
    y.detach().zero_()
    with pytest.raises(RuntimeError, match=r"backward needs was written in place"):
        y.sum().backward()
    gc.disable()
    try:
        with offload.OnHost(0):
            y = x.exp()
        memory = weakref.ref(y.untyped_storage())
        del y
        assert memory() is None
    finally:
        gc.enable()


@pytest.mark.slow_rows("None")
@pytest.mark.parametrize("budget", [None, 2 * 4 * KIB])
def test_python_collects_a_graph_while_room_is_made(budget):
    """It may do so anywhere: tables that are read then must not change."""
    x = torch.rand(32, 32, requires_grad=True)
    is_only_ours, collected = offload.Mover._is_only_ours, []

    def collect(self, page):
        collected.append(gc.collect())
        return is_only_ours(self, page)

    def program():
        for _ in range(3):
            with offload.OnHost(budget):
                cycle: list[object] = [x.exp().sigmoid().exp().tanh()]
            cycle.append(cycle)
            del cycle
        with mock.patch.object(offload.Mover, "_is_only_ours", collect), offload.OnHost(budget):
            y = x.exp().sigmoid().exp().tanh()
        (found,) = torch.autograd.grad(y.sum(), x)
        del y
        held = [*offload.MOVER._near, *offload.MOVER._away]
        return found, held

    gc.disable()
    try:
        machine, (found, held) = on_machine(program, ahead=2 * 4 * KIB, small=KIB)
    finally:
        gc.enable()
    assert any(collected)
    assert machine.races == []
    assert held == []
    expected = torch.autograd.grad(x.exp().sigmoid().exp().tanh().sum(), x)
    assert torch.equal(found, expected[0])


def test_small_tensors_stay():
    def program():
        with offload.OnHost(0):
            y = torch.rand(15, 16, requires_grad=True).exp().exp().exp()
            z = torch.rand(16, 16, requires_grad=True).exp().exp().exp()
        (y.sum() + z.sum()).backward()

    assert len(copies_out(machine_of(program))) == 1


def test_layouts_come_back():
    def makers():
        torch.manual_seed(0)
        wide = torch.randn(32, 48)
        yield torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
        yield wide.t()
        yield wide[:, 16:32].t()
        yield wide[:1].expand(32, 48)
        yield wide.to(torch.int64)
        yield torch.view_as_complex(torch.randn(32, 16, 2)).conj()

    def program():
        packed = [offload.MOVER.pack(0, tensor) for tensor in makers()]
        offload.MOVER.pack(0, torch.randn(32, 32))
        for saved, tensor in zip(packed, makers(), strict=True):
            back = offload.MOVER.unpack(0, saved)
            assert torch.equal(back, tensor)
            assert back.stride() == tensor.stride()
            assert back.is_conj() == tensor.is_conj()

    machine = machine_of(program)
    assert machine.races == []
    assert len(copies_out(machine)) == 4  # three views share one memory


def copies_out(machine):
    return [step for step in machine.steps if step.stream is machine.beside["out"] and step.run]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a device, and `-m gpu`")
def test_on_a_device():
    """Gradients as without offload, many times, while the device is behind and memory is reused."""
    device = torch.accelerator.current_accelerator()
    net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(20)))
    net.to(device)
    x = torch.randn(8192, 512, device=device)

    def gradients():
        net.zero_grad()
        net(x).square().mean().backward()
        return [p.grad.clone() for p in net.parameters()]

    kept = gradients()
    offload.offload(net)
    for ahead in (1, 2**25, offload.AHEAD_BYTES):
        with mock.patch.object(offload, "AHEAD_BYTES", ahead):
            for _ in range(20):
                found = gradients()
                torch.testing.assert_close(found, kept, rtol=0, atol=0)


def test_parts_of_pinned_memory_are_not_rounded_up_to_twice_the_size():
    for count in (1, 100, 6144, 6145, 2**16 + 1, 2**17 - 1, 805_306_369):
        sizes = sizes_of_parts(count)
        assert all(size.bit_count() == 1 for size in sizes)  # as torch gives them out
        assert count <= sum(sizes) <= count + count // 8
    memory = MemoryInParts()
    room = memory.take(100)
    assert [len(part) for part in room.parts] == [64, 32, 4]
    assert memory.held == 100
