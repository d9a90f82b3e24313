"""Ranks that live for the session: a test marked `spmd(n)` runs its body on each of n of them."""

import contextlib
import os
import queue
import socket
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SILENCE_S = 120  # of all ranks, before the pool is given up
GRACE_S = 5  # for the other ranks once one has failed
PRELOADED = ["torch", "lightning.pytorch", "neuralop.models", "tests.training"]


class Pool:
    """`ranks` processes with a gloo group, waiting for test bodies."""

    def __init__(self, ranks: int) -> None:
        context: Any = mp.get_context(os.environ.get("POOL_START", "forkserver"))
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(PRELOADED)  # imported once, not once on each rank
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.outbox = context.Queue()
        self.inboxes = [context.Queue() for _ in range(ranks)]
        self.processes = [
            context.Process(
                target=_serve, args=(rank, ranks, port, inbox, self.outbox), daemon=True
            )
            for rank, inbox in enumerate(self.inboxes)
        ]
        for process in self.processes:
            process.start()

    def run(self, body: Callable[..., None], kwargs: dict[str, Any]) -> None:
        for inbox in self.inboxes:
            inbox.put((body, kwargs))
        silent, errors = set(range(len(self.inboxes))), {}
        while silent:
            try:
                rank, error = self.outbox.get(timeout=GRACE_S if errors else SILENCE_S)
            except queue.Empty:
                break
            silent.remove(rank)
            if error:
                errors[rank] = error
        if errors or silent:
            self.close()  # a rank may be stuck in a collective: start afresh
            report = [f"[rank {rank}] {errors[rank]}" for rank in sorted(errors)]
            if silent:
                report.append(f"no answer from ranks {sorted(silent)}")
            pytest.fail("\n".join(report), pytrace=False)

    def close(self) -> None:
        _POOLS.pop(len(self.processes), None)
        for process in self.processes:
            process.kill()
            process.join()


_POOLS: dict[int, Pool] = {}


def pool_of(ranks: int) -> Pool:
    if ranks not in _POOLS:
        _POOLS[ranks] = Pool(ranks)
    return _POOLS[ranks]


def close_all() -> None:
    for pool in list(_POOLS.values()):
        pool.close()


def _serve(rank: int, ranks: int, port: int, inbox: Any, outbox: Any) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "pool",
    }  # fmt: skip
    os.environ.pop("PL_GLOBAL_SEED", None)  # of a test in the main process: it would seed samplers
    warnings.simplefilter("default")  # a forked rank begins with pytest's filters
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SILENCE_S))
    while True:
        body, kwargs = inbox.get()
        torch.manual_seed(0)
        try:
            body(**kwargs)
            outbox.put((rank, None))
        except BaseException:
            outbox.put((rank, traceback.format_exc()))
