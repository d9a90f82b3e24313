"""Functions launched on several processes from this one."""

import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.util import register_after_fork
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import lightning_shard
from lightning_shard import launch
from lightning_shard.memory.free import free_here
from lightning_shard.processes import forking, mesh
from lightning_shard.processes import launch as launching
from lightning_shard.processes.failures.linux_processes import own_place


@pytest.fixture(autouse=True)
def ends_soon():
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 60


def test_values_are_returned_in_the_order_of_ranks():
    offset = 10  # a closure, as in a notebook's cell

    def body(values):
        rank = dist.get_rank()
        total = values * (rank + 1)
        dist.all_reduce(total)
        return rank + offset, total, "x" * 2**20

    returned = launch(body, torch.ones(3), processes=3)
    assert [value[0] for value in returned] == [10, 11, 12]
    for _, total, long in returned:
        assert torch.equal(total, torch.full((3,), 6.0))
        assert len(long) == 2**20


def test_environment_is_that_of_torchrun():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    seen = launch(lambda: [os.environ[name] for name in names])
    assert seen == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]


def test_a_group_that_this_process_has_ended_is_not_freed_by_a_rank():
    """That would wait for its threads, which a fork has not."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cycle = [dist.group.WORLD]
    cycle.append(cycle)
    del cycle
    dist.destroy_process_group()
    assert len(launch(gc.collect)) == 2


def test_garbage_with_a_thread_is_not_freed_by_a_rank(monkeypatch):
    """Between the fork and the first line of a rank a collection freed it: SIGSEGV."""
    fork = multiprocessing.context.ForkProcess._Popen

    def fork_beside_garbage(process):
        local = {"is_master": True, "wait_for_workers": False}
        cycle = [dist.TCPStore("127.0.0.1", 0, **local) for _ in range(12)]
        cycle.append(cycle)
        del cycle
        return fork(process)

    class Noisy:
        pass

    noisy = Noisy()
    register_after_fork(noisy, lambda _: [[] for _ in range(100_000)])  # what starts a collection
    monkeypatch.setattr(
        multiprocessing.context.ForkProcess, "_Popen", staticmethod(fork_beside_garbage)
    )
    assert gc.isenabled()
    assert launch(gc.isenabled) == [True, True]
    assert gc.isenabled()


@pytest.mark.skipif(sys.platform != "linux", reason="a policy of Linux")
def test_meshes_of_this_process_are_not_freed_by_a_rank():
    """A rank that makes a mesh would drop the oldest one of the cache that it has forked."""
    for _ in range(mesh._made.cache_parameters()["maxsize"]):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh.make_mesh("cpu", 1, (1,))
        dist.destroy_process_group()
    assert launch(lambda: mesh.make_mesh("cpu", 1, (2,)).size()) == [2, 2]


def test_a_thread_that_wakes_up_does_not_interrupt_one_that_computes():
    """gloo's thread would spin for a lock: collectives took up to five times the CPU time."""
    before = os.sched_getscheduler(0)
    try:
        for chosen, wanted in ((os.SCHED_OTHER, os.SCHED_BATCH), (os.SCHED_IDLE, os.SCHED_IDLE)):
            os.sched_setscheduler(0, chosen, os.sched_param(0))
            assert launch(lambda: os.sched_getscheduler(0)) == [wanted, wanted]
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


def test_training_after_this_process_has_computed_with_threads():
    """libgomp's threads do not exist in a fork, which waits for them."""
    torch.set_num_threads(2)
    big = torch.randn(1000, 1000)
    (big @ big).exp().sum()
    torch.set_num_threads(1)

    def body():
        torch.manual_seed(0)
        layer = nn.Conv2d(3, 8, 3)
        layer(torch.randn(8, 3, 64, 64)).sum().backward()
        return (big @ big).exp().shape

    assert launch(body) == [(1000, 1000)] * 2


def test_error_of_a_rank_is_raised_here():
    def body():
        if dist.get_rank() == 1:
            raise ArithmeticError("a mistake on rank one")
        dist.barrier()

    with pytest.raises(ProcessRaisedException, match="rank 1 failed") as caught:
        launch(body)
    assert "ArithmeticError: a mistake on rank one" in str(caught.value)
    assert "in body" in str(caught.value)


def test_ranks_that_had_returned_are_named():
    def body():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(ProcessRaisedException, match=r"rank 0 failed.* \(ranks \[1\] had returned"):
        launch(body)


@pytest.mark.parametrize("returns", [0, 1])
def test_a_rank_that_waits_in_the_store_for_one_that_has_returned(returns):
    """No connection breaks there: it waited for half an hour."""

    def body():
        mesh = lightning_shard.init_mesh({"domain": -1})
        layer, options = nn.Linear(2, 2), lightning_shard.ShardingOptions("full")
        lightning_shard.parallelize(layer, mesh, options=options)
        if dist.get_rank() != returns:
            layer(torch.randn(3, 2))

    with pytest.raises(ProcessRaisedException) as caught:
        launch(body)
    words = str(caught.value)
    assert f"rank {1 - returns} failed, so all ranks were ended (ranks [{returns}] had" in words
    assert f"waited for another rank in vain: rank {returns}: has come to the end" in words
    assert "in body\n    layer(" in words


