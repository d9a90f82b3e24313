"""The pool of ranks with a fake XPU: processes that begin with the device, before torch."""

import os
import signal
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
        ends = [theirs.fileno() for _, theirs in pipes]
        self.parent = subprocess.Popen(
            [sys.executable, "-m", "tests.fake_xpu.ranks", str(free_port()), *map(str, ends)],
            pass_fds=ends,
            start_new_session=True,  # so that `kill` reaches the ranks
        )
        for _, theirs in pipes:
            theirs.close()

    def send(self, task: Any) -> None:
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
        os.killpg(self.parent.pid, signal.SIGKILL)
        self.parent.wait()
        for line in self.lines:
            line.close()
