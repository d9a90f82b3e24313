"""Activations on the host, on a simulated device: no race, no wrong number, bounded memory."""

import functools
import random
from unittest import mock

import pytest
import torch

from lightning_shard.memory import offload
from lightning_shard.memory.paging.host_memory import MemoryInParts
from lightning_shard.memory.paging.pages import Pages
from tests.memory.offload_programs import (
    KINDS,
    PROGRAMS,
    WIDTH,
    Branches,
    Chain,
    Heads,
    Mlp,
    Norm,
    gradients,
    network,
    random_kinds,
    random_program,
    sample,
    train,
)
from tests.memory.replay import Kernel, orders
from tests.memory.simulated_driver import on_machine
from tests.memory.streams import Stream
from tests.pairs import choose

MUL = torch.ops.aten.mul.Tensor
TENSOR_BYTES = 3 * WIDTH * 8  # of a block's output
SMALL = 0, TENSOR_BYTES  # weights of norms are no smaller than 0, and smaller than a tensor
AHEAD = {"one tensor": 1, "three tensors": 3 * TENSOR_BYTES, "everything": 2**20}
ahead = pytest.mark.parametrize("ahead", AHEAD.values(), ids=AHEAD)
one_ahead = pytest.mark.parametrize("ahead", choose(AHEAD.values(), fast=[1]), ids=AHEAD)


def run(program, net, ahead, drop=(), *, cheap=True):
    """The machine, and what a program finds on it."""
    return on_machine(lambda: program(net), ahead, drop=drop, cheap=cheap)


def offloaded(net, budget=None):
    offload.offload(net.blocks, budget)
    return net


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def right(machine, found):
    """Whether tensors have these values in every order of the streams."""
    return all(equal(machine.replayed(order, found), found) for order in orders().values())


def copies_on(machine, stream):
    kernels = [s for s in machine.steps if s.stream is stream and isinstance(s.run, Kernel)]
    return [s for s in kernels if str(s.run.func) == "aten.copy_.default"]


@pytest.mark.quick_rows("in_parts-everything")
@pytest.mark.parametrize(("program", "ahead"), choose(PROGRAMS, AHEAD))
def test_programs(program, ahead):
    program, ahead = PROGRAMS[program], AHEAD[ahead]
    expected = program(network(KINDS))
    machine, found = run(program, offloaded(network(KINDS)), ahead)
    assert equal(found, expected)
    assert machine.races == []
    assert right(machine, found)
    copies = {way: len(copies_on(machine, stream)) for way, stream in machine.beside.items()}
    assert copies["out"] > 15
    assert copies["back"] > 10 or ahead == AHEAD["everything"]


def train_once(net):
    return train(net, 1)


def check_random(seed, ahead, budget=None):
    program, kinds = functools.partial(random_program, seed), random_kinds(seed)
    expected = program(network(kinds))
    small = SMALL[seed % 2]
    net = offloaded(network(kinds), budget)
    machine, found = on_machine(lambda: program(net), ahead, small)
    assert equal(found, expected)
    assert machine.races == []
    assert right(machine, found)


@pytest.mark.slow_rows("0", "4")
@pytest.mark.parametrize("seed", choose(range(12), fast=[*range(5)]))
def test_random_programs(seed):
    check_random(seed, [*AHEAD.values()][seed % len(AHEAD)])


@pytest.mark.slow
@ahead
@pytest.mark.parametrize("seed", range(100, 200))
def test_more_random_programs(seed, ahead):
    check_random(seed, ahead)


def two_steps(net):
    """The second finds memory that has been used."""
    found = []
    for number in range(2):
        net.zero_grad()
        loss = net(sample(number)).sum()
        loss.backward()
        found += [loss.detach(), *gradients(net)]
    return found


def on_another_stream(net):
    """Backward runs elsewhere than forward ran; what blocks do not save is kept until the end."""
    machine = offload.MOVER.driver.machine
    other, found, kept = Stream(machine, "other"), [], []
    for number in range(2):
        net.zero_grad()
        kept.append(sample(number))
        loss = net(kept[-1]).sum()
        other.wait_stream(machine.compute)
        with other:
            loss.backward()
        machine.compute.wait_stream(other)
        found += [loss.detach(), *gradients(net)]
    return found


