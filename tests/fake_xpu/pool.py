"""The pool of ranks with a fake XPU: processes that begin with the device, before torch."""

import atexit
import functools
import signal
import socket
import subprocess
import sys
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from tests.fake_xpu.build import CannotBuildError, library
from tests.pool import Pool, free_port


class XPUPool(Pool):
    """`ranks` processes with an xccl group, each on a device of its own.

    They are forked from a process that has imported torch once (ranks.py).
    """

    def __init__(self, ranks: int) -> None:
        try:
            library()
        except CannotBuildError as err:
            pytest.skip(str(err))
        self.ranks = ranks
        self.answers = [deque() for _ in range(ranks)]
        pipes = [Pipe() for _ in range(ranks)]
        self.lines: list[Connection[Any, Any]] = [ours for ours, _ in pipes]
        control = parent_of_ranks(max(2, ranks))
        socket.send_fds(control, [str(free_port()).encode()], [p.fileno() for _, p in pipes])
        for _, theirs in pipes:
            theirs.close()
        self.pids = [int(pid) for pid in control.recv(1024).split()]

    def send(self, task: Any) -> None:
        self.signal(signal.SIGCONT)
        for line in self.lines:
            line.send(task)

    def receive(self, timeout_s: float) -> tuple[int, str | None] | None:
        for line in wait(self.lines, timeout_s):
            assert isinstance(line, Connection)
            try:
                return self.lines.index(line), line.recv()
            except EOFError:
                return self.lines.index(line), "the process has ended"
        return None

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for line in self.lines:
            line.close()


@functools.cache
def parent_of_ranks(devices: int) -> socket.socket:
    """The line to a process that forks the ranks of all pools with so many devices."""
    ours, theirs = socket.socketpair()
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.fake_xpu.ranks", str(devices), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # Ctrl-C is the session's
    )
    theirs.close()
    atexit.register(_end, ours, parent)
    return ours


def _end(line: socket.socket, parent: "subprocess.Popen[bytes]") -> None:
    line.close()
    parent.kill()
    parent.wait()
