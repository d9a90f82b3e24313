"""Ranks that live for the session: a test marked `spmd(n)` runs its body on each of n of them.

`spmd(n, "xpu")` has ranks whose torch.xpu is a fake (tests/fake_xpu).

torch's MultiProcContinuousTest has the same idea, with ranks that live for a class. It is private,
and knows no fixtures of pytest.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import queue
import signal
import socket
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._decomp.decompositions_for_jvp as loaded_by_forward_mode
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import device_mesh, distributed_c10d

from lightning_shard.lab.simulated.group import SimulatedGroup
from lightning_shard.processes import mesh
from lightning_shard.processes.torch_private.internals import open_groups
from tests import quick_dtensor

# torch parses it at the first use, which Python 3.11 at times refuses deep in a stack, by an error
# of its own: "AST constructor recursion depth mismatch"
assert loaded_by_forward_mode
PR_SET_PDEATHSIG = 1  # of Linux
UNPATCHED = "SHARD_TESTS_UNPATCHED" in os.environ  # set by `tests/run --unpatched`
SILENCE_S = 120  # of all ranks, before the pool is given up
STACKS_S = 100  # after which the ranks print, one after another, where their threads are
GRACE_S = 5  # for the other ranks once one has failed


class Pool:
    """`ranks` processes with a gloo group, waiting for test bodies."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        context = mp.get_context("fork")  # of the session, which has imported what tests need
        forget_groups()
        port = free_port()
        self.answers: list[deque[str | None]] = [deque() for _ in range(ranks)]
        self.outbox = context.Queue()
        self.inboxes = [context.Queue() for _ in range(ranks)]
        self.processes = [
            context.Process(
                target=_serve_queues, args=(rank, ranks, port, inbox, self.outbox), daemon=True
            )
            for rank, inbox in enumerate(self.inboxes)
        ]
        start_all(self.processes)
        self.pids = [process.pid for process in self.processes]

    def send(self, task: tuple[Callable[..., None], dict[str, Any]]) -> None:
        self.signal(signal.SIGCONT)
        for inbox in self.inboxes:
            inbox.put(task)

    def rest(self) -> None:
        """Stop the ranks until they are sent a task: their threads of gloo poll for ever."""
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, number)

    def receive(self, timeout_s: float) -> tuple[int, str | None] | None:
        """A rank that is ready, and its error; None if there is none in time."""
        try:
            return self.outbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def run(self, body: Callable[..., None], kwargs: dict[str, Any]) -> None:
        self.send((body, kwargs))
        self.wait()
        self.rest()

    def wait(self) -> None:
        """Until all ranks have ended the first of the bodies that were sent."""
        while True:
            # a rank's answer to this body may have come while another's to the last was waited for
            errors = {rank: a[0] for rank, a in enumerate(self.answers) if a and a[0]}
            silent = {rank for rank in range(self.ranks) if not self.answers[rank]}
            if not silent:
                break
            answer = self.receive(GRACE_S if errors else SILENCE_S)
            if answer is None:
                break
            self.answers[answer[0]].append(answer[1])
        if errors or silent:
            self.close()  # a rank may be stuck in a collective: start afresh
            report = [f"[rank {rank}] {errors[rank]}" for rank in sorted(errors)]
            if silent:
                report.append(f"no answer from ranks {sorted(silent)}")
            pytest.fail("\n".join(report), pytrace=False)
        for answers in self.answers:
            answers.popleft()

    def close(self) -> None:
        for key in [key for key, pool in _POOLS.items() if pool is self]:
            del _POOLS[key]
        self.kill()


_POOLS: dict[tuple[int, str], Pool] = {}


def pool_of(ranks: int, device: str = "cpu") -> Pool:
    key = (ranks, device)
    if key not in _POOLS:
        if device == "xpu":
            from tests.fake_xpu.pool import XPUPool

            _POOLS[key] = XPUPool(ranks)
        else:
            _POOLS[key] = Pool(ranks)
    return _POOLS[key]


