"""Ranks that are started again meet in the same store, and find nothing of those before them."""

import threading

import pytest
import torch.distributed as dist

from lightning_shard.processes.store import meeting


def met(store, ranks, timeout_s=20.0):
    """What each rank finds under one name, to which rank 0 of each start writes."""
    found, ready = {}, threading.Barrier(ranks)

    def rank_main(rank):
        with meeting(clones[rank], rank=rank, world_size=ranks, timeout_s=timeout_s) as own:
            assert not own.check(["from 0"]), "left by an earlier start"
            ready.wait(20)
            if rank == 0:
                own.set("from 0", "here")
            found[rank] = own.get("from 0")

    clones = [store.clone() for _ in range(ranks)]
    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_each_start_has_names_of_its_own(store):
    for ranks in (3, 3, 2, 3):  # a node goes and comes back
        assert met(store, ranks) == dict.fromkeys(range(ranks), b"here")


def test_rank_that_rank_0_does_not_answer(store):
    met(store, 2)
    alone = meeting(store, rank=1, world_size=2, timeout_s=0.2)
    with pytest.raises(TimeoutError, match="rank 1 has waited 0 s for rank 0"), alone:
        pass
