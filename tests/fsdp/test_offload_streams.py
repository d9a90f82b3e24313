"""Activations on the host, on a simulated device: no race, no wrong number, bounded memory."""

import functools
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_shard.fsdp import offload
from tests.fsdp.offload_programs import (
    KINDS,
    PROGRAMS,
    WIDTH,
    Branches,
    Chain,
    Exp,
    Mlp,
    network,
    random_kinds,
    random_program,
    sample,
    train,
)
from tests.fsdp.replay import orders
from tests.fsdp.streams import Machine, SimulatedDriver, Stream

TENSOR_BYTES = 3 * WIDTH * 8  # of a block's output
AHEAD = {"one tensor": 1, "three tensors": 3 * TENSOR_BYTES, "everything": 2**20}
ahead = pytest.mark.parametrize("ahead", AHEAD.values(), ids=AHEAD)


def run(program, net, ahead, drop=None, small=0):
    """The machine, and what a program finds on it."""
    with (
        Machine(drop) as machine,
        mock.patch.object(offload, "MOVER", offload.Mover(SimulatedDriver(machine))),
        mock.patch.multiple(offload, AHEAD_BYTES=ahead, SMALL_BYTES=small),
    ):
        found = program(net)
    return machine, found


def offloaded(net):
    offload.offload(net.blocks)
    return net


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def right(machine, found):
    """Whether the values of tensors are what they are, in every order of the streams."""
    return [name for name, order in orders().items() if not equal(machine.replayed(order, found), found)] == []


@ahead
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs(program, ahead):
    expected = program(network(KINDS))
    machine, found = run(program, offloaded(network(KINDS)), ahead)
    assert equal(found, expected)
    assert machine.races == []
    assert right(machine, found)
    assert sum(step.stream is machine.beside and step.run is not None for step in machine.steps) > 20


@ahead
@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed, ahead):
    program, kinds = functools.partial(random_program, seed), random_kinds(seed)
    expected = program(network(kinds))
    machine, found = run(program, offloaded(network(kinds)), ahead)
    assert equal(found, expected)
    assert machine.races == []
    assert right(machine, found)