def test_a_rank_whose_message_is_longer_than_another_expects():
    """gloo ends the process, in a thread of its own, where no Python runs."""

    def body():
        x = lightning_shard.shard(torch.ones(4), lightning_shard.init_mesh({"domain": -1}), 0)
        return (x.double() if dist.get_rank() else x).sum()

    with pytest.raises(ProcessExitedException) as caught:
        launch(body)
    words = str(caught.value)
    assert "rank 0 ended with SIGABRT" in words
    assert "their tensors differ in shape or dtype, or one has called another function" in words
    assert "Rank 1 has lost it:" in words
    assert "return (x.double()" in words


def test_death_of_a_rank_is_raised_here():
    def body():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(ProcessExitedException, match="rank 1 ended with SIGKILL"):
        launch(body, processes=3)


def test_rank_that_does_not_wait_for_the_others():
    def body():
        if dist.get_rank() == 0:
            raise SystemExit
        time.sleep(1000)

    with pytest.raises(ProcessExitedException, match="rank 0 ended with exit code 0"):
        launch(body)


def test_no_rank_connects_before_all_are_forked(tmp_path, monkeypatch):
    """Else a fork may have a lock of the parent's thread that answers who connects."""
    forked = []
    fork, become_rank = multiprocessing.context.ForkProcess._Popen, launching.become_rank

    def slow_fork(process):
        time.sleep(0.3)
        forked.append(time.monotonic())
        return fork(process)

    def noted(rank, *args):
        (tmp_path / str(rank)).write_text(str(time.monotonic()))
        become_rank(rank, *args)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "_Popen", staticmethod(slow_fork))
    monkeypatch.setattr(launching, "become_rank", noted)
    launch(dist.get_rank, processes=3)
    began = [float(file.read_text()) for file in tmp_path.iterdir()]
    assert len(began) == len(forked) == 3
    assert min(began) > max(forked)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_ends_all(tmp_path):
    def body():
        (tmp_path / str(dist.get_rank())).touch()
        time.sleep(1000)

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:  # Python loses an interrupt inside of a fork
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    others = set(multiprocessing.active_children())  # of the tests before
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(body)
    thread.join()
    assert set(multiprocessing.active_children()) <= others


def test_output_is_shown_by_lines_with_their_rank(capsys):
    def body():
        print("hello")
        print("half", end="", file=sys.stderr)
        os.system("echo of a child")

    launch(body)
    out, err = capsys.readouterr()
    expected = ["hello", "of a child", "[rank 1] hello", "[rank 1] of a child"]
    assert sorted(out.splitlines()) == sorted(expected)
    assert sorted(err.splitlines()) == ["[rank 1] half", "half"]


def test_output_that_the_terminal_has_no_letters_for_is_shown_by_their_numbers(monkeypatch):
    def body():
        for shown in (sys.stdout, sys.stderr):
            print("grün", file=shown)
        os.write(1, "größer\n".encode())
        os.write(1, b"\xff\n")

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "ascii"))
    launch(body, processes=1)
    out, err = (shown.buffer.getvalue().decode() for shown in (sys.stdout, sys.stderr))
    assert out.splitlines() == [r"gr\xfcn", r"gr\xf6\xdfer", r"\ufffd"]
    assert err == "gr\\xfcn\n"


def test_what_cannot_be_launched(monkeypatch):
    with pytest.raises(ValueError, match="processes must be 1 or more"):
        launch(print, processes=0)
    with pytest.raises(ProcessRaisedException, match="returned generator, which cannot be sent"):
        launch(lambda: (i for i in range(3)), processes=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK is not set"):
        launch(print)
    for name, value in {"RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="already belongs to one"):
        launch(print)


SCRIPT = """
import torch
import torch.distributed as dist
from lightning_shard import launch

if __name__ == "__main__":
    BEGIN
    print(launch(dist.get_world_size))
    del __file__, dist.get_world_size.__module__
    dist.get_world_size.__module__ = "__main__"  # as a function of a notebook's cell
    launch(dist.get_world_size)
"""


BACKWARD = """
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():  # it shows devices that are not there
        torch.ones(1, requires_grad=True).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "begun"),
    [
        ("torch.cuda.is_initialized = lambda: True", "CUDA has been initialised"),
        (BACKWARD, "torch has started threads for backward passes"),
    ],
    ids=["CUDA", "threads"],
)
def test_new_interpreters_where_a_fork_would_not_work(tmp_path, begin, begun):
    (tmp_path / "script.py").write_text(SCRIPT.replace("BEGIN", begin.strip()))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == "[2, 2]\n", done.stderr
    assert f"{begun} in this process" in done.stderr
    assert "restart the kernel" in done.stderr


def test_a_program_whose_name_linux_cuts_within_a_letter():
    """It keeps 15 bytes of the name of the file that is executed."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(("a" * 14 + "ü.py").encode())
    try:
        assert name.read_bytes() == b"a" * 14 + b"\xc3\n"
        assert launch(os.getppid) == [os.getpid()] * 2
        assert own_place().split()[1] == str(os.getpid())
        assert free_here()[0] > 0
    finally:
        name.write_bytes(before)


def test_threads_of_backward_passes_are_seen(monkeypatch):
    monkeypatch.setattr(forking, "initialised_accelerator", lambda: None)
    begun, done = threading.Event(), threading.Event()

    def work():
        Path("/proc/thread-self/comm").write_text("pt_autograd_0")
        begun.set()
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    assert forking.what_no_fork_has() == "torch has started threads for backward passes"
    done.set()
    thread.join()
