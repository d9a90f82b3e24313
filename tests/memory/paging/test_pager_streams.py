"""A pager on a simulated device: no race and no wrong number, whatever order its streams take."""

import functools
import random
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from lightning_shard.memory.paging import pager as of_pager
from lightning_shard.memory.paging.host_memory import Memory
from lightning_shard.memory.paging.pager import Pager
from lightning_shard.memory.paging.pages import Pages
from lightning_shard.processes.torch_private.internals import without_modes
from tests.memory.offload_programs import (
    KINDS,
    PROGRAMS,
    WIDTH,
    Chain,
    Mlp,
    Norm,
    gradients,
    network,
    random_kinds,
    random_program,
    sample,
)
from tests.memory.simulated_driver import SimulatedDriver
from tests.memory.streams import Machine
from tests.memory.test_offload_streams import (
    CloneBeside,
    LetGoAtOnce,
    MemoryOfTheCopies,
    NoCopyYet,
    equal,
    right,
)
from tests.pairs import choose

TENSOR_BYTES = 3 * WIDTH * 8
BUDGETS = {"turns": None, "two tensors": 2 * TENSOR_BYTES, "six tensors": 6 * TENSOR_BYTES}


def send_all(pager):
    with of_pager.without_modes():
        pager.send_all()


def run(program, net, budget, drop=()):
    """The machine, and what a program finds on it; a program with turns is given the pager."""
    with Machine(drop) as machine:

        @contextmanager
        def without_the_pager():  # what it copies is seen
            with without_modes(), machine:
                yield

        pager = Pager(
            torch.device("cpu"), budget, Memory(), small=0,
            driver=SimulatedDriver(machine),
        )  # fmt: skip
        with mock.patch.object(of_pager, "without_modes", without_the_pager):
            with pager.paging(), torch.autograd.set_multithreading_enabled(False):
                found = program(net, pager)
            copies = pager.pages.out, pager.pages.back
    return machine, found, copies


def in_turns(net, pager=None):
    """Two fields in one network, block by block; all that is on the device leaves in between."""
    sends = (lambda: None) if pager is None else (lambda: send_all(pager))
    given = [sample(rank).requires_grad_() for rank in range(2)]
    fields = [x * 2 for x in given]
    for block in net.blocks:
        for rank in range(2):
            fields[rank] = block(fields[rank].tanh()) + 1
            sends()
        for rank in range(2):
            fields[rank] *= 0.5  # what was copied as it left is written
            sends()
    losses = []
    for rank in range(2):
        losses.append(fields[rank].square().sum())
        losses[rank].backward()
        sends()
    found = [*losses, *fields, *(x.grad for x in given)]
    return [*(tensor.detach() for tensor in found), *gradients(net)]


def alone(program):
    return lambda net, pager: program(net)


def check(program, kinds, budget, expected, **options):
    machine, found, copies = run(program, network(kinds), budget, **options)
    assert equal(found, expected)
    assert machine.races == []
    assert right(machine, found)
    return copies


@pytest.mark.quick_rows("two tensors")
@pytest.mark.parametrize("budget", BUDGETS)
def test_turns(budget):
    out, back = check(in_turns, KINDS, BUDGETS[budget], in_turns(network(KINDS)))
    assert out > 10 * TENSOR_BYTES
    assert back > 10 * TENSOR_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(("program", "budget"), choose(PROGRAMS, [*BUDGETS][1:]))
def test_programs(program, budget):
    program, budget = PROGRAMS[program], BUDGETS[budget]
    check(alone(program), KINDS, budget, program(network(KINDS)))


@pytest.mark.quick_rows("2")
@pytest.mark.parametrize("seed", choose(range(40), fast=[*range(3)]))
def test_random_programs(seed):
    program, kinds = functools.partial(random_program, seed), random_kinds(seed)
    budget = [2, 5][seed % 2] * TENSOR_BYTES
    check(alone(program), kinds, budget, program(network(kinds)))


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_any_call_that_is_left_out_is_found(budget):
    """Or it does no harm in any order, where it follows from others.

    A wait may follow from one of the same stream before it: both are left out then.
    """

    def chain():
        return Chain(4)

    machine, expected, _ = run(in_turns, chain(), budget)
    told = [n for n, (_, tells) in enumerate(machine.calls) if tells]
    raced = []
    for number in random.Random(0).sample(told, 12):
        drop = {number}
        if (stream := machine.waits.get(number)) is not None:
            drop = {n for n, other in machine.waits.items() if n <= number and other is stream}
        mutant, found, _ = run(in_turns, chain(), budget, drop)
        assert equal(found, expected)
        raced.append(bool(mutant.races))
        assert mutant.races or right(mutant, found)
    assert sum(raced) >= 10


@pytest.mark.parametrize("bug", [MemoryOfTheCopies, LetGoAtOnce, CloneBeside, NoCopyYet])
def test_bugs_are_found(bug):
    for pages in (Pages, bug):
        with mock.patch.object(of_pager, "Pages", pages):
            machine, found, _ = run(in_turns, network([Mlp, Norm]), None)
        assert equal(found, in_turns(network([Mlp, Norm])))
        assert bool(machine.races) == (pages is bug)