def mutants(program, net, ahead, choose=lambda numbers: numbers, budget=None, *, cheap=True):
    """For each call that tells a stream something its kind, races, and whether values stay.

    What is copied to the host is older than what ran last, so the stream of these copies may have
    waited for it before: such a wait is left out together with those before it.
    """
    machine, expected = run(program, offloaded(net(), budget), ahead, cheap=cheap)
    assert machine.races == []
    out = machine.beside["out"]
    for number in choose([n for n, (_, tells) in enumerate(machine.calls) if tells]):
        drop = {number}
        if (stream := machine.waits.get(number)) is out:
            drop = {n for n, other in machine.waits.items() if n <= number and other is stream}
        mutant, found = run(program, offloaded(net(), budget), ahead, drop, cheap=cheap)
        assert equal(found, expected)  # computed in the order of the program
        yield machine.calls[number][0], bool(mutant.races), right(mutant, found)


@pytest.mark.slow
@one_ahead
@pytest.mark.parametrize("budget", choose([None, 3 * TENSOR_BYTES], fast=[3 * TENSOR_BYTES]))
def test_any_call_that_is_left_out_is_found(ahead, budget):
    """In a chain nothing is ordered twice: without any wait and any event there is a race."""
    rows = list(mutants(two_steps, lambda: Chain(24), ahead, budget=budget))
    assert all(raced for _, raced, stays in rows if not stays)
    rows = list(mutants(two_steps, lambda: Chain(6), ahead, budget=budget, cheap=False))
    assert all(raced for _, raced, _ in rows)
    assert {kind for kind, _, _ in rows} == {"wait", "record_event"}
    if ahead < AHEAD["everything"]:  # where no copy comes back, none has a wrong number
        assert sum(not stays for *_, stays in rows) > len(rows) // 2


@pytest.mark.slow
@one_ahead
def test_backward_on_another_stream(ahead):
    """There alone is record_stream asked for: the stream of the memory does not know its use."""
    rows = list(mutants(on_another_stream, lambda: Chain(24), ahead))
    assert all(raced for _, raced, stays in rows if not stays)
    rows = list(mutants(on_another_stream, lambda: Chain(6), ahead, cheap=False))
    # in each of two steps, of those that are near as backward begins
    tensors = {1: 4, 3 * TENSOR_BYTES: 6, 2**20: 12}[ahead]
    assert [raced for kind, raced, _ in rows if kind == "record_stream"] == [True] * tensors
    assert all(raced for _, raced, stays in rows if not stays)
    assert sum(not stays for *_, stays in rows) > 5


def check_judges(program, ahead, calls):
    """Two judges of one mistake: where numbers are wrong in some order, the clocks say why."""

    def some(numbers):
        return random.Random(0).sample(numbers, min(calls, len(numbers)))

    rows = list(mutants(program, lambda: network([Mlp, Heads, Branches]), ahead, some))
    assert all(raced for _, raced, stays in rows if not stays)
    return sum(raced for _, raced, _ in rows)


@pytest.mark.quick_rows("train")
@pytest.mark.parametrize("program", choose(PROGRAMS, fast=["train", "accumulate", "twice"]))
def test_wrong_numbers_are_races(program):
    check_judges(PROGRAMS[program], AHEAD["one tensor"], 3)


@pytest.mark.slow
@ahead
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_more_wrong_numbers_are_races(program, ahead):
    assert check_judges(program, ahead, 20) > 4


def peak(blocks, ahead, program=two_steps, *, cheap=False):
    """Places on the device, with blocks of one tensor each; without offload where None."""
    net = Chain(blocks)
    machine, _ = run(program, net if ahead is None else offloaded(net), ahead or 0, cheap=cheap)
    return machine.peak


@pytest.mark.parametrize("tensors", [1, 3])
def test_the_device_holds_what_is_ahead_however_deep_the_network_is(tensors):
    bytes_ahead = tensors * TENSOR_BYTES
    assert peak(30, None) == peak(10, None) + 20
    assert peak(30, bytes_ahead) == peak(10, bytes_ahead)
    # beside it, as without blocks: what computes, and the tensor that is computed next
    assert peak(30, bytes_ahead) <= peak(1, None) + tensors + 2
    # a tensor that is made again takes a source and the call before
    assert peak(31, bytes_ahead, cheap=True) == peak(23, bytes_ahead, cheap=True)
    assert peak(31, bytes_ahead, cheap=True) <= peak(1, None) + tensors + 4


