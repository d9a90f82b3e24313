"""The simulated device finds the races of programs that are known to have them."""

import pytest
import torch

from tests.memory.replay import orders
from tests.memory.streams import Machine

COPIES, COMPUTATION = orders()["copies first"], orders()["computation first"]


def host_like(machine, tensor):
    with machine.host():
        return torch.empty_like(tensor)


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_that_does_not_wait_for_what_it_copies(waits):
    with Machine() as machine:
        y = torch.ones(4) * 2
        host = host_like(machine, y)
        if waits:
            machine.beside["out"].wait_stream(machine.compute)
        with machine.beside["out"]:
            host.copy_(y)
    assert bool(machine.races) != waits
    (found,) = machine.replayed(COPIES, [host])
    assert torch.equal(found, y) == waits


@pytest.mark.parametrize("guard", ["nothing", "record_stream", "event"])
def test_memory_that_is_freed_while_it_is_copied(guard):
    with Machine() as machine:
        y = torch.ones(4) * 2
        host = host_like(machine, y)
        machine.beside["out"].wait_stream(machine.compute)
        with machine.beside["out"]:
            host.copy_(y)
        if guard == "record_stream":
            machine.record_stream(y, machine.beside["out"])
        elif guard == "event":
            machine.compute.wait_event(machine.beside["out"].record_event())
        del y
        z = torch.ones(4) * 3
    assert bool(machine.races) == (guard == "nothing")
    found, also = machine.replayed(COMPUTATION, [host, z])
    assert torch.equal(found, torch.full((4,), 2.0)) == (guard != "nothing")
    assert torch.equal(also, torch.full((4,), 3.0))


@pytest.mark.parametrize(("by_event", "places"), [(True, 2), (False, 6)])
def test_record_stream_keeps_memory_and_an_event_does_not(by_event, places):
    """The allocator may not hand it out before the host sees that the stream is done."""
    with Machine() as machine:
        for _ in range(5):
            y = torch.ones(4) * 2
            machine.beside["out"].wait_stream(machine.compute)
            with machine.beside["out"]:
                host_like(machine, y).copy_(y)
            if by_event:
                machine.compute.wait_event(machine.beside["out"].record_event())
            else:
                machine.record_stream(y, machine.beside["out"])
            del y
    assert not machine.races
    assert len([p for p in machine.places if p.pool is machine.compute]) == places


def test_memory_of_the_stream_of_the_copies():
    """The next copy there writes what the computation may still read."""
    with Machine() as machine:
        host = host_like(machine, torch.ones(4))
        host.fill_(2)
        sums = []
        for _ in range(2):
            machine.beside["out"].wait_stream(machine.compute) if not sums else None
            with machine.beside["out"]:
                y = torch.empty_like(host)
                y.copy_(host)
            machine.compute.wait_stream(machine.beside["out"])
            sums.append(y * 2)
            del y
    assert any("the end of a tensor writes" in race for race in machine.races)
    found = machine.replayed(COPIES, sums)
    assert not all(torch.equal(a, b) for a, b in zip(found, sums, strict=True))


def test_memory_of_the_host_that_is_reused_during_a_copy():
    with Machine() as machine:
        host = host_like(machine, torch.ones(4))
        host.fill_(1)
        machine.beside["out"].wait_stream(machine.compute)
        y = torch.empty_like(host)
        with machine.beside["out"]:
            y.copy_(host)
        del host
        host_like(machine, y).fill_(5)  # on the stream that computes
        machine.compute.wait_stream(machine.beside["out"])
    assert any("of host" in race for race in machine.races)
    (found,) = machine.replayed(COMPUTATION, [y])
    assert torch.equal(found, torch.full((4,), 5.0))


@pytest.mark.parametrize("laid_out", [lambda x: x.t(), lambda x: x.conj()], ids=["rows", "conj"])
def test_a_copy_that_needs_memory_in_between(laid_out):
    x = torch.ones(3, 3, dtype=torch.complex64)
    with Machine() as machine:
        host_like(machine, x).copy_(laid_out(x))
    assert machine.races == ["a copy from or to the host needs memory in between"]