def start_all(forks: Sequence[Any]) -> None:
    """Without Python 3.12's warning of threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
        for fork in forks:
            fork.start()


def forget_groups() -> None:
    """Let go of the groups of this process that its tests have ended.

    What frees a group of gloo waits for threads of it, which a fork does not have: a rank that
    emptied a cache would hang.
    """
    if dist.is_initialized():
        return
    for name, module in [*sys.modules.items()]:
        state = vars(module).get("PROCESS_STATE", {}) if name.startswith("lightning_shard") else {}
        for value in state.values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    mesh.share_mesh(None)
    mesh._of_script = None
    gc.collect()  # groups in cycles, which a rank would free when it happens to collect


def is_open(pool: Pool) -> bool:
    return pool in _POOLS.values()


def close_all() -> None:
    for pool in list(_POOLS.values()):
        pool.close()


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve_queues(rank: int, ranks: int, port: int, inbox: Any, outbox: Any) -> None:
    begin(rank, ranks, port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SILENCE_S))
    serve(inbox.get, lambda error: outbox.put((rank, error)))


def begin(rank: int, ranks: int, port: int) -> None:
    """Make this process a rank as those that torchrun starts."""
    # nobody else ends the ranks of a session that is killed, and a stopped one hears nothing else
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "pool",
    }  # fmt: skip
    warnings.simplefilter("default")  # a forked rank begins with pytest's filters
    torch.set_num_threads(1)
    # where it is "spawn" or "forkserver", the DataLoaders of a rank would each import torch
    mp.set_start_method("fork", force=True)
    if not UNPATCHED:
        quicken()


def quicken() -> None:
    """Replace slow parts of torch and Lightning in this process by quicker ones of equal results.

    `bash tests/run --unpatched` leaves all of this out.
    """
    distributed_c10d.ProcessGroupGloo = _GlooOnOneDevice
    reuse_groups()
    quick_dtensor.install()
    if registry := sys.modules.get("lightning.fabric.utilities.registry"):
        # each Trainer would read the metadata of every package that is installed: 50 ms
        vars(registry)["entry_points"] = functools.cache(registry.entry_points)
    seed_quickly()


def seed_quickly() -> None:
    """Seed without devices that are not there.

    For these torch 2.15 queues each seed, with a formatted stack trace: up to 4 ms of each
    `torch.manual_seed`.
    """
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = _ignore


def _ignore(seed: int) -> None:
    pass


class _GlooOnOneDevice(dist.ProcessGroupGloo):
    """A group of gloo on the device of the other groups of its rank.

    Each device has a thread that wakes a hundred times a second. With a device for each group
    these threads took half of the CPU.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: Any
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [_device_of_gloo()], timeout
        super().__init__(store, rank, size, options)


@functools.cache
def _device_of_gloo() -> Any:
    return dist.ProcessGroupGloo.create_default_device()


def reuse_groups() -> None:
    """Give a mesh the groups of an earlier one of its name and ranks: each Trainer makes a mesh.

    Other groups are made by torch. In a run it would take a call from here for that of a user's
    module, and count replicas (processes/replica_world.py).
    """
    make, made = distributed_c10d.new_group, dict[Any, Any]()

    def new_group(*args: Any, **kwargs: Any) -> Any:
        of_turns = isinstance(dist.group.WORLD, SimulatedGroup)  # a process has many ranks then
        if of_turns:
            return make(*args, **kwargs)
        key = repr((args, sorted(kwargs.items())))
        found = made.get(key)
        if found is None or (isinstance(found, dist.ProcessGroup) and found not in open_groups()):
            found = made[key] = make(*args, **kwargs)
        return found

    vars(device_mesh)["new_group"] = new_group


def serve(next_task: Callable[[], Any], answer: Callable[[str | None], None]) -> None:
    """Run the bodies that come, for ever."""
    own = dict(os.environ)
    own.pop("PL_GLOBAL_SEED", None)  # of a test of the session: it would seed samplers
    while True:
        body, kwargs = next_task()
        # Lightning takes WORLD_SIZE away, and adds a seed
        for name in os.environ.keys() - own:
            del os.environ[name]
        os.environ.update(own)
        patches = pytest.MonkeyPatch()
        if "monkeypatch" in kwargs:  # that of the session would undo what it has patched there
            kwargs = {**kwargs, "monkeypatch": patches}
        torch.manual_seed(0)
        # a hang on another machine is hard to see; a signal would not do, Lightning resets all
        faulthandler.dump_traceback_later(STACKS_S + int(os.environ["RANK"]), file=2)
        try:
            copy_context().run(body, **kwargs)  # the next test sees no variable that it has set
            answer(None)
        except BaseException:
            answer(traceback.format_exc())
        finally:
            patches.undo()
            faulthandler.cancel_dump_traceback_later()