@ahead
def test_nothing_stays_when_graphs_have_ended(ahead):
    """Neither after backward nor without it; `dropped` ends one in the middle of a backward."""
    for program in (train, PROGRAMS["dropped"]):
        machine, found = run(program, offloaded(network([Mlp, Branches, Mlp])), ahead)
        net = network([Mlp, Branches, Mlp])
        plain, _ = run(program, net, ahead)
        del found
        assert machine.held["host"] == 0
        assert plain.held["host"] == 0


def test_what_the_loss_leaves_out_does_not_stay_near():
    """Branches without a gradient are fetched with the others, and let go when they are passed."""

    def program(net):
        loss = net(sample()).square().sum()
        unused, near = [block.unused for block in net.blocks], []
        for block in net.blocks:
            mover = offload.MOVER

            def count(_, mover=mover):
                near.append(sum(map(mover._is_only_ours, mover._near)))

            block.a.up.weight.register_hook(count)
        loss.backward()
        assert len(unused) == 8
        return near

    net = functools.partial(network, [Branches] * 8)
    _, near = run(program, offloaded(net()), 2 * TENSOR_BYTES)
    oldest_first = mock.patch.object(offload.Mover, "_needed_last_first", lambda self: self._near)
    with oldest_first:
        _, staying = run(program, offloaded(net()), 2 * TENSOR_BYTES)
    assert len(near) == len(staying) == 8
    print(near, staying)
    assert max(near) <= 4


def test_each_tensor_comes_back_once_and_before_it_is_needed():
    machine, _ = run(train, offloaded(network([Mlp, Norm, Heads, Norm])), TENSOR_BYTES)
    out, back = (len(copies_on(machine, stream)) for stream in machine.beside.values())
    assert back <= out
    machine, _ = run(two_steps, offloaded(Chain(6)), TENSOR_BYTES, cheap=False)
    assert copies_on(machine, machine.compute) == []
    # of each step, but for the last two blocks' tensors, which backward takes where they are
    assert len(copies_on(machine, machine.beside["out"])) == 8
    back = copies_on(machine, machine.beside["back"])
    assert len(back) == 8
    steps = machine.steps[machine.steps.index(back[0]) :]
    of_backward = [s for s in steps if s in back or getattr(s.run, "func", None) is MUL]
    assert [s in back for s in of_backward[:7]] == [True, False] * 3 + [True]


BUDGETS = {"nothing": 0, "one tensor": TENSOR_BYTES, "four tensors": 4 * TENSOR_BYTES}


@pytest.mark.quick_rows("twice-nothing", "in_parts-four tensors")
@pytest.mark.parametrize(("program", "budget"), choose(PROGRAMS, BUDGETS))
def test_budgets(program, budget):
    """Only what is above the budget travels, and no more than it is near where nobody holds it."""
    program, budget = PROGRAMS[program], BUDGETS[budget]
    expected = program(network(KINDS))
    machine, found = run(program, offloaded(network(KINDS), budget), 2**20)
    assert equal(found, expected)
    assert machine.races == []
    assert right(machine, found)


@pytest.mark.slow_rows("0")
@pytest.mark.parametrize("seed", choose(range(12), fast=[*range(3)]))
def test_random_programs_within_budgets(seed):
    check_random(seed, 2**20, [*BUDGETS.values()][seed % len(BUDGETS)])


def test_only_the_excess_travels():
    """A chain of 20 tensors: each that is above the budget goes once and comes once."""
    for tensors in (3, 10, 30):
        net = offloaded(Chain(20), tensors * TENSOR_BYTES)
        machine, _ = run(train_once, net, 1, cheap=False)
        out, back = (len(copies_on(machine, stream)) for stream in machine.beside.values())
        excess = max(20 - tensors, 0)
        assert back == excess, tensors
        assert out in (excess, excess + 1), tensors  # the next one's copy has begun
        assert machine.peak <= peak(1, None, train_once) + tensors + 1
    plain = run(train_once, Chain(20), 1)[0].peak
    assert run(train_once, net, 1)[0].peak == plain


