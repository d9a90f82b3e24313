"""Many ranks in one process: collectives, what each rank has of its own, and how they end."""

import os
import resource
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.tensor import DTensor

import lightning_shard
from benchmarks.networks import UNet
from lightning_shard import StuckError, simulate
from lightning_shard.domain.halo import overlap_mode, overlapping
from lightning_shard.processes.mesh import make_mesh
from lightning_shard.processes.replica_world import replica_world
from tests import OLDEST


def uneven(rank: int) -> list[torch.Tensor]:
    ranks = dist.get_world_size()
    given, taken = [rank + peer for peer in range(ranks)], [peer + rank for peer in range(ranks)]
    whole = 100.0 * rank + torch.arange(float(sum(given)))
    place = torch.empty(sum(taken))
    work = dist.all_to_all_single(place, whole, taken, given, async_op=True)
    assert work
    several = [torch.zeros(2, 2) for _ in range(ranks)]
    if not OLDEST:  # its gloo has no all_to_all of lists
        sent = [torch.full((2, 2), 10.0 * rank + peer) for peer in range(ranks)]
        dist.all_to_all(several, sent)
    work.wait()  # after another collective has ended
    return [place, *several]


def reductions(rank: int) -> list[torch.Tensor]:
    found, ranks = [], dist.get_world_size()
    ops = dist.ReduceOp
    for op in (ops.SUM, ops.MAX, ops.MIN, ops.PRODUCT):
        x = torch.tensor([rank + 1.0, -rank, 2.0])
        dist.all_reduce(x, op)
        found.append(x)
    bits = torch.tensor([rank, 5])
    dist.all_reduce(bits, ops.BOR)
    whole = torch.arange(2.0 * ranks) * (rank + 1)
    part, listed = torch.empty(2), torch.empty(2)
    dist.reduce_scatter_tensor(part, whole)
    dist.reduce_scatter(listed, list(whole.split(2)))
    to_first = torch.tensor([rank + 0.5])
    dist.reduce(to_first, 0)
    return [*found, bits, part, listed, *([] if rank else [to_first])]


def copies(rank: int) -> list[torch.Tensor]:
    ranks = dist.get_world_size()
    of_one = torch.full((3,), float(rank))
    dist.broadcast(of_one, 1)
    gathered = torch.empty(2 * ranks)
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank)))
    listed = [torch.empty(2) for _ in range(ranks)]
    dist.all_gather(listed, torch.full((2,), 2.0 * rank))
    place = torch.empty(2)
    dist.scatter(place, [torch.full((2,), 3.0 * r) for r in range(ranks)] if rank == 1 else None, 1)
    wanted = [torch.empty(2) for _ in range(ranks)] if rank == 2 else None
    dist.gather(place, wanted, 2)
    return [of_one, gathered, *listed, place, *(wanted or [])]


def messages(rank: int) -> list[torch.Tensor]:
    ranks, came, back = dist.get_world_size(), torch.empty(3), torch.empty(())
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    ring = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), after),
        dist.P2POp(dist.irecv, came, before),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    if rank == 0:
        dist.recv(back, 1)
    elif rank == 1:
        dist.send(torch.tensor(7.0), 0)
    return [came] if rank else [came, back]


def groups(rank: int) -> list[torch.Tensor]:
    some: Any = dist.new_group([0, 2])
    every: Any = dist.group.WORLD
    x, z = torch.tensor(float(rank)), torch.complex(torch.ones(2), torch.full((2,), float(rank)))
    if rank != 1:
        dist.all_reduce(x, group=some)
    dist.all_reduce(z)
    inner = dist.get_rank(some)
    of_all: Any = dist.new_group(backend="gloo")
    of_all.monitored_barrier()  # as Lightning calls it
    lists = [functional.all_reduce(torch.ones(2), "sum", every)]
    return [x, z, torch.tensor(inner), *(functional.wait_tensor(t) for t in lists)]


def objects(rank: int) -> list[torch.Tensor]:
    ranks = dist.get_world_size()
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, {"rank": rank, "long": "x" * (50 * rank)})
    assert [each["rank"] for each in told] == list(range(ranks))
    mine: list[object] = [None]
    dist.scatter_object_list(mine, list(range(ranks)) if rank == 0 else None)
    common = [("from", rank)]
    dist.broadcast_object_list(common, 1)
    dist.barrier()
    assert (mine, common) == ([rank], [("from", 1)])
    return [torch.tensor(len(str(told)))]


