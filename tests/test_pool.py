"""The pool of ranks with which the other tests run."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_shard.processes import mesh
from tests import pool


def multiply(number, refused=None):
    assert number != refused, f"{number} is refused"
    total = torch.ones(1) * number
    dist.all_reduce(total)
    assert total == 2 * number


def test_ranks_can_differentiate_where_there_are_devices():
    """A session that sees one, as it does with `-m gpu` alone, has no such ranks."""
    assert not torch.accelerator.is_available()


def test_bodies_that_were_sent_ahead_are_answered_in_turn():
    ranks = pool.pool_of(2)
    for number in range(4):
        ranks.send((multiply, {"number": number, "refused": 2}))
    ranks.wait()
    ranks.wait()
    with pytest.raises(pytest.fail.Exception, match=r"\[rank 1\](.|\n)*2 is refused"):
        ranks.wait()
    assert not pool.is_open(ranks)
    again = pool.pool_of(2)
    assert again is not ranks
    again.run(multiply, {"number": 3})


def patch(monkeypatch):
    monkeypatch.setattr(pool, "SILENCE_S", -1)
    del os.environ["WORLD_SIZE"]  # as Lightning's environment of one process does as it ends
    os.environ["PL_GLOBAL_SEED"] = "3"


def look():
    assert pool.SILENCE_S > 0
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    assert "PL_GLOBAL_SEED" not in os.environ


def test_the_next_body_sees_nothing_that_one_has_changed(monkeypatch):
    """A rank patches itself, and undoes nothing of what the session has patched."""
    ranks = pool.pool_of(1)
    monkeypatch.delenv("RANK", raising=False)
    ranks.run(patch, {"monkeypatch": monkeypatch})
    ranks.run(look, {})


def run_in_a_fork(body, monkeypatch):
    """Run a body on a rank that is forked now; one that hangs is an error."""
    monkeypatch.setattr(pool, "SILENCE_S", 20)
    ranks = pool.Pool(1)
    try:
        ranks.run(body, {})
    finally:
        ranks.kill()


def forget_meshes():
    for cached in (mesh._made, mesh._sub_mesh, mesh._flat_mesh):
        cached.cache_clear()
    mesh._of_script = None


def test_ranks_can_forget_the_meshes_of_the_session(monkeypatch):
    """What frees a group waits for its threads: a rank, a fork without them, hung for ever."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh.init_mesh({"data": 1, "domain": 1}, "cpu")
    dist.destroy_process_group()
    run_in_a_fork(forget_meshes, monkeypatch)


def test_ranks_can_collect_the_groups_of_the_session(monkeypatch):
    """A group that only a cycle holds is freed when a process happens to collect."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cycle = [dist.group.WORLD]
    cycle.append(cycle)
    del cycle
    dist.destroy_process_group()
    run_in_a_fork(gc.collect, monkeypatch)


def refuse_on_the_first(number):
    if dist.get_rank() == 0 and number == 1:
        raise ValueError("only here")
    dist.barrier()
    time.sleep(dist.get_rank())  # so that the failure of rank 0 comes before this answer of rank 1


@pytest.mark.slow
def test_a_failure_of_one_rank_ends_the_wait_for_the_others():
    ranks = pool.pool_of(2)
    for number in range(2):
        ranks.send((refuse_on_the_first, {"number": number}))
    ranks.wait()
    with pytest.raises(pytest.fail.Exception, match=r"only here(.|\n)*no answer from ranks \[1\]"):
        ranks.wait()


@pytest.mark.slow
def test_ranks_end_with_a_session_that_is_killed():
    program = (
        "from tests import pool; import os, sys, time\n"
        "if __name__ == '__main__':\n"
        "    ranks = pool.Pool(2)\n"
        "    ranks.run(time.time, {})\n"
        "    print(*[p.pid for p in ranks.processes], flush=True)\n"
        "    time.sleep(1000)\n"
    )
    command, root = [sys.executable, "-c", program], Path(__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as session:
        running = {int(pid) for pid in session.stdout.readline().split()}
        assert len(running) == 2
        session.kill()
    deadline = time.monotonic() + 60
    while running and time.monotonic() < deadline:
        running = {pid for pid in running if Path(f"/proc/{pid}").exists()}
        time.sleep(0.1)
    assert not running