def test_what_somebody_holds_does_not_travel():
    """A frame that holds tensors would get nothing back for a copy."""

    def program(net):
        kept, x = [], sample() * net.weight - 3
        for block in net.blocks:
            x = block(x)
            kept += [x]
        x.sum().backward()
        return [*gradients(net), *(k.detach() for k in kept)]

    machine, found = run(program, offloaded(Chain(6), 0), 1)
    assert equal(found, program(Chain(6)))
    assert copies_on(machine, machine.beside["out"]) == []


class Skip(Chain):
    """A chain whose frame holds its first tensor until the last block, as of a U-Net."""

    def forward(self, x):
        first, *blocks, last = self.blocks
        x = kept = first(x * self.weight - 3)
        for block in blocks:
            x = block(x - 3)
        x = x + kept
        del kept
        return last(x)


def test_what_backward_needs_first_comes_first():
    """Also where it left before an older tensor, which a frame held for longer."""
    order, fetch = [], offload.Mover._fetch

    def noting(mover, pages, page):
        order.append(page.place)
        fetch(mover, pages, page)

    with mock.patch.object(offload.Mover, "_fetch", noting):
        run(train_once, offloaded(Skip(8), 2 * TENSOR_BYTES), 2**20)
    assert len(order) > 3
    assert order == sorted(order, reverse=True)


class MemoryOfTheCopies(Pages):
    """torchtune's first version: https://github.com/meta-pytorch/torchtune/issues/1867."""

    def fetch(self, page):
        with self.driver.beside(self.device, "back"):
            super().fetch(page)


class LetGoAtOnce(Pages):
    """The tensor is freed while it is copied."""

    def free(self, page):
        page.waits = False
        super().free(page)


class OneStreamForAll(Pages):
    """Waits for the first stream: https://github.com/huggingface/trl/pull/7195."""

    def note(self, storage):
        with self.driver.machine.compute:
            return super().note(storage)


def test_a_tensor_in_parts_of_the_host_is_copied_part_by_part():
    """144 bytes lie in 128 and 16."""
    program = functools.partial(two_steps, offloaded(Chain(6)))
    machine, found = on_machine(program, 1, memory=MemoryInParts)
    assert equal(found, two_steps(Chain(6)))
    assert machine.races == []
    assert right(machine, found)
    whole, _ = on_machine(functools.partial(two_steps, offloaded(Chain(6))), 1)
    ways = [len(copies_on(machine, stream)) for stream in machine.beside.values()]
    assert ways == [2 * len(copies_on(whole, stream)) for stream in whole.beside.values()]


class CloneBeside(Pages):
    """Memory in between is of the copies: https://github.com/axolotl-ai-cloud/axolotl/pull/3833."""

    def _copy(self, page, storage, way):
        if way == "back":
            return super()._copy(page, storage, way)
        sizes = [len(part) for part in page.host.parts]
        with self.driver.beside(self.device, way):
            parts = [part.clone() for part in self.driver.parts(storage, sizes)]
        with mock.patch.object(self.driver, "parts", return_value=parts):
            return super()._copy(page, storage, way)


class NoCopyYet(Pages):
    """Takes what is fetched without a wait."""

    def take(self, page):
        page.waits = False


def forward_on_another_stream(net):
    machine = offload.MOVER.driver.machine
    with Stream(machine, "mine") as mine:
        mine.wait_stream(machine.compute)
        found = two_steps(net)
    machine.compute.wait_stream(mine)
    return found


@pytest.mark.parametrize(
    ("bug", "program"),
    [
        (MemoryOfTheCopies, two_steps),
        (LetGoAtOnce, two_steps),
        (OneStreamForAll, forward_on_another_stream),
        (CloneBeside, two_steps),
        (NoCopyYet, two_steps),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_bugs_that_others_had_are_found(bug, program):
    expected = two_steps(Chain(6))
    for pages in (Pages, bug):
        with mock.patch.object(offload, "Pages", pages):
            machine, found = run(program, offloaded(Chain(6)), 1)
        assert equal(found, expected)
        assert bool(machine.races) == (pages is bug)
        assert right(machine, found) == (pages is not bug)