@pytest.mark.spmd(3)
@pytest.mark.parametrize("body", [uneven, reductions, copies, messages, groups, objects])
def test_collectives_equal_those_of_gloo(body):
    rank = dist.get_rank()
    expected = body(rank)
    found = simulate(_with_its_rank, body, processes=3)[rank]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _with_its_rank(body):
    return body(dist.get_rank())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 1, "domain": 3}, {"data": 2, "a": 2, "b": 1}])
def test_a_sharded_step_on_a_mesh_equals_one_process(sizes):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 3))
    net, x = net.double(), torch.randn(2, 2, 9, 8, dtype=torch.float64)
    domain = tuple(sizes)[1:]
    ranks = torch.Size(sizes.values()).numel()
    states = simulate(trained, net, x, sizes, domain, processes=ranks)
    expected = net.eval()  # statistics of a batch would be those of each replica
    optimizer = torch.optim.SGD(expected.parameters(), 0.1)
    expected(x).square().mean().backward()
    optimizer.step()
    for state in states:
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(state[name], value)


def trained(net, x, sizes, domain):
    mesh = lightning_shard.init_mesh(sizes)
    net.eval()
    lightning_shard.parallelize(net, mesh, domain=domain)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    mine = x.chunk(sizes["data"])[mesh["data"].get_local_rank()]
    split = lightning_shard.shard(mine, mesh[domain], tuple(range(2, 2 + len(domain))))
    net(split).square().mean().backward()
    optimizer.step()
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in net.state_dict().items()
    }


def own_things(scale):
    """What a rank finds before a collective, and again after the others have had their turns."""
    torch.manual_seed(dist.get_rank())
    os.environ["RANK_SEEN"] = "shared"
    scale *= 1 + dist.get_rank()
    first = torch.rand(1)
    with overlapping("always" if dist.get_rank() else "never"), torch.no_grad():
        dist.barrier()
        assert not torch.is_grad_enabled()
        mode = overlap_mode()
    again = torch.rand(1)
    info = lightning_shard.process_info()
    mesh = make_mesh("cpu", 1, (dist.get_world_size(),))
    assert make_mesh("cpu", 1, (dist.get_world_size(),)) is mesh
    return info.rank, os.environ["RANK"], scale.item(), torch.stack([first, again]), mode


def test_each_rank_has_its_own_process_group_random_numbers_and_choices():
    scale, state, variables = torch.tensor(3.0), torch.get_rng_state(), dict(os.environ)
    hook, threads = threading.excepthook, torch.get_num_threads()
    found = simulate(own_things, scale, processes=3)
    for rank, (number, variable, scaled, drawn, mode) in enumerate(found):
        assert (number, variable, scaled) == (rank, str(rank), 3.0 * (1 + rank))
        expected = torch.Generator().manual_seed(rank)
        assert torch.equal(drawn, torch.rand(2, 1, generator=expected))
        assert mode == ("always" if rank else "never")
    assert scale == 3.0
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(os.environ) == variables
    assert (threading.excepthook, torch.get_num_threads()) == (hook, threads)
    assert overlap_mode() == "auto"
    assert not dist.is_initialized()


def test_a_codebook_counts_replicas():
    """Collectives of a step without a group are those of the data replicas."""

    def body():
        mesh = make_mesh("cpu", 2, (2,))
        counts = torch.tensor(1.0 + dist.get_rank())
        of_second = counts.clone()
        with replica_world(mesh):
            dist.all_reduce(counts)
            dist.broadcast(of_second, 1)
        return counts.item(), of_second.item()

    assert simulate(body, processes=4) == [(4.0, 3.0), (6.0, 4.0), (4.0, 3.0), (6.0, 4.0)]


def test_ranks_run_one_at_a_time_in_the_same_order():
    def body():
        for turn in range(2):
            seen.append((turn, dist.get_rank()))
            dist.barrier()

    orders = []
    for _ in range(2):
        seen: list[tuple[int, int]] = []
        simulate(body, processes=3)
        orders.append(seen)
    assert orders[0] == orders[1]
    assert orders[0][:3] == [(0, 0), (0, 1), (0, 2)]


def test_the_error_of_a_rank_ends_all_and_names_it():
    def body():
        try:
            if dist.get_rank() == 2:
                raise ZeroDivisionError("here")
            dist.barrier()
        finally:
            ended.append(dist.get_rank())

    ended: list[int] = []
    with pytest.raises(ZeroDivisionError, match="here") as caught:
        simulate(body, processes=4)
    assert caught.value.__notes__ == ["This is rank 2 of 4 simulated ones."]
    assert sorted(ended) == [0, 1, 2]  # rank 3 had not begun
    assert simulate(dist.get_rank, processes=2) == [0, 1]  # and nothing of it is left


