"""Ranks in network namespaces of their own, whose links carry as many bits a second as one says.

Each rank is a process that leaves the network of this machine for one of its own. A veth pair leads
from there to a bridge, and `tc` with a token bucket limits what the rank sends. The bridge lies in
a namespace without a name, too (`unshare`), so all of it is gone when the processes are, however
they end.
"""

import contextlib
import ctypes
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.processes.cpu_settings import keep_freed_memory, let_threads_run_on

CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
INSIDE = "LIGHTNING_SHARD_SLOW_LINKS"  # set in the process that holds the bridge
LINK = "slow0"
ANSWER = "answer"  # a file that rank 0 writes: a pipe that nobody reads yet holds 64 KiB only
LATENCY = "400ms"  # how long a packet may wait for tokens before it is dropped


def missing() -> str | None:
    """Say in one sentence what this machine lacks, if it lacks anything."""
    if not sys.platform.startswith("linux"):
        return "Network namespaces are Linux's, and this is another system."
    if os.geteuid() != 0:
        return "Making network namespaces takes root, which this user is not."
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return (
                f"The program {program} is missing; iproute2 and util-linux have ip, tc, unshare."
            )
    tried = subprocess.run(
        ["unshare", "-n", "sh", "-c",
         "ip link add slowhub type bridge && ip link add slow1 type veth peer name slow0 && "
         f"tc qdisc add dev slow0 root tbf rate 1gbit burst 16000 latency {LATENCY}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if tried.returncode:
        return f"This kernel refuses a bridge, a veth pair or tbf: {tried.stderr.strip()}."
    return None


def inside(module: str) -> None:
    """Run this program again in a namespace that can hold the bridge, unless this is that run."""
    if INSIDE in os.environ:
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "slowhub", "type", "bridge")
        _run("ip", "link", "set", "slowhub", "up")
        return
    command = ["unshare", "--net", "--fork", "--kill-child", sys.executable, "-m", module]
    running = subprocess.Popen([*command, *sys.argv[1:]], env=os.environ | {INSIDE: "1"})
    signal.signal(signal.SIGTERM, lambda *_: running.kill())  # unshare ignores SIGTERM
    with contextlib.suppress(KeyboardInterrupt):  # which the process below hears, too
        running.wait()
    sys.exit(running.wait())


def start(ranks: int, function: Callable[..., Any], *args: Any, method: str = "spawn") -> Any:
    """Call `function(*args)` on each of `ranks` new processes, one thread each; as rank 0 answers.

    Args:
        ranks: The number of processes.
        function: A function of a module. It may call `limit_link`.
        args: Its arguments.
        method: Of multiprocessing; "fork" spares imports, in a process that has computed nothing.
    """
    context: Any = mp.get_context(method)
    with tempfile.TemporaryDirectory() as folder:
        pipes, running = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            job = (rank, ranks, folder, theirs, function, args)
            process = context.Process(target=_serve, args=job, daemon=True)
            process.start()
            pipes.append(ours)
            running.append(process)
        for rank, (pipe, process) in enumerate(zip(pipes, running, strict=True)):
            pipe.recv()  # it has its own network
            _run("ip", "link", "add", f"slow{ranks}_{rank}", "type", "veth", "peer", "name", LINK,
                 "netns", str(process.pid))  # fmt: skip
            _run("ip", "link", "set", f"slow{ranks}_{rank}", "master", "slowhub", "up")
            pipe.send("linked")
        for process in running:
            process.join()
        if failed := [p.exitcode for p in running if p.exitcode]:
            raise RuntimeError(f"a rank ended with status {failed[0]}.")
        return pickle.loads(Path(folder, ANSWER).read_bytes())


def limit_link(bits: float | None) -> None:
    """Limit what this rank sends to so many bits a second; None takes the limit away.

    The bucket holds what goes out in a tenth of a millisecond, so a halo does not fit into it.
    """
    subprocess.run(["tc", "qdisc", "del", "dev", LINK, "root"], capture_output=True, check=False)
    if bits is not None:
        burst = max(int(bits / 8 * 1e-4), 4000)
        _run("tc", "qdisc", "add", "dev", LINK, "root", "tbf", "rate", f"{bits:.0f}bit",
             "burst", str(burst), "latency", LATENCY)  # fmt: skip
    dist.barrier()


def _serve(
    rank: int, ranks: int, folder: str, pipe: Any, function: Callable[..., Any], args: Any
) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    pipe.send("alone")
    pipe.recv()
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", LINK)
    _run("ip", "link", "set", LINK, "up")
    os.environ["GLOO_SOCKET_IFNAME"] = LINK
    torch.set_num_threads(1)
    let_threads_run_on()
    keep_freed_memory()
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    result = function(*args)
    if rank == 0:
        Path(folder, ANSWER).write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
