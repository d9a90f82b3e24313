"""Ends all ranks with exit status 143 when one of them gets SIGTERM.

Lightning 2.6 begins a broadcast in the signal's handler. The other ranks do not take part in it, so
all would wait for the timeout of their collectives.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_shard.lightning import ClusterEnvironment, SLURMEnvironment
from lightning_shard.processes.failures.failure import SIGTERM_CODE
from lightning_shard.processes.failures.failure_watch import POLL_S
from lightning_shard.trainer.peers import Peers


class LeaveTogether:
    """Handles SIGTERM while a run has several processes."""

    def __init__(self, peers: Peers, rank: int) -> None:
        """End the ranks of `peers`, of which this process is number `rank`."""
        self._peers, self._rank, self._process = peers, rank, os.getpid()

    def __call__(self, *_: Any) -> NoReturn:
        """End all ranks, and exit; without a run, die as a process without a handler does."""
        failure = None
        if os.getpid() == self._process:  # and not a process that was forked of it
            failure = self._peers.end_all_ranks("SIGTERM", SIGTERM_CODE)
        if failure is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * POLL_S)  # so that all have heard of it before the first connection is lost
        raise SystemExit(SIGTERM_CODE)


def leave_together_on_sigterm(
    environment: ClusterEnvironment, peers: Peers, rank: int
) -> Callable[[], None]:
    """Take SIGTERM, unless the script has a handler of its own, or SLURM queues the job again.

    Returns:
        A function that takes it again, once Lightning has set its own handler.
    """
    before = signal.getsignal(signal.SIGTERM)
    is_free = before in (None, signal.SIG_DFL) or isinstance(before, LeaveTogether)
    wanted: Any = LeaveTogether(peers, rank) if is_free else before
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        wanted = _leave_it_to_slurm if is_free else before
    elif is_free:
        _handle(wanted)

    def take() -> None:
        if signal.getsignal(signal.SIGTERM) not in (before, wanted):
            _handle(wanted)

    return take


def _handle(handler: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _leave_it_to_slurm(*_: Any) -> None:
    """Do nothing: SLURM queues the job again."""
