"""A forked process and two threads at once are refused: ranks would not pair their messages."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lightning_shard
from lightning_shard import UnsupportedOperationError
from lightning_shard.domain import one_thread
from lightning_shard.processes.failures.lone_waits import REFUSED
from lightning_shard.processes.store import store_of_attempt
from tests.parity import mesh_of


def join(thread: threading.Thread) -> None:
    """Wait until a thread has left its number to others, which is some time after its end."""
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(0.001)


def forget_refusals():
    dist.barrier()
    one_thread._refusals.clear()
    store_of_attempt().delete_key(REFUSED)
    dist.barrier()


@pytest.mark.spmd(2)
def test_a_forked_process():
    x = lightning_shard.shard(torch.randn(5, 3), mesh_of(2), 0)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            words = str(x.sum())
        except UnsupportedOperationError as error:
            words = str(error)
        os.write(write, words.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "exchanged in a forked process, such as a worker" in os.read(read, 500).decode()
    os.close(read)
    os.close(write)
    assert x.sum().isfinite()


@pytest.mark.spmd(2)
def test_two_threads_at_once():
    x = lightning_shard.shard(torch.randn(5, 3), mesh_of(2), 0)
    works, done = threading.Event(), threading.Event()

    def work():
        x.sum()
        works.set()
        while not done.is_set():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    works.wait()
    with pytest.raises(UnsupportedOperationError, match="two threads use split tensors at once"):
        x.mean()
    done.set()
    thread.join()
    with pytest.raises(UnsupportedOperationError, match="or did so before"):
        x.mean()
    forget_refusals()
    assert x.mean().isfinite()


@pytest.mark.spmd(2)
def test_a_thread_that_comes_before_its_starter_waits():
    x = lightning_shard.shard(torch.arange(6.0), mesh_of(2), 0)
    sums = list[float]()
    thread = threading.Thread(target=lambda: sums.append(x.sum().item()))
    thread.start()
    begun = time.monotonic()
    while time.monotonic() < begun + 0.05:
        pass
    thread.join()
    assert sums == [15.0]
    assert x.mean() == 2.5


@pytest.mark.spmd(2)
def test_a_thread_that_waits_for_rows_is_at_work():
    x = lightning_shard.shard(torch.randn(1, 1, 512, 512), mesh_of(2), 2)
    store, is_first = store_of_attempt(), dist.get_rank() == 0
    errors, begun, took_over = list[Exception](), threading.Event(), threading.Event()

    def work():
        try:
            begun.wait()
            while innermost(threading.main_thread()) != ("threading.py", "wait"):
                time.sleep(0.001)  # it has split the tensor, and must not be at work any more
            x.sum()
            took_over.set()
            if not is_first:
                store.wait(["refused"])
            F.conv2d(x, torch.ones(1, 1, 3, 3), padding=1)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    begun.set()
    assert took_over.wait(60), errors
    if is_first:
        while innermost(thread) != ("wire.py", "brought"):  # it waits for rows of the other rank
            assert thread.is_alive(), errors
            time.sleep(0.001)
        with pytest.raises(UnsupportedOperationError, match="two threads use split tensors at"):
            x.mean()
        store.set("refused", "")
    thread.join()
    assert not errors, errors
    forget_refusals()
    store.delete_key("refused")


def innermost(thread: threading.Thread) -> tuple[str, str]:
    """The file and the function in which a thread is."""
    frame = sys._current_frames().get(thread.ident or 0)
    return (Path(frame.f_code.co_filename).name, frame.f_code.co_name) if frame else ("", "")


@pytest.mark.spmd(2)
def test_ranks_run_two_threads_in_another_order():
    whole = torch.randn(5, 3)
    x = lightning_shard.shard(whole, mesh_of(2), 0)
    rank, begun = dist.get_rank(), [threading.Event(), threading.Event()]
    errors = list[UnsupportedOperationError]()

    def work(own: int) -> None:
        begun[own].set()
        if own != rank:  # rank k begins with thread k
            time.sleep(0.1)
        try:
            (x * (1 + own)).sum()
        except UnsupportedOperationError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread, event in zip(threads, begun, strict=True):
        thread.start()
        event.wait()
    for thread in threads:
        thread.join()
    forget_refusals()
    assert len(errors) == 2
    assert "two threads use split tensors at once" in str(errors[0])
    torch.testing.assert_close(x.mean(), whole.mean())


@pytest.mark.spmd(2)
def test_threads_that_wait_for_each_other():
    whole = torch.randn(5, 3)
    x = lightning_shard.shard(whole, mesh_of(2), 0)
    with ThreadPoolExecutor(1) as pool:
        for factor in (1, 2):
            found = pool.submit(lambda k=factor: (x * k).sum()).result()
            torch.testing.assert_close(found, (whole * factor).sum())
            torch.testing.assert_close(x.mean(), whole.mean())


@pytest.mark.spmd(2)
def test_a_new_thread_may_have_the_number_of_one_that_ended():
    x = lightning_shard.shard(torch.randn(5, 3), mesh_of(2), 0)
    first = threading.Thread(target=x.sum)
    first.start()
    join(first)
    done = threading.Event()

    def spin():
        while not done.is_set():
            pass

    others = [threading.Thread(target=spin) for _ in range(3)]
    for other in others:
        other.start()
    assert first.ident in [other.ident for other in others]
    assert x.mean().isfinite()
    done.set()


@pytest.mark.spmd(2)
def test_a_new_thread_takes_over_a_number_on_one_rank_only():
    """One rank took it for the thread before, and the other waited for ranks to compare them."""
    whole = torch.randn(5, 3)
    x, numbers, done = lightning_shard.shard(whole, mesh_of(2), 0), list[int](), threading.Event()

    def work(factor: int) -> None:
        torch.testing.assert_close((x * factor).sum(), (whole * factor).sum())
        numbers.append(threading.get_ident())

    for factor in (1, 2):
        thread = threading.Thread(target=work, args=(factor,))
        thread.start()
        join(thread)
        if dist.get_rank() == 1:  # this one takes the number
            threading.Thread(target=done.wait, name="logger").start()
    done.set()
    assert (numbers[0] == numbers[1]) == (dist.get_rank() == 0)
    torch.testing.assert_close(x.mean(), whole.mean())
