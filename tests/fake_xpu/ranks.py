"""Ranks with a fake XPU: `python -m tests.fake_xpu.ranks DEVICES SOCKET`, which asks for pools."""

import os
import signal
import socket
import sys
from datetime import timedelta
from multiprocessing.connection import Connection

from tests import fake_xpu

MOST = 16  # ranks of a pool


def main(devices: int, control: socket.socket) -> None:
    """Fork a pool for each message, which is a port, and as many ends of pipes as it has ranks."""
    fake_xpu.install(devices=devices)
    import tests.training  # noqa: F401  # with all that it imports, once for all ranks

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks
    while True:
        port, ends, _, _ = socket.recv_fds(control, 16, MOST)
        if not port:  # the session is over
            return
        pids = []
        for rank, end in enumerate(ends):
            if not (pid := os.fork()):
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve_rank(rank, len(ends), int(port), Connection(end))
            pids.append(pid)
        for end in ends:
            os.close(end)
        control.sendall(" ".join(map(str, pids)).encode())


def serve_rank(rank: int, ranks: int, port: int, line: Connection) -> None:
    import torch
    import torch.distributed as dist

    from tests.pool import SILENCE_S, begin, serve

    begin(rank, ranks, port)
    device = torch.device("xpu", rank)
    torch.xpu.set_device(device)
    dist.init_process_group("xccl", timeout=timedelta(seconds=SILENCE_S), device_id=device)
    try:
        serve(line.recv, line.send)
    except (EOFError, BrokenPipeError):  # the session is over
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
