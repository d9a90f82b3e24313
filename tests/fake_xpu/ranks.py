"""Ranks with a fake XPU: `python -m tests.fake_xpu.ranks PORT END...`, of a pipe to each an end."""

import os
import sys
from datetime import timedelta
from multiprocessing.connection import Connection

from tests import fake_xpu


def main(port: int, ends: list[int]) -> None:
    fake_xpu.install(devices=max(2, len(ends)))
    import tests.training  # noqa: F401  # with all that it imports, once for all ranks

    for rank, end in enumerate(ends):
        if os.fork() == 0:
            serve_rank(rank, len(ends), port, Connection(end))
    for end in ends:
        os.close(end)
    while True:  # until the last rank has ended
        try:
            os.wait()
        except ChildProcessError:
            return


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
    main(int(sys.argv[1]), [int(end) for end in sys.argv[2:]])