def test_ranks_that_wait_for_ever_are_named():
    def body():
        if dist.get_rank():
            dist.all_reduce(torch.ones(1))

    with pytest.raises(StuckError, match=r"rank 0 has ended; rank 1, 2 waits for all_reduce of"):
        simulate(body, processes=3)

    def receiver():
        dist.recv(torch.ones(1), 1 - dist.get_rank())

    with pytest.raises(StuckError, match="rank 0 waits for recv from rank 1 to rank 0; rank 1"):
        simulate(receiver, processes=2)


def test_collectives_that_do_not_fit_are_named():
    def other():
        dist.barrier() if dist.get_rank() == 1 else dist.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError, match="rank 1 calls barrier where rank 0 of its group called"):
        simulate(other, processes=2)

    def shapes():
        dist.all_reduce(torch.ones(2 + dist.get_rank()))

    with pytest.raises(RuntimeError, match=r"other sizes: \(2,\), \(3,\)"):
        simulate(shapes, processes=2)

    def counts():
        ranks = dist.get_rank()
        dist.all_to_all_single(torch.empty(2), torch.ones(2 + ranks), [1, 1], [1, 1 + ranks])

    with pytest.raises(RuntimeError, match="rank 1 of the group sends 2 elements to rank 1"):
        simulate(counts, processes=2)


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ValueError, match="processes must be 1 or more; got 0"):
        simulate(dist.get_rank, processes=0)
    with pytest.raises(RuntimeError, match="a simulation is running in this process"):
        simulate(lambda: simulate(dist.get_rank), processes=1)

    def in_a_thread():
        errors: list[BaseException] = []

        def call():
            try:
                dist.barrier()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        raise errors[0]

    with pytest.raises(RuntimeError, match="simulated ranks communicate in one thread"):
        simulate(in_a_thread, processes=2)


def test_warnings_are_caught_by_the_rank_that_looks_for_them():
    def body():
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            dist.barrier()
            warnings.warn(f"rank {dist.get_rank()}", stacklevel=1)
            dist.barrier()
        return [str(each.message) for each in noted]

    assert simulate(body, processes=3) == [["rank 0"], ["rank 1"], ["rank 2"]]


def test_each_rank_watches_its_own_copies_of_rows():
    """Old rows are refused where they are read, and the tensor that was written is right."""

    def body() -> float:
        mesh = lightning_shard.init_mesh({"domain": -1})
        x = lightning_shard.shard(torch.zeros(3, 2), mesh["domain"], 0).clone()
        row = x[1]
        x.put_(torch.tensor([0]), torch.ones(1))  # ranks take turns in it
        with pytest.raises(lightning_shard.UnsupportedOperationError, match="written in place"):
            row * 1
        return float((x * 1).sum())

    assert simulate(body, processes=3) == [1.0] * 3


@pytest.mark.slow
def test_the_process_can_still_be_forked():
    """In an interpreter of its own: autograd begins once in a process."""
    code = """
import torch, torch.distributed as dist
from lightning_shard import init_mesh, launch, parallelize, simulate

def step():
    net = torch.nn.Linear(2, 2)
    parallelize(net, init_mesh({"data": -1}))
    net(torch.ones(1, 2)).sum().backward()
    return dist.get_rank()

print(simulate(step, processes=2), launch(step, processes=2))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True)
    assert done.stdout.decode() == "[0, 1] [0, 1]\n", done.stderr.decode()


def gradients_of_a_unet(net: torch.nn.Module, samples: torch.Tensor) -> dict[str, torch.Tensor]:
    """A step of one of 4 x 4 x 4 ranks: replicas, rows, columns."""
    mesh = lightning_shard.init_mesh({"data": 4, "rows": 4, "columns": 4})
    lightning_shard.parallelize(net, mesh)
    own = samples[mesh["data"].get_local_rank()][None]
    split = lightning_shard.shard(own, mesh["rows", "columns"], (2, 3))
    net(split).square().mean().backward()
    return {name: p.grad.full_tensor() for name, p in net.named_parameters()}


@pytest.mark.slow
def test_a_step_of_a_unet_on_64_ranks_is_exact_in_little_memory():
    torch.manual_seed(0)
    net, samples = UNet(8).double(), torch.randn(4, 3, 96, 96).double()
    found = simulate(gradients_of_a_unet, net, samples, processes=64)[0]
    net(samples).square().mean().backward()
    expected = {name: p.grad for name, p in net.named_parameters()}
    gap = sum(float((found[name] - grad).square().sum()) for name, grad in expected.items())
    norm = sum(float(grad.square().sum()) for grad in expected.values())
    assert (gap / norm) ** 0.5 < 1e-11
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 16 * 2**20  # KiB
